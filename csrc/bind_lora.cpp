// Low-rank adapters, as Python classes and a function.
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

#include "bind_packed.h"
#include "lora.h"
#include "program.h"

namespace tokenmill {
namespace {

template <class T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The rows of a step, and the column that they must not outlive.
class OwningAdapterRows : public AdapterRows {
 public:
  OwningAdapterRows(const Column<std::int32_t>& slot_of_row, int num_slots)
      : AdapterRows(slot_of_row.data(), static_cast<std::int64_t>(slot_of_row.size()), num_slots),
        slot_of_row_(slot_of_row) {
    check(num_slots >= 1, "num_slots", "at least 1");
  }

  void fill_arrays(const Column<const std::int64_t>& rows,
                   const Column<const std::int64_t>& counts) {
    check(rows.size() == counts.size(), "counts", "as long as rows");
    fill(rows.data(), counts.data(), static_cast<std::int64_t>(rows.size()));
  }

 private:
  Column<std::int32_t> slot_of_row_;
};

// The tables of a layer, and the memory that they must not outlive.
class OwningAdapterTables : public AdapterTables {
 public:
  OwningAdapterTables(const Tensor& a, const Tensor& b, const Matrix<std::int32_t>& ranks,
                      const Matrix<float>& scales, const std::vector<int>& widths)
      : memory_{a, b}, ranks_(ranks), scales_(scales) {
    check(a.ndim() == 4 && a.shape(1) == widths.size() && a.shape(2) % kRanks == 0, "a",
          "of [slots, parts, max_rank, in_features], max_rank a multiple of 4");
    num_slots = static_cast<int>(a.shape(0));
    max_rank = static_cast<int>(a.shape(2));
    in_features = static_cast<int>(a.shape(3));
    is_bf16 = tokenmill::is_bf16(a);
    check(is_bf16 || a.dtype() == nb::dtype<float>(), "a", "bfloat16 or float32");
    check(b.dtype() == a.dtype(), "b", "of the dtype of a");
    num_panels = 0;
    int column = 0;
    for (int width : widths) {
      check(width > 0, "widths", "positive");
      parts.push_back({column, width, num_panels});
      column += width;
      num_panels += parts.back().num_panels();
    }
    check(b.ndim() == 2 && b.shape(0) == a.shape(0) &&
              static_cast<std::int64_t>(b.shape(1)) ==
                  std::int64_t{num_panels} * max_rank * kPanel,
          "b", "of [slots, panels * max_rank * 32]");
    check(ranks.shape(0) == a.shape(0) && ranks.shape(1) == widths.size(), "ranks",
          "of [slots, parts]");
    check(scales.shape(0) == a.shape(0) && scales.shape(1) == widths.size(), "scales",
          "of [slots, parts]");
    check_contiguous(a, "a");
    check_contiguous(b, "b");
    this->a = static_cast<const char*>(a.data());
    this->b = static_cast<const char*>(b.data());
    this->ranks = ranks_.data();
    this->scales = scales_.data();
    num_columns_ = column;
  }

  int num_columns() const { return num_columns_; }

 private:
  static void check_contiguous(const Tensor& tensor, const char* name) {
    std::int64_t stride = 1;
    for (std::size_t i = tensor.ndim(); i-- > 0; stride *= tensor.shape(i))
      check(tensor.shape(i) <= 1 || tensor.stride(i) == stride, name, "contiguous");
  }

  std::vector<Tensor> memory_;
  Matrix<std::int32_t> ranks_;
  Matrix<float> scales_;
  int num_columns_;
};

// x is a matrix of values, or the bytes of `num_rows` quantised rows.
void run_adapters(const OwningAdapterRows& rows, const OwningAdapterTables& tables,
                  const ReadTensor& x, int num_rows, const Matrix<float>& low, const Tensor& out) {
  AdapterCall call{};
  call.rows = &rows;
  call.tables = &tables;
  if (x.dtype() == nb::dtype<std::uint8_t>()) {
    check(x.ndim() == 1, "x", "one row of bytes");
    call.quantized = quantized_rows(static_cast<const std::uint8_t*>(x.data()), x.shape(0),
                                    num_rows, tables.in_features);
  } else {
    call.x = token_rows(x, "x", tables.in_features);
    check(static_cast<int>(x.shape(0)) == num_rows, "x", "of num_rows rows");
  }
  call.out = token_rows(out, "out", tables.num_columns());
  check(static_cast<int>(out.shape(0)) == num_rows, "out", "of num_rows rows");
  check(static_cast<int>(low.shape(0)) == num_rows &&
            static_cast<int>(low.shape(1)) == tables.num_parts() * tables.max_rank,
        "low", "of [num_rows, parts * max_rank]");
  check(rows.num_slots() == tables.num_slots, "tables", "of as many slots as the rows have");
  call.low = low.data();
  submit({"adapters", tables.num_columns(), tables.in_features}, num_rows,
         [call](int num_rows) { add_adapters(call, num_rows); });
}

}  // namespace

void bind_lora(nb::module_& module) {
  nb::class_<AdapterRows>(module, "AnyAdapterRows");
  nb::class_<OwningAdapterRows, AdapterRows>(module, "AdapterRows")
      .def(nb::init<const Column<std::int32_t>&, int>(), nb::arg("slot_of_row"),
           nb::arg("num_slots"))
      .def("fill", &OwningAdapterRows::fill_arrays, nb::arg("rows"), nb::arg("counts"))
      .def("clear", &OwningAdapterRows::clear)
      .def_prop_ro("num_tiles",
                   [](const OwningAdapterRows& rows) { return rows.tiles().size(); });
  nb::class_<OwningAdapterTables>(module, "AdapterTables")
      .def(nb::init<const Tensor&, const Tensor&, const Matrix<std::int32_t>&,
                    const Matrix<float>&, const std::vector<int>&>(),
           nb::arg("a"), nb::arg("b"), nb::arg("ranks"), nb::arg("scales"), nb::arg("widths"));
  module.def("add_adapters", &run_adapters, nb::arg("rows"), nb::arg("tables"), nb::arg("x"),
             nb::arg("num_rows"), nb::arg("low"), nb::arg("out"));
}

}  // namespace tokenmill
