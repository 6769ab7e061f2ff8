// What the bindings share: checks of tensors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "attention_kernels.h"

namespace nb = nanobind;

namespace tokenmill {

using Tensor = nb::ndarray<nb::device::cpu>;
using ReadTensor = nb::ndarray<nb::device::cpu, nb::ro>;
using Unlocked = nb::gil_scoped_release;

static inline void check(bool holds, const char* name, const std::string& expected) {
  if (!holds) throw std::invalid_argument(std::string(name) + " must be " + expected);
}

template <class T>
static bool is_bf16(const T& tensor) {
  const nb::dlpack::dtype type = tensor.dtype();
  return type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat) && type.bits == 16;
}

template <class T>
static void check_matrix(const T& tensor, const char* name, std::int64_t columns) {
  check(tensor.ndim() == 2 && static_cast<std::int64_t>(tensor.shape(1)) == columns &&
            (tensor.shape(0) == 0 || columns <= 1 || tensor.stride(1) == 1),
        name, "a matrix of " + std::to_string(columns) + " columns, contiguous along them");
}

// Rows of tokens, contiguous within a row.
template <class T>
static TokenRows token_rows(const T& tensor, const char* name, std::int64_t columns) {
  check_matrix(tensor, name, columns);
  check(is_bf16(tensor) || tensor.dtype() == nb::dtype<float>(), name, "bfloat16 or float32");
  return {const_cast<void*>(static_cast<const void*>(tensor.data())), tensor.stride(0),
          is_bf16(tensor)};
}

}  // namespace tokenmill
