#include "decode_step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "pool.h"
#include "sampling_kernels.h"

namespace tokenmill {
namespace {

using Clock = std::chrono::steady_clock;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

template <class T>
void take(const T* column, const std::vector<std::int64_t>& rows, std::vector<T>& values) {
  values.resize(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) values[i] = column[rows[i]];
}

// Adds the time of its life to a sum.
class Timed {
 public:
  explicit Timed(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Timed() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  double& seconds_;
  const Clock::time_point begin_;
};

}  // namespace

DecodeStep::DecodeStep(const StepGather& gather, Program& layers, Program& head,
                       std::vector<DecodeAttention> attention, const DecodeHead& buffers,
                       const RowColumns& columns, AdapterRows* adapters)
    : gather_(gather),
      layers_(layers),
      head_(head),
      attention_(std::move(attention)),
      buffers_(buffers),
      columns_(columns),
      adapters_(adapters) {
  for (const DecodeAttention& each : attention_)
    require(each.group >= 0 && each.group < static_cast<int>(gather_.groups().size()),
            "attention must name a KV cache group of the gather");
  require(buffers_.slab <= head_.max_rows(), "the head's input is longer than its recording");
}

bool DecodeStep::takes(const std::vector<std::int64_t>& rows) const {
  const StepGather::Arrays& arrays = gather_.arrays();
  const auto num_reqs = static_cast<std::int64_t>(rows.size());
  if (rows.empty() || num_reqs > std::min(arrays.max_reqs, arrays.max_tokens)) return false;
  if (num_reqs > layers_.max_rows()) return false;
  return std::all_of(rows.begin(), rows.end(), [&](std::int64_t row) {
    return row >= 0 && row < arrays.num_rows && columns_.is_plain[row];
  });
}

void DecodeStep::run(std::vector<std::int64_t> rows) {
  rows_ = std::move(rows);
  run_layers();
  draw();
}

void DecodeStep::run_layers() {
  ones_.assign(rows_.size(), 1);
  take(columns_.num_computed_tokens, rows_, num_computed_);
  positions_.resize(rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    require(num_computed_[i] < columns_.num_tokens[rows_[i]], "a plan runs past known tokens");
    positions_[i] = num_computed_[i] + 1;
    require(positions_[i] < gather_.arrays().max_len, "a token is drawn behind the longest row");
  }
  gather_.fill(rows_.data(), ones_.data(), num_computed_.data(),
               static_cast<std::int64_t>(rows_.size()));
  if (adapters_ != nullptr)
    adapters_->fill(rows_.data(), ones_.data(), static_cast<std::int64_t>(rows_.size()));
  build_plans();
  Timed timed(kernel_seconds_.layers);
  layers_.run(static_cast<int>(rows_.size()));
}

void DecodeStep::build_plans() {
  const StepGather::Arrays& arrays = gather_.arrays();
  const std::int64_t longest = *std::max_element(positions_.begin(), positions_.end());
  const auto max_blocks = static_cast<int>((longest + arrays.block_size - 1) / arrays.block_size);
  for (const DecodeAttention& each : attention_) {
    const GatherGroup& group = gather_.groups()[each.group];
    const StepTables tables{static_cast<int>(rows_.size()), arrays.query_start_loc, arrays.seq_lens,
                            group.block_table, group.width};
    each.plan->build(each.shape, tables, max_blocks, each.num_blocks, num_threads());
  }
}

void DecodeStep::draw() {
  gather_columns();
  token_ids_.resize(rows_.size());
  is_valid_.resize(rows_.size());
  const auto num_reqs = static_cast<std::int64_t>(rows_.size());
  for (std::int64_t begin = 0; begin < num_reqs; begin += buffers_.slab)
    draw_slab(begin, static_cast<int>(std::min<std::int64_t>(buffers_.slab, num_reqs - begin)));
}

void DecodeStep::gather_columns() {
  take(columns_.is_greedy, rows_, is_greedy_);
  take(columns_.temperature, rows_, temperature_);
  take(columns_.min_p, rows_, min_p_);
  take(columns_.top_k, rows_, top_k_);
  take(columns_.top_p, rows_, top_p_);
  take(columns_.seed, rows_, seed_);
}

void DecodeStep::draw_slab(std::int64_t begin, int count) {
  std::memcpy(buffers_.input, buffers_.hidden + begin * buffers_.row_bytes,
              count * buffers_.row_bytes);
  const SampleCall call{{buffers_.logits, buffers_.vocab_size, count, buffers_.vocab_size},
                        is_greedy_.data() + begin,
                        temperature_.data() + begin,
                        min_p_.data() + begin,
                        top_k_.data() + begin,
                        top_p_.data() + begin,
                        seed_.data() + begin,
                        positions_.data() + begin,
                        token_ids_.data() + begin,
                        is_valid_.data() + begin};
  {
    Timed timed(kernel_seconds_.head);
    head_.run(count);
  }
  Timed timed(kernel_seconds_.sampling);
  sample(call);
}

void DecodeStep::commit() {
  const StepGather::Arrays& arrays = gather_.arrays();
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const std::int64_t row = rows_[i], position = positions_[i];
    arrays.token_ids[row * arrays.max_len + position] = static_cast<std::int32_t>(token_ids_[i]);
    columns_.num_computed_tokens[row] = position;
    columns_.num_tokens[row] = position + 1;
  }
}

std::vector<int> DecodeStep::bad_places() const {
  std::vector<int> places;
  for (std::size_t i = 0; i < is_valid_.size(); ++i)
    if (!is_valid_[i]) places.push_back(static_cast<int>(i));
  return places;
}

}  // namespace tokenmill
