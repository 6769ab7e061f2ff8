#include "gemm_limits.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common.h"
#include "isa.h"
#include "pack_memory.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr std::size_t kReadTask = std::size_t{128} << 10;
constexpr std::size_t kAhead[] = {4096, 0};  // bytes that the prefetch of a round runs ahead
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

// Numbers of both signs between a half and two.
void fill_random(bf16* values, std::size_t count) {
  std::uint32_t state = 1;
  for (std::size_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = static_cast<bf16>(0x3f00u | (state >> 24) | (state >> 8 & 0x8000u));
  }
}

// What a multiplier runs, given bf16 operands, and the level it needs.
struct Measured {
  Isa level;
  double (*multiply)(const void* data);
};

Measured measured(Multiplier multiplier) {
  switch (multiplier) {
#if defined(__x86_64__)
    case Multiplier::amx_registers: return {Isa::amx, multiply_registers_amx};
    case Multiplier::amx_cache:
      return {Isa::amx, [](const void* data) { return multiply_cache_amx(data, kCacheOperands); }};
    case Multiplier::avx512_bf16: return {Isa::avx512, multiply_bf16_avx512};
    case Multiplier::avx512_float32: return {Isa::avx512, multiply_float32_avx512};
    case Multiplier::avx512_int8: return {Isa::avx512, multiply_int8_avx512};
    case Multiplier::avx2_float32: return {Isa::avx2, multiply_float32_avx2};
    case Multiplier::avx2_int8: return {Isa::avx2, multiply_int8_avx2};
#elif defined(__aarch64__)
    case Multiplier::i8mm_bf16: return {Isa::i8mm, multiply_bf16_i8mm};
    case Multiplier::i8mm_int8: return {Isa::i8mm, multiply_int8_i8mm};
    case Multiplier::dotprod_int8: return {Isa::dotprod, multiply_int8_dotprod};
#endif
    case Multiplier::portable_float32: return {kLowestLevel, multiply_float32_portable};
    case Multiplier::portable_int8: return {kLowestLevel, multiply_int8_portable};
    default: throw std::runtime_error("this processor has other instructions");
  }
}

}  // namespace

double measure_read_bandwidth(std::size_t num_bytes, int repeats) {
  const auto read_bytes = TOKENMILL_AT_LEVEL(read_bytes);
  num_bytes = round_up(num_bytes == 0 ? kReadTask : num_bytes, std::size_t{4096});
  const std::shared_ptr<void> buffer = allocate_weights(num_bytes);
  std::memset(buffer.get(), 1, num_bytes);  // pages that were never written are all the same one
  const char* data = static_cast<const char*>(buffer.get());
  const int num_tasks = static_cast<int>(ceil_div(num_bytes, kReadTask));
  double seconds = 1e30;
  for (const std::size_t ahead : kAhead)
    seconds = min_of(seconds, best_seconds(repeats / 2 + 1, [&] {
      parallel_for(num_tasks, [&](int task, int) {
        const std::size_t begin = task * kReadTask;
        read_bytes(data + begin, min_of(kReadTask, num_bytes - begin), ahead);
      });
    }));
  return static_cast<double>(num_bytes) / seconds;
}

double measure_peak(Multiplier multiplier, int repeats) {
  const Measured limit = measured(multiplier);
  if (active_isa() < limit.level)
    throw std::runtime_error(std::string("this measurement needs ") + isa_name(limit.level));
  const std::size_t size = kCacheOperands * num_threads();
  const std::shared_ptr<void> buffer = allocate_weights(size);
  fill_random(static_cast<bf16*>(buffer.get()), size / sizeof(bf16));
  std::vector<double> operations(num_threads());
  const double seconds = best_seconds(repeats + 1, [&] {
    parallel_for(num_threads(), [&](int task, int) {
      const char* data = static_cast<const char*>(buffer.get()) + task * kCacheOperands;
      operations[task] = limit.multiply(data);
    });
  });
  double sum = 0;
  for (double count : operations) sum += count;
  return sum / seconds;
}

double measure_handover(int repeats) {
  if (num_threads() < 2) return 0.0;
  constexpr int kTrips = 2000, kPolls = 4096;
  alignas(kCacheLine) std::atomic<int> turn{0};
  const auto answer = [&](int from, int to) {
    for (int polls = 1; turn.load(std::memory_order_acquire) != from; ++polls)
      if (polls % kPolls == 0) std::this_thread::yield();  // the other may wait for this processor
    turn.store(to, std::memory_order_release);
  };
  const int rounds = repeats + 1;
  std::thread other([&] {
    for (int trip = 0; trip < rounds * kTrips; ++trip) answer(1, 0);
  });
  const double seconds = best_seconds(rounds, [&] {
    for (int trip = 0; trip < kTrips; ++trip) answer(0, 1);
  });
  other.join();
  return seconds / (2 * kTrips);
}

}  // namespace tokenmill
