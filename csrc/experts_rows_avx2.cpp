// experts_rows_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define route_avx512 route_avx2
#define weighted_sum_avx512 weighted_sum_avx2
#include "experts_rows_avx512.cpp"
