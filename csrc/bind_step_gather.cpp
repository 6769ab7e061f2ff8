// A step's inputs, gathered from the rows' tables: what worker/inputs/host.py does with numpy, in
// one call. Tables and buffers are numpy's; they are given once and keep their places.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace tokenmill {
namespace {

template <class T>
using Array = nb::ndarray<T, nb::numpy, nb::c_contig>;
using Ids = Array<std::int32_t>;
using Numbers = Array<std::int64_t>;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("step gather: ") + what);
}

class StepGather {
 public:
  StepGather(Ids token_ids, std::vector<Ids> block_ids, std::int64_t block_size,
             Ids query_start_loc, Ids seq_lens, Ids input_ids, Numbers positions,
             std::vector<Ids> block_tables, std::vector<Numbers> slot_mappings)
      : token_ids_(token_ids),
        block_ids_(std::move(block_ids)),
        block_size_(block_size),
        query_start_loc_(query_start_loc),
        seq_lens_(seq_lens),
        input_ids_(input_ids),
        positions_(positions),
        block_tables_(std::move(block_tables)),
        slot_mappings_(std::move(slot_mappings)) {
    require(token_ids_.ndim() == 2 && block_size_ > 0, "token_ids must be a matrix");
    require(block_tables_.size() == block_ids_.size() &&
                slot_mappings_.size() == block_ids_.size(),
            "every KV group needs a block table and a slot mapping");
    for (std::size_t g = 0; g < block_ids_.size(); ++g)
      require(block_ids_[g].ndim() == 2 && block_tables_[g].ndim() == 2 &&
                  block_tables_[g].shape(1) == block_ids_[g].shape(1) &&
                  slot_mappings_[g].shape(0) == positions_.shape(0),
              "block tables must be as wide as the rows', slot mappings as long as positions");
    require(input_ids_.shape(0) == positions_.shape(0), "one position a token");
    require(query_start_loc_.shape(0) == seq_lens_.shape(0) + 1, "one start more than lengths");
  }

  // Request i computes counts[i] tokens of row rows[i], behind num_computed[i] others.
  void fill(Numbers rows, Numbers counts, Numbers num_computed) {
    const std::int64_t num_reqs = rows.shape(0);
    require(counts.shape(0) == rows.shape(0) && num_computed.shape(0) == rows.shape(0),
            "rows, counts and num_computed must be equally long");
    require(num_reqs <= static_cast<std::int64_t>(seq_lens_.shape(0)), "too many requests");
    std::int64_t place = 0;
    query_start_loc_.data()[0] = 0;
    for (std::int64_t i = 0; i < num_reqs; ++i) {
      const std::int64_t row = rows.data()[i], count = counts.data()[i];
      const std::int64_t first = num_computed.data()[i], end = first + count;
      require(row >= 0 && row < static_cast<std::int64_t>(token_ids_.shape(0)), "no such row");
      require(first >= 0 && count >= 0 && end <= static_cast<std::int64_t>(token_ids_.shape(1)),
              "positions beyond the row");
      require(place + count <= static_cast<std::int64_t>(positions_.shape(0)), "too many tokens");
      const std::int32_t* tokens = token_ids_.data() + row * token_ids_.shape(1);
      std::copy(tokens + first, tokens + end, input_ids_.data() + place);
      for (std::int64_t t = 0; t < count; ++t) positions_.data()[place + t] = first + t;
      for (std::size_t g = 0; g < block_ids_.size(); ++g) fill_group(g, i, row, first, end, place);
      place += count;
      query_start_loc_.data()[i + 1] = static_cast<std::int32_t>(place);
      seq_lens_.data()[i] = static_cast<std::int32_t>(end);
    }
  }

 private:
  void fill_group(std::size_t group, std::int64_t req, std::int64_t row, std::int64_t first,
                  std::int64_t end, std::int64_t place) {
    const std::int64_t width = block_ids_[group].shape(1);
    const std::int64_t used = (end + block_size_ - 1) / block_size_;
    require(used <= width, "blocks beyond the row");
    const std::int32_t* blocks = block_ids_[group].data() + row * width;
    std::copy(blocks, blocks + used, block_tables_[group].data() + req * width);
    std::int64_t* slots = slot_mappings_[group].data() + place;
    for (std::int64_t p = first; p < end; ++p)
      *slots++ = blocks[p / block_size_] * block_size_ + p % block_size_;
  }

  Ids token_ids_;
  std::vector<Ids> block_ids_;
  std::int64_t block_size_;
  Ids query_start_loc_, seq_lens_, input_ids_;
  Numbers positions_;
  std::vector<Ids> block_tables_;
  std::vector<Numbers> slot_mappings_;
};

}  // namespace

void bind_step_gather(nb::module_& module) {
  nb::class_<StepGather>(module, "StepGather")
      .def(nb::init<Ids, std::vector<Ids>, std::int64_t, Ids, Ids, Ids, Numbers, std::vector<Ids>,
                    std::vector<Numbers>>(),
           nb::arg("token_ids"), nb::arg("block_ids"), nb::arg("block_size"),
           nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("input_ids"),
           nb::arg("positions"), nb::arg("block_tables"), nb::arg("slot_mappings"))
      .def("fill", &StepGather::fill, nb::arg("rows"), nb::arg("counts"),
           nb::arg("num_computed"));
}

}  // namespace tokenmill
