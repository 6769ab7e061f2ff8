// The one Python module of the kernels, `tokenmill._native`. Each group of kernels registers itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace tokenmill {
void bind_gemm(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_bitmask(nb::module_& module);
void bind_decode_step(nb::module_& module);
void bind_elementwise(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_lora(nb::module_& module);
void bind_ngram_index(nb::module_& module);
void bind_pool(nb::module_& module);
void bind_program(nb::module_& module);
void bind_sampling(nb::module_& module);
void bind_shared_group(nb::module_& module);
void bind_state_space(nb::module_& module);
void bind_step_gather(nb::module_& module);
void bind_suffix_index(nb::module_& module);
}  // namespace tokenmill

NB_MODULE(_native, module) {
  module.doc() = "Native kernels. The typed faces are in tokenmill.kernels.";
  tokenmill::bind_gemm(module);
  tokenmill::bind_attention(module);
  tokenmill::bind_bitmask(module);
  tokenmill::bind_elementwise(module);
  tokenmill::bind_experts(module);
  tokenmill::bind_lora(module);
  tokenmill::bind_ngram_index(module);
  tokenmill::bind_pool(module);
  tokenmill::bind_program(module);
  tokenmill::bind_sampling(module);
  tokenmill::bind_shared_group(module);
  tokenmill::bind_state_space(module);
  tokenmill::bind_step_gather(module);
  tokenmill::bind_suffix_index(module);
  tokenmill::bind_decode_step(module);
}
