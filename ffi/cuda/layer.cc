// Handlers of the single-GPU expert layer: the API of kernels_cuda/moe.h with the checks of an FFI call around it. Tokens in, tokens out:
// dispatch and combine happen inside. Workspaces are results; their sizes come from the functions the module exports.
#include "moe.h"

#include <cuda_runtime.h>

#include <string>

#include "cuda/handlers.h"
#include "cuda/layer_checks.h"
#include "cuda/ways.h"

namespace moejax::xla_ffi {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Result = ffi::Result<AnyBuffer>;

constexpr auto kBf16 = DataType::BF16;
constexpr auto kF32 = DataType::F32;

// What both handlers take, in the order of their operands.
struct LayerArguments {
  AnyBuffer x, weight, slot_M, row_TxK, count_E, start_E, w_gate_up, w_down, b_gate_up, b_down;
};

bool HasBiases(const LayerArguments& a) { return !Absent(a.b_down); }

Indices IndicesOf(const LayerArguments& a) { return {a.slot_M, a.row_TxK, a.count_E, a.start_E}; }

void CheckLayer(Checker& check, const LayerArguments& a, const moe::LayerShape& s) {
  check.Array("w_down", a.w_down, {kBf16}, {{"E"}, {"D"}, {"F"}}, kInt32Max);
  check.Array("w_gate_up", a.w_gate_up, {kBf16}, {{"E", s.experts}, {"2", 2}, {"F", s.width}, {"D", s.d_model}});
  check.Optional("b_gate_up", a.b_gate_up, {kF32}, {{"E", s.experts}, {"2", 2}, {"F", s.width}});
  check.Optional("b_down", a.b_down, {kF32}, {{"E", s.experts}, {"D", s.d_model}});
  check.Require(Absent(a.b_gate_up) == Absent(a.b_down), "b_gate_up and b_down must be given together, or neither");
  CheckIndices(check, IndicesOf(a), s, 8, 8, "");
  check.Array("x", a.x, {kBf16}, {{"T", s.tokens}, {"D", s.d_model}});
  check.Array("weight", a.weight, {kF32}, {{"T", s.tokens}, {"K", s.top_k}});
}

// Where a gradient starts from: in the gradient's own memory, or absent.
void CheckAccumulator(Checker& check, const AnyBuffer& start, const AnyBuffer& gradient, bool expected) {
  check.Require(expected != Absent(start), std::string("accumulators are ") + (expected ? "absent" : "given") +
                                               ", against attribute accumulate or the biases");
  check.Require(!expected || start.untyped_data() == gradient.untyped_data(),
                "accumulators must be aliased to their gradients (input_output_aliases)");
}

uint16_t* Bf16(const AnyBuffer& buffer) { return Data<uint16_t>(buffer); }
float* F32(const AnyBuffer& buffer) { return Data<float>(buffer); }

moe::Weights WeightsOf(const LayerArguments& a) { return {Bf16(a.w_gate_up), Bf16(a.w_down), F32(a.b_gate_up), F32(a.b_down)}; }

ffi::Error Forward(cudaStream_t stream, AnyBuffer x, AnyBuffer weight, AnyBuffer slot_M, AnyBuffer row_TxK, AnyBuffer count_E,
                   AnyBuffer start_E, AnyBuffer w_gate_up, AnyBuffer w_down, AnyBuffer b_gate_up, AnyBuffer b_down, Result y,
                   Result saved, Result workspace, float alpha, float beta, float gamma, float limit) {
  constexpr const char* kTarget = "moejax_cuda_moe_forward";
  Checker check(kTarget);
  const LayerArguments arguments{x, weight, slot_M, row_TxK, count_E, start_E, w_gate_up, w_down, b_gate_up, b_down};
  moe::LayerShape shape = ShapeOf(IndicesOf(arguments), w_down);
  CheckLayer(check, arguments, shape);
  check.Array("y", *y, {kBf16}, {{"T", shape.tokens}, {"D", shape.d_model}});
  check.Optional("saved", *saved, {kBf16}, {{"2", 2}, {"M", shape.rows}, {"F", shape.width}});
  if (check.ok()) ChooseWays(shape);
  if (check.ok()) CheckWorkspace(check, *workspace, moe::forward_workspace_bytes(shape));
  for (const AnyBuffer& buffer : {x, w_gate_up, w_down}) CheckAligned(check, "x, w_gate_up or w_down", buffer);
  if (!check.ok() || shape.tokens == 0) return check.error();
  return ErrorOf(kTarget, moe::forward(shape, {alpha, beta, gamma, limit}, Bf16(x), F32(weight), PlanOf(IndicesOf(arguments)), WeightsOf(arguments),
                                       Bf16(*y), Bf16(*saved), workspace->untyped_data(), stream));
}

ffi::Error Backward(cudaStream_t stream, AnyBuffer x, AnyBuffer dy, AnyBuffer weight, AnyBuffer saved, AnyBuffer slot_M,
                    AnyBuffer row_TxK, AnyBuffer count_E, AnyBuffer start_E, AnyBuffer w_gate_up, AnyBuffer w_down,
                    AnyBuffer b_gate_up, AnyBuffer b_down, AnyBuffer acc_gate_up, AnyBuffer acc_down, AnyBuffer acc_b_gate_up,
                    AnyBuffer acc_b_down, Result dx, Result d_weight, Result dw_gate_up, Result dw_down, Result db_gate_up, Result db_down,
                    Result workspace, float alpha, float beta, float gamma, float limit, bool accumulate) {
  constexpr const char* kTarget = "moejax_cuda_moe_backward";
  Checker check(kTarget);
  const LayerArguments arguments{x, weight, slot_M, row_TxK, count_E, start_E, w_gate_up, w_down, b_gate_up, b_down};
  moe::LayerShape shape = ShapeOf(IndicesOf(arguments), w_down);
  CheckLayer(check, arguments, shape);
  check.Array("dy", dy, {kBf16}, {{"T", shape.tokens}, {"D", shape.d_model}});
  check.Optional("saved", saved, {kBf16}, {{"2", 2}, {"M", shape.rows}, {"F", shape.width}});
  check.Array("dx", *dx, {kBf16}, {{"T", shape.tokens}, {"D", shape.d_model}});
  check.Array("d_weight", *d_weight, {kF32}, {{"T", shape.tokens}, {"K", shape.top_k}});
  check.Array("dw_gate_up", *dw_gate_up, {kF32}, {{"E", shape.experts}, {"2", 2}, {"F", shape.width}, {"D", shape.d_model}});
  check.Array("dw_down", *dw_down, {kF32}, {{"E", shape.experts}, {"D", shape.d_model}, {"F", shape.width}});
  check.Optional("db_gate_up", *db_gate_up, {kF32}, {{"E", shape.experts}, {"2", 2}, {"F", shape.width}});
  check.Optional("db_down", *db_down, {kF32}, {{"E", shape.experts}, {"D", shape.d_model}});
  const bool biases = HasBiases(arguments);
  check.Require(biases != Absent(*db_gate_up) && biases != Absent(*db_down), "gradients of biases come with biases, and only with them");
  CheckAccumulator(check, acc_gate_up, *dw_gate_up, accumulate);
  CheckAccumulator(check, acc_down, *dw_down, accumulate);
  CheckAccumulator(check, acc_b_gate_up, *db_gate_up, accumulate && biases);
  CheckAccumulator(check, acc_b_down, *db_down, accumulate && biases);
  if (check.ok()) ChooseWays(shape);
  if (check.ok()) CheckWorkspace(check, *workspace, moe::backward_workspace_bytes(shape, Absent(saved)));
  for (const AnyBuffer& buffer : {x, dy, w_gate_up, w_down, saved}) CheckAligned(check, "x, dy, saved, w_gate_up or w_down", buffer);
  if (!check.ok()) return check.error();
  if (shape.tokens == 0) {
    if (accumulate) return ffi::Error::Success();
    for (const Result& gradient : {dw_gate_up, dw_down, db_gate_up, db_down}) {
      const cudaError_t failed = cudaMemsetAsync(gradient->untyped_data(), 0, gradient->size_bytes(), stream);
      if (failed != cudaSuccess) return ffi::Error(ffi::ErrorCode::kInternal, std::string(kTarget) + ": " + cudaGetErrorString(failed));
    }
    return ffi::Error::Success();
  }
  const moe::WeightGradients gradients = {F32(*dw_gate_up), F32(*dw_down), F32(*db_gate_up), F32(*db_down)};
  return ErrorOf(kTarget, moe::backward(shape, {alpha, beta, gamma, limit}, Bf16(x), F32(weight), Bf16(dy), PlanOf(IndicesOf(arguments)),
                                        WeightsOf(arguments), Bf16(saved), Bf16(*dx), F32(*d_weight), gradients, accumulate,
                                        workspace->untyped_data(), stream));
}

}  // namespace

// Both are the same launches on every call, with addresses that XLA watches, so they may be recorded into a CUDA graph.
XLA_FFI_Error* CudaMoeForward(XLA_FFI_CallFrame* call_frame) {
  static auto* const handler = ffi::Ffi::Bind()
                                   .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                   .Arg<AnyBuffer>()  // x
                                   .Arg<AnyBuffer>()  // weight
                                   .Arg<AnyBuffer>()  // slot_M
                                   .Arg<AnyBuffer>()  // row_TxK
                                   .Arg<AnyBuffer>()  // count_E
                                   .Arg<AnyBuffer>()  // start_E
                                   .Arg<AnyBuffer>()  // w_gate_up
                                   .Arg<AnyBuffer>()  // w_down
                                   .Arg<AnyBuffer>()  // b_gate_up
                                   .Arg<AnyBuffer>()  // b_down
                                   .Ret<AnyBuffer>()  // y
                                   .Ret<AnyBuffer>()  // saved
                                   .Ret<AnyBuffer>()  // workspace
                                   .Attr<float>("alpha")
                                   .Attr<float>("beta")
                                   .Attr<float>("gamma")
                                   .Attr<float>("limit")
                                   .To(Forward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

XLA_FFI_Error* CudaMoeBackward(XLA_FFI_CallFrame* call_frame) {
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
                                   .Arg<AnyBuffer>()  // w_gate_up
                                   .Arg<AnyBuffer>()  // w_down
                                   .Arg<AnyBuffer>()  // b_gate_up
                                   .Arg<AnyBuffer>()  // b_down
                                   .Arg<AnyBuffer>()  // acc_gate_up
                                   .Arg<AnyBuffer>()  // acc_down
                                   .Arg<AnyBuffer>()  // acc_b_gate_up
                                   .Arg<AnyBuffer>()  // acc_b_down
                                   .Ret<AnyBuffer>()  // dx
                                   .Ret<AnyBuffer>()  // d_weight
                                   .Ret<AnyBuffer>()  // dw_gate_up
                                   .Ret<AnyBuffer>()  // dw_down
                                   .Ret<AnyBuffer>()  // db_gate_up
                                   .Ret<AnyBuffer>()  // db_down
                                   .Ret<AnyBuffer>()  // workspace
                                   .Attr<float>("alpha")
                                   .Attr<float>("beta")
                                   .Attr<float>("gamma")
                                   .Attr<float>("limit")
                                   .Attr<bool>("accumulate")
                                   .To(Backward, {ffi::Traits::kCmdBufferCompatible})
                                   .release();
  return handler->Call(call_frame);
}

}  // namespace moejax::xla_ffi
