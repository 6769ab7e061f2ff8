// The end of a product on any processor: add the bias, round, store four columns of a row.
#pragma once

#include "gemm_kernels.h"
#include "quad_vectors.h"

namespace tokenmill {
namespace {

constexpr int kQuad = 4;                 // columns of a vector
constexpr int kParts = kPanel / kQuad;   // vectors of a panel's columns

// Where the 32 columns of a panel go, in eight parts. Columns beyond n are left out.
class PanelOutputQuads {
 public:
  PanelOutputQuads(const OutputRows& out, int n, int panel)
      : out_(out), column_(panel * kPanel), num_columns_(min_of(n - panel * kPanel, kPanel)) {
    // x + -0 is x, for -0 too
    for (int i = 0; i < kPanel; ++i)
      bias_[i] = out.bias != nullptr && i < num_columns_ ? out.bias[column_ + i] : -0.0f;
  }

  void store(int row, int part, F32x4 sum) const {
    const F32x4 value = sum + load_as<F32x4>(bias_ + part * kQuad);
    const int count = min_of(num_columns_ - part * kQuad, kQuad);
    if (count <= 0) return;
    const std::int64_t at = row * out_.stride + column_ + part * kQuad;
    if (out_.is_bf16) {
      const U16x8 halves = lower_halves(bf16_words(value), I32x4{});
      copy(static_cast<bf16*>(out_.data) + at, &halves, count * sizeof(bf16), count == kQuad);
    } else {
      copy(static_cast<float*>(out_.data) + at, &value, count * sizeof(float), count == kQuad);
    }
  }

 private:
  template <class Value, class V>
  static void copy(Value* target, const V* source, std::size_t num_bytes, bool is_whole) {
    if (is_whole) {
      std::memcpy(target, source, kQuad * sizeof(Value));  // one store
    } else {
      std::memcpy(target, source, num_bytes);
    }
  }

  const OutputRows& out_;
  int column_, num_columns_;
  alignas(16) float bias_[kPanel];
};

}  // namespace
}  // namespace tokenmill
