// What the bindings of products share: packed weights and quantised rows.
#pragma once

#include <cstdint>
#include <iterator>
#include <string>

#include "bind_rows.h"
#include "gemm_kernels.h"
#include "pack_weights.h"

namespace tokenmill {

using ReadBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bias = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

static inline int dimension(std::int64_t value, const char* name) {
  check(value >= 0 && value < (std::int64_t{1} << 31) - 64, name, "a size of at most 31 bits");
  return static_cast<int>(value);
}

static inline BlockType block_type(const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < std::size(kBlockTypeNames); ++i) {
    if (name == kBlockTypeNames[i]) return static_cast<BlockType>(i);
    known += (i == 0 ? "" : ", ") + std::string(kBlockTypeNames[i]);
  }
  throw std::invalid_argument("block type must be one of " + known + ", not " + name);
}

static inline void check_groups(int k) {
  check(k % kStep == 0, "k", "a multiple of " + std::to_string(kStep));
}

static inline void check_bytes(std::size_t actual, std::size_t expected, const char* name) {
  check(actual == expected, name,
        std::to_string(expected) + " bytes, not " + std::to_string(actual));
}

static inline Bf16Weights bf16_weights(const ReadBytes& packed, std::int64_t n, std::int64_t k) {
  const Bf16Weights weights{reinterpret_cast<const bf16*>(packed.data()), dimension(n, "n"),
                            dimension(k, "k")};
  check_bytes(packed.size(), packed_bf16_bytes(weights.n, weights.k), "packed");
  return weights;
}

static inline Float32Weights float32_weights(const ReadBytes& packed, std::int64_t n,
                                             std::int64_t k) {
  const Float32Weights weights{reinterpret_cast<const float*>(packed.data()), dimension(n, "n"),
                               dimension(k, "k")};
  check_bytes(packed.size(), packed_float32_bytes(weights.n, weights.k), "packed");
  return weights;
}

static inline BlockWeights block_weights(const ReadBytes& packed, const std::string& type,
                                         std::int64_t n, std::int64_t k) {
  const BlockWeights weights{packed.data(), dimension(n, "n"), dimension(k, "k"),
                             block_format(block_type(type))};
  check_groups(weights.k);
  check_bytes(packed.size(), packed_blocks_bytes(weights.n, weights.k, weights.format), "packed");
  return weights;
}

// Quantised rows in a buffer of bytes; see QuantizedGroup for the layout.
static inline QuantizedRows quantized_rows(const std::uint8_t* data, std::size_t num_bytes, int m,
                                           int k) {
  check_groups(k);
  check_bytes(num_bytes, QuantizedRows::num_bytes(m, k), "quantized");
  check(reinterpret_cast<std::uintptr_t>(data) % alignof(QuantizedGroup) == 0, "quantized",
        "aligned to 64 bytes");
  auto* groups = reinterpret_cast<QuantizedGroup*>(const_cast<std::uint8_t*>(data));
  return {groups, k / kStep};
}

}  // namespace tokenmill
