// Kernels whose rows do not depend on each other: norms, gates, copies. Sums run in one order for
// a given length, whatever the batch and the threads are.
#pragma once

#include <cstdint>

#include "attention_kernels.h"
#include "gemm_kernels.h"

namespace tokenmill {

// What a gate and its value become:
//   silu, gelu_tanh   activation(gate) * up
//   clamped           (up + 1) * gate * logistic(alpha * gate), with gate at most `limit`, and up
//                     within [-limit, limit]
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped = 2 };

struct GateFunction {
  Gate gate = Gate::silu;
  float alpha = 0.0f, limit = 0.0f;  // of a clamped one
};

// Where a kernel puts its rows: as values, or quantised as `quantize_rows` does it with the same
// values in float32.
struct ActivationOutput {
  TokenRows rows;           // data may be null
  QuantizedRows quantized;  // else this is used
};

// residual += x (or residual = x at the start of a stream); then
//   add_rms_norm     out = residual / sqrt(mean(residual^2) + eps) * weight
//   add_layer_norm   out = c / sqrt(mean(c^2) + eps) * weight + bias, c = residual - mean(residual)
//   add_residual     out = residual
struct NormCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, size]
  float* residual;
  std::int64_t residual_stride;
  bool starts_stream;
  const float* weight;  // [size]
  const float* bias;    // [size], of add_layer_norm
  float eps;
  ActivationOutput out;
};

// out = x / sqrt(mean(x^2) + eps) * weight, in each head of a row.
struct HeadNormCall {
  int num_rows, num_heads, head_size;
  TokenRows x, out;     // [num_rows, num_heads * head_size]
  const float* weight;  // [head_size]
  float eps;
};

//   gated_activation   out = x[:, :size] and x[:, size:], gated
//   activation         out = activation(x), of a gate without a limit
struct GateCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, 2 * size], or [num_rows, size]
  GateFunction gate;
  ActivationOutput out;
};

// out = x + table[rows].
struct AddRowsCall {
  int num_rows, size;
  TokenRows x, out;          // [num_rows, size]
  const float* table;        // [any, size]
  const std::int64_t* rows;  // [num_rows]
};

// out = x, in parts of rows that lie apart.
struct CopyCall {
  int num_rows, num_parts, size;
  TokenRows x, out;  // [num_rows, num_parts, size]
  std::int64_t x_part_stride, out_part_stride;
};

void add_rms_norm(const NormCall& call);
void add_layer_norm(const NormCall& call);
void add_residual(const NormCall& call);
void head_rms_norm(const HeadNormCall& call);
void gated_activation(const GateCall& call);
void activation(const GateCall& call);
void add_rows(const AddRowsCall& call);
void copy_parts(const CopyCall& call);

// ---------------------------------------------------------------------------------------------
// What the instruction sets provide.

#define TOKENMILL_LEVELS(name, Call)        \
  void name##_portable(const Call&, Range); \
  void name##_avx2(const Call&, Range);     \
  void name##_avx512(const Call&, Range);
TOKENMILL_LEVELS(add_rms_norm, NormCall)
TOKENMILL_LEVELS(add_layer_norm, NormCall)
TOKENMILL_LEVELS(add_residual, NormCall)
TOKENMILL_LEVELS(head_rms_norm, HeadNormCall)
TOKENMILL_LEVELS(gated_activation, GateCall)
TOKENMILL_LEVELS(activation, GateCall)
TOKENMILL_LEVELS(add_rows, AddRowsCall)
TOKENMILL_LEVELS(copy_parts, CopyCall)
#undef TOKENMILL_LEVELS

}  // namespace tokenmill
