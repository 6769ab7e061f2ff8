// A place for one row on its way out. For files compiled with AVX-512 only.
#pragma once

#include "elementwise_kernels.h"
#include "elementwise_math.h"
#include "pool.h"

namespace tokenmill {
namespace {  // classes, too, are compiled for each instruction set by itself

class RowOutput {
 public:
  RowOutput(const ActivationOutput& out, int size)
      : out_(out),
        scratch_(out.rows.data != nullptr
                     ? nullptr
                     : static_cast<float*>(thread_scratch(2, sizeof(float) * size))) {}

  void store(int row, int at, __mmask16 mask, __m512 values) const {
    if (scratch_ == nullptr) {
      store_values(out_.rows.data, out_.rows.is_bf16, row * out_.rows.stride + at, mask, values);
    } else {
      _mm512_mask_storeu_ps(scratch_ + at, mask, values);
    }
  }
  void finish(int row) const {
    if (scratch_ != nullptr)
      quantize_rows_avx512({scratch_, 0, false}, {row, row + 1}, out_.quantized);
  }

 private:
  const ActivationOutput& out_;
  float* scratch_;
};

}  // namespace
}  // namespace tokenmill
