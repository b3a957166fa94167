// The Python module moejax.native._cpu: the handlers as capsules, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/gemm.h"
#include "cpu/vector_ops.h"
#include "xla/check.h"
#include "xla/handlers.h"

namespace nb = nanobind;

namespace {

nb::dict Handlers() {
  using namespace moejax::xla_ffi;
  nb::dict handlers;
  const auto add = [&](const char* target, XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
    handlers[target] = nb::capsule(reinterpret_cast<void*>(handler));
  };
  add("moejax_moe_forward", MoeForward);
  add("moejax_moe_backward", MoeBackward);
  add("moejax_schedule", Schedule);
  add("moejax_dispatch", Dispatch);
  add("moejax_combine", Combine);
  add("moejax_grouped_product", GroupedProduct);
  add("moejax_grouped_wgrad", GroupedWgrad);
  add("moejax_mx_quantize", MxQuantize);
  add("moejax_mx_dequantize", MxDequantize);
  return handlers;
}

nb::list Variants() {
  nb::list names;
  for (const auto* const* variant = moejax::cpu::VectorVariants(); *variant != nullptr; ++variant) names.append((*variant)->name);
  return names;
}

}  // namespace

NB_MODULE(_cpu, module) {
  moejax::cpu::InitGemm();
  module.doc() = "XLA FFI handlers of moejax's CPU kernels. Use moejax.native, which registers them.";
  module.def("handlers", &Handlers, "Capsules of the handlers, by FFI target name.");
  module.def("handlers_version", [] { return moejax::xla_ffi::kHandlersVersion; }, "Version of the handlers' operands, results and attributes.");
  module.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
             "Version of the XLA FFI headers this module was compiled against.");
  module.def("gemm", &moejax::cpu::GemmDescription, "The matrix-product library and the kernels it chose for this processor.");
  module.def("vector_isa", [] { return std::string(moejax::cpu::Vector().name); }, "Instruction set of the elementwise loops in use.");
  module.def("vector_isas", &Variants, "Instruction sets of the elementwise loops that run here, widest first.");
}
