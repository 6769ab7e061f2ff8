// Kernels whose rows do not depend on each other: norms and gates. Sums run in one order for a
// given length, whatever the batch and the threads are.
#pragma once

#include <cstdint>

#include "attention_kernels.h"
#include "gemm_kernels.h"

namespace tokenmill {

enum class Gate : int { silu = 0, gelu_tanh = 1 };

// Where a kernel puts its rows: as values, or quantised as `quantize_rows` does it with the same
// values in float32.
struct ActivationOutput {
  TokenRows rows;           // data may be null
  QuantizedRows quantized;  // else this is used
};

// residual += x (or residual = x at the start of a stream);
// out = residual / sqrt(mean(residual^2) + eps) * weight.
struct NormCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, size]
  float* residual;
  std::int64_t residual_stride;
  bool starts_stream;
  const float* weight;  // [size]
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

// out = gate(x[:, :size]) * x[:, size:].
struct GateCall {
  int num_rows, size;
  TokenRows x;  // [num_rows, 2 * size]
  Gate gate;
  ActivationOutput out;
};

void add_rms_norm(const NormCall& call);
void head_rms_norm(const HeadNormCall& call);
void gated_activation(const GateCall& call);

// ---------------------------------------------------------------------------------------------
// What the instruction sets provide.

void add_rms_norm_avx2(const NormCall&, Range rows);
void add_rms_norm_avx512(const NormCall&, Range rows);
void head_rms_norm_avx2(const HeadNormCall&, Range rows);
void head_rms_norm_avx512(const HeadNormCall&, Range rows);
void gated_activation_avx2(const GateCall&, Range rows);
void gated_activation_avx512(const GateCall&, Range rows);

}  // namespace tokenmill
