// elementwise_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define add_rms_norm_avx512 add_rms_norm_avx2
#define add_layer_norm_avx512 add_layer_norm_avx2
#define add_residual_avx512 add_residual_avx2
#define head_rms_norm_avx512 head_rms_norm_avx2
#define gated_activation_avx512 gated_activation_avx2
#define activation_avx512 activation_avx2
#define add_rows_avx512 add_rows_avx2
#define copy_parts_avx512 copy_parts_avx2
#define quantize_rows_avx512 quantize_rows_avx2
#include "elementwise_avx512.cpp"
