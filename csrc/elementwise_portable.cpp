// elementwise_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define add_rms_norm_avx512 add_rms_norm_portable
#define add_layer_norm_avx512 add_layer_norm_portable
#define add_residual_avx512 add_residual_portable
#define activation_avx512 activation_portable
#define add_rows_avx512 add_rows_portable
#define copy_parts_avx512 copy_parts_portable
#define head_rms_norm_avx512 head_rms_norm_portable
#define gated_activation_avx512 gated_activation_portable
#define quantize_rows_avx512 quantize_rows_portable
#include "elementwise_avx512.cpp"
