// Norms, gates and copies with AVX-512. A row is worked on by one thread.
#include "elementwise_kernels.h"
#include "elementwise_math.h"
#include "pool.h"
#include "row_output.h"

namespace tokenmill {
namespace {

// x * logistic(alpha * x), given -alpha * x.
__m512 logistic_gate(__m512 x, __m512 negative_alpha_x) {
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp_of(negative_alpha_x)));
}

// Of one without a limit. A NaN stays one, here and below.
__m512 apply_gate(Gate gate, __m512 x) {
  if (gate == Gate::silu) return logistic_gate(x, _mm512_sub_ps(_mm512_setzero_ps(), x));
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  const __m512 inner = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x),
                                     _mm512_set1_ps(0.7978845608f));
  return _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5f)),
                       _mm512_add_ps(one, tanh_of(inner)));
}

__m512 gated(const GateFunction& function, __m512 gate, __m512 up) {
  if (function.gate != Gate::clamped) return _mm512_mul_ps(apply_gate(function.gate, gate), up);
  const __m512 limit = _mm512_set1_ps(function.limit);
  gate = _mm512_min_ps(limit, gate);
  up = _mm512_max_ps(_mm512_set1_ps(-function.limit), _mm512_min_ps(limit, up));
  return _mm512_mul_ps(_mm512_add_ps(up, _mm512_set1_ps(1.0f)),
                       logistic_gate(gate, _mm512_mul_ps(_mm512_set1_ps(-function.alpha), gate)));
}

float sum_of(const __m512 (&sums)[4]) {
  return _mm512_reduce_add_ps(
      _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

// What values with that sum of squares are multiplied by.
__m512 norm_factor(float sum_of_squares, int size, float eps) {
  const float mean = sum_of_squares / static_cast<float>(size);
  return _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
}

// Adds x to the residual of a row; returns the sum of squares, or of values, in four sums of 16
// lanes.
template <bool Squares>
float add_to_stream(const NormCall& call, int row, float* residual) {
  __m512 sums[4];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  const std::int64_t x_row = row * call.x.stride;
  for (int at = 0; at < call.size; at += 16) {
    const __mmask16 mask = first_lanes(call.size - at);
    __m512 value = load_values(call.x.data, call.x.is_bf16, x_row + at, mask);
    if (!call.starts_stream)
      value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, residual + at), value);
    _mm512_mask_storeu_ps(residual + at, mask, value);
    __m512& sum = sums[at / 16 % 4];
    sum = Squares ? _mm512_fmadd_ps(value, value, sum) : _mm512_add_ps(value, sum);
  }
  return sum_of(sums);
}

// Values of a row from their mean on; lanes that are not there give 0.
__m512 centred(const float* row, int at, __mmask16 mask, __m512 mean) {
  return _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, row + at), mean);
}

float sum_of_centred_squares(const float* row, int size, __m512 mean) {
  __m512 sums[4];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int at = 0; at < size; at += 16) {
    const __m512 value = centred(row, at, first_lanes(size - at), mean);
    __m512& sum = sums[at / 16 % 4];
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return sum_of(sums);
}

float sum_of_squares(const TokenRows& x, std::int64_t begin, int size) {
  __m512 sums[4];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int at = 0; at < size; at += 16) {
    const __m512 value = load_values(x.data, x.is_bf16, begin + at, first_lanes(size - at));
    __m512& sum = sums[at / 16 % 4];
    sum = _mm512_fmadd_ps(value, value, sum);
  }
  return sum_of(sums);
}

}  // namespace

void add_rms_norm_avx512(const NormCall& call, Range rows) {
  const RowOutput out(call.out, call.size);
  for (int row = rows.begin; row < rows.end; ++row) {
    float* residual = call.residual + row * call.residual_stride;
    const __m512 factor = norm_factor(add_to_stream<true>(call, row, residual), call.size, call.eps);
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, residual + at), factor);
      out.store(row, at, mask, _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, call.weight + at)));
    }
    out.finish(row);
  }
}

void add_layer_norm_avx512(const NormCall& call, Range rows) {
  const RowOutput out(call.out, call.size);
  for (int row = rows.begin; row < rows.end; ++row) {
    float* residual = call.residual + row * call.residual_stride;
    const float sum = add_to_stream<false>(call, row, residual);
    const __m512 mean = _mm512_set1_ps(sum / static_cast<float>(call.size));
    const __m512 factor =
        norm_factor(sum_of_centred_squares(residual, call.size, mean), call.size, call.eps);
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      const __m512 value = _mm512_mul_ps(centred(residual, at, mask, mean), factor);
      out.store(row, at, mask,
                _mm512_fmadd_ps(value, _mm512_maskz_loadu_ps(mask, call.weight + at),
                                _mm512_maskz_loadu_ps(mask, call.bias + at)));
    }
    out.finish(row);
  }
}

void add_residual_avx512(const NormCall& call, Range rows) {
  const RowOutput out(call.out, call.size);
  for (int row = rows.begin; row < rows.end; ++row) {
    float* residual = call.residual + row * call.residual_stride;
    add_to_stream<false>(call, row, residual);
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      out.store(row, at, mask, _mm512_maskz_loadu_ps(mask, residual + at));
    }
    out.finish(row);
  }
}

void head_rms_norm_avx512(const HeadNormCall& call, Range rows) {
  for (int row = rows.begin; row < rows.end; ++row) {
    for (int head = 0; head < call.num_heads; ++head) {
      const std::int64_t x_head = row * call.x.stride + head * call.head_size;
      const std::int64_t out_head = row * call.out.stride + head * call.head_size;
      const __m512 factor =
          norm_factor(sum_of_squares(call.x, x_head, call.head_size), call.head_size, call.eps);
      for (int at = 0; at < call.head_size; at += 16) {
        const __mmask16 mask = first_lanes(call.head_size - at);
        const __m512 value =
            _mm512_mul_ps(load_values(call.x.data, call.x.is_bf16, x_head + at, mask), factor);
        store_values(call.out.data, call.out.is_bf16, out_head + at, mask,
                     _mm512_mul_ps(value, _mm512_maskz_loadu_ps(mask, call.weight + at)));
      }
    }
  }
}

void gated_activation_avx512(const GateCall& call, Range rows) {
  const RowOutput out(call.out, call.size);
  for (int row = rows.begin; row < rows.end; ++row) {
    const std::int64_t x_row = row * call.x.stride;
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      const __m512 gate = load_values(call.x.data, call.x.is_bf16, x_row + at, mask);
      const __m512 up = load_values(call.x.data, call.x.is_bf16, x_row + call.size + at, mask);
      out.store(row, at, mask, gated(call.gate, gate, up));
    }
    out.finish(row);
  }
}

void activation_avx512(const GateCall& call, Range rows) {
  const RowOutput out(call.out, call.size);
  for (int row = rows.begin; row < rows.end; ++row) {
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      const __m512 x = load_values(call.x.data, call.x.is_bf16, row * call.x.stride + at, mask);
      out.store(row, at, mask, apply_gate(call.gate.gate, x));
    }
    out.finish(row);
  }
}

void add_rows_avx512(const AddRowsCall& call, Range rows) {
  for (int row = rows.begin; row < rows.end; ++row) {
    const float* added = call.table + call.rows[row] * call.size;
    for (int at = 0; at < call.size; at += 16) {
      const __mmask16 mask = first_lanes(call.size - at);
      const __m512 x = load_values(call.x.data, call.x.is_bf16, row * call.x.stride + at, mask);
      store_values(call.out.data, call.out.is_bf16, row * call.out.stride + at, mask,
                   _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, added + at)));
    }
  }
}

void copy_parts_avx512(const CopyCall& call, Range rows) {
  for (int row = rows.begin; row < rows.end; ++row) {
    for (int part = 0; part < call.num_parts; ++part) {
      const std::int64_t from = row * call.x.stride + part * call.x_part_stride;
      const std::int64_t to = row * call.out.stride + part * call.out_part_stride;
      for (int at = 0; at < call.size; at += 16) {
        const __mmask16 mask = first_lanes(call.size - at);
        store_values(call.out.data, call.out.is_bf16, to + at, mask,
                     load_values(call.x.data, call.x.is_bf16, from + at, mask));
      }
    }
  }
}

}  // namespace tokenmill
