// Attention, as Python functions.
//
// As in bind_gemm.cpp: tensors come as DLPack without a copy, what a kernel relies on is checked
// here, and the interpreter lock is released while a kernel runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "attention_plan.h"
#include "bind_rows.h"
#include "pool.h"
#include "program.h"

namespace tokenmill {
namespace {

using Ints = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Longs = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Angles = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

KvFormat kv_format(const std::string& name) {
  if (name == "bfloat16") return KvFormat::bf16;
  if (name == "float32") return KvFormat::float32;
  check(name == "int8", "kv_dtype", "bfloat16, float32 or int8, not " + name);
  return KvFormat::int8;
}

AttentionShape make_shape(const std::string& kv_dtype, int num_heads, int num_kv_heads,
                          int head_size, int block_size, float scale, float soft_cap, int window,
                          bool causal, int value_offset) {
  check(num_kv_heads > 0 && num_heads > 0 && num_heads % num_kv_heads == 0, "num_heads",
        "a multiple of num_kv_heads");
  check(head_size > 0 && head_size % 16 == 0 && head_size <= kMaxHeadSize, "head_size",
        "a multiple of 16, at most " + std::to_string(kMaxHeadSize));
  check(value_offset == -1 || (value_offset >= 0 && value_offset % 16 == 0 &&
                               value_offset < head_size),
        "value_offset", "a multiple of 16 below head_size, or -1 for values of their own");
  check(block_size > 0 && block_size % kValueGroup == 0, "block_size",
        "a multiple of " + std::to_string(kValueGroup));
  check(scale > 0.0f, "scale", "positive");
  check(soft_cap >= 0.0f, "soft_cap", "positive, or 0 for none");
  check(window >= 0, "window", "positive, or 0 for none");
  return {{kv_format(kv_dtype), num_kv_heads, head_size, block_size, value_offset}, num_heads, scale,
          soft_cap, window, causal};
}

template <class T>
int count_blocks(const T& cache, const CacheLayout& layout) {
  std::int64_t stride = 1;
  for (std::size_t i = cache.ndim(); i-- > 0;) {
    check(cache.shape(i) <= 1 || cache.stride(i) == stride, "kv_cache", "contiguous");
    stride *= cache.shape(i);
  }
  const std::int64_t bytes = static_cast<std::int64_t>(cache.size()) * cache.itemsize();
  check(bytes % layout.block_bytes() == 0, "kv_cache",
        "whole blocks of " + std::to_string(layout.block_bytes()) + " bytes");
  check(reinterpret_cast<std::uintptr_t>(cache.data()) % kCacheLine == 0, "kv_cache",
        "aligned to 64 bytes");
  return static_cast<int>(bytes / layout.block_bytes());
}

void build_plan(AttentionPlan& plan, const AttentionShape& shape, const Ints& query_start_loc,
                const Ints& seq_lens, const Table& block_table, int num_blocks) {
  const std::size_t num_reqs = seq_lens.size();
  check(query_start_loc.size() == num_reqs + 1, "query_start_loc", "one longer than seq_lens");
  check(block_table.shape(0) >= num_reqs && (num_reqs == 0 || block_table.shape(1) <= 1 ||
                                             block_table.stride(1) == 1),
        "block_table", "a row for each request, contiguous");
  const StepTables tables{static_cast<int>(num_reqs), query_start_loc.data(), seq_lens.data(),
                          block_table.data(), block_table.stride(0)};
  plan.build(shape, tables, static_cast<int>(block_table.shape(1)), num_blocks, num_threads());
}

void run_attention(const AttentionShape& shape, AttentionPlan& plan, const ReadTensor& query,
                   const ReadTensor& kv_cache, Tensor out, const std::optional<Floats>& sinks) {
  const std::int64_t heads = shape.num_heads;
  check(!sinks || static_cast<int>(sinks->size()) == shape.num_heads, "sinks",
        "a value for each head");
  const AttentionCall call{shape, static_cast<const std::uint8_t*>(kv_cache.data()),
                           token_rows(query, "query", heads * shape.cache.head_size),
                           token_rows(out, "out", heads * shape.cache.value_size()),
                           sinks ? sinks->data() : nullptr, {}};
  const AttentionShape& planned = plan.shape();
  check(planned.num_heads == shape.num_heads && planned.window == shape.window &&
            planned.causal == shape.causal &&
            planned.cache.num_kv_heads == shape.cache.num_kv_heads &&
            planned.cache.head_size == shape.cache.head_size &&
            planned.cache.value_offset == shape.cache.value_offset &&
            planned.cache.block_size == shape.cache.block_size,
        "plan", "built for layers of this shape");
  check(static_cast<int>(query.shape(0)) >= plan.num_tokens(), "query", "a row for each token");
  check(static_cast<int>(out.shape(0)) >= plan.num_tokens(), "out", "a row for each token");
  check(count_blocks(kv_cache, shape.cache) >= plan.num_blocks(), "kv_cache",
        "as many blocks as the plan was built for");
  submit({"attention"}, query.shape(0), [call, &plan](int) { attention(call, plan); });
}

void check_write(const KvWrite& call, const Longs& slots, std::int64_t num_blocks) {
  const std::int64_t num_slots = num_blocks * call.cache.block_size;
  for (int i = 0; i < call.num_tokens; ++i)
    check(slots.data()[i] < num_slots, "slot_mapping", "within the cache");
}

void set_rotation(KvWrite& call, const std::optional<Longs>& positions,
                  const std::optional<Angles>& cos, const std::optional<Angles>& sin) {
  if (!cos) return;
  check(sin && positions && static_cast<int>(positions->size()) == call.num_tokens, "positions",
        "given with cos and sin, one for each token");
  check(sin->shape(0) == cos->shape(0) && sin->shape(1) == cos->shape(1), "sin",
        "of the shape of cos");
  check(2 * static_cast<int>(cos->shape(1)) <= call.cache.head_size, "cos",
        "of at most head_size / 2 columns");
  for (int i = 0; i < call.num_tokens; ++i)
    check(positions->data()[i] >= 0 &&
              positions->data()[i] < static_cast<std::int64_t>(cos->shape(0)),
          "positions", "rows of cos");
  call.positions = positions->data();
  call.cos = cos->data();
  call.sin = sin->data();
  call.rotary_dim = 2 * static_cast<int>(cos->shape(1));
}

void run_write(const AttentionShape& shape, const ReadTensor& key,
               const std::optional<ReadTensor>& value, Tensor kv_cache, const Longs& slots, const std::optional<ReadTensor>& query,
               const std::optional<Tensor>& out_query, const std::optional<Longs>& positions,
               const std::optional<Angles>& cos, const std::optional<Angles>& sin) {
  const std::int64_t columns = std::int64_t{shape.cache.num_kv_heads} * shape.cache.head_size;
  const std::int64_t query_columns = std::int64_t{shape.num_heads} * shape.cache.head_size;
  KvWrite call{};
  call.cache = shape.cache;
  call.blocks = static_cast<std::uint8_t*>(kv_cache.data());
  call.num_tokens = static_cast<int>(slots.size());
  call.num_heads = shape.num_heads;
  call.keys = token_rows(key, "key", columns);
  check(value.has_value() == shape.cache.stores_values(), "value",
        "given where the cache stores values, and only there");
  if (value) call.values = token_rows(*value, "value", columns);
  call.slots = slots.data();
  check(key.shape(0) == slots.size() && (!value || value->shape(0) == slots.size()),
        "slot_mapping", "as long as key and value");
  check(query.has_value() == out_query.has_value(), "out_query", "given with query");
  if (query) {
    call.queries = token_rows(*query, "query", query_columns);
    call.out_queries = token_rows(*out_query, "out_query", query_columns);
    check(query->shape(0) == slots.size() && out_query->shape(0) == slots.size(), "query",
          "as long as key and value");
  }
  check_write(call, slots, count_blocks(kv_cache, shape.cache));
  set_rotation(call, positions, cos, sin);
  submit({"write_kv"}, call.num_tokens, [call](int num_tokens) mutable {
    call.num_tokens = num_tokens;
    write_kv(call);
  });
}

}  // namespace

void bind_attention(nb::module_& module) {
  nb::class_<AttentionShape>(module, "AttentionShape")
      .def("__init__", [](AttentionShape* self, const std::string& kv_dtype, int num_heads,
                          int num_kv_heads, int head_size, int block_size, float scale,
                          float soft_cap, int window, bool causal, int value_offset) {
        new (self) AttentionShape(make_shape(kv_dtype, num_heads, num_kv_heads, head_size,
                                             block_size, scale, soft_cap, window, causal,
                                             value_offset));
      }, nb::kw_only(), nb::arg("kv_dtype"), nb::arg("num_heads"), nb::arg("num_kv_heads"),
         nb::arg("head_size"), nb::arg("block_size"), nb::arg("scale"), nb::arg("soft_cap"),
         nb::arg("window"), nb::arg("causal"), nb::arg("value_offset") = -1)
      .def_prop_ro("block_bytes", [](const AttentionShape& s) { return s.cache.block_bytes(); });
  nb::class_<AttentionPlan>(module, "AttentionPlan")
      .def(nb::init<>())
      .def("build", &build_plan)
      .def_prop_ro("num_tasks", [](const AttentionPlan& p) { return p.tasks().size(); })
      .def_prop_ro("num_merges", [](const AttentionPlan& p) { return p.merges().size(); });
  module.def("attention", &run_attention, nb::arg("shape"), nb::arg("plan"), nb::arg("query"),
             nb::arg("kv_cache"), nb::arg("out"), nb::arg("sinks").none() = nb::none());
  module.def("write_kv", &run_write, nb::arg("shape"), nb::arg("key"), nb::arg("value").none(),
             nb::arg("kv_cache"), nb::arg("slot_mapping"), nb::arg("query").none() = nb::none(),
             nb::arg("out_query").none() = nb::none(), nb::arg("positions").none() = nb::none(),
             nb::arg("cos").none() = nb::none(), nb::arg("sin").none() = nb::none());
}

}  // namespace tokenmill
