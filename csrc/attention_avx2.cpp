// attention_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define attention_avx512 attention_avx2
#define merge_partials_avx512 merge_partials_avx2
#include "attention_avx512.cpp"
