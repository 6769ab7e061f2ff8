// Steps of decoding requests, as a Python class.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_rows.h"
#include "decode_step.h"

namespace tokenmill {
namespace {

template <class T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Whether every entry is the small integer 1, which Python has one object of.
bool all_one(const nb::list& numbers) {
  for (nb::handle each : numbers)
    if (PyLong_AsLong(each.ptr()) != 1) return false;
  return true;
}

bool all_true(const nb::list& flags) {
  for (nb::handle each : flags)
    if (each.ptr() != Py_True) return false;
  return true;
}

std::vector<std::int64_t> numbers_of(const nb::list& list) {
  std::vector<std::int64_t> numbers;
  numbers.reserve(list.size());
  for (nb::handle each : list) {
    numbers.push_back(PyLong_AsLongLong(each.ptr()));
    if (numbers.back() == -1 && PyErr_Occurred()) throw nb::python_error();
  }
  return numbers;
}

template <class T>
std::int64_t row_bytes(const T& rows) {
  return rows.stride(0) * static_cast<std::int64_t>(rows.itemsize());
}

// A list of one token a request.
nb::object lists_of(const std::vector<std::int64_t>& token_ids) {
  nb::object lists = nb::steal(PyList_New(static_cast<Py_ssize_t>(token_ids.size())));
  for (std::size_t i = 0; i < token_ids.size(); ++i) {
    PyObject* one = PyList_New(1);
    PyList_SET_ITEM(one, 0, PyLong_FromLongLong(token_ids[i]));
    PyList_SET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(i), one);
  }
  return lists;
}

class Columns {
 public:
  Columns(const Column<bool>& is_plain, const Column<bool>& is_greedy,
          const Column<float>& temperature, const Column<float>& min_p,
          const Column<std::int64_t>& top_k, const Column<double>& top_p,
          const Column<std::uint64_t>& seed, const Column<std::int64_t>& num_tokens,
          const Column<std::int64_t>& num_computed_tokens)
      : flags_{is_plain, is_greedy}, floats_{temperature, min_p},
        integers_{top_k, num_tokens, num_computed_tokens}, top_p_(top_p), seed_(seed) {
    const std::size_t count = is_plain.size();
    check(is_greedy.size() == count && temperature.size() == count && min_p.size() == count &&
              top_k.size() == count && top_p.size() == count && seed.size() == count &&
              num_tokens.size() == count && num_computed_tokens.size() == count,
          "columns", "a value for each row");
  }

  std::size_t num_rows() const { return seed_.size(); }

  RowColumns columns() const {
    return {reinterpret_cast<const std::uint8_t*>(flags_[0].data()),
            reinterpret_cast<const std::uint8_t*>(flags_[1].data()),
            floats_[0].data(), floats_[1].data(), integers_[0].data(), top_p_.data(),
            seed_.data(), integers_[1].data(), integers_[2].data()};
  }

 private:
  std::vector<Column<bool>> flags_;
  std::vector<Column<float>> floats_;
  std::vector<Column<std::int64_t>> integers_;
  Column<double> top_p_;
  Column<std::uint64_t> seed_;
};

// The step, and what it must not outlive: objects of Python.
class OwningDecodeStep {
 public:
  OwningDecodeStep(StepGather& gather, Program& layers, Program& head, const nb::list& attention,
                   const ReadTensor& hidden, const Tensor& head_input, const Tensor& logits,
                   Columns& columns, AdapterRows* adapters)
      : step_(gather, layers, head, attention_of(attention), head_of(hidden, head_input, logits),
              columns.columns(), adapters),
        tensors_{head_input, logits}, hidden_(hidden), attention_(attention) {
    check(static_cast<std::int64_t>(columns.num_rows()) == gather.arrays().num_rows, "columns",
          "as long as the tables of the gather");
    check(static_cast<int>(hidden.shape(0)) >= layers.max_rows(), "hidden",
          "a row for each row of the layers");
  }

  // False if the step is none of these; then nothing has happened.
  bool run(const nb::list& rows, const nb::list& num_scheduled_tokens, const nb::list& num_logits,
           const nb::list& is_sampled) {
    if (!all_one(num_scheduled_tokens) || !all_one(num_logits) || !all_true(is_sampled))
      return false;
    std::vector<std::int64_t> numbers = numbers_of(rows);
    if (!step_.takes(numbers)) return false;
    Unlocked unlocked;
    step_.run(std::move(numbers));
    return true;
  }

  // Token lists, one a request, and the places of those without a token to draw.
  std::pair<nb::object, std::vector<int>> drawn() const {
    return {lists_of(step_.token_ids()), step_.bad_places()};
  }

  std::pair<nb::object, std::vector<int>> commit() {
    step_.commit();
    return drawn();
  }

  std::tuple<double, double, double> kernel_seconds() const {
    const KernelSeconds& seconds = step_.kernel_seconds();
    return {seconds.layers, seconds.head, seconds.sampling};
  }

 private:
  static std::vector<DecodeAttention> attention_of(const nb::list& entries) {
    std::vector<DecodeAttention> attention;
    for (nb::handle each : entries) {
      const auto entry = nb::cast<nb::tuple>(each);
      attention.push_back({nb::cast<AttentionPlan*>(entry[0]),
                           nb::cast<const AttentionShape&>(entry[1]), nb::cast<int>(entry[2]),
                           nb::cast<int>(entry[3])});
    }
    return attention;
  }

  static DecodeHead head_of(const ReadTensor& hidden, const Tensor& input, const Tensor& logits) {
    check_matrix(hidden, "hidden", hidden.shape(1));
    check_matrix(input, "head_input", hidden.shape(1));
    check_matrix(logits, "logits", logits.shape(1));
    check(input.dtype() == hidden.dtype(), "head_input", "of the dtype of hidden");
    check(row_bytes(input) == row_bytes(hidden), "head_input", "contiguous, as hidden");
    check(logits.dtype() == nb::dtype<float>() && logits.shape(0) == input.shape(0) &&
              logits.stride(0) == static_cast<std::int64_t>(logits.shape(1)),
          "logits", "float32, contiguous, a row for each row of head_input");
    return {static_cast<const char*>(hidden.data()), static_cast<char*>(input.data()),
            row_bytes(hidden), static_cast<const float*>(logits.data()),
            static_cast<int>(input.shape(0)), static_cast<int>(logits.shape(1))};
  }

  DecodeStep step_;
  std::vector<Tensor> tensors_;
  ReadTensor hidden_;
  nb::list attention_;
};

}  // namespace

void bind_decode_step(nb::module_& module) {
  nb::class_<Columns>(module, "RowColumns")
      .def(nb::init<const Column<bool>&, const Column<bool>&, const Column<float>&,
                    const Column<float>&, const Column<std::int64_t>&, const Column<double>&,
                    const Column<std::uint64_t>&, const Column<std::int64_t>&,
                    const Column<std::int64_t>&>(),
           nb::kw_only(), nb::arg("is_plain"), nb::arg("is_greedy"), nb::arg("temperature"),
           nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"), nb::arg("seed"),
           nb::arg("num_tokens"), nb::arg("num_computed_tokens"));
  nb::class_<OwningDecodeStep>(module, "DecodeStep")
      .def(nb::init<StepGather&, Program&, Program&, const nb::list&, const ReadTensor&,
                    const Tensor&, const Tensor&, Columns&, AdapterRows*>(),
           nb::kw_only(), nb::arg("gather"), nb::arg("layers"), nb::arg("head"),
           nb::arg("attention"), nb::arg("hidden"), nb::arg("head_input"), nb::arg("logits"),
           nb::arg("columns"), nb::arg("adapters").none() = nb::none(), nb::keep_alive<1, 2>(),
           nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(), nb::keep_alive<1, 9>(),
           nb::keep_alive<1, 10>())
      .def("run", &OwningDecodeStep::run)
      .def("drawn", &OwningDecodeStep::drawn)
      .def("commit", &OwningDecodeStep::commit)
      .def_prop_ro("kernel_seconds", &OwningDecodeStep::kernel_seconds);
}

}  // namespace tokenmill
