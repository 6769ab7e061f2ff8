// Rows of activations to int8 on any processor, group by group. The bits are AVX-512's.
#include "gemm_kernels.h"
#include "quad_vectors.h"

namespace tokenmill {
namespace {

constexpr int kVectors = kStep / 4;
constexpr float kSmallest = 1e-30f;  // below this a group counts as zero; 127 / it is finite

void load_group(const FloatRows& x, std::int64_t at, F32x4 (&values)[kVectors]) {
  if (x.is_bf16) {
    const auto* data = static_cast<const bf16*>(x.data) + at;
    for (int i = 0; i < kVectors; i += 2) {
      const U16x8 halves = load_as<U16x8>(data + 4 * i);
      values[i] = floats_low(halves);
      values[i + 1] = floats_high(halves);
    }
  } else {
    const auto* data = static_cast<const float*>(x.data) + at;
    for (int i = 0; i < kVectors; ++i) values[i] = load_as<F32x4>(data + 4 * i);
  }
}

// Magnitudes are compared as integers: in that order a NaN is larger than infinity. Without their
// sign they are positive, so the comparison may be of signed ones.
float largest_of(const F32x4 (&values)[kVectors]) {
  I32x4 most = {};
  for (const F32x4& part : values) {
    const I32x4 bits = bits_as<I32x4>(magnitude(part));
    most = bits > most ? bits : most;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < 4; ++i) largest = most[i] > largest ? most[i] : largest;
  return float_from_bits(static_cast<std::uint32_t>(largest));
}

void quantize_group(const FloatRows& x, std::int64_t at, int row, QuantizedGroup& group) {
  F32x4 values[kVectors];
  load_group(x, at, values);
  const float largest = largest_of(values);
  const bool is_nonzero = largest >= kSmallest;  // not of a NaN
  const F32x4 inverse = splat(is_nonzero ? 127.0f / largest : 0.0f);
  I32x4 sums = {};
  for (int i = 0; i < kVectors; ++i) {
    const I32x4 codes = to_integers(values[i] * inverse);
    sums += codes;
    for (int lane = 0; lane < 4; ++lane)
      group.codes[row][4 * i + lane] = static_cast<std::int8_t>(codes[lane]);
  }
  const std::int32_t sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const float scale =
      largest != largest ? __builtin_nanf("") : is_nonzero ? largest / 127.0f : 0.0f;
  group.scales[row] = scale;
  group.scaled_sums[row] = static_cast<float>(sum) * scale;
  group.sums[row] = sum;
}

}  // namespace

void quantize_rows_portable(const FloatRows& x, Range rows, const QuantizedRows& out) {
  for (int row = rows.begin; row < rows.end; ++row) {
    QuantizedGroup* groups = out.block_of(row);
    for (int g = 0; g < out.num_groups; ++g)
      quantize_group(x, row * x.stride + std::int64_t{g} * kStep, row % QuantizedGroup::kRows,
                     groups[g]);
  }
}

}  // namespace tokenmill
