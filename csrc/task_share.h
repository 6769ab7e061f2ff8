// The tasks of a job that one thread begins with.
#pragma once

#include <atomic>
#include <cstdint>

#include "common.h"
#include "pool.h"

namespace tokenmill {

// In a cache line of its own: the thread takes tasks from the front, one after another, and
// threads that are done with theirs take from the back.
class alignas(kCacheLine) TaskShare {
 public:
  void deal(TaskRange tasks) { left_.store(pack(tasks), std::memory_order_release); }

  // Up to `count` tasks; none if none is left.
  TaskRange take_first(int count) {
    return take([count](TaskRange& left) {
      const int begin = left.begin;
      left.begin = min_of(begin + count, left.end);
      return TaskRange{begin, left.begin};
    });
  }
  TaskRange take_last(int count) {
    return take([count](TaskRange& left) {
      const int end = left.end;
      left.end = end - min_of(count, left.size());
      return TaskRange{left.end, end};
    });
  }

 private:
  static std::uint64_t pack(TaskRange tasks) {
    return std::uint64_t{static_cast<std::uint32_t>(tasks.end)} << 32 |
           static_cast<std::uint32_t>(tasks.begin);
  }

  // `part` takes tasks away from those that are left, and returns them.
  template <class Part>
  TaskRange take(Part&& part) {
    std::uint64_t seen = left_.load(std::memory_order_acquire);
    for (;;) {
      TaskRange left{static_cast<int>(seen), static_cast<int>(seen >> 32)};
      if (left.size() <= 0) return {0, 0};
      const TaskRange taken = part(left);
      if (left_.compare_exchange_weak(seen, pack(left), std::memory_order_acq_rel)) return taken;
    }
  }

  std::atomic<std::uint64_t> left_{0};
};

}  // namespace tokenmill
