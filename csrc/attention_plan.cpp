// Cost is counted in values of K and V times what a kernel spends on one: reading it, and a
// multiplication for each row.
#include "attention_plan.h"

#include <algorithm>
#include <stdexcept>

namespace tokenmill {
namespace {

constexpr int kTasksPerThread = 8;
constexpr double kReadCost = 16.0;        // a value from memory, in multiplications by a row
constexpr double kSmallestTask = 400e3;   // a few microseconds

void check(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

struct Request {
  int query_len, seq_len, num_rows;

  Request(const AttentionShape& shape, const StepTables& tables, int index)
      : query_len(tables.query_start_loc[index + 1] - tables.query_start_loc[index]),
        seq_len(tables.seq_lens[index]),
        num_rows(query_len * shape.group_size()) {}

  // All keys that any row sees.
  KeyRange keys(const AttentionShape& shape) const {
    return num_rows == 0 ? KeyRange{0, 0} : keys(shape, 0, num_rows);
  }

  // All keys that rows [begin, end) see.
  KeyRange keys(const AttentionShape& shape, int begin, int end) const {
    const int group = shape.group_size();
    return {visible_keys(shape, query_len, seq_len, begin / group).begin,
            visible_keys(shape, query_len, seq_len, (end - 1) / group).end};
  }
};

double block_cost(const AttentionShape& shape, const Request& request, int begin, int end) {
  const KeyRange keys = request.keys(shape, begin, end);
  return double(keys.end - keys.begin) * shape.cache.head_size * (kReadCost + (end - begin));
}

double request_cost(const AttentionShape& shape, const Request& request) {
  double cost = 0.0;
  for (int row = 0; row < request.num_rows; row += kRowBlock)
    cost += block_cost(shape, request, row, std::min(row + kRowBlock, request.num_rows));
  return cost * shape.cache.num_kv_heads;
}

}  // namespace

void AttentionPlan::build(const AttentionShape& shape, const StepTables& tables, int max_blocks,
                          int num_blocks, int num_threads) {
  shape_ = shape;
  num_blocks_ = num_blocks;
  tasks_.clear();
  merges_.clear();
  num_partials_ = 0;
  copy_tables(tables, max_blocks);
  const StepTables own = this->tables();
  double cost = 0.0;
  for (int i = 0; i < own.num_reqs; ++i) cost += request_cost(shape, Request(shape, own, i));
  task_cost_ = num_threads == 1 ? cost : std::max(cost / (num_threads * kTasksPerThread),
                                                  kSmallestTask);
  for (int i = 0; i < own.num_reqs; ++i) add_request(i);
  const std::size_t floats = num_partials_ * partial_floats(shape.cache.value_size());
  if (partials_.size() < floats) partials_.resize(floats);
}

StepTables AttentionPlan::tables() const {
  return {static_cast<int>(seq_lens_.size()), query_start_loc_.data(), seq_lens_.data(),
          block_table_.data(), max_blocks_};
}

void AttentionPlan::copy_tables(const StepTables& tables, int max_blocks) {
  const int n = tables.num_reqs, block_size = shape_.cache.block_size;
  query_start_loc_.assign(tables.query_start_loc, tables.query_start_loc + n + 1);
  seq_lens_.assign(tables.seq_lens, tables.seq_lens + n);
  check(query_start_loc_[0] == 0, "query_start_loc must begin with 0");
  max_blocks_ = 0;
  for (int i = 0; i < n; ++i) {
    const int query_len = query_start_loc_[i + 1] - query_start_loc_[i];
    check(query_len >= 0, "query_start_loc must not fall");
    check(seq_lens_[i] >= query_len, "seq_lens must be at least the query lengths");
    max_blocks_ = std::max(max_blocks_, ceil_div(seq_lens_[i], block_size));
  }
  check(max_blocks_ <= max_blocks, "block_table has too few columns for seq_lens");
  block_table_.assign(std::size_t(n) * max_blocks_, 0);
  for (int i = 0; i < n; ++i) {
    const std::int32_t* row = tables.block_table + i * tables.block_table_stride;
    const KeyRange keys = Request(shape_, tables, i).keys(shape_);
    for (int b = keys.begin / block_size; b * block_size < keys.end; ++b) {
      check(row[b] >= 0 && row[b] < num_blocks_, "block_table names a block that is not there");
      block_table_[std::size_t(i) * max_blocks_ + b] = row[b];
    }
  }
}

void AttentionPlan::add_request(int index) {
  const AttentionShape& shape = shape_;
  const Request request(shape, tables(), index);
  const int num_heads = shape.cache.num_kv_heads;
  if (request.num_rows == 0) return;
  const double cost = request_cost(shape, request);
  if (cost <= task_cost_) {
    tasks_.push_back({index, 0, num_heads, 0, request.num_rows, 0, 0, -1});
    return;
  }
  if (request.num_rows <= kRowBlock) {
    // Several heads a task, as far as that is enough to share it out.
    const int heads = std::max(1, static_cast<int>(task_cost_ / (cost / num_heads)));
    if (cost / num_heads <= 1.5 * task_cost_) {
      for (int head = 0; head < num_heads; head += heads)
        tasks_.push_back({index, head, std::min(head + heads, num_heads), 0, request.num_rows,
                          0, 0, -1});
      return;
    }
  }
  for (int head = 0; head < num_heads; ++head) {
    int begin = 0;
    double sum = 0.0;
    for (int row = 0; row < request.num_rows; row += kRowBlock) {
      const int end = std::min(row + kRowBlock, request.num_rows);
      const double block = block_cost(shape, request, row, end);
      if (row > begin && sum + block > task_cost_) {
        tasks_.push_back({index, head, head + 1, begin, row, 0, 0, -1});
        begin = row;
        sum = 0.0;
      }
      sum += block;
      if (sum > 1.5 * task_cost_ && begin == row) {
        const KeyRange keys = request.keys(shape, row, end);
        add_block({index, head, head + 1, row, end, 0, 0, -1}, keys.begin / kPartition,
                  ceil_div(keys.end, kPartition), block);
        begin = end;
        sum = 0.0;
      }
    }
    if (begin < request.num_rows)
      tasks_.push_back({index, head, head + 1, begin, request.num_rows, 0, 0, -1});
  }
}

// One block of rows that is too much for a task: its partitions are shared out.
void AttentionPlan::add_block(const AttentionTask& block, int partition_begin, int partition_end,
                              double cost) {
  const int num_partitions = partition_end - partition_begin;
  const int num_shares = std::min(num_partitions, static_cast<int>(cost / task_cost_) + 1);
  if (num_shares <= 1) {
    tasks_.push_back(block);
    return;
  }
  for (int share = 0; share < num_shares; ++share) {
    AttentionTask task = block;
    task.partition_begin = partition_begin + num_partitions * share / num_shares;
    task.partition_end = partition_begin + num_partitions * (share + 1) / num_shares;
    task.first_partial = num_partials_ + task.partition_begin - partition_begin;
    tasks_.push_back(task);
  }
  merges_.push_back({block.request, block.kv_head_begin, block.row_begin, block.row_end,
                     num_partials_, num_partitions});
  num_partials_ += num_partitions;
}

}  // namespace tokenmill
