// The way of a task through its blocks of rows and their partitions, and what becomes of their
// results. For files compiled with AVX-512 only.
#pragma once

#include "attention_kernels.h"
#include "elementwise_math.h"
#include "pool.h"

namespace tokenmill {
namespace {  // classes, too, are compiled for each instruction set by itself

// Floats between two rows of scores; a cache line more than needed, so that the rows of a tile do
// not fall into the same few sets of the cache.
constexpr int kScoreStride = kPartition + 16;
constexpr int kUnit = kValueGroup;  // tokens of a unit: two groups of K, or one of V
constexpr int kUnits = kPartition / kUnit;

// Hidden scores, and the m of a row that has seen no key. They are so far apart and so large that
// exp2 makes 0 of every difference with another number; both stay finite.
constexpr float kHidden = -1e30f;
constexpr float kNothing = -1e20f;

// Running result of the rows of a block: m, l and o of the partitions so far.
struct RowState {
  float* m;  // [kRowBlock]
  float* l;  // [kRowBlock]
  float* o;  // [kRowBlock][value_size]

  static RowState at(float* data) { return {data, data + kRowBlock, data + 2 * kRowBlock}; }
};

static inline void clear_state(const RowState& state, int num_rows, int value_size) {
  for (int r = 0; r < kRowBlock; ++r) {
    state.m[r] = kNothing;
    state.l[r] = 0.0f;
  }
  std::memset(state.o, 0, sizeof(float) * num_rows * value_size);
}

// Scores are multiplied by this in the exponent of 2.
static inline float exponent_factor(const AttentionShape& shape) {
  return shape.soft_cap > 0.0f ? kLog2E : shape.scale * kLog2E;
}

static inline void merge_state(const RowState& state, const RowState& next, int num_rows,
                               int value_size, float factor) {
  alignas(64) float keep[kRowBlock], add[kRowBlock];
  const __m512 c = _mm512_set1_ps(factor);
  for (int r = 0; r < num_rows; r += 16) {
    const __m512 m = _mm512_loadu_ps(state.m + r), next_m = _mm512_loadu_ps(next.m + r);
    const __m512 largest = _mm512_max_ps(m, next_m);
    const __m512 a = exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(m, largest), c));
    const __m512 b = exp2_of<6>(_mm512_mul_ps(_mm512_sub_ps(next_m, largest), c));
    const __m512 l = _mm512_loadu_ps(state.l + r), next_l = _mm512_loadu_ps(next.l + r);
    _mm512_storeu_ps(state.m + r, largest);
    _mm512_storeu_ps(state.l + r, _mm512_fmadd_ps(l, a, _mm512_mul_ps(next_l, b)));
    _mm512_store_ps(keep + r, a);
    _mm512_store_ps(add + r, b);
  }
  for (int r = 0; r < num_rows; ++r) {
    const __m512 a = _mm512_set1_ps(keep[r]), b = _mm512_set1_ps(add[r]);
    float* o = state.o + std::int64_t{r} * value_size;
    const float* next_o = next.o + std::int64_t{r} * value_size;
    for (int d = 0; d < value_size; d += 16)
      _mm512_storeu_ps(o + d, _mm512_fmadd_ps(_mm512_loadu_ps(o + d), a,
                                              _mm512_mul_ps(_mm512_loadu_ps(next_o + d), b)));
  }
}

// The rows of one request and KV head that are worked on together.
struct Block {
  int request, kv_head, row_begin, num_rows;
};

struct RequestView {
  int first_token, query_len, seq_len;
  const std::int32_t* blocks;

  RequestView(const StepTables& tables, int request)
      : first_token(tables.query_start_loc[request]),
        query_len(tables.query_start_loc[request + 1] - first_token),
        seq_len(tables.seq_lens[request]),
        blocks(tables.block_table + request * tables.block_table_stride) {}
};

// Steps through the rows of a block.
class RowCursor {
 public:
  RowCursor(const AttentionShape& shape, const RequestView& request, const Block& block)
      : group_(shape.group_size()), first_token_(request.first_token), first_head_(block.kv_head * group_),
        query_(block.row_begin / group_), head_(block.row_begin % group_) {}

  int query() const { return query_; }
  int head() const { return first_head_ + head_; }
  // Where the row is in rows of activations with so many values a head.
  std::int64_t offset(std::int64_t stride, int size) const {
    return std::int64_t{first_token_ + query_} * stride + std::int64_t{head()} * size;
  }
  void advance() {
    if (++head_ == group_) {
      head_ = 0;
      ++query_;
    }
  }

 private:
  const int group_, first_token_, first_head_;
  int query_, head_;
};

// What a row's sum of weighted values is multiplied by. A sink is a key more in its softmax, with
// values of zero; `m` is the row's largest score, and scores times `factor` are exponents of 2.
static inline __m512 result_factor(float m, float l, const float* sink, float factor) {
  const __m512 one = _mm512_set1_ps(1.0f);
  if (sink == nullptr) return _mm512_div_ps(one, _mm512_set1_ps(l));
  const __m512 zero = _mm512_setzero_ps(), least = _mm512_set1_ps(-200.0f);
  const __m512 above = _mm512_set1_ps(*sink * kLog2E - m * factor);
  const __m512 below = _mm512_sub_ps(zero, above);
  const __m512 add = exp2_of<6>(_mm512_max_ps(least, _mm512_min_ps(zero, above)));
  const __m512 keep = exp2_of<6>(_mm512_max_ps(least, _mm512_min_ps(zero, below)));
  return _mm512_div_ps(keep, _mm512_fmadd_ps(_mm512_set1_ps(l), keep, add));
}

static inline void store_result(const AttentionCall& call, const Block& block,
                                const RowState& state) {
  const int size = call.shape.cache.value_size();
  const float factor = exponent_factor(call.shape);
  RowCursor row(call.shape, RequestView(call.tables, block.request), block);
  for (int r = 0; r < block.num_rows; ++r, row.advance()) {
    const std::int64_t at = row.offset(call.out.stride, size);
    const float* sink = call.sinks == nullptr ? nullptr : call.sinks + row.head();
    const __m512 inverse = result_factor(state.m[r], state.l[r], sink, factor);
    for (int d = 0; d < size; d += 16) {
      const __m512 o = _mm512_loadu_ps(state.o + std::int64_t{r} * size + d);
      // A zero's sign could tell which keys were skipped; 0 + -0 is 0.
      const __m512 value = _mm512_add_ps(_mm512_mul_ps(o, inverse), _mm512_setzero_ps());
      store_values(call.out.data, call.out.is_bf16, at + d, 0xffff, value);
    }
  }
}

// Goes through the visits of a task: the partitions of each of its blocks.
class Visits {
 public:
  Visits(const AttentionCall& call, const AttentionTask& task)
      : call_(&call), task_(&task),
        block_{task.request, task.kv_head_begin, task.row_begin,
               min_of(kRowBlock, task.row_end - task.row_begin)} {
    enter();
  }

  const Block& block() const { return block_; }
  int partition() const { return partition_; }
  bool is_first() const { return partition_ == begin_; }  // of its block
  bool is_last() const { return partition_ + 1 == end_; }

  // The keys of the partition that any row of the block sees; from the start of a unit on.
  KeyRange keys() const {
    const int start = partition_ * kPartition;
    return {keys_.begin > start ? keys_.begin / kUnit * kUnit : start,
            min_of(keys_.end, start + kPartition)};
  }

  // To the next visit; false after the last one.
  bool advance() {
    if (++partition_ < end_) return true;
    block_.row_begin += kRowBlock;
    if (block_.row_begin >= task_->row_end) {
      block_.row_begin = task_->row_begin;
      if (++block_.kv_head == task_->kv_head_end) return false;
    }
    block_.num_rows = min_of(kRowBlock, task_->row_end - block_.row_begin);
    enter();
    return true;
  }

 private:
  void enter() {
    const AttentionShape& shape = call_->shape;
    const RequestView request(call_->tables, block_.request);
    const int group = shape.group_size(), last = block_.row_begin + block_.num_rows - 1;
    keys_ = {visible_keys(shape, request.query_len, request.seq_len,
                          block_.row_begin / group).begin,
             visible_keys(shape, request.query_len, request.seq_len, last / group).end};
    const bool is_whole = task_->first_partial < 0;
    begin_ = is_whole ? keys_.begin / kPartition : task_->partition_begin;
    end_ = is_whole ? ceil_div(keys_.end, kPartition) : task_->partition_end;
    partition_ = begin_;
  }

  const AttentionCall* call_;
  const AttentionTask* task_;
  Block block_;
  KeyRange keys_;
  int partition_, begin_, end_;
};

// Where a visit's keys and values are, in units of 32 tokens. Scores have a column for each key;
// what follows the last of `num_keys` keys in its unit may be anything.
struct Units {
  int first_key, num_keys, count;
  std::int64_t to_values;  // bytes from K to V, if that is stored
  const std::uint8_t* keys[kUnits];

  const std::uint8_t* values(int unit) const { return keys[unit] + to_values; }
};

static inline Units find_units(const AttentionCall& call, const Visits& visit) {
  const CacheLayout& cache = call.shape.cache;
  const std::int64_t token_bytes = cache.token_bytes(), part_bytes = cache.part_bytes();
  const std::int64_t block_bytes = cache.block_bytes();
  const std::int32_t* blocks = RequestView(call.tables, visit.block().request).blocks;
  const std::uint8_t* part = call.cache + visit.block().kv_head * part_bytes;
  const KeyRange range = visit.keys();
  Units units;
  units.first_key = range.begin;
  units.num_keys = range.end - range.begin;
  units.count = ceil_div(units.num_keys, kUnit);
  units.to_values = cache.num_kv_heads * part_bytes;
  int at = range.begin / cache.block_size, offset = range.begin % cache.block_size;
  for (int u = 0; u < units.count; ++u) {
    units.keys[u] = part + blocks[at] * block_bytes + offset * token_bytes;
    offset += kUnit;
    if (offset == cache.block_size) {
      offset = 0;
      ++at;
    }
  }
  return units;
}

// A unit of K or V that should be fetched.
struct AheadUnit {
  const std::uint8_t* data;
  bool is_value;
  bool is_half;  // only the first group of K
};

// Runs some units ahead of the work, through those of K and, if V is stored, then of V of each
// visit: memory answers in time only if it is asked early. It goes on through the tasks that this thread most likely
// takes next, where their own Lookahead will start.
class Lookahead {
 public:
  Lookahead(const AttentionCall& call, const TaskQueue& queue)
      : call_(call), queue_(queue), visits_(call, queue.tasks[queue.at]),
        units_(find_units(call, visits_)) {
    const std::int64_t unit_bytes = kUnit * call.shape.cache.token_bytes();
    for (std::int64_t bytes = 0; bytes < kDistance; bytes += unit_bytes) pull();
  }

  // The next unit; after the last one any.
  AheadUnit pull() {
    if (at_ == units_.count) {
      at_ = 0;
      is_value_ = !is_value_ && call_.shape.cache.stores_values();
      if (!is_value_) enter_next();
    }
    const std::uint8_t* data = is_value_ ? units_.values(at_) : units_.keys[at_];
    ++at_;
    return {data, is_value_, !is_value_ && at_ * kUnit - kKeyGroup >= units_.num_keys};
  }

 private:
  static constexpr std::int64_t kDistance = 16 << 10;  // bytes

  void enter_next() {
    if (!visits_.advance()) {
      queue_.at = min_of(queue_.at + queue_.step, queue_.count - 1);
      visits_ = Visits(call_, queue_.tasks[queue_.at]);
    }
    units_ = find_units(call_, visits_);
  }

  const AttentionCall& call_;
  TaskQueue queue_;
  Visits visits_;
  Units units_;
  int at_ = 0;
  bool is_value_ = false;
};

// Takes a worker through a task, the first of the queue. The worker has
//   load_rows(block)              before the visits of a block
//   attend(units, ahead, result)  the result of a visit. For each unit of K and then, if that is
//                                 stored, of V there is one `ahead` that should be fetched meanwhile
template <class Worker>
static void walk(Worker& worker, const AttentionCall& call, const TaskQueue& queue,
                 const RowState& state, const RowState& next, float* partials) {
  const AttentionTask& task = queue.tasks[queue.at];
  const int size = call.shape.cache.value_size();
  const int num_parts = call.shape.cache.stores_values() ? 2 : 1;
  const bool is_whole = task.first_partial < 0;
  Visits visit(call, task);
  Lookahead lookahead(call, queue);
  do {
    const Block& block = visit.block();
    if (visit.is_first()) worker.load_rows(block);
    const Units units = find_units(call, visit);
    AheadUnit ahead[2 * kUnits];
    for (int u = 0; u < num_parts * units.count; ++u) ahead[u] = lookahead.pull();
    if (!is_whole) {
      const std::int64_t index = task.first_partial + visit.partition() - task.partition_begin;
      worker.attend(units, ahead, RowState::at(partials + index * partial_floats(size)));
    } else if (visit.is_first()) {
      // Merging the first partition into nothing would give its own bits.
      worker.attend(units, ahead, state);
    } else {
      worker.attend(units, ahead, next);
      merge_state(state, next, block.num_rows, size, exponent_factor(call.shape));
    }
    if (is_whole && visit.is_last()) store_result(call, block, state);
  } while (visit.advance());
}

}  // namespace
}  // namespace tokenmill
