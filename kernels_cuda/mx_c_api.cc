// The plain C door to quantize.h and mx_moe.h, as c_api.cc is to moe.h: for tests and benchmarks, through ctypes.
#include "mx_moe.h"
#include "quantize.h"

namespace {

const char* report(const moe::Status& status) {
  thread_local std::string message;
  if (status.ok()) return nullptr;
  message = status.message;
  return message.c_str();
}

}  // namespace

extern "C" {

struct MxOutputC {  // moe::MxOutput with plain integers
  int32_t form, layout, transposed, unused;
  void* elements;
  uint8_t* codes;
};

static moe::MxOutput output(const MxOutputC& o) {
  moe::MxOutput out;
  out.form = static_cast<moe::Form>(o.form);
  out.layout = static_cast<moe::CodeLayout>(o.layout);
  out.transposed = o.transposed != 0;
  out.elements = o.elements;
  out.codes = o.codes;
  return out;
}

static moe::QuantizeSource source(const void* data, int fp32, int64_t batch, int64_t rows, int64_t columns, const int32_t* slot_M,
                                  int64_t gather, int64_t tokens = 0) {
  moe::QuantizeSource s;
  s.data = data;
  s.fp32 = fp32 != 0;
  s.batch = batch;
  s.rows = rows;
  s.columns = columns;
  s.slot_M = slot_M;
  s.gather = gather;
  s.tokens = tokens;
  return s;
}

const char* mx_quantize(const void* data, int fp32, int64_t batch, int64_t rows, int64_t columns, const int32_t* slot_M, int64_t gather,
                        int64_t tokens, const MxOutputC* by_rows, const MxOutputC* by_columns, void* stream) {
  return report(moe::quantize(source(data, fp32, batch, rows, columns, slot_M, gather, tokens), output(*by_rows), output(*by_columns),
                              static_cast<cudaStream_t>(stream)));
}

int64_t mx_code_bytes(int64_t batch, int64_t rows, int64_t columns, const MxOutputC* out, int by_rows) {
  return moe::code_bytes(source(nullptr, 0, batch, rows, columns, nullptr, 0), output(*out), by_rows != 0);
}

const char* mx_count_losses(const void* data, int fp32, int64_t batch, int64_t rows, int64_t columns, const int32_t* slot_M,
                            uint64_t* counts, void* stream) {
  return report(moe::count_losses(source(data, fp32, batch, rows, columns, slot_M, 0), counts, static_cast<cudaStream_t>(stream)));
}

const char* mx_prepare_weight(int mode, const void* master, int fp32, int64_t matrices, int64_t rows, int64_t columns, void* fprop,
                              uint8_t* fprop_codes, void* dgrad, uint8_t* dgrad_codes, void* stream) {
  return report(moe::prepare_mx_weight(static_cast<moe::MxMode>(mode), master, fp32 != 0, matrices, rows, columns, fprop, fprop_codes, dgrad,
                                       dgrad_codes, static_cast<cudaStream_t>(stream)));
}

size_t mx_forward_workspace_bytes(const moe::LayerShape* shape, int mode, int wgrad_bf16) {
  return moe::mx_forward_workspace_bytes(*shape, {static_cast<moe::MxMode>(mode), wgrad_bf16 != 0});
}
size_t mx_backward_workspace_bytes(const moe::LayerShape* shape, int mode, int wgrad_bf16) {
  return moe::mx_backward_workspace_bytes(*shape, {static_cast<moe::MxMode>(mode), wgrad_bf16 != 0});
}

const char* mx_forward(const moe::LayerShape* shape, const moe::Activation* act, int mode, int wgrad_bf16, const uint16_t* x,
                       const float* weight, const moe::Plan* plan, const moe::MxWeights* weights, uint16_t* y, const moe::MxSaved* saved,
                       void* workspace, void* stream) {
  return report(moe::mx_forward(*shape, *act, {static_cast<moe::MxMode>(mode), wgrad_bf16 != 0}, x, weight, *plan, *weights, y, *saved,
                                workspace, static_cast<cudaStream_t>(stream)));
}

const char* mx_backward(const moe::LayerShape* shape, const moe::Activation* act, int mode, int wgrad_bf16, const uint16_t* x,
                        const float* weight, const uint16_t* dy, const moe::Plan* plan, const moe::MxWeights* weights,
                        const moe::MxSaved* saved, uint16_t* dx, float* d_weight, float* dw_gate_up, float* dw_down, int accumulate,
                        void* workspace, void* stream) {
  return report(moe::mx_backward(*shape, *act, {static_cast<moe::MxMode>(mode), wgrad_bf16 != 0}, x, weight, dy, *plan, *weights, *saved, dx,
                                 d_weight, dw_gate_up, dw_down, accumulate != 0, workspace, static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
