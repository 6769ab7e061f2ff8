#include "common.h"
#include "gemm_limits.h"
#include "gemm_tiles.h"

namespace tokenmill {
namespace {

constexpr std::size_t kTileBytes = 1024;
constexpr double kProductOperations = 2.0 * 16 * 16 * 32;
constexpr int kRounds = 20000;  // of four products: about half a millisecond

void use_full_tiles() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, 16, 64);
  shapes.use();
}

void zero_sums() {
  zero_tile<0>();
  zero_tile<1>();
  zero_tile<2>();
  zero_tile<3>();
}

void load_operands(const char* data) {
  load_tile<4>(data, 64);
  load_tile<5>(data + kTileBytes, 64);
  load_tile<6>(data + 2 * kTileBytes, 64);
  load_tile<7>(data + 3 * kTileBytes, 64);
}

void multiply_block() {
  multiply_bf16<0, 4, 6>();
  multiply_bf16<1, 4, 7>();
  multiply_bf16<2, 5, 6>();
  multiply_bf16<3, 5, 7>();
}

}  // namespace

double multiply_registers_amx(const void* data) {
  use_full_tiles();
  zero_sums();
  load_operands(static_cast<const char*>(data));
  for (int round = 0; round < kRounds; ++round) multiply_block();
  release_tiles();
  return kRounds * 4 * kProductOperations;
}

double multiply_cache_amx(const void* data, std::size_t num_bytes) {
  use_full_tiles();
  zero_sums();
  const char* operands = static_cast<const char*>(data);
  std::size_t at = 0;
  for (int round = 0; round < kRounds; ++round) {
    load_operands(operands + at);
    multiply_block();
    at += 4 * kTileBytes;
    if (at == num_bytes) at = 0;
  }
  release_tiles();
  return kRounds * 4 * kProductOperations;
}

}  // namespace tokenmill
