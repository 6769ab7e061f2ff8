// attention_write_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define write_kv_avx512 write_kv_avx2
#include "attention_write_avx512.cpp"
