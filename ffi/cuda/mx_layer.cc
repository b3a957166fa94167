// Handlers of the MXFP8 expert layer on one GPU: the API of kernels_cuda/mx_moe.h with the checks of an FFI call around it. As layer.cc.
#include "mx_moe.h"
#include "quantize.h"

#include <cuda_runtime.h>

#include <string>

#include "cuda/layer_checks.h"
#include "cuda/mx_handlers.h"

namespace moejax::xla_ffi {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Result = ffi::Result<AnyBuffer>;

constexpr auto kBf16 = DataType::BF16;
constexpr auto kE4m3 = DataType::F8E4M3FN;
constexpr auto kF32 = DataType::F32;
constexpr auto kS32 = DataType::S32;
constexpr auto kU8 = DataType::U8;

int64_t Blocks(int64_t n) { return (n + 127) / 128; }

// One orientation of a weight.
struct Weight {
  AnyBuffer data, codes;
};

// `lead` matrices-per-expert axis 2 for gate and up. Exact: BF16 in the master's layout. Aligned: E4M3, codes per 128 x 128.
void CheckWeight(Checker& check, const char* name, const Weight& w, bool aligned, int64_t experts, bool halves, int64_t rows, int64_t columns) {
  const std::string codes = std::string(name) + "_codes";
  const DataType type = aligned ? kE4m3 : kBf16;
  if (halves) {
    check.Array(name, w.data, {type}, {{"E", experts}, {"2", 2}, {"N", rows}, {"K", columns}});
    if (aligned) check.Array(codes.c_str(), w.codes, {kU8}, {{"E", experts}, {"2", 2}, {"N/128", Blocks(rows)}, {"K/128", Blocks(columns)}});
  } else {
    check.Array(name, w.data, {type}, {{"E", experts}, {"N", rows}, {"K", columns}});
    if (aligned) check.Array(codes.c_str(), w.codes, {kU8}, {{"E", experts}, {"N/128", Blocks(rows)}, {"K/128", Blocks(columns)}});
  }
  if (!aligned) check.Require(Absent(w.codes), codes + " must be absent in mode exact");
}

// gate and up: BF16 without codes, E4M3 with codes, or absent.
void CheckSaved(Checker& check, const AnyBuffer& saved, const AnyBuffer& codes, const moe::LayerShape& s) {
  check.Optional("saved", saved, {kBf16, kE4m3}, {{"2", 2}, {"M", s.rows}, {"F", s.width}});
  const bool packed = !Absent(saved) && saved.element_type() == kE4m3;
  if (packed) {
    check.Array("saved_codes", codes, {kU8}, {{"2", 2}, {"F/128", Blocks(s.width)}, {"M", s.rows}});
  } else {
    check.Require(Absent(codes), "saved_codes are given but saved is not E4M3");
  }
  CheckAligned(check, "saved", saved);
}

moe::MxSaved SavedOf(const AnyBuffer& saved, const AnyBuffer& codes) {
  moe::MxSaved out;
  if (Absent(saved)) return out;
  if (saved.element_type() == kBf16) {
    out.gate_up_2xMxF = Data<uint16_t>(saved);
  } else {
    out.elements_2xMxF = Data<uint8_t>(saved);
    out.codes = Data<uint8_t>(codes);
  }
  return out;
}

moe::MxOptions Options(bool aligned, bool wgrad_bf16) {
  return {aligned ? moe::MxMode::kAligned : moe::MxMode::kExact, wgrad_bf16};
}

ffi::Error Prepare(cudaStream_t stream, AnyBuffer master, Result fprop, Result fprop_codes, Result dgrad, Result dgrad_codes, bool aligned) {
  constexpr const char* kTarget = "moejax_cuda_mx_prepare";
  Checker check(kTarget);
  const int64_t B = DimOf(master, 0), R = DimOf(master, 1), C = DimOf(master, 2);
  check.Array("master", master, {kF32, kBf16}, {{"B"}, {"R"}, {"C"}});
  check.Require(R > 0 && C > 0 && R % 32 == 0 && C % 32 == 0, "master has matrices of " + std::to_string(R) + " x " + std::to_string(C) +
                                                                  "; expected positive multiples of 32 (a scale block of MXFP8)");
  const DataType type = aligned ? kE4m3 : kBf16;
  check.Array("fprop", *fprop, {type}, {{"B", B}, {"R", R}, {"C", C}});
  if (aligned) {
    check.Array("dgrad", *dgrad, {type}, {{"B", B}, {"C", C}, {"R", R}});
    check.Array("fprop_codes", *fprop_codes, {kU8}, {{"B", B}, {"R/128", Blocks(R)}, {"C/128", Blocks(C)}});
    check.Array("dgrad_codes", *dgrad_codes, {kU8}, {{"B", B}, {"C/128", Blocks(C)}, {"R/128", Blocks(R)}});
  } else {
    check.Array("dgrad", *dgrad, {type}, {{"B", B}, {"R", R}, {"C", C}});
    check.Require(Absent(*fprop_codes) && Absent(*dgrad_codes), "codes must be absent in mode exact");
  }
  if (!check.ok() || B == 0) return check.error();
  return ErrorOf(kTarget, moe::prepare_mx_weight(Options(aligned, false).mode, master.untyped_data(), master.element_type() == kF32, B, R, C,
                                                 fprop->untyped_data(), Data<uint8_t>(*fprop_codes), dgrad->untyped_data(),
                                                 Data<uint8_t>(*dgrad_codes), stream));
}

ffi::Error Forward(cudaStream_t stream, AnyBuffer x, AnyBuffer weight, AnyBuffer slot_M, AnyBuffer row_TxK, AnyBuffer count_E,
                   AnyBuffer start_E, AnyBuffer gate_up, AnyBuffer gate_up_codes, AnyBuffer down, AnyBuffer down_codes, Result y, Result saved,
                   Result saved_codes, Result workspace, float alpha, float beta, float gamma, float limit, bool aligned) {
  constexpr const char* kTarget = "moejax_cuda_mx_forward";
  Checker check(kTarget);
  const Indices indices{slot_M, row_TxK, count_E, start_E};
  const moe::LayerShape s = ShapeOf(indices, down);
  CheckWeight(check, "down", {down, down_codes}, aligned, s.experts, false, s.d_model, s.width);
  CheckWeight(check, "gate_up", {gate_up, gate_up_codes}, aligned, s.experts, true, s.width, s.d_model);
  CheckIndices(check, indices, s, 32, 32, " (a scale block of MXFP8)");
  check.Array("x", x, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  check.Array("weight", weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
  check.Array("y", *y, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  CheckSaved(check, *saved, *saved_codes, s);
  const moe::MxOptions options = Options(aligned, false);
  if (check.ok()) CheckWorkspace(check, *workspace, moe::mx_forward_workspace_bytes(s, options));
  for (const AnyBuffer& buffer : {x, gate_up, down}) CheckAligned(check, "x, gate_up or down", buffer);
  if (!check.ok() || s.tokens == 0) return check.error();
  moe::MxWeights weights;
  weights.gate_up_fprop = gate_up.untyped_data();
  weights.gate_up_fprop_codes = Data<uint8_t>(gate_up_codes);
  weights.down_fprop = down.untyped_data();
  weights.down_fprop_codes = Data<uint8_t>(down_codes);
  return ErrorOf(kTarget, moe::mx_forward(s, {alpha, beta, gamma, limit}, options, Data<uint16_t>(x), Data<float>(weight), PlanOf(indices),
                                          weights, Data<uint16_t>(*y), SavedOf(*saved, *saved_codes), workspace->untyped_data(), stream));
}

ffi::Error Backward(cudaStream_t stream, AnyBuffer x, AnyBuffer dy, AnyBuffer weight, AnyBuffer saved, AnyBuffer saved_codes,
                    AnyBuffer slot_M, AnyBuffer row_TxK, AnyBuffer count_E, AnyBuffer start_E, AnyBuffer gate_up_fprop,
                    AnyBuffer gate_up_fprop_codes, AnyBuffer gate_up_dgrad, AnyBuffer gate_up_dgrad_codes, AnyBuffer down_fprop,
                    AnyBuffer down_fprop_codes, AnyBuffer down_dgrad, AnyBuffer down_dgrad_codes, AnyBuffer acc_gate_up, AnyBuffer acc_down,
                    Result dx, Result d_weight, Result dw_gate_up, Result dw_down, Result workspace, float alpha, float beta, float gamma,
                    float limit, bool aligned, bool wgrad_bf16, bool accumulate) {
  constexpr const char* kTarget = "moejax_cuda_mx_backward";
  Checker check(kTarget);
  const Indices indices{slot_M, row_TxK, count_E, start_E};
  const moe::LayerShape s = ShapeOf(indices, down_fprop);
  CheckWeight(check, "down_fprop", {down_fprop, down_fprop_codes}, aligned, s.experts, false, s.d_model, s.width);
  CheckWeight(check, "gate_up_fprop", {gate_up_fprop, gate_up_fprop_codes}, aligned, s.experts, true, s.width, s.d_model);
  const int64_t D = s.d_model, F = s.width;
  CheckWeight(check, "down_dgrad", {down_dgrad, down_dgrad_codes}, aligned, s.experts, false, aligned ? F : D, aligned ? D : F);
  CheckWeight(check, "gate_up_dgrad", {gate_up_dgrad, gate_up_dgrad_codes}, aligned, s.experts, true, aligned ? D : F, aligned ? F : D);
  CheckIndices(check, indices, s, 32, 32, " (a scale block of MXFP8)");
  check.Array("x", x, {kBf16}, {{"T", s.tokens}, {"D", D}});
  check.Array("dy", dy, {kBf16}, {{"T", s.tokens}, {"D", D}});
  check.Array("weight", weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
  CheckSaved(check, saved, saved_codes, s);
  check.Array("dx", *dx, {kBf16}, {{"T", s.tokens}, {"D", D}});
  check.Array("d_weight", *d_weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
  check.Array("dw_gate_up", *dw_gate_up, {kF32}, {{"E", s.experts}, {"2", 2}, {"F", F}, {"D", D}});
  check.Array("dw_down", *dw_down, {kF32}, {{"E", s.experts}, {"D", D}, {"F", F}});
  check.Require(accumulate != Absent(acc_gate_up) && accumulate != Absent(acc_down),
                std::string("accumulators are given or absent against attribute accumulate, which is ") + (accumulate ? "true" : "false"));
  check.Require(!accumulate || (acc_gate_up.untyped_data() == dw_gate_up->untyped_data() && acc_down.untyped_data() == dw_down->untyped_data()),
                "accumulators must be aliased to their gradients (input_output_aliases)");
  const moe::MxOptions options = Options(aligned, wgrad_bf16);
  if (check.ok()) CheckWorkspace(check, *workspace, moe::mx_backward_workspace_bytes(s, options));
  for (const AnyBuffer& buffer : {x, dy, gate_up_fprop, gate_up_dgrad, down_fprop, down_dgrad}) CheckAligned(check, "x, dy or a weight", buffer);
  if (!check.ok()) return check.error();
  if (s.tokens == 0) {
    if (accumulate) return ffi::Error::Success();
    for (const Result& gradient : {dw_gate_up, dw_down}) {
      const cudaError_t failed = cudaMemsetAsync(gradient->untyped_data(), 0, gradient->size_bytes(), stream);
      if (failed != cudaSuccess) return ffi::Error(ffi::ErrorCode::kInternal, std::string(kTarget) + ": " + cudaGetErrorString(failed));
    }
    return ffi::Error::Success();
  }
  moe::MxWeights weights;
  weights.gate_up_fprop = gate_up_fprop.untyped_data();
  weights.gate_up_fprop_codes = Data<uint8_t>(gate_up_fprop_codes);
  weights.gate_up_dgrad = gate_up_dgrad.untyped_data();
  weights.gate_up_dgrad_codes = Data<uint8_t>(gate_up_dgrad_codes);
  weights.down_fprop = down_fprop.untyped_data();
  weights.down_fprop_codes = Data<uint8_t>(down_fprop_codes);
  weights.down_dgrad = down_dgrad.untyped_data();
  weights.down_dgrad_codes = Data<uint8_t>(down_dgrad_codes);
  return ErrorOf(kTarget,
                 moe::mx_backward(s, {alpha, beta, gamma, limit}, options, Data<uint16_t>(x), Data<float>(weight), Data<uint16_t>(dy),
                                  PlanOf(indices), weights, SavedOf(saved, saved_codes), Data<uint16_t>(*dx), Data<float>(*d_weight),
                                  Data<float>(*dw_gate_up), Data<float>(*dw_down), accumulate, workspace->untyped_data(), stream));
}

// Counts are 64-bit, which arrays in JAX mostly cannot be: each comes as its low and its high word.
ffi::Error LossCounts(cudaStream_t stream, AnyBuffer x, AnyBuffer real, Result counts) {
  constexpr const char* kTarget = "moejax_cuda_mx_loss_counts";
  Checker check(kTarget);
  const int64_t T = DimOf(x, 0), D = DimOf(x, 1);
  check.Array("x", x, {kBf16}, {{"T"}, {"D"}});
  check.Require(D > 0 && D % 32 == 0, "D is " + std::to_string(D) + "; expected a positive multiple of 32 (a scale block of MXFP8)");
  check.Array("real", real, {kS32}, {{"T", T}});
  check.Array("counts", *counts, {DataType::U32}, {{"6", 6}, {"2", 2}});
  CheckAligned(check, "x", x);
  CheckAligned(check, "counts", *counts, 8);
  if (!check.ok()) return check.error();
  const cudaError_t failed = cudaMemsetAsync(counts->untyped_data(), 0, counts->size_bytes(), stream);
  if (failed != cudaSuccess) return ffi::Error(ffi::ErrorCode::kInternal, std::string(kTarget) + ": " + cudaGetErrorString(failed));
  if (T == 0) return ffi::Error::Success();
  moe::QuantizeSource source;
  source.data = x.untyped_data();
  source.rows = T;
  source.columns = D;
  source.slot_M = Data<int32_t>(real);
  return ErrorOf(kTarget, moe::count_losses(source, static_cast<uint64_t*>(counts->untyped_data()), stream));
}

}  // namespace

// All are the same launches on every call, with addresses that XLA watches, so they may be recorded into a CUDA graph.
XLA_FFI_Error* CudaMxPrepare(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // master
                                   .Ret<AnyBuffer>()  // fprop
                                   .Ret<AnyBuffer>()  // fprop_codes
                                   .Ret<AnyBuffer>()  // dgrad
                                   .Ret<AnyBuffer>()  // dgrad_codes
                                   .Attr<bool>("aligned")
                                   .To(Prepare, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaMxForward(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // x
                                   .Arg<AnyBuffer>()  // weight
                                   .Arg<AnyBuffer>()  // slot_M
                                   .Arg<AnyBuffer>()  // row_TxK
                                   .Arg<AnyBuffer>()  // count_E
                                   .Arg<AnyBuffer>()  // start_E
                                   .Arg<AnyBuffer>()  // gate_up
                                   .Arg<AnyBuffer>()  // gate_up_codes
                                   .Arg<AnyBuffer>()  // down
                                   .Arg<AnyBuffer>()  // down_codes
                                   .Ret<AnyBuffer>()  // y
                                   .Ret<AnyBuffer>()  // saved
                                   .Ret<AnyBuffer>()  // saved_codes
                                   .Ret<AnyBuffer>()  // workspace
                                   .Attr<float>("alpha")
                                   .Attr<float>("beta")
                                   .Attr<float>("gamma")
                                   .Attr<float>("limit")
                                   .Attr<bool>("aligned")
                                   .To(Forward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaMxBackward(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // x
                                   .Arg<AnyBuffer>()  // dy
                                   .Arg<AnyBuffer>()  // weight
                                   .Arg<AnyBuffer>()  // saved
                                   .Arg<AnyBuffer>()  // saved_codes
                                   .Arg<AnyBuffer>()  // slot_M
                                   .Arg<AnyBuffer>()  // row_TxK
                                   .Arg<AnyBuffer>()  // count_E
                                   .Arg<AnyBuffer>()  // start_E
                                   .Arg<AnyBuffer>()  // gate_up_fprop
                                   .Arg<AnyBuffer>()  // gate_up_fprop_codes
                                   .Arg<AnyBuffer>()  // gate_up_dgrad
                                   .Arg<AnyBuffer>()  // gate_up_dgrad_codes
                                   .Arg<AnyBuffer>()  // down_fprop
                                   .Arg<AnyBuffer>()  // down_fprop_codes
                                   .Arg<AnyBuffer>()  // down_dgrad
                                   .Arg<AnyBuffer>()  // down_dgrad_codes
                                   .Arg<AnyBuffer>()  // acc_gate_up
                                   .Arg<AnyBuffer>()  // acc_down
                                   .Ret<AnyBuffer>()  // dx
                                   .Ret<AnyBuffer>()  // d_weight
                                   .Ret<AnyBuffer>()  // dw_gate_up
                                   .Ret<AnyBuffer>()  // dw_down
                                   .Ret<AnyBuffer>()  // workspace
                                   .Attr<float>("alpha")
                                   .Attr<float>("beta")
                                   .Attr<float>("gamma")
                                   .Attr<float>("limit")
                                   .Attr<bool>("aligned")
                                   .Attr<bool>("wgrad_bf16")
                                   .Attr<bool>("accumulate")
                                   .To(Backward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaMxLossCounts(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // x
                                   .Arg<AnyBuffer>()  // real
                                   .Ret<AnyBuffer>()  // counts
                                   .To(LossCounts, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace moejax::xla_ffi
