// bitmask_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define apply_bitmask_avx512 apply_bitmask_avx2
#include "bitmask_avx512.cpp"
