// experts_rows_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define route_avx512 route_portable
#define weighted_sum_avx512 weighted_sum_portable
#include "experts_rows_avx512.cpp"
