// Block formats as products of integers see them: a kernel is made for each.
#pragma once

#include "gemm_kernels.h"

namespace tokenmill {
namespace {

// How codes are multiplied.
enum class Kind { unsigned4, table4, signed8 };

template <Kind Kind_, bool HasMinimum_>
struct Format {
  static constexpr Kind kKind = Kind_;
  static constexpr bool kHasMinimum = HasMinimum_;
  static constexpr int kBits = Kind_ == Kind::signed8 ? 8 : 4;
  static constexpr int kHalfBytes = kHalf * kStep * kBits / 8;
  static constexpr std::size_t kGroupBytes = BlockFormat{kBits, 0, kHasMinimum}.group_bytes();
};

// Calls `run` with the Format of the weights. Unsigned codes have a zero or a minimum, never both.
template <class Run>
void with_format(const BlockFormat& format, const Run& run) {
  static_assert(block_format(BlockType::q4_1).zero == 0, "no zero beside a minimum");
  if (format.codes != Codes::linear) {
    run(Format<Kind::table4, false>{});
  } else if (format.bits == 4) {
    format.has_minimum ? run(Format<Kind::unsigned4, true>{})
                       : run(Format<Kind::unsigned4, false>{});
  } else {
    format.has_minimum ? run(Format<Kind::signed8, true>{}) : run(Format<Kind::signed8, false>{});
  }
}

}  // namespace
}  // namespace tokenmill
