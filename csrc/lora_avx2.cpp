// lora_avx512.cpp for AVX2: the same source on pairs of registers.
#include "avx2_registers.h"

#define shrink_rows_avx512 shrink_rows_avx2
#define expand_rows_avx512 expand_rows_avx2
#include "lora_avx512.cpp"
