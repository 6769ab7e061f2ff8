// State-space layers over the flat batch: a convolution, a scan, a gated norm.
//
// A row of inputs is | gates | x of all heads | B of all groups | C of all groups | dt |.
//
//   u       silu(convolution of x, B and C with the last inputs of each channel)
//   dt      softplus(dt + dt_bias), within limits; decay = exp(dt * a)
//   state   state * decay + dt * x B^T      a matrix [head_size][state_size] a head
//   y       state C + d * x                 a sum in four parts of 16 lanes
//   out     RMSNorm of y * silu(gate), in each group
//
// A state is | inputs [kernel_size - 1][channels] | matrices of the heads |. A block has two places
// for states, each with the number of tokens that its state has seen: a step reads the one that has
// seen those before its own, and leaves it as it is.
#pragma once

#include <cstdint>
#include <vector>

#include "elementwise_kernels.h"

namespace tokenmill {

constexpr int kStatePlaces = 2;

struct StateSpaceShape {
  int num_heads, head_size, state_size, num_groups, kernel_size;
  float dt_min, dt_max;
  float norm_eps;

  int inner() const { return num_heads * head_size; }
  int channels() const { return inner() + 2 * num_groups * state_size; }
  int columns() const { return inner() + channels() + num_heads; }
  std::int64_t past_values() const { return std::int64_t{kernel_size - 1} * channels(); }
  std::int64_t head_values() const { return std::int64_t{head_size} * state_size; }
  std::int64_t state_values() const { return past_values() + num_heads * head_values(); }
};

// Behind how many of a step's rows a state is kept, and where.
struct StateWrite {
  int num_rows, block;
};

// A request's part of a step.
struct StateStep {
  int row_begin, row_end;
  std::int64_t num_seen;  // tokens before
  int read_block;         // with the state behind these, if there are any
  int write_begin, write_end;
};

// Built once a step, for all layers.
class StatePlan {
 public:
  // Takes over a step's tables, as in attention/backend.py. Throws std::invalid_argument if they
  // contradict each other, or name blocks outside of [0, num_blocks).
  void build(int num_reqs, const std::int32_t* query_start_loc, const std::int32_t* seq_lens,
             const std::int32_t* block_table, std::int64_t table_stride, int table_columns,
             int block_size, int num_blocks);

  const std::vector<StateStep>& steps() const { return steps_; }
  const std::vector<StateWrite>& writes() const { return writes_; }
  int num_rows() const { return steps_.empty() ? 0 : steps_.back().row_end; }
  int num_blocks() const { return num_blocks_; }
  // The place that each step reads, in one layer.
  std::vector<int>& places() { return places_; }

 private:
  int num_blocks_ = 0;
  std::vector<StateStep> steps_;
  std::vector<StateWrite> writes_;
  std::vector<int> places_;
};

struct StateSpaceCall {
  StateSpaceShape shape;
  const float* conv_weight;  // [kernel_size][channels], the oldest input first
  const float* conv_bias;    // [channels]
  const float* a;            // [num_heads]
  const float* d;            // [num_heads]
  const float* dt_bias;      // [num_heads]
  const float* norm_weight;  // [inner]
  float* states;             // [num_blocks][kStatePlaces][state_values]
  std::int64_t* num_seen;    // [num_blocks][kStatePlaces]; -1: no state
  TokenRows inputs;          // [num_rows, columns]
  // Space: [num_rows] of channels, inner, heads and heads.
  float *u, *y, *dt, *decay;
  ActivationOutput out;  // [num_rows, inner]

  const float* state(int block, int place) const {
    return states + (std::int64_t{block} * kStatePlaces + place) * shape.state_values();
  }
  float* state(int block, int place) {
    return states + (std::int64_t{block} * kStatePlaces + place) * shape.state_values();
  }
};

// Rows are those of the plan. Throws std::runtime_error if a state that a step reads is not there.
void state_space(StateSpaceCall call, StatePlan& plan);

// ---------------------------------------------------------------------------------------------
// What an instruction set provides.

// u of some rows of a step. `past` is that of the state before it, or null.
void convolve_portable(const StateSpaceCall&, const StateStep&, const float* past, Range rows);
void convolve_avx2(const StateSpaceCall&, const StateStep&, const float* past, Range rows);
void convolve_avx512(const StateSpaceCall&, const StateStep&, const float* past, Range rows);

// y of a head in rows of a step: `before` (null: zeros) to `after`, matrices that may be the same.
void scan_head_portable(const StateSpaceCall&, int head, Range rows, const float* before,
                        float* after);
void scan_head_avx2(const StateSpaceCall&, int head, Range rows, const float* before,
                    float* after);
void scan_head_avx512(const StateSpaceCall&, int head, Range rows, const float* before,
                      float* after);

void gated_norm_portable(const StateSpaceCall&, Range rows);
void gated_norm_avx2(const StateSpaceCall&, Range rows);
void gated_norm_avx512(const StateSpaceCall&, Range rows);

}  // namespace tokenmill
