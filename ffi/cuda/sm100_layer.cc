// Handlers of the expert layer on one Blackwell GPU: the API of kernels_cuda/sm100_moe.h with the checks of an FFI call around it. The dtype
// of the weights says whether it is the BF16 or the MXFP8 layer. None of this has run on such a GPU.
#include "sm100_moe.h"

#include <cuda_runtime.h>

#include <string>

#include "cuda/layer_checks.h"
#include "cuda/sm100_handlers.h"

namespace moejax::xla_ffi {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Result = ffi::Result<AnyBuffer>;

constexpr auto kBf16 = DataType::BF16;
constexpr auto kE4m3 = DataType::F8E4M3FN;
constexpr auto kF32 = DataType::F32;
constexpr auto kU8 = DataType::U8;

// One orientation of a weight. In BF16 there is one, without codes.
struct WeightArguments {
  AnyBuffer elements, codes;
};

// gate and up are `halves`, of `rows` x `columns`. Blocks lie along the columns (fprop) or the rows (dgrad).
void CheckWeight(Checker& check, const std::string& name, const WeightArguments& w, bool mx, const moe::LayerShape& s, bool halves,
                 bool dgrad) {
  const int64_t rows = halves ? s.width : s.d_model, columns = halves ? s.d_model : s.width;
  const int64_t bytes = dgrad ? moe::sm100_code_bytes(columns, rows) : moe::sm100_code_bytes(rows, columns);
  const std::string codes = name + "_codes";
  const DataType type = mx ? kE4m3 : kBf16;
  if (halves) {
    check.Array(name.c_str(), w.elements, {type}, {{"E", s.experts}, {"2", 2}, {"F", rows}, {"D", columns}});
    if (mx) check.Array(codes.c_str(), w.codes, {kU8}, {{"E", s.experts}, {"2", 2}, {"bytes", bytes}});
  } else {
    check.Array(name.c_str(), w.elements, {type}, {{"E", s.experts}, {"D", rows}, {"F", columns}});
    if (mx) check.Array(codes.c_str(), w.codes, {kU8}, {{"E", s.experts}, {"bytes", bytes}});
  }
  check.Require(mx || Absent(w.codes), codes + " must be absent, as the weights are BF16");
  CheckAligned(check, name.c_str(), w.elements, 16);
  CheckAligned(check, codes.c_str(), w.codes, 16);
}

// What both passes share.
void CheckLayer(Checker& check, const moe::LayerShape& s, const Indices& plan, bool mx, const AnyBuffer& x, const AnyBuffer& weight,
                const AnyBuffer& saved, int64_t blocks) {
  CheckIndices(check, plan, s, mx ? 32 : 8, mx ? 32 : 16, mx ? " (a scale block of MXFP8)" : "");
  check.Array("x", x, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  check.Array("weight", weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
  check.Optional("saved", saved, {kBf16}, {{"2", 2}, {"M", s.rows}, {"F", s.width}});
  CheckAligned(check, "x", x, 16);
  CheckAligned(check, "saved", saved, 32);
  check.Range("blocks", blocks, 0, 2);
}

ffi::Error Prepare(cudaStream_t stream, AnyBuffer master, Result fprop, Result fprop_codes, Result dgrad, Result dgrad_codes) {
  constexpr const char* kTarget = "moejax_cuda_sm100_prepare";
  Checker check(kTarget);
  const int64_t B = DimOf(master, 0), R = DimOf(master, 1), C = DimOf(master, 2);
  check.Array("master", master, {kF32, kBf16}, {{"B"}, {"R"}, {"C"}});
  check.Require(R > 0 && C > 0 && R % 32 == 0 && C % 32 == 0, "master has matrices of " + std::to_string(R) + " x " + std::to_string(C) +
                                                                  "; expected positive multiples of 32 (a scale block of MXFP8)");
  check.Array("fprop", *fprop, {kE4m3}, {{"B", B}, {"R", R}, {"C", C}});
  check.Array("dgrad", *dgrad, {kE4m3}, {{"B", B}, {"R", R}, {"C", C}});
  check.Array("fprop_codes", *fprop_codes, {kU8}, {{"B", B}, {"bytes", moe::sm100_code_bytes(R, C)}});
  check.Array("dgrad_codes", *dgrad_codes, {kU8}, {{"B", B}, {"bytes", moe::sm100_code_bytes(C, R)}});
  if (!check.ok() || B == 0) return check.error();
  return ErrorOf(kTarget, moe::sm100_prepare_weight(master.untyped_data(), master.element_type() == kF32, B, R, C, fprop->untyped_data(),
                                                    Data<uint8_t>(*fprop_codes), dgrad->untyped_data(), Data<uint8_t>(*dgrad_codes), stream));
}

ffi::Error Forward(cudaStream_t stream, AnyBuffer x, AnyBuffer weight, AnyBuffer slot_M, AnyBuffer row_TxK, AnyBuffer count_E,
                   AnyBuffer start_E, AnyBuffer gate_up, AnyBuffer gate_up_codes, AnyBuffer down, AnyBuffer down_codes, Result y, Result saved,
                   Result workspace, float alpha, float beta, float gamma, float limit, int64_t blocks) {
  constexpr const char* kTarget = "moejax_cuda_sm100_forward";
  Checker check(kTarget);
  const Indices plan{slot_M, row_TxK, count_E, start_E};
  const moe::LayerShape s = ShapeOf(plan, down);
  const bool mx = down.element_type() == kE4m3;
  CheckWeight(check, "down", {down, down_codes}, mx, s, false, false);
  CheckWeight(check, "gate_up", {gate_up, gate_up_codes}, mx, s, true, false);
  CheckLayer(check, s, plan, mx, x, weight, *saved, blocks);
  check.Array("y", *y, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  const moe::Sm100Options options = {mx, static_cast<int>(blocks)};
  if (check.ok()) CheckWorkspace(check, *workspace, moe::sm100_forward_workspace_bytes(s, options));
  if (!check.ok() || s.tokens == 0) return check.error();
  moe::Sm100Weights weights;
  weights.gate_up_fprop = gate_up.untyped_data();
  weights.gate_up_fprop_codes = Data<uint8_t>(gate_up_codes);
  weights.down_fprop = down.untyped_data();
  weights.down_fprop_codes = Data<uint8_t>(down_codes);
  return ErrorOf(kTarget, moe::sm100_forward(s, {alpha, beta, gamma, limit}, options, Data<uint16_t>(x), Data<float>(weight),
                                             PlanOf(plan), weights, Data<uint16_t>(*y), Data<uint16_t>(*saved),
                                             workspace->untyped_data(), stream));
}

ffi::Error Backward(cudaStream_t stream, AnyBuffer x, AnyBuffer dy, AnyBuffer weight, AnyBuffer saved, AnyBuffer slot_M, AnyBuffer row_TxK,
                    AnyBuffer count_E, AnyBuffer start_E, AnyBuffer gate_up_fprop, AnyBuffer gate_up_fprop_codes, AnyBuffer gate_up_dgrad,
                    AnyBuffer gate_up_dgrad_codes, AnyBuffer down_fprop, AnyBuffer down_fprop_codes, AnyBuffer down_dgrad,
                    AnyBuffer down_dgrad_codes, AnyBuffer acc_gate_up, AnyBuffer acc_down, Result dx, Result d_weight, Result dw_gate_up,
                    Result dw_down, Result workspace, float alpha, float beta, float gamma, float limit, int64_t blocks, bool accumulate) {
  constexpr const char* kTarget = "moejax_cuda_sm100_backward";
  Checker check(kTarget);
  const Indices plan{slot_M, row_TxK, count_E, start_E};
  const moe::LayerShape s = ShapeOf(plan, down_fprop);
  const bool mx = down_fprop.element_type() == kE4m3;
  CheckWeight(check, "down_fprop", {down_fprop, down_fprop_codes}, mx, s, false, false);
  CheckWeight(check, "gate_up_fprop", {gate_up_fprop, gate_up_fprop_codes}, mx, s, true, false);
  if (mx) CheckWeight(check, "down_dgrad", {down_dgrad, down_dgrad_codes}, mx, s, false, true);
  if (mx) CheckWeight(check, "gate_up_dgrad", {gate_up_dgrad, gate_up_dgrad_codes}, mx, s, true, true);
  check.Require(mx || (Absent(down_dgrad) && Absent(gate_up_dgrad)), "dgrad orientations must be absent: BF16 weights have one");
  CheckLayer(check, s, plan, mx, x, weight, saved, blocks);
  check.Array("dy", dy, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  check.Array("dx", *dx, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  check.Array("d_weight", *d_weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
  check.Array("dw_gate_up", *dw_gate_up, {kF32}, {{"E", s.experts}, {"2", 2}, {"F", s.width}, {"D", s.d_model}});
  check.Array("dw_down", *dw_down, {kF32}, {{"E", s.experts}, {"D", s.d_model}, {"F", s.width}});
  CheckAligned(check, "dw_gate_up", *dw_gate_up, 32);
  CheckAligned(check, "dw_down", *dw_down, 32);
  check.Require(accumulate != Absent(acc_gate_up) && accumulate != Absent(acc_down),
                std::string("accumulators are given or absent against attribute accumulate, which is ") + (accumulate ? "true" : "false"));
  check.Require(!accumulate || (acc_gate_up.untyped_data() == dw_gate_up->untyped_data() && acc_down.untyped_data() == dw_down->untyped_data()),
                "accumulators must be aliased to their gradients (input_output_aliases)");
  const moe::Sm100Options options = {mx, static_cast<int>(blocks)};
  if (check.ok()) CheckWorkspace(check, *workspace, moe::sm100_backward_workspace_bytes(s, options, Absent(saved)));
  if (!check.ok()) return check.error();
  if (s.tokens == 0) {
    if (accumulate) return ffi::Error::Success();
    for (const Result& gradient : {dw_gate_up, dw_down}) {
      const cudaError_t failed = cudaMemsetAsync(gradient->untyped_data(), 0, gradient->size_bytes(), stream);
      if (failed != cudaSuccess) return ffi::Error(ffi::ErrorCode::kInternal, std::string(kTarget) + ": " + cudaGetErrorString(failed));
    }
    return ffi::Error::Success();
  }
  moe::Sm100Weights weights;
  weights.gate_up_fprop = gate_up_fprop.untyped_data();
  weights.gate_up_fprop_codes = Data<uint8_t>(gate_up_fprop_codes);
  weights.gate_up_dgrad = mx ? gate_up_dgrad.untyped_data() : weights.gate_up_fprop;
  weights.gate_up_dgrad_codes = Data<uint8_t>(gate_up_dgrad_codes);
  weights.down_fprop = down_fprop.untyped_data();
  weights.down_fprop_codes = Data<uint8_t>(down_fprop_codes);
  weights.down_dgrad = mx ? down_dgrad.untyped_data() : weights.down_fprop;
  weights.down_dgrad_codes = Data<uint8_t>(down_dgrad_codes);
  return ErrorOf(kTarget, moe::sm100_backward(s, {alpha, beta, gamma, limit}, options, Data<uint16_t>(x), Data<float>(weight),
                                              Data<uint16_t>(dy), PlanOf(plan), weights, Data<uint16_t>(saved),
                                              Data<uint16_t>(*dx), Data<float>(*d_weight), Data<float>(*dw_gate_up),
                                              Data<float>(*dw_down), accumulate, workspace->untyped_data(), stream));
}

}  // namespace

// All are the same launches on every call, with addresses that XLA watches, so they may be recorded into a CUDA graph.
XLA_FFI_Error* CudaSm100Prepare(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // master
                                   .Ret<AnyBuffer>()  // fprop
                                   .Ret<AnyBuffer>()  // fprop_codes
                                   .Ret<AnyBuffer>()  // dgrad
                                   .Ret<AnyBuffer>()  // dgrad_codes
                                   .To(Prepare, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaSm100Forward(XLA_FFI_CallFrame* call_frame) {
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
                                   .Ret<AnyBuffer>()  // workspace
                                   .Attr<float>("alpha")
                                   .Attr<float>("beta")
                                   .Attr<float>("gamma")
                                   .Attr<float>("limit")
                                   .Attr<int64_t>("blocks")
                                   .To(Forward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaSm100Backward(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // x
                                   .Arg<AnyBuffer>()  // dy
                                   .Arg<AnyBuffer>()  // weight
                                   .Arg<AnyBuffer>()  // saved
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
                                   .Attr<int64_t>("blocks")
                                   .Attr<bool>("accumulate")
                                   .To(Backward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace moejax::xla_ffi
