// The Python module moejax.native._cuda: its handlers as capsules, and what was built.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "cuda/handlers.h"
#include "cuda/mx_handlers.h"
#include "cuda/probe.h"
#include "cuda/sm100_handlers.h"
#include "cuda/ways.h"
#include "moe.h"
#include "mx_moe.h"
#include "sm100_moe.h"
#include "xla/check.h"

namespace nb = nanobind;

namespace moejax::xla_ffi {
namespace {

ffi::Error Probe(cudaStream_t stream, ffi::AnyBuffer in, ffi::Result<ffi::AnyBuffer> out) {
  Checker check("moejax_probe");
  const int64_t n = DimOf(in, 0);
  check.Array("in", in, {ffi::DataType::S32}, {{"n"}});
  check.Array("out", *out, {ffi::DataType::S32}, {{"n", n}});
  if (!check.ok()) return check.error();
  const cudaError_t status = cuda::LaunchProbe(stream, static_cast<const int32_t*>(in.untyped_data()),
                                               static_cast<int32_t*>(out->untyped_data()), n);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::string("moejax_probe: launch failed: ") + cudaGetErrorString(status));
}

XLA_FFI_Error* ProbeHandler(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<ffi::AnyBuffer>()
                                   .Ret<ffi::AnyBuffer>()
                                   .To(Probe, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace
}  // namespace moejax::xla_ffi

NB_MODULE(_cuda, module) {
  module.doc() = "XLA FFI handlers of moejax's CUDA kernels. Use moejax.native, which registers them.";
  module.def("handlers", [] {
    nb::dict handlers;
    handlers["moejax_probe"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::ProbeHandler));
    handlers["moejax_cuda_moe_forward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMoeForward));
    handlers["moejax_cuda_moe_backward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMoeBackward));
    handlers["moejax_cuda_mx_prepare"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMxPrepare));
    handlers["moejax_cuda_mx_forward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMxForward));
    handlers["moejax_cuda_mx_backward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMxBackward));
    handlers["moejax_cuda_mx_loss_counts"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaMxLossCounts));
    handlers["moejax_cuda_sm100_prepare"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaSm100Prepare));
    handlers["moejax_cuda_sm100_forward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaSm100Forward));
    handlers["moejax_cuda_sm100_backward"] = nb::capsule(reinterpret_cast<void*>(&moejax::xla_ffi::CudaSm100Backward));
    return handlers;
  }, "Capsules of the handlers, by FFI target name.");
  module.def("handlers_version", [] { return moejax::xla_ffi::kHandlersVersion; }, "Version of the handlers' operands, results and attributes.");
  module.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
             "Version of the XLA FFI headers this module was compiled against.");
  module.def("cuda_version", [] { return CUDART_VERSION; }, "Version of the CUDA runtime linked in, such as 13000.");
  module.def("forward_workspace_bytes", [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width) {
    return moe::forward_workspace_bytes({tokens, top_k, experts, rows, d_model, width});
  }, "Size of the forward's workspace result.");
  module.def("backward_workspace_bytes",
             [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width, bool recompute) {
    return moe::backward_workspace_bytes({tokens, top_k, experts, rows, d_model, width}, recompute);
  }, "Size of the backward's workspace result.");
  module.def("mx_forward_workspace_bytes",
             [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width, bool aligned) {
    const moe::MxOptions options = {aligned ? moe::MxMode::kAligned : moe::MxMode::kExact, false};
    return moe::mx_forward_workspace_bytes({tokens, top_k, experts, rows, d_model, width}, options);
  }, "Size of the MXFP8 forward's workspace result.");
  module.def("mx_backward_workspace_bytes", [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width,
                                               bool aligned, bool wgrad_bf16) {
    const moe::MxOptions options = {aligned ? moe::MxMode::kAligned : moe::MxMode::kExact, wgrad_bf16};
    return moe::mx_backward_workspace_bytes({tokens, top_k, experts, rows, d_model, width}, options);
  }, "Size of the MXFP8 backward's workspace result.");
  module.def("sm100_forward_workspace_bytes",
             [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width, bool mx, int blocks) {
    return moe::sm100_forward_workspace_bytes({tokens, top_k, experts, rows, d_model, width}, {mx, blocks});
  }, "Size of the workspace result of the Blackwell forward.");
  module.def("sm100_backward_workspace_bytes", [](int64_t tokens, int64_t top_k, int64_t experts, int64_t rows, int64_t d_model, int64_t width,
                                                  bool mx, int blocks, bool recompute) {
    return moe::sm100_backward_workspace_bytes({tokens, top_k, experts, rows, d_model, width}, {mx, blocks}, recompute);
  }, "Size of the workspace result of the Blackwell backward.");
  module.def("sm100_code_bytes", &moe::sm100_code_bytes, "Bytes of the scale codes of a matrix, from its lines and the elements along which blocks lie.");
  module.def("driver_version", [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }, "CUDA version of the driver, such as 13000; 0 without one.");
  moejax::xla_ffi::BindWays(module);
  module.def("targets", [] { return nb::make_tuple("sm_90a", "sm_100f"); }, "Architectures the kernels were compiled for.");
}
