// State-space layers with AVX-512.
#include "row_output.h"
#include "state_space.h"

namespace tokenmill {
namespace {

__m512 silu(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_div_ps(x, _mm512_add_ps(one, exp_of(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

float sum_of(const __m512 (&sums)[4]) {
  return _mm512_reduce_add_ps(
      _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

}  // namespace

void convolve_avx512(const StateSpaceCall& call, const StateStep& step, const float* past,
                     Range rows) {
  const StateSpaceShape& shape = call.shape;
  const int channels = shape.channels(), taps = shape.kernel_size;
  for (int row = rows.begin; row < rows.end; ++row) {
    float* u = call.u + std::int64_t{row} * channels;
    for (int at = 0; at < channels; at += 16) {
      const __mmask16 mask = first_lanes(channels - at);
      __m512 sum = _mm512_maskz_loadu_ps(mask, call.conv_bias + at);
      for (int tap = 0; tap < taps; ++tap) {
        const int from = row - (taps - 1) + tap;
        __m512 value;
        if (from >= step.row_begin) {
          value = load_values(call.inputs.data, call.inputs.is_bf16,
                              from * call.inputs.stride + shape.inner() + at, mask);
        } else if (past != nullptr) {
          const int kept = from - step.row_begin + taps - 1;
          value = _mm512_maskz_loadu_ps(mask, past + std::int64_t{kept} * channels + at);
        } else {
          value = _mm512_setzero_ps();
        }
        const float* weight = call.conv_weight + std::int64_t{tap} * channels + at;
        sum = _mm512_fmadd_ps(value, _mm512_maskz_loadu_ps(mask, weight), sum);
      }
      _mm512_mask_storeu_ps(u + at, mask, silu(sum));
    }
  }
}

void scan_head_avx512(const StateSpaceCall& call, int head, Range rows, const float* before,
                      float* after) {
  const StateSpaceShape& shape = call.shape;
  const int size = shape.state_size, group = head / (shape.num_heads / shape.num_groups);
  for (int row = rows.begin; row < rows.end; ++row) {
    const float* u = call.u + std::int64_t{row} * shape.channels();
    const float* x = u + head * shape.head_size;
    const float* b = u + shape.inner() + group * size;
    const float* c = b + shape.num_groups * size;
    const float dt = call.dt[std::int64_t{row} * shape.num_heads + head];
    const __m512 decay = _mm512_set1_ps(call.decay[std::int64_t{row} * shape.num_heads + head]);
    float* y = call.y + std::int64_t{row} * shape.inner() + head * shape.head_size;
    for (int i = 0; i < shape.head_size; ++i) {
      const __m512 input = _mm512_set1_ps(dt * x[i]);
      const float* from = before == nullptr ? nullptr : before + std::int64_t{i} * size;
      float* to = after + std::int64_t{i} * size;
      __m512 sums[4];
      for (__m512& sum : sums) sum = _mm512_setzero_ps();
      for (int at = 0; at < size; at += 16) {
        const __mmask16 mask = first_lanes(size - at);
        const __m512 old =
            from == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, from + at);
        const __m512 added = _mm512_mul_ps(input, _mm512_maskz_loadu_ps(mask, b + at));
        const __m512 state = _mm512_fmadd_ps(old, decay, added);
        _mm512_mask_storeu_ps(to + at, mask, state);
        __m512& sum = sums[at / 16 % 4];
        sum = _mm512_fmadd_ps(state, _mm512_maskz_loadu_ps(mask, c + at), sum);
      }
      y[i] = sum_of(sums) + call.d[head] * x[i];
    }
    before = after;
  }
}

void gated_norm_avx512(const StateSpaceCall& call, Range rows) {
  const StateSpaceShape& shape = call.shape;
  const int inner = shape.inner(), size = inner / shape.num_groups;
  const RowOutput out(call.out, inner);
  for (int row = rows.begin; row < rows.end; ++row) {
    float* y = call.y + std::int64_t{row} * inner;
    for (int group = 0; group < shape.num_groups; ++group) {
      const int begin = group * size;
      __m512 sums[4];
      for (__m512& sum : sums) sum = _mm512_setzero_ps();
      for (int at = 0; at < size; at += 16) {
        const __mmask16 mask = first_lanes(size - at);
        const __m512 gate = load_values(call.inputs.data, call.inputs.is_bf16,
                                        row * call.inputs.stride + begin + at, mask);
        const __m512 value =
            _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, y + begin + at), silu(gate));
        _mm512_mask_storeu_ps(y + begin + at, mask, value);
        __m512& sum = sums[at / 16 % 4];
        sum = _mm512_fmadd_ps(value, value, sum);
      }
      const float mean = sum_of(sums) / static_cast<float>(size);
      const __m512 factor = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + shape.norm_eps));
      for (int at = 0; at < size; at += 16) {
        const __mmask16 mask = first_lanes(size - at);
        const __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, y + begin + at), factor);
        const __m512 weight = _mm512_maskz_loadu_ps(mask, call.norm_weight + begin + at);
        out.store(row, begin + at, mask, _mm512_mul_ps(value, weight));
      }
    }
    out.finish(row);
  }
}

}  // namespace tokenmill
