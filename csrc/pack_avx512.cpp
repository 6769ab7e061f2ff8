// Packing with AVX-512, sixteen columns at a time.
namespace tokenmill {
namespace {
constexpr int kWidth = 16;
}
}  // namespace tokenmill

#include "pack_lanes.h"

namespace tokenmill {

void quantize_step_avx512(SourceType source, const void* const* rows, BlockType type,
                      std::uint8_t* group) {
  quantize_columns(source, rows, type, group);
}

void place_bf16_step_avx512(const void* const* rows, bf16* target) { place_bf16(rows, target); }

}  // namespace tokenmill
