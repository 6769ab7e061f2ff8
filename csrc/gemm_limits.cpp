#include "gemm_limits.h"

#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common.h"
#include "isa.h"
#include "pack_memory.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr std::size_t kReadTask = std::size_t{128} << 10;
constexpr std::size_t kCacheOperands = std::size_t{1} << 20;  // half of a second-level cache

template <class F>
double best_seconds(int repeats, F&& round) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    round();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
    best = min_of(best, passed.count());
  }
  return best;
}

void need(Isa isa) {
  if (active_isa() < isa)
    throw std::runtime_error(std::string("this measurement needs ") + isa_name(isa));
}

}  // namespace

double measure_read_bandwidth(std::size_t num_bytes, int repeats) {
  need(Isa::avx512);
  num_bytes = round_up(num_bytes == 0 ? kReadTask : num_bytes, std::size_t{4096});
  const std::shared_ptr<void> buffer = allocate_weights(num_bytes);
  std::memset(buffer.get(), 1, num_bytes);  // pages that were never written are all the same one
  const char* data = static_cast<const char*>(buffer.get());
  const int num_tasks = static_cast<int>(ceil_div(num_bytes, kReadTask));
  const double seconds = best_seconds(repeats + 1, [&] {
    parallel_for(num_tasks, [&](int task, int) {
      const std::size_t begin = task * kReadTask;
      read_bytes_avx512(data + begin, min_of(kReadTask, num_bytes - begin));
    });
  });
  return static_cast<double>(num_bytes) / seconds;
}

double measure_amx_peak(PeakSource source, int repeats) {
  need(Isa::amx);
  const std::size_t operands = source == PeakSource::cache ? kCacheOperands : 0;
  const std::shared_ptr<void> buffer = allocate_weights(operands * num_threads());
  std::vector<double> operations(num_threads());
  const double seconds = best_seconds(repeats + 1, [&] {
    parallel_for(num_threads(), [&](int task, int) {
      const char* data = static_cast<const char*>(buffer.get()) + task * operands;
      operations[task] = source == PeakSource::cache ? multiply_cache_amx(data, operands)
                                                     : multiply_registers_amx();
    });
  });
  double sum = 0;
  for (double count : operations) sum += count;
  return sum / seconds;
}

}  // namespace tokenmill
