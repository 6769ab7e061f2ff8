#include "step_gather.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace tokenmill {
namespace {

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("step gather: ") + what);
}

}  // namespace

void StepGather::fill(const std::int64_t* rows, const std::int64_t* counts,
                      const std::int64_t* num_computed, std::int64_t num_reqs) const {
  const Arrays& to = arrays_;
  require(num_reqs <= to.max_reqs, "too many requests");
  std::int64_t place = 0;
  to.query_start_loc[0] = 0;
  for (std::int64_t i = 0; i < num_reqs; ++i) {
    const std::int64_t row = rows[i], count = counts[i];
    const std::int64_t first = num_computed[i], end = first + count;
    require(row >= 0 && row < to.num_rows, "no such row");
    require(first >= 0 && count >= 0 && end <= to.max_len, "positions beyond the row");
    require(place + count <= to.max_tokens, "too many tokens");
    const std::int32_t* tokens = to.token_ids + row * to.max_len;
    std::copy(tokens + first, tokens + end, to.input_ids + place);
    const std::int64_t position = first + (to.position_offsets ? to.position_offsets[row] : 0);
    for (std::int64_t t = 0; t < count; ++t) to.positions[place + t] = position + t;
    for (const GatherGroup& group : groups_) fill_group(group, i, row, first, end, place);
    place += count;
    to.query_start_loc[i + 1] = static_cast<std::int32_t>(place);
    to.seq_lens[i] = static_cast<std::int32_t>(end);
  }
}

void StepGather::fill_group(const GatherGroup& group, std::int64_t req, std::int64_t row,
                            std::int64_t first, std::int64_t end, std::int64_t place) const {
  const std::int64_t block_size = arrays_.block_size;
  const std::int64_t used = (end + block_size - 1) / block_size;
  require(used <= group.width, "blocks beyond the row");
  const std::int32_t* blocks = group.block_ids + row * group.width;
  std::copy(blocks, blocks + used, group.block_table + req * group.width);
  std::int64_t* slots = group.slot_mapping + place;
  for (std::int64_t p = first; p < end; ++p)
    *slots++ = blocks[p / block_size] * block_size + p % block_size;
}

}  // namespace tokenmill
