// Elementwise kernels and sampling, as Python functions.
#include <nanobind/stl/string.h>

#include <algorithm>

#include "bind_outputs.h"
#include "elementwise_kernels.h"
#include "program.h"
#include "sampling_kernels.h"

namespace tokenmill {
namespace {

template <class T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Parts = nb::ndarray<nb::ndim<3>, nb::device::cpu>;
using ReadParts = nb::ndarray<nb::ndim<3>, nb::device::cpu, nb::ro>;
using FloatMatrix = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;

int rows_of(const ReadTensor& x) {
  check(x.ndim() == 2, "x", "a matrix");
  return static_cast<int>(x.shape(0));
}

// A norm's call with all but weight and bias.
NormCall norm_call(const ReadTensor& x, const FloatMatrix& residual, bool starts_stream, float eps,
                   const Tensor& out) {
  NormCall call{};
  call.num_rows = rows_of(x);
  call.size = static_cast<int>(x.shape(1));
  call.x = token_rows(x, "x", call.size);
  check_matrix(residual, "residual", call.size);
  check(static_cast<int>(residual.shape(0)) == call.num_rows, "residual", "of as many rows as x");
  call.residual = residual.data();
  call.residual_stride = residual.stride(0);
  call.starts_stream = starts_stream;
  call.eps = eps;
  call.out = activation_output(out, call.num_rows, call.size);
  return call;
}

void run_norm(const ReadTensor& x, const FloatMatrix& residual, bool starts_stream,
              const Column<const float>& weight, float eps, const Tensor& out) {
  NormCall call = norm_call(x, residual, starts_stream, eps, out);
  check(static_cast<int>(weight.size()) == call.size, "weight", "a value for each column of x");
  call.weight = weight.data();
  submit({"add_rms_norm"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    add_rms_norm(call);
  });
}

void run_layer_norm(const ReadTensor& x, const FloatMatrix& residual, bool starts_stream,
                    const Column<const float>& weight, const Column<const float>& bias, float eps,
                    const Tensor& out) {
  NormCall call = norm_call(x, residual, starts_stream, eps, out);
  check(static_cast<int>(weight.size()) == call.size, "weight", "a value for each column of x");
  check(static_cast<int>(bias.size()) == call.size, "bias", "a value for each column of x");
  call.weight = weight.data();
  call.bias = bias.data();
  submit({"add_layer_norm"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    add_layer_norm(call);
  });
}

void run_add_residual(const ReadTensor& x, const FloatMatrix& residual, bool starts_stream,
                      const Tensor& out) {
  NormCall call = norm_call(x, residual, starts_stream, 0.0f, out);
  submit({"add_residual"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    add_residual(call);
  });
}

void run_head_norm(const ReadTensor& x, const Column<const float>& weight, float eps,
                   const Tensor& out) {
  HeadNormCall call{};
  call.num_rows = rows_of(x);
  call.head_size = static_cast<int>(weight.size());
  const std::int64_t columns = static_cast<std::int64_t>(x.shape(1));
  check(call.head_size > 0 && columns % call.head_size == 0, "x",
        "of a multiple of the weight's size in columns");
  call.num_heads = static_cast<int>(columns / call.head_size);
  call.x = token_rows(x, "x", columns);
  call.out = token_rows(out, "out", columns);
  check(static_cast<int>(out.shape(0)) == call.num_rows, "out", "of as many rows as x");
  call.weight = weight.data();
  call.eps = eps;
  submit({"head_rms_norm"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    head_rms_norm(call);
  });
}

Gate gate_of(const std::string& name) {
  check(name == "silu" || name == "gelu_tanh", "gate", "silu or gelu_tanh, not " + name);
  return name == "silu" ? Gate::silu : Gate::gelu_tanh;
}

void run_gate(const ReadTensor& x, const std::string& gate, const Tensor& out) {
  GateCall call{};
  call.num_rows = rows_of(x);
  check(x.shape(1) % 2 == 0, "gate_up", "of an even number of columns");
  call.size = static_cast<int>(x.shape(1) / 2);
  call.x = token_rows(x, "gate_up", 2 * std::int64_t{call.size});
  call.gate = {gate_of(gate)};
  call.out = activation_output(out, call.num_rows, call.size);
  submit({"gated_activation"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    gated_activation(call);
  });
}

void run_activation(const ReadTensor& x, const std::string& gate, const Tensor& out) {
  GateCall call{};
  call.num_rows = rows_of(x);
  call.size = static_cast<int>(x.shape(1));
  call.x = token_rows(x, "x", call.size);
  call.gate = {gate_of(gate)};
  call.out = activation_output(out, call.num_rows, call.size);
  submit({"activation"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    activation(call);
  });
}

void run_add_rows(const ReadTensor& x, const Matrix<const float>& table,
                  const Column<const std::int64_t>& rows, const Tensor& out) {
  AddRowsCall call{};
  call.num_rows = rows_of(x);
  call.size = static_cast<int>(x.shape(1));
  call.x = token_rows(x, "x", call.size);
  call.out = token_rows(out, "out", call.size);
  check(static_cast<int>(out.shape(0)) == call.num_rows, "out", "of as many rows as x");
  check(static_cast<int>(table.shape(1)) == call.size, "table", "of as many columns as x");
  check(static_cast<int>(rows.size()) == call.num_rows, "rows", "a value for each row of x");
  for (int i = 0; i < call.num_rows; ++i)
    check(rows.data()[i] >= 0 && rows.data()[i] < static_cast<std::int64_t>(table.shape(0)), "rows",
          "rows of the table");
  call.table = table.data();
  call.rows = rows.data();
  submit({"add_rows"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    add_rows(call);
  });
}

// Values of [rows, parts, size], contiguous within a part.
template <class T>
TokenRows part_rows(const T& x, const char* name) {
  check(is_bf16(x) || x.dtype() == nb::dtype<float>(), name, "bfloat16 or float32");
  check(x.shape(2) <= 1 || x.stride(2) == 1, name, "contiguous along the last dimension");
  return {const_cast<void*>(static_cast<const void*>(x.data())), x.stride(0), is_bf16(x)};
}

void run_copy(const ReadParts& x, const Parts& out) {
  for (int i = 0; i < 3; ++i) check(x.shape(i) == out.shape(i), "out", "of the shape of x");
  CopyCall call{static_cast<int>(x.shape(0)), static_cast<int>(x.shape(1)),
                static_cast<int>(x.shape(2)), part_rows(x, "x"), part_rows(out, "out"),
                x.stride(1), out.stride(1)};
  submit({"copy"}, call.num_rows, [call](int num_rows) mutable {
    call.num_rows = num_rows;
    copy_parts(call);
  });
}

Logits logits_of(const nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>& logits) {
  check_matrix(logits, "logits", logits.shape(1));
  check(logits.shape(1) > 0, "logits", "of at least one column");
  return {logits.data(), logits.stride(0), static_cast<int>(logits.shape(0)),
          static_cast<int>(logits.shape(1))};
}
using LogitsMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

void check_column(std::size_t size, const Logits& logits, const char* name) {
  check(static_cast<int>(size) == logits.num_rows, name, "a value for each row of logits");
}

void run_score(const LogitsMatrix& logits, const Column<const std::int64_t>& chosen,
               const Column<const std::int64_t>& num_best, const Matrix<std::int64_t>& token_ids,
               const Matrix<float>& logprobs, const Column<std::int32_t>& ranks,
               const Column<bool>& is_finite) {
  const ScoreCall call{logits_of(logits),
                       chosen.data(),
                       num_best.data(),
                       static_cast<int>(token_ids.shape(1)),
                       token_ids.data(),
                       logprobs.data(),
                       ranks.data(),
                       reinterpret_cast<std::uint8_t*>(is_finite.data())};
  check_column(chosen.size(), call.logits, "chosen");
  check_column(num_best.size(), call.logits, "num_best");
  check_column(token_ids.shape(0), call.logits, "token_ids");
  check_column(logprobs.shape(0), call.logits, "logprobs");
  check_column(ranks.size(), call.logits, "ranks");
  check_column(is_finite.size(), call.logits, "is_finite");
  check(logprobs.shape(1) == token_ids.shape(1), "logprobs", "of the shape of token_ids");
  const int most = std::min(call.width - 1, call.logits.vocab_size);
  for (int row = 0; row < call.logits.num_rows; ++row) {
    check(call.chosen[row] >= 0 && call.chosen[row] < call.logits.vocab_size, "chosen",
          "columns of logits");
    check(call.num_best[row] >= 0 && call.num_best[row] <= most, "num_best",
          "from 0 to " + std::to_string(most));
  }
  Unlocked unlocked;
  score_tokens(call);
}

void run_sample(const LogitsMatrix& logits, const Column<const bool>& is_greedy,
                const Column<const float>& temperature, const Column<const float>& min_p,
                const Column<const std::int64_t>& top_k, const Column<const double>& top_p,
                const Column<const std::uint64_t>& seed,
                const Column<const std::int64_t>& position, const Column<std::int64_t>& token_ids,
                const Column<bool>& is_valid) {
  const SampleCall call{logits_of(logits),
                        reinterpret_cast<const std::uint8_t*>(is_greedy.data()),
                        temperature.data(),
                        min_p.data(),
                        top_k.data(),
                        top_p.data(),
                        seed.data(),
                        position.data(),
                        token_ids.data(),
                        reinterpret_cast<std::uint8_t*>(is_valid.data())};
  check_column(is_greedy.size(), call.logits, "is_greedy");
  check_column(temperature.size(), call.logits, "temperature");
  check_column(min_p.size(), call.logits, "min_p");
  check_column(top_k.size(), call.logits, "top_k");
  check_column(top_p.size(), call.logits, "top_p");
  check_column(seed.size(), call.logits, "seed");
  check_column(position.size(), call.logits, "position");
  check_column(token_ids.size(), call.logits, "token_ids");
  check_column(is_valid.size(), call.logits, "is_valid");
  Unlocked unlocked;
  sample(call);
}

}  // namespace

void bind_elementwise(nb::module_& module) {
  module.def("add_rms_norm", &run_norm);
  module.def("add_layer_norm", &run_layer_norm);
  module.def("add_residual", &run_add_residual);
  module.def("head_rms_norm", &run_head_norm);
  module.def("gated_activation", &run_gate);
  module.def("activation", &run_activation);
  module.def("add_rows", &run_add_rows);
  module.def("copy", &run_copy);
  module.def("sample", &run_sample);
  module.def("score_tokens", &run_score);
}

}  // namespace tokenmill
