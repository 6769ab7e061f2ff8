// Elementwise kernels as a whole: the split among threads.
#include <algorithm>

#include "elementwise_kernels.h"
#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kTaskValues = 1 << 13;

// body(Range) over rows, in tasks of a few thousand values.
template <class F>
void for_rows(int num_rows, int row_values, F&& body) {
  require_kernels();
  const int task_rows = kTaskValues / (row_values + 1) + 1;
  parallel_for(ceil_div(num_rows, task_rows), [&](int task, int) {
    const int row = task * task_rows;
    body(Range{row, std::min(row + task_rows, num_rows)});
  });
}

}  // namespace

void add_rms_norm(const NormCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(add_rms_norm);
  for_rows(call.num_rows, call.size, [&](Range rows) { kernel(call, rows); });
}

void add_layer_norm(const NormCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(add_layer_norm);
  for_rows(call.num_rows, call.size, [&](Range rows) { kernel(call, rows); });
}

void add_residual(const NormCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(add_residual);
  for_rows(call.num_rows, call.size, [&](Range rows) { kernel(call, rows); });
}

void head_rms_norm(const HeadNormCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(head_rms_norm);
  for_rows(call.num_rows, call.num_heads * call.head_size,
           [&](Range rows) { kernel(call, rows); });
}

void gated_activation(const GateCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(gated_activation);
  for_rows(call.num_rows, 2 * call.size, [&](Range rows) { kernel(call, rows); });
}

void activation(const GateCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(activation);
  for_rows(call.num_rows, call.size, [&](Range rows) { kernel(call, rows); });
}

void add_rows(const AddRowsCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(add_rows);
  for_rows(call.num_rows, call.size, [&](Range rows) { kernel(call, rows); });
}

void copy_parts(const CopyCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(copy_parts);
  for_rows(call.num_rows, call.num_parts * call.size, [&](Range rows) { kernel(call, rows); });
}

}  // namespace tokenmill
