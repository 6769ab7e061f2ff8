// Packing on any processor, four columns at a time.
namespace tokenmill {
namespace {
constexpr int kWidth = 4;
}
}  // namespace tokenmill

#include "pack_lanes.h"

namespace tokenmill {

void quantize_step_portable(SourceType source, const void* const* rows, BlockType type,
                            std::uint8_t* group) {
  quantize_columns(source, rows, type, group);
}

void place_bf16_step_portable(const void* const* rows, bf16* target) { place_bf16(rows, target); }

}  // namespace tokenmill
