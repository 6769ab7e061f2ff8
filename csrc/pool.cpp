#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common.h"
#include "task_share.h"

namespace tokenmill {
namespace {

// How long a waiting thread spins before it goes to sleep: longer than any gap between the kernels
// of a step, as waking it takes longer than many a kernel. A pause takes 40 cycles or 140, by
// processor, so the time is read from the clock now and then.
constexpr std::chrono::microseconds kSpinTime{100};
constexpr int kPausesPerLook = 32;
constexpr int kMaxThreads = 1024;
constexpr int kScratchSlots = 4;

thread_local bool inside_job = false;
thread_local int thread_index = 0;

// Tells the processor that a loop waits.
void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb" : : : "memory");  // about as long; `yield` does nothing on most processors
#endif
}

// Pauses until `is_done` or for as long as a thread spins; whether it is done.
template <class IsDone>
bool spin(IsDone&& is_done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int pauses = 0; pauses < kPausesPerLook; ++pauses) {
      if (is_done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

int processors() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  const int count = CPU_COUNT(&set);
  return count > 0 ? count : 1;
}

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads), shares_(num_threads) {}

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void resize(int num_threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    stop();
    num_threads_ = num_threads;
    shares_ = std::vector<TaskShare>(num_threads);
  }

  void run(int num_tasks, int most_at_once, detail::TaskFunction function, void* context) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (workers_.empty() && num_threads_ > 1) start();
    function_ = function;
    context_ = context;
    most_at_once_.store(most_at_once, std::memory_order_relaxed);
    unfinished_.store(num_tasks, std::memory_order_relaxed);
    for (int thread = 0; thread < num_threads_; ++thread)
      shares_[thread].deal(share_of(num_tasks, thread, num_threads_));
    announce();
    inside_job = true;
    {
      FlushDenormals mode;
      work(0);
    }
    inside_job = false;
    const auto is_done = [this] { return unfinished_.load(std::memory_order_acquire) == 0; };
    if (!spin(is_done))
      while (!is_done()) sched_yield();
  }

 private:
  // The job's function and context are read after a claim only: they cannot change before the
  // claimed tasks are counted as finished. A worker that comes late finds nothing to claim, or
  // takes part in the job that runs by then.
  void work(int thread) {
    int finished = 0;
    const auto run_tasks = [&](TaskRange tasks) {
      if (tasks.size() > 0) function_(context_, tasks, thread);
      finished += tasks.size();
      return tasks.size() > 0;
    };
    const auto most = [this] { return most_at_once_.load(std::memory_order_relaxed); };
    while (run_tasks(shares_[thread].take_first(most()))) {}
    for (int i = 1; i < num_threads_; ++i) {
      TaskShare& other = shares_[(thread + i) % num_threads_];
      while (run_tasks(other.take_last(most()))) {}
    }
    if (finished > 0) unfinished_.fetch_sub(finished, std::memory_order_release);
  }

  // The count of jobs and the count of sleepers are each written by one side and read by the
  // other, sequentially consistent: either the worker sees the new job or we see the sleeper.
  void announce() {
    jobs_.fetch_add(1);
    if (sleepers_.load() > 0) futex_wake_all(jobs_);
  }

  void worker(int thread) {
    inside_job = true;
    thread_index = thread;
    FlushDenormals mode;
    std::uint32_t seen = 0;
    while (!stopping_.load(std::memory_order_acquire)) {
      seen = wait_for_job(seen);
      work(thread);
    }
  }

  std::uint32_t wait_for_job(std::uint32_t seen) {
    if (spin([this, seen] { return jobs_.load(std::memory_order_acquire) != seen; }))
      return jobs_.load(std::memory_order_acquire);
    sleepers_.fetch_add(1);
    while (jobs_.load() == seen) futex_wait(jobs_, seen);
    sleepers_.fetch_sub(1);
    return jobs_.load();
  }

  void start() {
    for (int thread = 1; thread < num_threads_; ++thread)
      workers_.emplace_back([this, thread] { worker(thread); });
  }

  void stop() {
    stopping_.store(true, std::memory_order_release);
    announce();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stopping_.store(false, std::memory_order_release);
  }

  std::mutex mutex_;
  std::atomic<int> num_threads_;
  std::vector<std::thread> workers_;
  std::atomic<bool> stopping_{false};

  detail::TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int> most_at_once_{1};
  std::vector<TaskShare> shares_;

  alignas(kCacheLine) std::atomic<int> unfinished_{0};
  alignas(kCacheLine) std::atomic<std::uint32_t> jobs_{0};
  std::atomic<int> sleepers_{0};
};

// Never destroyed: workers may still sleep in it when the process ends. A child of fork has none
// of the workers, so it leaves the old pool behind.
std::atomic<Pool*>& pool_slot() {
  static std::atomic<Pool*> slot = [] {
    pthread_atfork(nullptr, nullptr, [] {
      pool_slot().store(new Pool(pool_slot().load()->num_threads()));
      inside_job = false;
    });
    return new Pool(processors());
  }();
  return slot;
}

Pool& pool() { return *pool_slot().load(std::memory_order_acquire); }

}  // namespace

TaskRange share_of(int num_tasks, int thread, int num_threads) {
  const auto begin_of = [&](std::int64_t thread) {
    return static_cast<int>(ceil_div(num_tasks * thread, std::int64_t{num_threads}));
  };
  return {begin_of(thread), begin_of(thread + 1)};
}

int num_threads() { return pool().num_threads(); }

void set_num_threads(int n) {
  if (n < 1 || n > kMaxThreads)
    throw std::invalid_argument("num_threads is " + std::to_string(n) +
                                "; it takes 1 to " + std::to_string(kMaxThreads));
  pool().resize(n);
}

namespace detail {

void run(int num_tasks, int most_at_once, TaskFunction function, void* context) {
  if (inside_job || num_tasks == 1 || num_threads() == 1) {
    FlushDenormals mode;
    if (num_tasks > 0) function(context, {0, num_tasks}, thread_index);
  } else if (num_tasks > 0) {
    pool().run(num_tasks, most_at_once, function, context);
  }
}

}  // namespace detail

void* thread_scratch(int slot, std::size_t num_bytes) {
  struct Slots {
    void* data[kScratchSlots] = {};
    std::size_t size[kScratchSlots] = {};
    ~Slots() {
      for (void* p : data) std::free(p);
    }
  };
  thread_local Slots slots;
  if (slots.size[slot] < num_bytes) {
    const std::size_t size = round_up<std::size_t>(num_bytes + num_bytes / 4, 4096);
    std::free(slots.data[slot]);
    slots.data[slot] = std::aligned_alloc(4096, size);
    if (slots.data[slot] == nullptr) throw std::bad_alloc();
    slots.size[slot] = size;
  }
  return slots.data[slot];
}

}  // namespace tokenmill
