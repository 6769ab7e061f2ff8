// Gathering a step's inputs, as a Python class. Tables and buffers are numpy's; they are given once
// and keep their places.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "step_gather.h"

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

// The gather, and the arrays that it must not outlive.
class OwningStepGather : public StepGather {
 public:
  OwningStepGather(Ids token_ids, std::vector<Ids> block_ids, std::int64_t block_size,
                   Ids query_start_loc, Ids seq_lens, Ids input_ids, Numbers positions,
                   std::vector<Ids> block_tables, std::vector<Numbers> slot_mappings,
                   std::optional<Numbers> position_offsets)
      : StepGather(checked(token_ids, block_size, query_start_loc, seq_lens, input_ids, positions,
                           position_offsets),
                   checked(block_ids, block_tables, slot_mappings, positions)),
        single_{token_ids, query_start_loc, seq_lens, input_ids},
        positions_(positions),
        position_offsets_(std::move(position_offsets)),
        block_ids_(std::move(block_ids)),
        block_tables_(std::move(block_tables)),
        slot_mappings_(std::move(slot_mappings)) {}

  void fill_arrays(Numbers rows, Numbers counts, Numbers num_computed) const {
    require(counts.shape(0) == rows.shape(0) && num_computed.shape(0) == rows.shape(0),
            "rows, counts and num_computed must be equally long");
    fill(rows.data(), counts.data(), num_computed.data(), size(rows, 0));
  }

 private:
  template <class T>
  static std::int64_t size(const Array<T>& array, std::size_t dimension) {
    return static_cast<std::int64_t>(array.shape(dimension));
  }

  static Arrays checked(Ids& token_ids, std::int64_t block_size, Ids& query_start_loc,
                        Ids& seq_lens, Ids& input_ids, Numbers& positions,
                        const std::optional<Numbers>& position_offsets) {
    require(token_ids.ndim() == 2 && block_size > 0, "token_ids must be a matrix");
    require(input_ids.shape(0) == positions.shape(0), "one position a token");
    require(query_start_loc.shape(0) == seq_lens.shape(0) + 1, "one start more than lengths");
    require(!position_offsets || position_offsets->shape(0) == token_ids.shape(0),
            "one position offset a row");
    return {token_ids.data(), size(token_ids, 0), size(token_ids, 1), block_size,
            query_start_loc.data(), seq_lens.data(), input_ids.data(), positions.data(),
            size(seq_lens, 0), size(positions, 0),
            position_offsets ? position_offsets->data() : nullptr};
  }

  static std::vector<GatherGroup> checked(std::vector<Ids>& block_ids,
                                          std::vector<Ids>& block_tables,
                                          std::vector<Numbers>& slot_mappings,
                                          const Numbers& positions) {
    require(block_tables.size() == block_ids.size() && slot_mappings.size() == block_ids.size(),
            "every KV group needs a block table and a slot mapping");
    std::vector<GatherGroup> groups;
    for (std::size_t g = 0; g < block_ids.size(); ++g) {
      require(block_ids[g].ndim() == 2 && block_tables[g].ndim() == 2 &&
                  block_tables[g].shape(1) == block_ids[g].shape(1) &&
                  slot_mappings[g].shape(0) == positions.shape(0),
              "block tables must be as wide as the rows', slot mappings as long as positions");
      groups.push_back({block_ids[g].data(), block_tables[g].data(), slot_mappings[g].data(),
                        size(block_ids[g], 1)});
    }
    return groups;
  }

  std::vector<Ids> single_;
  Numbers positions_;
  std::optional<Numbers> position_offsets_;
  std::vector<Ids> block_ids_, block_tables_;
  std::vector<Numbers> slot_mappings_;
};

}  // namespace

void bind_step_gather(nb::module_& module) {
  nb::class_<StepGather>(module, "AnyStepGather");
  nb::class_<OwningStepGather, StepGather>(module, "StepGather")
      .def(nb::init<Ids, std::vector<Ids>, std::int64_t, Ids, Ids, Ids, Numbers, std::vector<Ids>,
                    std::vector<Numbers>, std::optional<Numbers>>(),
           nb::arg("token_ids"), nb::arg("block_ids"), nb::arg("block_size"),
           nb::arg("query_start_loc"), nb::arg("seq_lens"), nb::arg("input_ids"),
           nb::arg("positions"), nb::arg("block_tables"), nb::arg("slot_mappings"),
           nb::arg("position_offsets") = nb::none())
      .def("fill", &OwningStepGather::fill_arrays, nb::arg("rows"), nb::arg("counts"),
           nb::arg("num_computed"));
}

}  // namespace tokenmill
