// attention_write_avx512.cpp for any processor: the same source on vectors of 128 bits.
#include "portable_registers.h"

#define write_kv_avx512 write_kv_portable
#include "attention_write_avx512.cpp"
