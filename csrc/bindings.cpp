// The one Python module of the kernels, `tokenmill._native`. Each group of kernels registers itself.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace tokenmill {
void bind_gemm(nb::module_& module);
// Absent as long as its file is.
__attribute__((weak)) void bind_attention(nb::module_& module);
}  // namespace tokenmill

NB_MODULE(_native, module) {
  module.doc() = "Native kernels. The typed faces are in tokenmill.kernels.";
  tokenmill::bind_gemm(module);
  if (tokenmill::bind_attention != nullptr) tokenmill::bind_attention(module);
}
