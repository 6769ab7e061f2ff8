// Mixtures of experts, as Python functions.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bind_packed.h"
#include "experts.h"
#include "program.h"

namespace tokenmill {
namespace {

using FloatMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ReadFloatMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using IntMatrix = nb::ndarray<std::int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Workspace = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// Packed weights, their format ("bf16", "float32" or a block type), columns.
using Span = std::tuple<ReadBytes, std::string, std::int64_t>;

ExpertMatrix matrix_of(const std::vector<Span>& spans, int n, int k,
                       const std::optional<Bias>& bias) {
  check(!bias || static_cast<int>(bias->size()) == n, "bias", std::to_string(n) + " values");
  ExpertMatrix matrix{{}, bias ? bias->data() : nullptr};
  int column = 0;
  for (const auto& [packed, format, columns] : spans) {
    WeightSpan span{WeightSpan::Kind::blocks, packed.data(), dimension(columns, "columns"), k, {},
                    column};
    if (format == "bf16") {
      span.kind = WeightSpan::Kind::bf16;
      bf16_weights(packed, columns, k);
    } else if (format == "float32") {
      span.kind = WeightSpan::Kind::float32;
      float32_weights(packed, columns, k);
    } else {
      span.format = block_weights(packed, format, columns, k).format;
    }
    column += span.n;
    matrix.spans.push_back(span);
  }
  check(column == n, "spans", "of " + std::to_string(n) + " columns together");
  return matrix;
}

void add_expert(ExpertSet& experts, const std::vector<Span>& gate_up, const std::vector<Span>& down,
                const std::optional<Bias>& gate_up_bias, const std::optional<Bias>& down_bias) {
  ExpertMatrix first = matrix_of(gate_up, 2 * experts.size, experts.hidden, gate_up_bias);
  ExpertMatrix second = matrix_of(down, experts.hidden, experts.size, down_bias);
  experts.gate_up.push_back(std::move(first));
  experts.down.push_back(std::move(second));
}

GateFunction gate_function(const std::string& name, float alpha, float limit) {
  if (name == "silu") return {Gate::silu};
  if (name == "gelu_tanh") return {Gate::gelu_tanh};
  check(name == "clamped", "gate", "silu, gelu_tanh or clamped, not " + name);
  return {Gate::clamped, alpha, limit};
}

void run_route(const ReadFloatMatrix& logits, const std::optional<Bias>& bias, bool by_logistic,
               bool renormalize, int num_groups, int num_best_groups, int group_best, float factor,
               FloatMatrix weights, IntMatrix chosen) {
  RoutingCall call{};
  call.num_rows = dimension(logits.shape(0), "logits");
  call.num_experts = dimension(logits.shape(1), "logits");
  check_matrix(logits, "logits", call.num_experts);
  call.num_chosen = dimension(chosen.shape(1), "chosen");
  call.logits = logits.data();
  call.stride = logits.stride(0);
  check(!bias || static_cast<int>(bias->size()) == call.num_experts, "bias",
        "a value for each expert");
  call.bias = bias ? bias->data() : nullptr;
  call.by_logistic = by_logistic;
  call.renormalize = renormalize;
  check(num_groups >= 1 && call.num_experts % num_groups == 0, "num_groups",
        "a divisor of the number of experts");
  check(num_best_groups >= 1 && num_best_groups <= num_groups, "num_best_groups",
        "within [1, num_groups]");
  const int group_size = call.num_experts / num_groups;
  check((group_best == 1 || group_best == 2) && group_best <= group_size, "group_best",
        "1 or 2, and at most the experts of a group");
  check(call.num_chosen >= 1 && call.num_chosen <= num_best_groups * group_size, "chosen",
        "of as many columns as there are experts to choose from, or fewer");
  call.num_groups = num_groups;
  call.num_best_groups = num_best_groups;
  call.group_best = group_best;
  call.factor = factor;
  check(static_cast<int>(weights.shape(0)) == call.num_rows &&
            static_cast<int>(chosen.shape(0)) == call.num_rows &&
            weights.shape(1) == chosen.shape(1),
        "weights and chosen", "of one shape, with as many rows as logits");
  call.weights = weights.data();
  call.chosen = chosen.data();
  submit({"route"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    route(call);
  });
}

// Packed plain weights take rows of their own type.
void check_kinds(const std::vector<ExpertMatrix>& matrices, bool is_bf16) {
  const auto other = is_bf16 ? WeightSpan::Kind::float32 : WeightSpan::Kind::bf16;
  for (const ExpertMatrix& matrix : matrices)
    for (const WeightSpan& span : matrix.spans)
      check(span.kind != other, "is_bf16", "that of the weights, where they are plain");
}

ProductRows product_rows(const ReadTensor& x, const ExpertSet& experts, int num_rows,
                         bool is_bf16) {
  if (x.dtype() == nb::dtype<std::uint8_t>()) {
    check(!ExpertSet::reads_plain(experts.gate_up), "x", "plain for these experts");
    check(x.ndim() == 1, "x", "a matrix, or the bytes of quantised rows");
    return {{}, quantized_rows(static_cast<const std::uint8_t*>(x.data()), x.size(), num_rows,
                               experts.hidden)};
  }
  const TokenRows rows = token_rows(x, "x", experts.hidden);
  check(static_cast<int>(x.shape(0)) == num_rows, "x", "of as many rows as weights");
  check(rows.is_bf16 == is_bf16, "x", is_bf16 ? "bfloat16" : "float32");
  return {rows, {}};
}

void run_mix(const std::shared_ptr<ExpertSet>& experts, const ReadTensor& x,
             const FloatMatrix& weights, const IntMatrix& chosen, const std::string& gate,
             float alpha, float limit, const std::optional<ReadTensor>& base, bool is_bf16,
             Workspace workspace, FloatMatrix out) {
  MixtureCall call{};
  call.num_rows = dimension(weights.shape(0), "weights");
  call.num_chosen = dimension(weights.shape(1), "weights");
  check(call.num_chosen >= 1, "weights", "of at least one column");
  check(chosen.shape(0) == weights.shape(0) && chosen.shape(1) == weights.shape(1), "chosen",
        "of the shape of weights");
  call.is_bf16 = is_bf16;
  check_kinds(experts->gate_up, is_bf16);
  check_kinds(experts->down, is_bf16);
  call.x = product_rows(x, *experts, call.num_rows, is_bf16);
  call.weights = weights.data();
  call.chosen = chosen.data();
  call.gate = gate_function(gate, alpha, limit);
  if (base) {
    call.base = token_rows(*base, "base", experts->hidden);
    check(static_cast<int>(base->shape(0)) == call.num_rows, "base", "of as many rows as weights");
  }
  check(static_cast<int>(out.shape(0)) == call.num_rows &&
            static_cast<int>(out.shape(1)) == experts->hidden,
        "out", "[rows, hidden]");
  call.out = out.data();
  call.out_stride = out.stride(0);
  const std::size_t num_bytes =
      mixture_bytes(*experts, call.num_rows, call.num_chosen, call.is_bf16);
  check(workspace.size() >= num_bytes, "workspace", std::to_string(num_bytes) + " bytes");
  check(reinterpret_cast<std::uintptr_t>(workspace.data()) % kCacheLine == 0, "workspace",
        "aligned to 64 bytes");
  call.workspace = workspace.data();
  const auto plan = std::make_shared<MixturePlan>();
  const CallLabel label{"mix_experts", experts->size, experts->hidden};
  submit(label, call.num_rows, [experts, call, plan](int num_rows) mutable {
    call.num_rows = num_rows;
    mix_experts(*experts, call, *plan);
  });
}

}  // namespace

void bind_experts(nb::module_& module) {
  nb::class_<ExpertSet>(module, "Experts")
      .def("__init__", [](ExpertSet* self, std::int64_t hidden, std::int64_t size) {
        new (self) ExpertSet{dimension(hidden, "hidden"), dimension(size, "size"), {}, {}};
      })
      .def("add", &add_expert, nb::arg("gate_up"), nb::arg("down"),
           nb::arg("gate_up_bias").none(), nb::arg("down_bias").none())
      .def("workspace_bytes",
           [](const ExpertSet& experts, std::int64_t rows, std::int64_t chosen, bool is_bf16) {
             return mixture_bytes(experts, dimension(rows, "rows"), dimension(chosen, "chosen"),
                                  is_bf16);
           });
  module.def("route", &run_route, nb::arg("logits"), nb::arg("bias").none(),
             nb::arg("by_logistic"), nb::arg("renormalize"), nb::arg("num_groups"),
             nb::arg("num_best_groups"), nb::arg("group_best"), nb::arg("factor"),
             nb::arg("weights"), nb::arg("chosen"));
  module.def("mix_experts", &run_mix, nb::arg("experts"), nb::arg("x"), nb::arg("weights"),
             nb::arg("chosen"), nb::arg("gate"), nb::arg("alpha"), nb::arg("limit"),
             nb::arg("base").none(), nb::arg("is_bf16"), nb::arg("workspace"), nb::arg("out"));
}

}  // namespace tokenmill
