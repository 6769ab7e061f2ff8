// Edits of logits, and what is left of a row for sampling, as Python functions.
#include <algorithm>

#include "bind_rows.h"
#include "sampling_edits.h"
#include "sampling_kernels.h"

namespace tokenmill {
namespace {

template <class T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatMatrix = nb::ndarray<float, nb::ndim<2>, nb::device::cpu>;
using LogitsMatrix = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using TokenMatrix = nb::ndarray<const std::int32_t, nb::ndim<2>, nb::device::cpu>;

void run_penalties(const FloatMatrix& logits, const Column<std::int64_t>& logits_rows,
                   const TokenMatrix& token_ids, const Column<std::int64_t>& table_rows,
                   const Column<std::int64_t>& num_prompt_tokens,
                   const Column<std::int64_t>& num_tokens, const Column<float>& repetition,
                   const Column<float>& frequency, const Column<float>& presence) {
  check_matrix(logits, "logits", logits.shape(1));
  check_matrix(token_ids, "token_ids", token_ids.shape(1));
  const std::size_t n = logits_rows.size();
  check(table_rows.size() == n && num_prompt_tokens.size() == n && num_tokens.size() == n &&
            repetition.size() == n && frequency.size() == n && presence.size() == n,
        "columns", "of one length");
  const auto vocab_size = static_cast<std::int32_t>(logits.shape(1));
  const auto width = static_cast<std::int64_t>(token_ids.shape(1));
  for (std::size_t i = 0; i < n; ++i) {
    const std::int64_t row = table_rows.data()[i], end = num_tokens.data()[i];
    check(logits_rows.data()[i] >= 0 &&
              logits_rows.data()[i] < static_cast<std::int64_t>(logits.shape(0)),
          "logits_rows", "rows of logits");
    check(row >= 0 && row < static_cast<std::int64_t>(token_ids.shape(0)), "table_rows",
          "rows of token_ids");
    check(num_prompt_tokens.data()[i] >= 0 && num_prompt_tokens.data()[i] <= end && end <= width,
          "num_tokens", "from num_prompt_tokens to the width of token_ids");
    const std::int32_t* tokens = token_ids.data() + row * token_ids.stride(0);
    check(std::all_of(tokens, tokens + end,
                      [=](std::int32_t token) { return token >= 0 && token < vocab_size; }),
          "token_ids", "columns of logits");
  }
  const PenaltyCall call{logits.data(),
                         logits.stride(0),
                         vocab_size,
                         static_cast<int>(n),
                         logits_rows.data(),
                         token_ids.data(),
                         token_ids.stride(0),
                         table_rows.data(),
                         num_prompt_tokens.data(),
                         num_tokens.data(),
                         repetition.data(),
                         frequency.data(),
                         presence.data()};
  Unlocked unlocked;
  apply_penalties(call);
}

void run_filter(const LogitsMatrix& logits, const Column<bool>& is_greedy,
                const Column<float>& temperature, const Column<float>& min_p,
                const Column<std::int64_t>& top_k, const Column<double>& top_p,
                const FloatMatrix& out) {
  check_matrix(logits, "logits", logits.shape(1));
  check(logits.shape(1) > 0, "logits", "of at least one column");
  const std::size_t n = logits.shape(0);
  check(is_greedy.size() == n && temperature.size() == n && min_p.size() == n &&
            top_k.size() == n && top_p.size() == n,
        "columns", "a value for each row of logits");
  check_matrix(out, "out", logits.shape(1));
  check(out.shape(0) == n, "out", "of the shape of logits");
  SampleCall call{};
  call.logits = {logits.data(), logits.stride(0), static_cast<int>(n),
                 static_cast<int>(logits.shape(1))};
  call.is_greedy = reinterpret_cast<const std::uint8_t*>(is_greedy.data());
  call.temperature = temperature.data();
  call.min_p = min_p.data();
  call.top_k = top_k.data();
  call.top_p = top_p.data();
  float* to = out.data();
  const std::int64_t stride = out.stride(0);
  Unlocked unlocked;
  filter_logits(call, to, stride);
}

}  // namespace

void bind_sampling(nb::module_& module) {
  module.def("apply_penalties", &run_penalties);
  module.def("filter_logits", &run_filter);
}

}  // namespace tokenmill
