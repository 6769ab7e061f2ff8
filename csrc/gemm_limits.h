// What the machine can do at best, measured with the pool's threads: the limits that benchmarks
// print beside their figures.
#pragma once

#include <cstddef>

namespace tokenmill {

// Bytes per second of reading a buffer of `num_bytes` from front to back, shared among the threads;
// the best of `repeats` rounds. A buffer that fits a cache shows the cache.
double measure_read_bandwidth(std::size_t num_bytes, int repeats);

enum class PeakSource {
  registers,  // operands stay in registers
  cache,      // both operands are read from the second-level cache
};

// bf16 floating-point operations per second of all threads together, with tiles; the best of
// `repeats` rounds. Operands are random: with zeros the clock runs about a sixth faster, which no
// product of real numbers reaches. Needs AMX.
double measure_amx_peak(PeakSource source, int repeats);

// What the instruction sets provide: one thread's share of a round.
void read_bytes_avx512(const void* data, std::size_t num_bytes);
// These return the operations done. `data` are bf16 operands, a multiple of four tiles.
double multiply_registers_amx(const void* data);
double multiply_cache_amx(const void* data, std::size_t num_bytes);

}  // namespace tokenmill
