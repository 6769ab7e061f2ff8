// Loops whose index is a constant from the first, so that arrays become registers.
#pragma once

#include <utility>

#include "common.h"

namespace tokenmill {
namespace {  // compiled for each instruction set by itself

template <int N>
struct Number {
  static constexpr int value = N;
};

// body(Number<0>), ..., body(Number<N - 1>).
template <int... I, class F>
static TOKENMILL_INLINE void repeat(std::integer_sequence<int, I...>, const F& body) {
  (body(Number<I>{}), ...);
}
template <int N, class F>
static TOKENMILL_INLINE void repeat(const F& body) {
  repeat(std::make_integer_sequence<int, N>{}, body);
}

}  // namespace
}  // namespace tokenmill
