// A plain C door to moe.h for tests and benchmarks, driven through ctypes. Every function returns null, or a message that stays
// valid until the next call on the same thread.
#include "moe.h"

namespace {

const char* report(const moe::Status& status) {
  thread_local std::string message;
  if (status.ok()) return nullptr;
  message = status.message;
  return message.c_str();
}

}  // namespace

extern "C" {

int64_t moe_rows_bound(int64_t tokens, int64_t top_k, int64_t experts) { return moe::rows_bound(tokens, top_k, experts); }
size_t moe_schedule_workspace_bytes(const moe::LayerShape* shape) { return moe::schedule_workspace_bytes(*shape); }
size_t moe_forward_workspace_bytes(const moe::LayerShape* shape) { return moe::forward_workspace_bytes(*shape); }
size_t moe_backward_workspace_bytes(const moe::LayerShape* shape, int recompute) {
  return moe::backward_workspace_bytes(*shape, recompute != 0);
}

int moe_has_way(const moe::LayerShape* shape, int product, int way) { return moe::has_way(*shape, product, static_cast<moe::Way>(way)); }

const char* moe_schedule(const moe::LayerShape* shape, const int32_t* expert_TxK, int32_t first_expert, int32_t capacity,
                         const moe::Plan* plan, void* workspace, void* stream) {
  return report(moe::schedule(*shape, expert_TxK, first_expert, capacity, *plan, workspace, static_cast<cudaStream_t>(stream)));
}

const char* moe_forward(const moe::LayerShape* shape, const moe::Activation* act, const uint16_t* x, const float* weight,
                        const moe::Plan* plan, const moe::Weights* weights, uint16_t* y, uint16_t* gate_up, void* workspace,
                        void* stream) {
  return report(moe::forward(*shape, *act, x, weight, *plan, *weights, y, gate_up, workspace, static_cast<cudaStream_t>(stream)));
}

const char* moe_backward(const moe::LayerShape* shape, const moe::Activation* act, const uint16_t* x, const float* weight,
                         const uint16_t* dy, const moe::Plan* plan, const moe::Weights* weights, const uint16_t* gate_up, uint16_t* dx,
                         float* d_weight, const moe::WeightGradients* gradients, int accumulate, void* workspace, void* stream) {
  return report(moe::backward(*shape, *act, x, weight, dy, *plan, *weights, gate_up, dx, d_weight, *gradients, accumulate != 0, workspace,
                              static_cast<cudaStream_t>(stream)));
}

}  // extern "C"
