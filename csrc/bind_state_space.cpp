// State-space layers, as Python functions.
#include "bind_outputs.h"
#include "program.h"
#include "state_space.h"

namespace tokenmill {
namespace {

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using Counts = nb::ndarray<std::int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConvWeights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Space = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// A layer's sizes, weights and states, which their owner keeps.
struct StateSpaceLayer {
  StateSpaceCall call;
  int num_blocks;
};

void check_size(std::size_t size, std::int64_t expected, const char* name) {
  check(static_cast<std::int64_t>(size) == expected, name, std::to_string(expected) + " values");
}

StateSpaceShape make_shape(int num_heads, int head_size, int state_size, int num_groups,
                           int kernel_size, float dt_min, float dt_max, float norm_eps) {
  check(num_heads > 0 && head_size > 0 && state_size > 0, "shape", "of positive sizes");
  check(num_groups > 0 && num_heads % num_groups == 0, "num_heads", "a multiple of num_groups");
  check(kernel_size > 1, "kernel_size", "at least 2");
  check(dt_min <= dt_max, "dt_min", "at most dt_max");
  return {num_heads, head_size, state_size, num_groups, kernel_size, dt_min, dt_max, norm_eps};
}

StateSpaceLayer make_layer(const StateSpaceShape& shape, const ConvWeights& conv_weight,
                           const Weights& conv_bias, const Weights& a, const Weights& d,
                           const Weights& dt_bias, const Weights& norm_weight,
                           const States& states, const Counts& num_seen) {
  check(static_cast<int>(conv_weight.shape(0)) == shape.kernel_size &&
            static_cast<int>(conv_weight.shape(1)) == shape.channels(),
        "conv_weight", "a row of all channels for each tap");
  check_size(conv_bias.size(), shape.channels(), "conv_bias");
  check_size(a.size(), shape.num_heads, "a");
  check_size(d.size(), shape.num_heads, "d");
  check_size(dt_bias.size(), shape.num_heads, "dt_bias");
  check_size(norm_weight.size(), shape.inner(), "norm_weight");
  const int num_blocks = static_cast<int>(states.shape(0));
  check(static_cast<int>(states.shape(1)) == kStatePlaces &&
            static_cast<std::int64_t>(states.shape(2)) == shape.state_values(),
        "states", "two places for a state in each block");
  check(static_cast<int>(num_seen.shape(0)) == num_blocks &&
            static_cast<int>(num_seen.shape(1)) == kStatePlaces,
        "num_seen", "a number for each place");
  StateSpaceCall call{};
  call.shape = shape;
  call.conv_weight = conv_weight.data();
  call.conv_bias = conv_bias.data();
  call.a = a.data();
  call.d = d.data();
  call.dt_bias = dt_bias.data();
  call.norm_weight = norm_weight.data();
  call.states = states.data();
  call.num_seen = num_seen.data();
  return {call, num_blocks};
}

void build_plan(StatePlan& plan, const Ints& query_start_loc, const Ints& seq_lens,
                const Table& block_table, int block_size, int num_blocks) {
  const std::size_t num_reqs = seq_lens.size();
  check(query_start_loc.size() == num_reqs + 1, "query_start_loc", "one longer than seq_lens");
  check(block_table.shape(0) >= num_reqs && (num_reqs == 0 || block_table.shape(1) <= 1 ||
                                             block_table.stride(1) == 1),
        "block_table", "a row for each request, contiguous");
  check(block_size > 0, "block_size", "positive");
  plan.build(static_cast<int>(num_reqs), query_start_loc.data(), seq_lens.data(),
             block_table.data(), block_table.stride(0), static_cast<int>(block_table.shape(1)),
             block_size, num_blocks);
}

float* space_of(const Space& space, std::int64_t num_rows, int columns, const char* name) {
  check(static_cast<std::int64_t>(space.shape(0)) == num_rows &&
            static_cast<int>(space.shape(1)) == columns,
        name, "of as many rows as inputs, and " + std::to_string(columns) + " columns");
  return space.data();
}

void run(const StateSpaceLayer& layer, StatePlan& plan, const ReadTensor& inputs, const Space& u,
         const Space& y, const Space& dt, const Space& decay, const Tensor& out) {
  StateSpaceCall call = layer.call;
  const StateSpaceShape& shape = call.shape;
  call.inputs = token_rows(inputs, "inputs", shape.columns());
  const auto num_rows = static_cast<std::int64_t>(inputs.shape(0));
  call.u = space_of(u, num_rows, shape.channels(), "u");
  call.y = space_of(y, num_rows, shape.inner(), "y");
  call.dt = space_of(dt, num_rows, shape.num_heads, "dt");
  call.decay = space_of(decay, num_rows, shape.num_heads, "decay");
  call.out = activation_output(out, static_cast<int>(num_rows), shape.inner());
  check(num_rows >= plan.num_rows(), "inputs", "a row for each token of the plan");
  check(layer.num_blocks >= plan.num_blocks(), "states", "as many blocks as the plan has");
  submit({"state_space"}, num_rows, [call, &plan](int) { state_space(call, plan); });
}

}  // namespace

void bind_state_space(nb::module_& module) {
  nb::class_<StatePlan>(module, "StatePlan").def(nb::init<>()).def("build", &build_plan);
  nb::class_<StateSpaceLayer>(module, "StateSpaceLayer")
      .def("__init__",
           [](StateSpaceLayer* self, int num_heads, int head_size, int state_size, int num_groups,
              int kernel_size, float dt_min, float dt_max, float norm_eps,
              const ConvWeights& conv_weight, const Weights& conv_bias, const Weights& a,
              const Weights& d, const Weights& dt_bias, const Weights& norm_weight,
              const States& states, const Counts& num_seen) {
             new (self) StateSpaceLayer(
                 make_layer(make_shape(num_heads, head_size, state_size, num_groups, kernel_size,
                                       dt_min, dt_max, norm_eps),
                            conv_weight, conv_bias, a, d, dt_bias, norm_weight, states, num_seen));
           },
           nb::kw_only(), nb::arg("num_heads"), nb::arg("head_size"), nb::arg("state_size"),
           nb::arg("num_groups"), nb::arg("kernel_size"), nb::arg("dt_min"), nb::arg("dt_max"),
           nb::arg("norm_eps"), nb::arg("conv_weight"), nb::arg("conv_bias"), nb::arg("a"),
           nb::arg("d"), nb::arg("dt_bias"), nb::arg("norm_weight"), nb::arg("states"),
           nb::arg("num_seen"));
  module.def("state_space", &run);
}

}  // namespace tokenmill
