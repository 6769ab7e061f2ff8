// Mixtures of experts as a whole: rows in the order of their experts, work for all threads.
#include "experts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pool.h"

namespace tokenmill {
namespace {

constexpr int kBlockRows = QuantizedGroup::kRows;
// Rows whose values stay in a core's second-level cache while the panels pass by.
constexpr std::int64_t kRowBlockBytes = 768 << 10;
constexpr int kRowBlockStep = 32;
// So many tasks a thread even out interruptions; a task should not read less than this.
constexpr int kTasksPerThread = 16;
constexpr std::int64_t kTaskBytes = 16 << 10;
// A panel is read from memory in the time that it takes to multiply it with about so many rows.
constexpr int kPanelRows = 8;
// Of elementwise work, in a task.
constexpr int kTaskValues = 1 << 15;

int most_places(int num_experts, int num_rows, int num_chosen) {
  const int rows = num_rows * num_chosen;
  return round_up(rows + std::min(num_experts, rows) * (kBlockRows - 1), kBlockRows);
}

// Hands out parts of the workspace; without memory, it counts them.
class Carver {
 public:
  explicit Carver(std::uint8_t* memory) : memory_(memory) {}

  template <class T>
  T* take(std::size_t num_bytes) {
    auto* part = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += round_up(num_bytes, kCacheLine);
    most_ = std::max(most_, used_);
    return part;
  }
  // What is taken from now on lies where everything since `mark` does.
  std::size_t mark() const { return used_; }
  void return_to(std::size_t mark) { used_ = mark; }
  void skip_to_end() { used_ = most_; }
  std::size_t num_bytes() const { return most_; }

 private:
  std::uint8_t* memory_;
  std::size_t used_ = 0, most_ = 0;
};

// Between the products. Parts that do not live together share memory.
struct Workspace {
  ProductRows gathered;   // [places, hidden]; dead when the results are written
  TokenRows results;      // [places, hidden]
  QuantizedRows x;        // [num_rows, hidden]; dead when rows are gathered
  TokenRows gate_up;      // [places, 2 * size]
  ProductRows activated;  // [places, size]

  Workspace(const ExpertSet& experts, int num_rows, int num_chosen, bool is_bf16, Carver& carver)
      : places_(most_places(experts.num_experts(), num_rows, num_chosen)), is_bf16_(is_bf16) {
    std::size_t begin = carver.mark();
    gathered = product_rows(experts.gate_up, experts.hidden, carver);
    carver.return_to(begin);
    results = plain_rows(experts.hidden, carver);
    carver.skip_to_end();
    begin = carver.mark();
    if (ExpertSet::reads_quantized(experts.gate_up))
      x = quantized_rows(num_rows, experts.hidden, carver);
    carver.return_to(begin);
    gate_up = plain_rows(2 * experts.size, carver);
    carver.skip_to_end();
    activated = product_rows(experts.down, experts.size, carver);
  }

 private:
  TokenRows plain_rows(int columns, Carver& carver) const {
    const std::size_t value_bytes = is_bf16_ ? sizeof(bf16) : sizeof(float);
    return {carver.take<void>(value_bytes * columns * std::size_t(places_)), columns, is_bf16_};
  }
  static QuantizedRows quantized_rows(int rows, int columns, Carver& carver) {
    return {carver.take<QuantizedGroup>(QuantizedRows::num_bytes(rows, columns)), columns / kStep};
  }
  // What matrices read; plain rows with room for zeros behind them, so that steps are whole.
  ProductRows product_rows(const std::vector<ExpertMatrix>& matrices, int columns,
                           Carver& carver) const {
    ProductRows rows{};
    if (ExpertSet::reads_plain(matrices)) rows.plain = plain_rows(round_up(columns, kStep), carver);
    if (ExpertSet::reads_quantized(matrices))
      rows.quantized = quantized_rows(places_, columns, carver);
    return rows;
  }

  int places_;
  bool is_bf16_;
};

void sort_rows(const MixtureCall& call, int num_experts, MixturePlan& plan) {
  const int num_rows = call.num_rows * call.num_chosen;
  plan.counts.assign(num_experts, 0);
  plan.begins.resize(num_experts);
  plan.rows.resize(num_rows);
  plan.places.resize(num_rows);
  plan.place_of_row.resize(num_rows);
  for (int row = 0; row < num_rows; ++row) {
    const std::int32_t expert = call.chosen[row];
    if (expert < 0 || expert >= num_experts)
      throw std::invalid_argument("chosen must be within [0, " + std::to_string(num_experts) +
                                  "), not " + std::to_string(expert));
    ++plan.counts[expert];
  }
  // First where each expert's rows go among the sorted ones, then their places.
  plan.next.resize(num_experts);
  int place = 0, sorted = 0;
  for (int expert = 0; expert < num_experts; ++expert) {
    plan.begins[expert] = place;
    plan.next[expert] = sorted;
    place += round_up(plan.counts[expert], kBlockRows);
    sorted += plan.counts[expert];
  }
  for (int row = 0; row < num_rows; ++row) plan.rows[plan.next[call.chosen[row]]++] = row;
  for (int expert = 0, at = 0; expert < num_experts; ++expert) {
    for (int i = 0; i < plan.counts[expert]; ++i, ++at) {
      plan.places[at] = plan.begins[expert] + i;
      plan.place_of_row[plan.rows[at]] = plan.places[at];
    }
  }
}

// body(row, place) for all rows, by expert, in tasks of a few thousand values.
template <class F>
void for_places(const MixturePlan& plan, int row_values, F&& body) {
  const int num_rows = static_cast<int>(plan.rows.size());
  const int task_rows = kTaskValues / (row_values + 1) + 1;
  parallel_for(ceil_div(num_rows, task_rows), [&](int task, int) {
    const int end = std::min((task + 1) * task_rows, num_rows);
    for (int i = task * task_rows; i < end; ++i) body(plan.rows[i], plan.places[i]);
  });
}

void copy_values(const TokenRows& from, int row, int columns, const TokenRows& to, int place) {
  const std::size_t value_bytes = to.is_bf16 ? sizeof(bf16) : sizeof(float);
  const auto* source = static_cast<const char*>(from.data) + row * from.stride * value_bytes;
  auto* target = static_cast<char*>(to.data) + place * to.stride * value_bytes;
  std::memcpy(target, source, columns * value_bytes);
  std::memset(target + columns * value_bytes, 0, (to.stride - columns) * value_bytes);
}

void copy_codes(const QuantizedRows& from, int row, const QuantizedRows& to, int place) {
  const QuantizedGroup* sources = from.block_of(row);
  QuantizedGroup* targets = to.block_of(place);
  row %= kBlockRows;
  place %= kBlockRows;
  for (int g = 0; g < to.num_groups; ++g) {
    const QuantizedGroup& source = sources[g];
    QuantizedGroup& target = targets[g];
    std::memcpy(target.codes[place], source.codes[row], kStep);
    target.scales[place] = source.scales[row];
    target.scaled_sums[place] = source.scaled_sums[row];
    target.sums[place] = source.sums[row];
  }
}

void gather(const ExpertSet& experts, const MixtureCall& call, const MixturePlan& plan,
            const Workspace& workspace) {
  const ProductRows& out = workspace.gathered;
  QuantizedRows codes = call.x.quantized;
  if (out.quantized.num_groups > 0 && codes.groups == nullptr) {
    codes = workspace.x;
    quantize_rows({call.x.plain.data, call.x.plain.stride, call.x.plain.is_bf16}, call.num_rows,
                  codes);
  }
  for_places(plan, experts.hidden, [&](int row, int place) {
    const int token = row / call.num_chosen;
    if (out.plain.data != nullptr)
      copy_values(call.x.plain, token, experts.hidden, out.plain, place);
    if (out.quantized.num_groups > 0) copy_codes(codes, token, out.quantized, place);
  });
}

void activate(const ExpertSet& experts, const MixtureCall& call, const MixturePlan& plan,
              const Workspace& workspace) {
  const auto kernel = TOKENMILL_AT_LEVEL(gated_activation);
  const TokenRows& plain = workspace.activated.plain;
  const GateCall to_plain{0, experts.size, workspace.gate_up, call.gate, {plain, {}}};
  const GateCall to_codes{0, experts.size, workspace.gate_up, call.gate,
                          {{}, workspace.activated.quantized}};
  const std::size_t value_bytes = plain.is_bf16 ? sizeof(bf16) : sizeof(float);
  for_places(plan, 2 * experts.size, [&](int, int place) {
    if (plain.data != nullptr) {
      kernel(to_plain, {place, place + 1});
      auto* row = static_cast<char*>(plain.data) + place * plain.stride * value_bytes;
      std::memset(row + experts.size * value_bytes, 0, (plain.stride - experts.size) * value_bytes);
    }
    if (workspace.activated.quantized.num_groups > 0) kernel(to_codes, {place, place + 1});
  });
}

// One product with the matrices of all experts.
class GroupedProduct {
 public:
  GroupedProduct(const std::vector<ExpertMatrix>& matrices, const ProductRows& x,
                 const TokenRows& out, MixturePlan& plan)
      : matrices_(matrices), x_(x), out_(out), plan_(plan) {}

  void run() {
    const std::int64_t task_cost = total_cost() / (num_threads() * kTasksPerThread) + 1;
    plan_.tasks.clear();
    for_spans([&](int expert, int span) { add_tasks(expert, span, task_cost); });
    const auto bf16_kernel = choose_bf16_kernel();
    const auto float32_kernel = choose_float32_kernel();
    const auto block_kernel = choose_block_kernel();
    parallel_for(static_cast<int>(plan_.tasks.size()), [&](int index, int) {
      const MixturePlan::Task& task = plan_.tasks[index];
      const ExpertMatrix& matrix = matrices_[task.expert];
      const WeightSpan& span = matrix.spans[task.span];
      const OutputRows out = output_of(matrix, span);
      switch (span.kind) {
        case WeightSpan::Kind::bf16:
          bf16_kernel({static_cast<const bf16*>(x_.plain.data), x_.plain.stride}, task.rows,
                      {reinterpret_cast<const bf16*>(span.data), span.n, span.k}, task.panels, out);
          break;
        case WeightSpan::Kind::float32:
          float32_kernel({static_cast<const float*>(x_.plain.data), x_.plain.stride}, task.rows,
                         {reinterpret_cast<const float*>(span.data), span.n, span.k}, task.panels,
                         out);
          break;
        case WeightSpan::Kind::blocks:
          block_kernel(x_.quantized, task.rows, {span.data, span.n, span.k, span.format},
                       task.panels, out);
      }
    });
  }

 private:
  // Those with rows.
  template <class F>
  void for_spans(F&& body) const {
    for (int expert = 0; expert < static_cast<int>(matrices_.size()); ++expert)
      if (plan_.counts[expert] > 0)
        for (int span = 0; span < static_cast<int>(matrices_[expert].spans.size()); ++span)
          body(expert, span);
  }

  // Of a panel and so many rows, in bytes read.
  static std::int64_t cost(const WeightSpan& span, int num_rows) {
    return span.panel_bytes() * (kPanelRows + num_rows) / kPanelRows + 1;
  }

  std::int64_t total_cost() const {
    std::int64_t total = 0;
    for_spans([&](int expert, int index) {
      const WeightSpan& span = matrices_[expert].spans[index];
      total += ceil_div(span.n, kPanel) * cost(span, plan_.counts[expert]);
    });
    return total;
  }

  void add_tasks(int expert, int index, std::int64_t task_cost) {
    const WeightSpan& span = matrices_[expert].spans[index];
    const std::int64_t row_bytes = span.kind == WeightSpan::Kind::blocks
        ? x_.quantized.num_groups * sizeof(QuantizedGroup) / kBlockRows
        : x_.plain.stride * (x_.plain.is_bf16 ? sizeof(bf16) : sizeof(float));
    const int num_rows = plan_.counts[expert], num_panels = ceil_div(span.n, kPanel);
    const int cached_rows = static_cast<int>(kRowBlockBytes / (row_bytes + 1));
    const int num_blocks = ceil_div(num_rows, std::max(cached_rows, kRowBlockStep));
    const int block_rows = round_up(ceil_div(num_rows, num_blocks), kRowBlockStep);
    for (int row = 0; row < num_rows; row += block_rows) {
      const int end = std::min(row + block_rows, num_rows);
      const auto wanted = std::max(task_cost / cost(span, end - row),
                                   ceil_div(kTaskBytes, span.panel_bytes() + 1));
      const int num_tasks = static_cast<int>(
          std::min<std::int64_t>(ceil_div<std::int64_t>(num_panels, wanted), num_panels));
      const int begin = plan_.begins[expert];
      for (int i = 0; i < num_tasks; ++i)
        plan_.tasks.push_back({expert, index, {begin + row, begin + end},
                               {static_cast<int>(std::int64_t{num_panels} * i / num_tasks),
                                static_cast<int>(std::int64_t{num_panels} * (i + 1) / num_tasks)}});
    }
  }

  OutputRows output_of(const ExpertMatrix& matrix, const WeightSpan& span) const {
    const std::size_t value_bytes = out_.is_bf16 ? sizeof(bf16) : sizeof(float);
    return {static_cast<char*>(out_.data) + span.first_column * value_bytes, out_.stride,
            out_.is_bf16, matrix.bias == nullptr ? nullptr : matrix.bias + span.first_column};
  }

  const std::vector<ExpertMatrix>& matrices_;
  const ProductRows& x_;
  const TokenRows& out_;
  MixturePlan& plan_;
};

template <class F>
bool any_span(const std::vector<ExpertMatrix>& matrices, F&& holds) {
  return std::any_of(matrices.begin(), matrices.end(), [&](const ExpertMatrix& matrix) {
    return std::any_of(matrix.spans.begin(), matrix.spans.end(), holds);
  });
}

}  // namespace

std::int64_t WeightSpan::panel_bytes() const {
  switch (kind) {
    case Kind::bf16: return std::int64_t{round_up(k, kStep)} * kPanel * sizeof(bf16);
    case Kind::float32: return std::int64_t{k} * kPanel * sizeof(float);
    default: return std::int64_t{k / kStep} * format.group_bytes();
  }
}

bool ExpertSet::reads_plain(const std::vector<ExpertMatrix>& matrices) {
  return any_span(matrices, [](const WeightSpan& s) { return s.kind != WeightSpan::Kind::blocks; });
}

bool ExpertSet::reads_quantized(const std::vector<ExpertMatrix>& matrices) {
  return any_span(matrices, [](const WeightSpan& s) { return s.kind == WeightSpan::Kind::blocks; });
}

std::size_t mixture_bytes(const ExpertSet& experts, int num_rows, int num_chosen, bool is_bf16) {
  Carver carver(nullptr);
  Workspace(experts, num_rows, num_chosen, is_bf16, carver);
  return carver.num_bytes();
}

void route(const RoutingCall& call) {
  const auto kernel = TOKENMILL_AT_LEVEL(route);
  const int task_rows = kTaskValues / (8 * call.num_experts) + 1;
  parallel_for(ceil_div(call.num_rows, task_rows), [&](int task, int) {
    kernel(call, {task * task_rows, std::min((task + 1) * task_rows, call.num_rows)});
  });
}

void mix_experts(const ExpertSet& experts, const MixtureCall& call, MixturePlan& plan) {
  require_kernels();
  if (call.num_rows == 0) return;
  Carver carver(call.workspace);
  const Workspace workspace(experts, call.num_rows, call.num_chosen, call.is_bf16, carver);
  sort_rows(call, experts.num_experts(), plan);
  gather(experts, call, plan, workspace);
  GroupedProduct(experts.gate_up, workspace.gathered, workspace.gate_up, plan).run();
  activate(experts, call, plan, workspace);
  GroupedProduct(experts.down, workspace.activated, workspace.results, plan).run();
  const WeightedSum sum{call.num_chosen, experts.hidden, call.weights, plan.place_of_row.data(),
                        workspace.results, call.base, call.out, call.out_stride};
  const auto kernel = TOKENMILL_AT_LEVEL(weighted_sum);
  const int task_rows = kTaskValues / (call.num_chosen * experts.hidden + 1) + 1;
  parallel_for(ceil_div(call.num_rows, task_rows), [&](int task, int) {
    kernel(sum, {task * task_rows, std::min((task + 1) * task_rows, call.num_rows)});
  });
}

}  // namespace tokenmill
