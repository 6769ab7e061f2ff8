// Bans by a bitmask, as a Python function.
#include <algorithm>
#include <stdexcept>

#include "bind_rows.h"
#include "bitmask_kernels.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

using LogitsMatrix = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using Rows = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void apply_bitmask(const LogitsMatrix& logits, const Rows& rows, const Words& words) {
  const auto kernel = TOKENMILL_AT_LEVEL(apply_bitmask);
  check_matrix(logits, "logits", logits.shape(1));
  const auto vocab_size = static_cast<std::int64_t>(logits.shape(1));
  const auto num_rows = static_cast<std::int64_t>(logits.shape(0));
  const auto num_words = (vocab_size + 31) / 32;
  check(static_cast<std::int64_t>(words.shape(1)) == num_words, "bitmask",
        std::to_string(num_words) + " words wide");
  check(words.shape(0) == rows.shape(0), "bitmask", "a row for each entry of rows");
  const std::int64_t* first = rows.data();
  const std::int64_t* last = first + rows.shape(0);
  check(std::all_of(first, last, [&](auto row) { return row >= 0 && row < num_rows; }), "rows",
        "rows of logits");
  const auto* bits = reinterpret_cast<const std::uint32_t*>(words.data());
  float* values = logits.data();
  const std::int64_t stride = logits.stride(0);
  Unlocked unlocked;
  parallel_for(static_cast<int>(last - first), [&](int i, int) {
    kernel(values + first[i] * stride, static_cast<int>(vocab_size), bits + i * num_words);
  });
}

}  // namespace

void bind_bitmask(nb::module_& module) {
  module.def("apply_bitmask", &apply_bitmask, nb::arg("logits"), nb::arg("rows"),
             nb::arg("bitmask"));
}

}  // namespace tokenmill
