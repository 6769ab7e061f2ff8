// Mixtures of experts: routing, and the gated MLPs that tokens chose.
//
//   route    logits of a token -> its experts, best first, and their weights
//   mix      out[token] = base[token] + sum over its choices, in order, of
//                         weight * down(gate(gate_up(x[token])))
//
// A mixture's rows are the choices, token by token: row token * k + choice. They are put in the
// order of their experts, and an expert's rows begin at a multiple of 16, as quantised rows lie in
// blocks of 16; what lies between two experts is never computed.
//
//   chosen       token 0: [2, 0]   token 1: [0, 3]   token 2: [2, 0]
//   places       0: rows 1 2 5 | 16: rows 0 4 | 32: row 3          by expert 0, 2, 3
//
// Each product splits (expert, block of rows, strip of columns) into tasks of about the same time,
// so that one token keeps every thread busy, and an expert with many rows does not hold up others.
// A row's result is that of a product of its own, whatever rows share the call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "elementwise_kernels.h"
#include "experts_kernels.h"
#include "gemm_kernels.h"

namespace tokenmill {

void route(const RoutingCall& call);

// Columns of a matrix that are packed together.
struct WeightSpan {
  enum class Kind { bf16, float32, blocks };
  Kind kind;
  const std::uint8_t* data;
  int n, k;
  BlockFormat format;  // of blocks
  int first_column;

  std::int64_t panel_bytes() const;
};

struct ExpertMatrix {
  std::vector<WeightSpan> spans;
  const float* bias;  // of all columns, or null
};

// Rows in the forms in which products read them; a form may be absent.
struct ProductRows {
  TokenRows plain;
  QuantizedRows quantized;
};

// All experts of a layer.
struct ExpertSet {
  int hidden = 0, size = 0;
  std::vector<ExpertMatrix> gate_up;  // [2 * size, hidden]
  std::vector<ExpertMatrix> down;     // [hidden, size]

  int num_experts() const { return static_cast<int>(down.size()); }
  // Whether a matrix reads rows as they are, or quantised.
  static bool reads_plain(const std::vector<ExpertMatrix>& matrices);
  static bool reads_quantized(const std::vector<ExpertMatrix>& matrices);
};

struct MixtureCall {
  int num_rows;    // tokens
  int num_chosen;  // experts of a token
  bool is_bf16;    // values between the products, else float32
  ProductRows x;   // [num_rows, hidden], in one form at least
  const float* weights;        // [num_rows, num_chosen]
  const std::int32_t* chosen;  // the same shape, of [0, num_experts)
  GateFunction gate;
  TokenRows base;  // [num_rows, hidden]; data may be null
  float* out;      // [num_rows, hidden], `out_stride` values apart
  std::int64_t out_stride;
  std::uint8_t* workspace;  // mixture_bytes, aligned to a cache line
};

// Memory that a mixture of at most `num_rows` tokens works in.
std::size_t mixture_bytes(const ExpertSet& experts, int num_rows, int num_chosen, bool is_bf16);

// Where rows lie; kept from call to call, so that its memory is allocated once.
struct MixturePlan {
  std::vector<int> begins;  // [num_experts], place of an expert's first row
  std::vector<int> counts;  // [num_experts], its rows
  std::vector<int> rows;    // [num_rows * num_chosen], by expert
  std::vector<int> places;  // of these rows
  std::vector<int> place_of_row;
  std::vector<int> next;  // where the next row of an expert goes, while they are sorted
  struct Task {
    int expert, span;
    Range rows, panels;
  };
  std::vector<Task> tasks;
};

// Throws std::invalid_argument for an expert that there is not.
void mix_experts(const ExpertSet& experts, const MixtureCall& call, MixturePlan& plan);

}  // namespace tokenmill
