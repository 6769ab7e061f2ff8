// A thread pool for kernels: fork and join within microseconds.
//
// The caller works too. Each thread begins with a share of the tasks, neighbours, so that it reads
// their memory in one stream, and then takes what the others have left, so that a thread that was
// interrupted does not hold them up. Which thread runs a task never changes a result: a task owns
// its outputs.
//
// Workers spin for a short time after a job, then sleep. Denormals are flushed on every thread
// while it runs tasks. After a fork the child starts with a pool of its own. Jobs of two threads
// run one after the other.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace tokenmill {

// Threads that take part, the caller included. At first: the processors of the affinity mask.
int num_threads();

// At least 1. Waits for a running job. More threads than processors are allowed, for tests.
void set_num_threads(int n);

struct TaskRange {
  int begin, end;

  int size() const { return end - begin; }
};

// The tasks that a thread begins with.
TaskRange share_of(int num_tasks, int thread, int num_threads);

namespace detail {
using TaskFunction = void (*)(void* context, TaskRange tasks, int thread);
void run(int num_tasks, int most_at_once, TaskFunction function, void* context);
}  // namespace detail

// Runs body(tasks) for ranges that make up [0, num_tasks), of at most `most_at_once` tasks where
// several threads take part, and returns when all are done. Otherwise as parallel_for.
template <class F>
void parallel_ranges(int num_tasks, int most_at_once, F&& body) {
  using Body = std::remove_reference_t<F>;
  detail::run(
      num_tasks, most_at_once,
      [](void* context, TaskRange tasks, int) { (*static_cast<Body*>(context))(tasks); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Runs body(task, thread) for every task in [0, num_tasks) and returns when all are done; thread
// is in [0, num_threads()). The body must not throw. A call from within a body runs inline, on the
// thread that makes it.
template <class F>
void parallel_for(int num_tasks, F&& body) {
  using Body = std::remove_reference_t<F>;
  detail::run(
      num_tasks, 1,
      [](void* context, TaskRange tasks, int thread) {
        for (int task = tasks.begin; task < tasks.end; ++task)
          (*static_cast<Body*>(context))(task, thread);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Memory of the calling thread, aligned to a cache line, kept until the thread ends and grown when
// it is too small. Slots are for different uses at the same time: 0 for GEMM, 1 for attention, 2
// for others, 3 for inputs that a product had to copy; a use within a use needs another slot.
void* thread_scratch(int slot, std::size_t num_bytes);

}  // namespace tokenmill
