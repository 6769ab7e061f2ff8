// Groups of ranks in shared memory, and the lookup of tokens in a rank's part of a vocabulary.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "bind_packed.h"
#include "program.h"
#include "shared_group.h"

namespace tokenmill {
namespace {

using Memory = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LocalIds = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::size_t checked_slot_bytes(std::int64_t slot_bytes) {
  check(slot_bytes > 0 && slot_bytes % 64 == 0, "slot_bytes", "a multiple of 64");
  return static_cast<std::size_t>(slot_bytes);
}

void make_group(SharedGroup* place, const Memory& memory, int rank, int size,
                std::int64_t slot_bytes) {
  check(size > 0 && rank >= 0 && rank < size, "rank", "within [0, size)");
  check(reinterpret_cast<std::uintptr_t>(memory.data()) % 64 == 0, "memory", "aligned to 64 bytes");
  check_bytes(memory.size(), SharedGroup::memory_bytes(size, checked_slot_bytes(slot_bytes)),
              "memory");
  new (place) SharedGroup(memory.data(), rank, size, static_cast<std::size_t>(slot_bytes));
}

void run_all_reduce(SharedGroup& group, const Floats& x) {
  const std::int64_t columns = x.shape(1);
  submit({"all_reduce"}, x.shape(0), [&group, values = x.data(), columns](int num_rows) {
    group.all_reduce(values, num_rows * columns);
  });
}

void run_all_gather(SharedGroup& group, const ReadFloats& x, const std::vector<int>& widths,
                    const Floats& out) {
  check(static_cast<int>(widths.size()) == group.size(), "widths", "one for each rank");
  check(*std::min_element(widths.begin(), widths.end()) > 0, "widths", "positive");
  const std::int64_t width = std::accumulate(widths.begin(), widths.end(), std::int64_t{0});
  check(static_cast<std::int64_t>(x.shape(1)) == widths[group.rank()], "x",
        "of this rank's width");
  check(static_cast<std::int64_t>(out.shape(1)) == width && out.shape(0) == x.shape(0), "out",
        "of as many rows as x, and of all widths together");
  submit({"all_gather"}, x.shape(0), [&group, values = x.data(), widths,
                                      target = out.data()](int num_rows) {
    group.all_gather(values, num_rows, widths, target);
  });
}

// Of ids, those of a part [first, first + count) as its own; the others become 0.
void run_local_ids(const Ids& ids, std::int32_t first, std::int32_t count, const LocalIds& out) {
  check(ids.size() == out.size(), "out", "a value for each id");
  submit({"local_ids"}, ids.size(), [source = ids.data(), target = out.data(), first,
                                     count](int num_rows) {
    for (int i = 0; i < num_rows; ++i) {
      const std::int32_t id = source[i] - first;
      target[i] = id >= 0 && id < count ? id : 0;
    }
  });
}

// Zeros in the rows of x whose ids are not of the part.
void run_clear_others(const Ids& ids, std::int32_t first, std::int32_t count, const Floats& x) {
  check(ids.size() == x.shape(0), "x", "a row for each id");
  const std::int64_t columns = x.shape(1);
  submit({"clear_others"}, ids.size(), [source = ids.data(), rows = x.data(), first, count,
                                        columns](int num_rows) {
    for (int i = 0; i < num_rows; ++i) {
      const std::int32_t id = source[i] - first;
      if (id < 0 || id >= count) std::fill_n(rows + i * columns, columns, 0.0f);
    }
  });
}

}  // namespace

void bind_shared_group(nb::module_& module) {
  nb::class_<SharedGroup>(module, "SharedGroup")
      .def("__init__", &make_group, nb::arg("memory"), nb::arg("rank"), nb::arg("size"),
           nb::arg("slot_bytes"), nb::keep_alive<1, 2>())
      .def_static("memory_bytes", [](int size, std::int64_t slot_bytes) {
        check(size > 0, "size", "positive");
        return SharedGroup::memory_bytes(size, checked_slot_bytes(slot_bytes));
      }, nb::arg("size"), nb::arg("slot_bytes"))
      .def("begin", &SharedGroup::begin, nb::arg("mark"))
      .def("all_reduce", &run_all_reduce, nb::arg("x").noconvert())
      .def("all_gather", &run_all_gather, nb::arg("x").noconvert(), nb::arg("widths"),
           nb::arg("out").noconvert())
      .def("break_up", &SharedGroup::break_up)
      .def_prop_ro("is_broken", &SharedGroup::is_broken);
  module.def("local_ids", &run_local_ids, nb::arg("ids"), nb::arg("first"), nb::arg("count"),
             nb::arg("out").noconvert());
  module.def("clear_others", &run_clear_others, nb::arg("ids"), nb::arg("first"),
             nb::arg("count"), nb::arg("x").noconvert());
}

}  // namespace tokenmill
