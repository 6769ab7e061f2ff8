// state_space_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define convolve_avx512 convolve_portable
#define scan_head_avx512 scan_head_portable
#define gated_norm_avx512 gated_norm_portable
#define quantize_rows_avx512 quantize_rows_portable
#include "state_space_avx512.cpp"
