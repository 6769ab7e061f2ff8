// Prompt lookup, as a Python class.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ngram_index.h"

namespace nb = nanobind;

namespace tokenmill {
namespace {

using Table = nb::ndarray<const std::int32_t, nb::numpy, nb::ndim<2>, nb::c_contig>;
using Numbers = nb::ndarray<const std::int64_t, nb::numpy, nb::ndim<1>, nb::c_contig>;

class BoundNgramIndex : public NgramIndex {
 public:
  using NgramIndex::NgramIndex;

  std::vector<std::pair<std::vector<std::int32_t>, int>> propose_all(
      const Numbers& rows, const Numbers& generations, const Table& token_ids,
      const Numbers& num_tokens, const Numbers& max_drafts) {
    const std::size_t num_reqs = rows.shape(0);
    if (generations.shape(0) != num_reqs || num_tokens.shape(0) != num_reqs ||
        max_drafts.shape(0) != num_reqs)
      throw std::invalid_argument("n-grams: one entry a request in every array");
    const auto num_rows = static_cast<std::int64_t>(token_ids.shape(0));
    const auto max_len = static_cast<std::int64_t>(token_ids.shape(1));
    std::vector<std::pair<std::vector<std::int32_t>, int>> found(num_reqs);
    for (std::size_t i = 0; i < num_reqs; ++i) {
      const std::int64_t row = rows.data()[i], count = num_tokens.data()[i];
      if (row < 0 || row >= num_rows || count < 1 || count > max_len)
        throw std::invalid_argument("n-grams: rows and numbers of tokens must fit the table");
      propose(row, generations.data()[i], token_ids.data() + row * max_len, count,
              static_cast<int>(max_drafts.data()[i]), found[i].first, found[i].second);
    }
    return found;
  }
};

}  // namespace

void bind_ngram_index(nb::module_& module) {
  nb::class_<BoundNgramIndex>(module, "NgramIndex")
      .def(nb::init<std::int64_t, int, int>(), nb::arg("num_rows"), nb::arg("shortest"),
           nb::arg("longest"))
      .def("propose", &BoundNgramIndex::propose_all, nb::arg("rows"), nb::arg("generations"),
           nb::arg("token_ids"), nb::arg("num_tokens"), nb::arg("max_drafts"));
}

}  // namespace tokenmill
