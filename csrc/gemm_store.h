// The end of a product: add the bias, round, store a row of one panel. For files compiled with
// AVX-512 only.
#pragma once

#include "common.h"
#include "gemm_kernels.h"

namespace tokenmill {
namespace {

// Where the 32 columns of a panel go. Columns beyond n are masked.
class PanelOutput {
 public:
  PanelOutput(const OutputRows& out, int n, int panel)
      : out_(out), column_(panel * kPanel) {
    for (int half = 0; half < 2; ++half) {
      const int left = n - column_ - half * kHalf;
      masks_[half] = left >= kHalf ? 0xffff : left <= 0 ? 0 : (1u << left) - 1;
      bias_[half] = out.bias != nullptr
          ? _mm512_maskz_loadu_ps(masks_[half], out.bias + column_ + half * kHalf)
          : _mm512_set1_ps(-0.0f);  // x + -0 is x, for -0 too
    }
  }

  void store(int row, int half, __m512 sum) const {
    const __m512 value = _mm512_add_ps(sum, bias_[half]);
    const std::int64_t at = row * out_.stride + column_ + half * kHalf;
    if (out_.is_bf16) {
      _mm256_mask_storeu_epi16(static_cast<bf16*>(out_.data) + at, masks_[half],
                               (__m256i)_mm512_cvtneps_pbh(value));
    } else {
      _mm512_mask_storeu_ps(static_cast<float*>(out_.data) + at, masks_[half], value);
    }
  }

 private:
  const OutputRows& out_;
  int column_;
  __mmask16 masks_[2];
  __m512 bias_[2];
};

}  // namespace
}  // namespace tokenmill
