#include "shared_group.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

#include "common.h"
#include "pool.h"

namespace tokenmill {
namespace {

// How long a rank spins for another before it sleeps. Ranks do the same work, so mostly they come
// within this; where there are more of them than processors, spinning keeps the others away.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerLook = 32;
constexpr long kLookNanoseconds = 100'000'000;  // between two looks of a sleeper at `broken`
constexpr int kTaskValues = 1 << 13;            // of a slot, that a thread of the pool works on

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" : : : "memory");
#endif
}

// Not private to the process, as those of the pool are.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected) {
  const timespec limit{0, kLookNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, expected, &limit, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

template <class Body>
void over_values(std::int64_t count, Body&& body) {
  const int num_tasks = static_cast<int>(ceil_div<std::int64_t>(count, kTaskValues));
  parallel_for(num_tasks, [&](int task, int) {
    const std::int64_t begin = std::int64_t{task} * kTaskValues;
    body(begin, min_of<std::int64_t>(begin + kTaskValues, count));
  });
}

}  // namespace

struct alignas(2 * kCacheLine) SharedGroup::Line {
  std::atomic<std::uint32_t> arrived;   // rounds that the rank has filled its slot for
  std::atomic<std::uint32_t> sleepers;  // ranks that sleep until it arrives
  std::atomic<std::uint64_t> tags[2];   // of the last two rounds
  std::atomic<std::uint32_t> broken;    // of rank 0's line: of the group
};

std::size_t SharedGroup::memory_bytes(int size, std::size_t slot_bytes) {
  return size * (sizeof(Line) + 2 * slot_bytes);
}

SharedGroup::SharedGroup(void* memory, int rank, int size, std::size_t slot_bytes)
    : memory_(static_cast<char*>(memory)), rank_(rank), size_(size), slot_bytes_(slot_bytes) {}

SharedGroup::Line& SharedGroup::line(int rank) const {
  return reinterpret_cast<Line*>(memory_)[rank];
}

float* SharedGroup::slot(int rank) const {
  const std::size_t slots = 2 * static_cast<std::size_t>(rank) + round_ % 2;
  return reinterpret_cast<float*>(memory_ + size_ * sizeof(Line) + slots * slot_bytes_);
}

void SharedGroup::all_reduce(float* values, std::int64_t count) {
  const std::int64_t slot_values = slot_bytes_ / sizeof(float);
  for (std::int64_t done = 0; done < count; done += slot_values) {
    const std::int64_t size = min_of(slot_values, count - done);
    float* const part = values + done;
    float* const own = slot(rank_);
    over_values(size, [&](std::int64_t begin, std::int64_t end) {
      std::copy(part + begin, part + end, own + begin);
    });
    exchange(static_cast<std::uint64_t>(count) << 1);
    over_values(size, [&](std::int64_t begin, std::int64_t end) {
      const float* first = slot(0);
      std::copy(first + begin, first + end, part + begin);
      for (int rank = 1; rank < size_; ++rank) {
        const float* other = slot(rank);
        for (std::int64_t i = begin; i < end; ++i) part[i] += other[i];
      }
    });
    ++round_;
  }
}

void SharedGroup::all_gather(const float* columns, int num_rows, const std::vector<int>& widths,
                             float* out) {
  const std::int64_t slot_values = slot_bytes_ / sizeof(float);
  const std::int64_t widest = *std::max_element(widths.begin(), widths.end());
  std::int64_t out_width = 0;
  for (const int width : widths) out_width += width;
  const std::int64_t own_count = num_rows * std::int64_t{widths[rank_]};
  const std::uint64_t tag = static_cast<std::uint64_t>(num_rows * out_width) << 1 | 1;
  for (std::int64_t done = 0; done < num_rows * widest; done += slot_values) {
    if (done < own_count)
      std::copy(columns + done, columns + min_of(done + slot_values, own_count), slot(rank_));
    exchange(tag);
    std::int64_t first_column = 0;
    for (int rank = 0; rank < size_; ++rank) {
      const std::int64_t width = widths[rank], end = min_of(done + slot_values, num_rows * width);
      const float* const source = slot(rank);
      for (std::int64_t at = done; at < end;) {  // what the slot has of one row after another
        const std::int64_t row = at / width, column = at % width;
        const std::int64_t count = min_of(width - column, end - at);
        std::copy(source + (at - done), source + (at - done) + count,
                  out + row * out_width + first_column + column);
        at += count;
      }
      first_column += width;
    }
    ++round_;
  }
}

// Says that the slot is filled, and waits until all are.
void SharedGroup::exchange(std::uint64_t tag) {
  tag = tag << 32 | mark_;
  Line& own = line(rank_);
  check_whole();
  own.tags[round_ % 2].store(tag, std::memory_order_relaxed);
  // Sequentially consistent, as is the count of sleepers: either they see that we have arrived, or
  // we see them.
  own.arrived.store(round_ + 1);
  if (own.sleepers.load() > 0) futex_wake_all(own.arrived);
  for (int rank = 0; rank < size_; ++rank) {
    if (rank == rank_) continue;
    wait_for(rank);
    if (line(rank).tags[round_ % 2].load(std::memory_order_relaxed) == tag) continue;
    break_up();
    throw std::runtime_error("rank " + std::to_string(rank) + " of the group does something else"
                             " than rank " + std::to_string(rank_) + ": one of them has failed");
  }
}

void SharedGroup::wait_for(int rank) {
  Line& other = line(rank);
  const auto has_arrived = [&] {
    return static_cast<std::int32_t>(other.arrived.load() - round_ - 1) >= 0;
  };
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int pauses = 0; pauses < kPausesPerLook; ++pauses) {
      if (has_arrived()) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  other.sleepers.fetch_add(1);
  while (!has_arrived() && !is_broken()) {
    const std::uint32_t seen = other.arrived.load();
    if (static_cast<std::int32_t>(seen - round_ - 1) < 0) futex_wait(other.arrived, seen);
  }
  other.sleepers.fetch_sub(1);
  if (!has_arrived()) check_whole();
}

void SharedGroup::break_up() {
  line(0).broken.store(1);
  for (int rank = 0; rank < size_; ++rank) futex_wake_all(line(rank).arrived);
}

bool SharedGroup::is_broken() const { return line(0).broken.load() != 0; }

void SharedGroup::check_whole() const {
  if (is_broken()) throw std::runtime_error("another rank of the group has failed");
}

}  // namespace tokenmill
