// state_space_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define convolve_avx512 convolve_avx2
#define scan_head_avx512 scan_head_avx2
#define gated_norm_avx512 gated_norm_avx2
#define quantize_rows_avx512 quantize_rows_avx2
#include "state_space_avx512.cpp"
