// What the machine can do at best, measured with the pool's threads: the limits that benchmarks
// print beside their figures.
#pragma once

#include <cstddef>

namespace tokenmill {

// Bytes per second of reading a buffer of `num_bytes` from front to back, shared among the threads;
// the best of `repeats` rounds, with and without a prefetch. A buffer that fits a cache shows the
// cache.
double measure_read_bandwidth(std::size_t num_bytes, int repeats);

enum class Multiplier {
  amx_registers,  // bf16 tiles, operands in registers
  amx_cache,      // bf16 tiles, both operands read from the second-level cache
  avx512_bf16,    // bf16 pairs, operands in registers
  avx512_float32, // floats, operands in registers
  avx512_int8,    // int8 quads, operands in registers
  avx2_float32,   // floats, operands in registers
  avx2_int8,      // unsigned times signed bytes, added up in 16 bits, operands in registers
  i8mm_bf16,      // matrices of bf16, operands in registers
  i8mm_int8,      // matrices of int8, operands in registers
  dotprod_int8,   // int8 quads, operands in registers
  portable_float32,  // four floats, operands in registers
  portable_int8,  // int8 values as pairs of 16 bits, operands in registers
};

// Operations per second of all threads together, a multiplication and an addition being two; the
// best of `repeats` rounds. Operands are random: with zeros the clock of tiles runs about a sixth
// faster, which no product of real numbers reaches. Throws std::runtime_error if the instructions
// may not be used.
double measure_peak(Multiplier multiplier, int repeats);

// Seconds until a thread sees what another has written: half of a round trip of one cache line, the
// best of `repeats` rounds. 0 if the pool has a single thread. In a virtual machine it tells whether
// the host runs the processors near each other, which may change while it runs.
double measure_handover(int repeats);

// What the instruction sets provide: one thread's share of a round. The prefetch runs `ahead` bytes
// ahead.
void read_bytes_portable(const void* data, std::size_t num_bytes, std::size_t ahead);
void read_bytes_avx2(const void* data, std::size_t num_bytes, std::size_t ahead);
void read_bytes_avx512(const void* data, std::size_t num_bytes, std::size_t ahead);
// These return the operations done. `data` are bf16 operands, a multiple of four tiles (4 kB).
double multiply_registers_amx(const void* data);
double multiply_cache_amx(const void* data, std::size_t num_bytes);
double multiply_bf16_avx512(const void* data);
double multiply_float32_avx512(const void* data);
double multiply_int8_avx512(const void* data);
double multiply_bf16_i8mm(const void* data);
double multiply_int8_i8mm(const void* data);
double multiply_int8_dotprod(const void* data);
double multiply_float32_portable(const void* data);
double multiply_int8_portable(const void* data);
double multiply_float32_avx2(const void* data);
double multiply_int8_avx2(const void* data);

}  // namespace tokenmill
