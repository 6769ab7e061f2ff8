// Drafts by suffix, as a Python class.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "suffix_index.h"

namespace nb = nanobind;

namespace tokenmill {
namespace {

using Table = nb::ndarray<const std::int32_t, nb::numpy, nb::ndim<2>, nb::c_contig>;
using Numbers = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<1>, nb::c_contig>;
using Salts = nb::ndarray<const std::uint64_t, nb::numpy, nb::ndim<1>, nb::c_contig>;

class BoundSuffixIndex : public SuffixIndex {
 public:
  using SuffixIndex::SuffixIndex;

  std::vector<std::pair<std::vector<std::int32_t>, int>> propose_all(
      const Numbers& rows, const Numbers& generations, const Salts& salts, const Table& token_ids,
      const Numbers& num_tokens, const Numbers& max_drafts) {
    const std::size_t num_reqs = rows.shape(0);
    if (generations.shape(0) != num_reqs || salts.shape(0) != num_reqs ||
        num_tokens.shape(0) != num_reqs || max_drafts.shape(0) != num_reqs)
      throw std::invalid_argument("suffixes: one entry a request in every array");
    const auto num_rows = static_cast<std::int64_t>(token_ids.shape(0));
    const auto max_len = static_cast<std::int64_t>(token_ids.shape(1));
    std::vector<std::pair<std::vector<std::int32_t>, int>> found(num_reqs);
    for (std::size_t i = 0; i < num_reqs; ++i) {
      const std::int64_t row = rows.data()[i], count = num_tokens.data()[i];
      if (row < 0 || row >= num_rows || count < 1 || count > max_len)
        throw std::invalid_argument("suffixes: rows and numbers of tokens must fit the table");
      propose(row, generations.data()[i], salts.data()[i], token_ids.data() + row * max_len, count,
              static_cast<int>(max_drafts.data()[i]), found[i].first, found[i].second);
    }
    return found;
  }
};

}  // namespace

void bind_suffix_index(nb::module_& module) {
  nb::class_<BoundSuffixIndex>(module, "SuffixIndex")
      .def(nb::init<std::int64_t, int, int, std::int64_t, double>(), nb::arg("num_rows"),
           nb::arg("shortest"), nb::arg("longest"), nb::arg("num_places"),
           nb::arg("least_probability"))
      .def("propose", &BoundSuffixIndex::propose_all, nb::arg("rows"), nb::arg("generations"),
           nb::arg("salts"), nb::arg("token_ids"), nb::arg("num_tokens"), nb::arg("max_drafts"));
}

}  // namespace tokenmill
