// A step's inputs, gathered from the rows' tables: what worker/inputs/host.py does with numpy, in
// one call.
#pragma once

#include <cstdint>
#include <vector>

namespace tokenmill {

// The block ids of every row and of every request of a step, for one KV cache group.
struct GatherGroup {
  const std::int32_t* block_ids;  // [num_rows, width]
  std::int32_t* block_table;      // [max_reqs, width]
  std::int64_t* slot_mapping;     // [max_tokens]
  std::int64_t width;
};

// Tables and buffers keep their places for as long as this object lives.
class StepGather {
 public:
  struct Arrays {
    std::int32_t* token_ids;  // [num_rows, max_len]
    std::int64_t num_rows, max_len;
    std::int64_t block_size;
    std::int32_t* query_start_loc;  // [max_reqs + 1]
    std::int32_t* seq_lens;         // [max_reqs]
    std::int32_t* input_ids;        // [max_tokens]
    std::int64_t* positions;        // [max_tokens]
    std::int64_t max_reqs, max_tokens;
    const std::int64_t* position_offsets;  // [num_rows], added to a row's positions; null adds none
  };

  StepGather(const Arrays& arrays, std::vector<GatherGroup> groups)
      : arrays_(arrays), groups_(std::move(groups)) {}

  // Request i computes counts[i] tokens of row rows[i], behind num_computed[i] others. Throws
  // std::invalid_argument for what does not fit the tables.
  void fill(const std::int64_t* rows, const std::int64_t* counts, const std::int64_t* num_computed,
            std::int64_t num_reqs) const;

  const Arrays& arrays() const { return arrays_; }
  const std::vector<GatherGroup>& groups() const { return groups_; }

 private:
  void fill_group(const GatherGroup& group, std::int64_t req, std::int64_t row, std::int64_t first,
                  std::int64_t end, std::int64_t place) const;

  Arrays arrays_;
  std::vector<GatherGroup> groups_;
};

}  // namespace tokenmill
