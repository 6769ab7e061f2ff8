// A step of a state-space layer as a whole: which states it reads and writes, and the split among
// threads.
#include "state_space.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr std::int64_t kNothing = -1;
constexpr int kTaskRows = 8;
constexpr float kLinear = 20.0f;  // above it, softplus(x) is x

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

int place_read(const StateSpaceCall& call, const StateStep& step) {
  if (step.num_seen == 0) return 0;
  const std::int64_t* seen = call.num_seen + std::int64_t{step.read_block} * kStatePlaces;
  for (int place = 0; place < kStatePlaces; ++place)
    if (seen[place] == step.num_seen) return place;
  throw std::runtime_error("no state behind " + std::to_string(step.num_seen) +
                           " tokens is in block " + std::to_string(step.read_block));
}

// Where a step keeps a state: beside the one that it has read, or in front.
int place_written(const StateStep& step, int read_place, const StateWrite& write) {
  return step.num_seen > 0 && write.block == step.read_block ? 1 - read_place : 0;
}

const float* state_read(const StateSpaceCall& call, const StateStep& step, int place) {
  return step.num_seen == 0 ? nullptr : call.state(step.read_block, place);
}

// Time steps and decays of rows.
void time_steps(const StateSpaceCall& call, Range rows) {
  const StateSpaceShape& shape = call.shape;
  const int heads = shape.num_heads;
  for (int row = rows.begin; row < rows.end; ++row) {
    const std::int64_t at = row * call.inputs.stride + shape.inner() + shape.channels();
    for (int head = 0; head < heads; ++head) {
      const float given = call.inputs.is_bf16
                              ? bf16_to_float(static_cast<const bf16*>(call.inputs.data)[at + head])
                              : static_cast<const float*>(call.inputs.data)[at + head];
      const float x = given + call.dt_bias[head];
      const float softplus = x > kLinear ? x : std::log1p(std::exp(x));
      // Written so that a NaN stays one.
      const float low = softplus < shape.dt_min ? shape.dt_min : softplus;
      const float dt = low > shape.dt_max ? shape.dt_max : low;
      call.dt[std::int64_t{row} * heads + head] = dt;
      call.decay[std::int64_t{row} * heads + head] = std::exp(dt * call.a[head]);
    }
  }
}

void scan_head(const StateSpaceCall& call, const StatePlan& plan, const StateStep& step,
               int read_place, int head) {
  const auto kernel = TOKENMILL_AT_LEVEL(scan_head);
  const StateSpaceShape& shape = call.shape;
  const std::int64_t offset = shape.past_values() + head * shape.head_values();
  const float* before = state_read(call, step, read_place);
  if (before != nullptr) before += offset;
  StateSpaceCall target = call;
  int row = step.row_begin;
  for (int i = step.write_begin; i < step.write_end; ++i) {
    const StateWrite& write = plan.writes()[i];
    float* after = target.state(write.block, place_written(step, read_place, write)) + offset;
    const int end = step.row_begin + write.num_rows;
    kernel(call, head, {row, end}, before, after);
    before = after;
    row = end;
  }
}

// The inputs behind a step's rows that the convolution will need, and how many tokens were seen.
void keep_inputs(StateSpaceCall& call, const StatePlan& plan, const StateStep& step,
                 int read_place) {
  const StateSpaceShape& shape = call.shape;
  const int channels = shape.channels(), kept = shape.kernel_size - 1;
  const float* past = state_read(call, step, read_place);
  for (int i = step.write_begin; i < step.write_end; ++i) {
    const StateWrite& write = plan.writes()[i];
    const int place = place_written(step, read_place, write);
    float* target = call.state(write.block, place);
    for (int at = 0; at < kept; ++at) {
      float* row = target + std::int64_t{at} * channels;
      const int from = write.num_rows - kept + at;  // in the step's rows
      if (from < 0) {
        const float* old = past == nullptr ? nullptr : past + std::int64_t{from + kept} * channels;
        for (int c = 0; c < channels; ++c) row[c] = old == nullptr ? 0.0f : old[c];
        continue;
      }
      const std::int64_t input = (step.row_begin + from) * call.inputs.stride + shape.inner();
      for (int c = 0; c < channels; ++c)
        row[c] = call.inputs.is_bf16
                     ? bf16_to_float(static_cast<const bf16*>(call.inputs.data)[input + c])
                     : static_cast<const float*>(call.inputs.data)[input + c];
    }
    std::int64_t* seen = call.num_seen + std::int64_t{write.block} * kStatePlaces;
    if (step.num_seen == 0 || write.block != step.read_block)
      std::fill(seen, seen + kStatePlaces, kNothing);
    seen[place] = step.num_seen + write.num_rows;
  }
}

}  // namespace

void StatePlan::build(int num_reqs, const std::int32_t* query_start_loc,
                      const std::int32_t* seq_lens, const std::int32_t* block_table,
                      std::int64_t table_stride, int table_columns, int block_size,
                      int num_blocks) {
  num_blocks_ = num_blocks;
  steps_.clear();
  writes_.clear();
  check(query_start_loc[0] == 0, "query_start_loc must begin with 0");
  for (int req = 0; req < num_reqs; ++req) {
    const int begin = query_start_loc[req], end = query_start_loc[req + 1];
    const int seq_len = seq_lens[req], seen = seq_len - (end - begin);
    check(begin <= end, "query_start_loc must not fall");
    check(seen >= 0, "seq_lens must be at least the query lengths");
    if (begin == end) continue;
    check(ceil_div(seq_len, block_size) <= table_columns,
          "block_table has too few columns for seq_lens");
    const std::int32_t* table = block_table + req * table_stride;
    const auto block = [&](int token) {
      const int found = table[token / block_size];
      check(found >= 0 && found < num_blocks, "block_table names a block that is not there");
      return found;
    };
    StateStep step{begin, end, seen, seen == 0 ? 0 : block(seen - 1),
                   static_cast<int>(writes_.size()), 0};
    for (int boundary = (seen / block_size + 1) * block_size; boundary < seq_len;
         boundary += block_size)
      if (block(boundary - 1) != 0) writes_.push_back({boundary - seen, block(boundary - 1)});
    // The null block keeps nothing, but a step must end somewhere.
    writes_.push_back({seq_len - seen, block(seq_len - 1)});
    step.write_end = static_cast<int>(writes_.size());
    steps_.push_back(step);
  }
  places_.resize(steps_.size());
}

void state_space(StateSpaceCall call, StatePlan& plan) {
  const std::vector<StateStep>& steps = plan.steps();
  std::vector<int>& places = plan.places();
  const int num_steps = static_cast<int>(steps.size()), num_rows = plan.num_rows();
  for (int i = 0; i < num_steps; ++i) places[i] = place_read(call, steps[i]);

  const auto convolve = TOKENMILL_AT_LEVEL(convolve);
  parallel_for(ceil_div(num_rows, kTaskRows), [&](int task, int) {
    const Range rows{task * kTaskRows, min_of((task + 1) * kTaskRows, num_rows)};
    time_steps(call, rows);
    int index = static_cast<int>(
        std::upper_bound(steps.begin(), steps.end(), rows.begin,
                         [](int row, const StateStep& step) { return row < step.row_end; }) -
        steps.begin());
    for (int row = rows.begin; row < rows.end; ++index) {
      const StateStep& step = steps[index];
      const int end = min_of(step.row_end, rows.end);
      convolve(call, step, state_read(call, step, places[index]), {row, end});
      row = end;
    }
  });
  const int heads = call.shape.num_heads;
  parallel_for(num_steps * heads, [&](int task, int) {
    const int index = task / heads;
    scan_head(call, plan, steps[index], places[index], task % heads);
  });
  parallel_for(num_steps, [&](int index, int) {
    StateSpaceCall own = call;
    keep_inputs(own, plan, steps[index], places[index]);
  });
  const auto norm = TOKENMILL_AT_LEVEL(gated_norm);
  parallel_for(ceil_div(num_rows, kTaskRows), [&](int task, int) {
    norm(call, {task * kTaskRows, min_of((task + 1) * kTaskRows, num_rows)});
  });
}

}  // namespace tokenmill
