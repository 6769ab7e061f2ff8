// What bindings share whose results may be quantised on the way out.
#pragma once

#include "bind_rows.h"
#include "elementwise_kernels.h"

namespace tokenmill {

// `out` is a matrix of values, or the uint8 buffer of quantised rows.
static inline ActivationOutput activation_output(const Tensor& out, int num_rows, int size) {
  if (out.dtype() != nb::dtype<std::uint8_t>()) {
    const TokenRows rows = token_rows(out, "out", size);
    check(static_cast<int>(out.shape(0)) == num_rows, "out", "of as many rows as x");
    return {rows, {}};
  }
  check(size % kStep == 0, "size", "a multiple of 32 to be quantised");
  check(out.ndim() == 1 && (out.shape(0) <= 1 || out.stride(0) == 1) &&
            out.shape(0) == QuantizedRows::num_bytes(num_rows, size),
        "out", std::to_string(QuantizedRows::num_bytes(num_rows, size)) + " bytes");
  check(reinterpret_cast<std::uintptr_t>(out.data()) % alignof(QuantizedGroup) == 0, "out",
        "aligned to 64 bytes");
  return {{}, {static_cast<QuantizedGroup*>(out.data()), size / kStep}};
}

}  // namespace tokenmill
