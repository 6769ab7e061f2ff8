// Instruction sets, threads, limits and matrix products, as Python functions.
//
// Tensors come as DLPack, without a copy. What a kernel relies on is checked here: types, shapes,
// strides. The interpreter lock is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_packed.h"
#include "block_formats.h"
#include "gemm_kernels.h"
#include "gemm_limits.h"
#include "isa.h"
#include "pack_memory.h"
#include "pack_weights.h"
#include "pool.h"
#include "program.h"

namespace tokenmill {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
bool is_float32(const T& tensor) { return tensor.dtype() == nb::dtype<float>(); }

SourceType source_type(const ReadTensor& tensor) {
  if (is_bf16(tensor)) return SourceType::bf16;
  if (is_float32(tensor)) return SourceType::float32;
  const nb::dlpack::dtype type = tensor.dtype();
  check(type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float) && type.bits == 16,
        "weight", "bfloat16, float16 or float32");
  return SourceType::fp16;
}

Multiplier multiplier(const std::string& name) {
  constexpr std::pair<const char*, Multiplier> kMultipliers[] = {
      {"amx_registers", Multiplier::amx_registers},
      {"amx_cache", Multiplier::amx_cache},
      {"avx512_bf16", Multiplier::avx512_bf16},
      {"avx512_float32", Multiplier::avx512_float32},
      {"avx512_int8", Multiplier::avx512_int8},
      {"avx2_float32", Multiplier::avx2_float32},
      {"avx2_int8", Multiplier::avx2_int8},
      {"i8mm_bf16", Multiplier::i8mm_bf16},
      {"i8mm_int8", Multiplier::i8mm_int8},
      {"dotprod_int8", Multiplier::dotprod_int8},
      {"portable_float32", Multiplier::portable_float32},
      {"portable_int8", Multiplier::portable_int8}};
  for (const auto& [known, value] : kMultipliers)
    if (name == known) return value;
  throw std::invalid_argument("no multiplier is called " + name);
}

const std::int64_t* check_ids(const Ids& ids, std::int64_t below, const char* name) {
  for (std::size_t i = 0; i < ids.size(); ++i)
    check(ids.data()[i] >= 0 && ids.data()[i] < below, name,
          "within [0, " + std::to_string(below) + ")");
  return ids.data();
}

const std::int64_t* row_order(const std::optional<Ids>& ids, int n) {
  if (!ids) return nullptr;
  check(static_cast<int>(ids->size()) == n, "row_index", std::to_string(n) + " rows");
  return check_ids(*ids, n, "row_index");
}

OutputRows output_rows(const Tensor& out, std::size_t m, int n, const std::optional<Bias>& bias) {
  check_matrix(out, "out", n);
  check(is_bf16(out) || is_float32(out), "out", "bfloat16 or float32");
  check(out.shape(0) == m, "out", "of " + std::to_string(m) + " rows, as many as x has");
  check(!bias || static_cast<int>(bias->size()) == n, "bias", std::to_string(n) + " values");
  return {out.data(), out.stride(0), is_bf16(out), bias ? bias->data() : nullptr};
}

// Ids of rows to unpack, int32 or int64; they are read and checked when the call is made.
class TokenIds {
 public:
  TokenIds(const ReadTensor& ids, std::int64_t below) : data_(ids.data()), below_(below) {
    check(ids.ndim() == 1 && (ids.shape(0) <= 1 || ids.stride(0) == 1), "ids", "contiguous");
    is_wide_ = ids.dtype() == nb::dtype<std::int64_t>();
    check(is_wide_ || ids.dtype() == nb::dtype<std::int32_t>(), "ids", "int32 or int64");
    count_ = dimension(ids.shape(0), "ids");
  }

  int count() const { return count_; }

  std::vector<std::int64_t> first(int count) const {
    std::vector<std::int64_t> ids(count);
    for (int i = 0; i < count; ++i) {
      ids[i] = is_wide_ ? static_cast<const std::int64_t*>(data_)[i]
                        : static_cast<const std::int32_t*>(data_)[i];
      check(ids[i] >= 0 && ids[i] < below_, "ids", "within [0, " + std::to_string(below_) + ")");
    }
    return ids;
  }

 private:
  const void* data_;
  std::int64_t below_;
  bool is_wide_;
  int count_;
};

template <class Weights>
void submit_unpack(const TokenIds& ids, const Weights& weights, const Tensor& out,
                   void (*unpack)(const Weights&, const std::int64_t*, int, float*)) {
  check_matrix(out, "out", weights.k);
  check(is_float32(out) && static_cast<int>(out.shape(0)) == ids.count(), "out",
        "float32, a row for each id");
  auto* rows = static_cast<float*>(out.data());
  submit({"unpack_rows"}, ids.count(), [ids, weights, rows, unpack](int num_rows) {
    unpack(weights, ids.first(num_rows).data(), num_rows, rows);
  });
}

void bind_machine(nb::module_& module) {
  // The levels of this build, from `reference` up; the machine may lack the last ones.
  module.def("isas", [] {
    nb::list names;
    for (int i = 0; i < num_isas(); ++i) names.append(isa_name(static_cast<Isa>(i)));
    return names;
  });
  module.def("detected_isa", [] { return isa_name(detected_isa()); });
  module.def("active_isa", [] { return isa_name(active_isa()); });
  module.def("set_active_isa", [](const std::string& name) { set_active_isa(name.c_str()); });
  module.def("measure_read_bandwidth", [](std::size_t num_bytes, int repeats) {
    Unlocked unlocked;
    return measure_read_bandwidth(num_bytes, repeats);
  });
  module.def("measure_peak", [](const std::string& name, int repeats) {
    const Multiplier source = multiplier(name);
    Unlocked unlocked;
    return measure_peak(source, repeats);
  });
  module.def("measure_handover", [](int repeats) {
    Unlocked unlocked;
    return measure_handover(repeats);
  });
}

void bind_packing(nb::module_& module) {
  module.def("allocate_weights", [](std::size_t num_bytes) {
    auto owner = std::make_unique<std::shared_ptr<void>>(allocate_weights(num_bytes));
    void* data = owner->get();
    nb::capsule capsule(owner.release(), [](void* p) noexcept {
      delete static_cast<std::shared_ptr<void>*>(p);
    });
    return nb::ndarray<std::uint8_t, nb::ndim<1>>(data, {num_bytes}, capsule);
  });
  module.def("packed_bf16_bytes", [](std::int64_t n, std::int64_t k) {
    return packed_bf16_bytes(dimension(n, "n"), dimension(k, "k"));
  });
  module.def("packed_float32_bytes", [](std::int64_t n, std::int64_t k) {
    return packed_float32_bytes(dimension(n, "n"), dimension(k, "k"));
  });
  module.def("packed_blocks_bytes", [](const std::string& type, std::int64_t n, std::int64_t k) {
    return packed_blocks_bytes(dimension(n, "n"), dimension(k, "k"),
                               block_format(block_type(type)));
  });
  module.def("pack_bf16", [](const ReadTensor& weight, Bytes packed, std::optional<Ids> row_index) {
    check(weight.ndim() == 2 && is_bf16(weight), "weight", "a bfloat16 matrix");
    check_matrix(weight, "weight", weight.shape(1));
    const int n = dimension(weight.shape(0), "n"), k = dimension(weight.shape(1), "k");
    check_bytes(packed.size(), packed_bf16_bytes(n, k), "packed");
    const std::int64_t* order = row_order(row_index, n);
    Unlocked unlocked;
    pack_bf16(static_cast<const bf16*>(weight.data()), weight.stride(0), n, k, order,
              reinterpret_cast<bf16*>(packed.data()));
  }, nb::arg("weight"), nb::arg("packed"), nb::arg("row_index").none());
  module.def("pack_float32", [](const ReadTensor& weight, Bytes packed,
                                std::optional<Ids> row_index) {
    check(weight.ndim() == 2 && is_float32(weight), "weight", "a float32 matrix");
    check_matrix(weight, "weight", weight.shape(1));
    const int n = dimension(weight.shape(0), "n"), k = dimension(weight.shape(1), "k");
    check_bytes(packed.size(), packed_float32_bytes(n, k), "packed");
    const std::int64_t* order = row_order(row_index, n);
    Unlocked unlocked;
    pack_float32(static_cast<const float*>(weight.data()), weight.stride(0), n, k, order,
                 reinterpret_cast<float*>(packed.data()));
  }, nb::arg("weight"), nb::arg("packed"), nb::arg("row_index").none());
  module.def("pack_blocks", [](const std::string& type, const ReadBytes& raw, std::int64_t rows,
                               std::int64_t columns, Bytes packed, std::optional<Ids> row_index) {
    const BlockType block = block_type(type);
    const int n = dimension(rows, "n"), k = dimension(columns, "k");
    const BlockSize size = block_size(block);
    check(k % size.values == 0, "k", "a multiple of " + std::to_string(size.values));
    check_bytes(raw.size(), std::size_t(n) * (k / size.values) * size.bytes, "raw");
    check_bytes(packed.size(), packed_blocks_bytes(n, k, block_format(block)), "packed");
    const std::int64_t* order = row_order(row_index, n);
    Unlocked unlocked;
    pack_blocks(block, raw.data(), n, k, order, packed.data());
  }, nb::arg("type"), nb::arg("raw"), nb::arg("n"), nb::arg("k"), nb::arg("packed"),
     nb::arg("row_index").none());
  module.def("pack_quantized", [](const ReadTensor& weight, const std::string& type, Bytes packed,
                                  std::optional<Ids> row_index) {
    check(weight.ndim() == 2, "weight", "a matrix");
    check_matrix(weight, "weight", weight.shape(1));
    const BlockType block = block_type(type);
    check(block == BlockType::q8_0 || block == BlockType::q4_1, "type", "Q8_0 or Q4_1");
    const int n = dimension(weight.shape(0), "n"), k = dimension(weight.shape(1), "k");
    check_groups(k);
    check_bytes(packed.size(), packed_blocks_bytes(n, k, block_format(block)), "packed");
    const SourceRows rows{weight.data(), weight.stride(0), source_type(weight)};
    const std::int64_t* order = row_order(row_index, n);
    Unlocked unlocked;
    pack_quantized(rows, n, k, order, block, packed.data());
  }, nb::arg("weight"), nb::arg("type"), nb::arg("packed"), nb::arg("row_index").none());
  module.def("unpack_bf16_rows", [](const ReadBytes& packed, std::int64_t n, std::int64_t k,
                                    const ReadTensor& ids, Tensor out) {
    const Bf16Weights weights = bf16_weights(packed, n, k);
    submit_unpack(TokenIds(ids, n), weights, out, unpack_bf16_rows);
  });
  module.def("unpack_float32_rows", [](const ReadBytes& packed, std::int64_t n, std::int64_t k,
                                       const ReadTensor& ids, Tensor out) {
    const Float32Weights weights = float32_weights(packed, n, k);
    submit_unpack(TokenIds(ids, n), weights, out, unpack_float32_rows);
  });
  module.def("unpack_block_rows", [](const ReadBytes& packed, const std::string& type,
                                     std::int64_t n, std::int64_t k, const ReadTensor& ids,
                                     Tensor out) {
    const BlockWeights weights = block_weights(packed, type, n, k);
    submit_unpack(TokenIds(ids, n), weights, out, unpack_block_rows);
  });
}

void bind_products(nb::module_& module) {
  module.def("gemm_bf16", [](const ReadTensor& x, const ReadBytes& packed, std::int64_t n,
                             std::int64_t k, Tensor out, std::optional<Bias> bias) {
    const Bf16Weights weights = bf16_weights(packed, n, k);
    check_matrix(x, "x", k);
    check(is_bf16(x), "x", "bfloat16");
    const OutputRows target = output_rows(out, x.shape(0), weights.n, bias);
    const Bf16Rows rows{static_cast<const bf16*>(x.data()), x.stride(0)};
    const CallLabel label{"gemm_bf16", weights.n, weights.k};
    submit(label, dimension(x.shape(0), "m"), [rows, weights, target](int num_rows) {
      gemm_bf16(rows, num_rows, weights, target);
    });
  }, nb::arg("x"), nb::arg("packed"), nb::arg("n"), nb::arg("k"), nb::arg("out"),
     nb::arg("bias").none());
  module.def("gemm_float32", [](const ReadTensor& x, const ReadBytes& packed, std::int64_t n,
                                std::int64_t k, Tensor out, std::optional<Bias> bias) {
    const Float32Weights weights = float32_weights(packed, n, k);
    check_matrix(x, "x", k);
    check(is_float32(x), "x", "float32");
    const OutputRows target = output_rows(out, x.shape(0), weights.n, bias);
    const Float32Rows rows{static_cast<const float*>(x.data()), x.stride(0)};
    const CallLabel label{"gemm_float32", weights.n, weights.k};
    submit(label, dimension(x.shape(0), "m"), [rows, weights, target](int num_rows) {
      gemm_float32(rows, num_rows, weights, target);
    });
  }, nb::arg("x"), nb::arg("packed"), nb::arg("n"), nb::arg("k"), nb::arg("out"),
     nb::arg("bias").none());
  module.def("quantized_bytes", [](std::int64_t rows, std::int64_t columns) {
    const int m = dimension(rows, "m"), k = dimension(columns, "k");
    check_groups(k);
    return QuantizedRows::num_bytes(m, k);
  });
  module.def("quantize_rows", [](const ReadTensor& x, Bytes quantized) {
    check(x.ndim() == 2 && (is_bf16(x) || is_float32(x)), "x", "a bfloat16 or float32 matrix");
    check_matrix(x, "x", x.shape(1));
    const int m = dimension(x.shape(0), "m"), k = dimension(x.shape(1), "k");
    const QuantizedRows out = quantized_rows(quantized.data(), quantized.size(), m, k);
    const FloatRows in{x.data(), x.stride(0), is_bf16(x)};
    submit({"quantize_rows"}, m, [in, out](int num_rows) { quantize_rows(in, num_rows, out); });
  });
  module.def("gemm_blocks", [](const ReadBytes& quantized, std::int64_t rows,
                               const ReadBytes& packed, const std::string& type, std::int64_t n,
                               std::int64_t k, Tensor out, std::optional<Bias> bias) {
    const BlockWeights weights = block_weights(packed, type, n, k);
    const int m = dimension(rows, "m");
    const QuantizedRows x = quantized_rows(quantized.data(), quantized.size(), m, weights.k);
    const OutputRows target = output_rows(out, m, weights.n, bias);
    const CallLabel label{"gemm_blocks", weights.n, weights.k};
    submit(label, m, [x, weights, target](int num_rows) {
      gemm_blocks(x, num_rows, weights, target);
    });
  }, nb::arg("quantized"), nb::arg("m"), nb::arg("packed"), nb::arg("type"), nb::arg("n"),
     nb::arg("k"), nb::arg("out"), nb::arg("bias").none());
}

}  // namespace

void bind_gemm(nb::module_& module) {
  bind_machine(module);
  bind_packing(module);
  bind_products(module);
}

}  // namespace tokenmill
