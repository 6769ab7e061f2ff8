// lora_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define shrink_rows_avx512 shrink_rows_portable
#define expand_rows_avx512 expand_rows_portable
#include "lora_avx512.cpp"
