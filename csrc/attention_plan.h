// The work of one step's attention, cut into tasks.
#pragma once

#include <vector>

#include "attention_kernels.h"

namespace tokenmill {

// Built once a step, for all layers of one shape. Its memory is kept from step to step.
class AttentionPlan {
 public:
  // Copies the tables and cuts the step into tasks of about equal cost for `num_threads` threads.
  // Throws std::invalid_argument for tables that contradict each other, or name blocks outside of
  // [0, num_blocks).
  void build(const AttentionShape& shape, const StepTables& tables, int max_blocks, int num_blocks,
             int num_threads);

  StepTables tables() const;
  int num_tokens() const { return query_start_loc_.empty() ? 0 : query_start_loc_.back(); }
  int num_blocks() const { return num_blocks_; }
  const AttentionShape& shape() const { return shape_; }
  const std::vector<AttentionTask>& tasks() const { return tasks_; }
  const std::vector<MergeTask>& merges() const { return merges_; }
  float* partials() { return partials_.data(); }

 private:
  void copy_tables(const StepTables& tables, int max_blocks);
  void add_request(int request);
  void add_block(const AttentionTask& block, int partition_begin, int partition_end, double cost);

  AttentionShape shape_{};
  int num_blocks_ = 0;
  std::vector<std::int32_t> query_start_loc_, seq_lens_, block_table_;
  int max_blocks_ = 0;  // of a request in this step

  double task_cost_ = 0.0;  // what a task should cost
  int num_partials_ = 0;
  std::vector<AttentionTask> tasks_;
  std::vector<MergeTask> merges_;
  std::vector<float> partials_;
};

// Attends with the plan of this step, whose tables it uses. Splits the work among the pool's threads.
void attention(AttentionCall call, AttentionPlan& plan);

}  // namespace tokenmill
