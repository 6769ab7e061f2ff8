// The pool, as Python functions; most are for its tests.
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <tuple>

#include "bind_packed.h"
#include "pool.h"

namespace tokenmill {

void bind_pool(nb::module_& module) {
  module.def("num_threads", &num_threads);
  module.def("set_num_threads", [](int n) { Unlocked unlocked; set_num_threads(n); });
  // Adds 1 to the count of each task, in `repeats` jobs.
  module.def("count_tasks", [](Tensor counts, int repeats, int most_at_once) {
    check(counts.ndim() == 1 && counts.dtype() == nb::dtype<std::int32_t>(), "counts",
          "int32 of one dimension");
    check(most_at_once > 0, "most_at_once", "positive");
    auto* data = static_cast<std::int32_t*>(counts.data());
    const int num_tasks = dimension(counts.shape(0), "counts");
    Unlocked unlocked;
    for (int i = 0; i < repeats; ++i)
      parallel_ranges(num_tasks, most_at_once, [&](TaskRange tasks) {
        for (int task = tasks.begin; task < tasks.end; ++task)
          parallel_for(1, [&](int, int) { data[task] += 1; });
      });
  }, nb::arg("counts"), nb::arg("repeats"), nb::arg("most_at_once") = 1);
  module.def("share_of", [](int num_tasks, int thread, int num_threads) {
    const TaskRange tasks = share_of(num_tasks, thread, num_threads);
    return std::tuple{tasks.begin, tasks.end};
  });
}

}  // namespace tokenmill
