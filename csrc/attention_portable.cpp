// attention_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define attention_avx512 attention_portable
#define merge_partials_avx512 merge_partials_portable
#include "attention_avx512.cpp"
