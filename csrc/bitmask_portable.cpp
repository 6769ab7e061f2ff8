// bitmask_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define apply_bitmask_avx512 apply_bitmask_portable
#include "bitmask_avx512.cpp"
