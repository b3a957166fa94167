// The Blackwell expert layer on the GPU: sm100_layer.h with CUDA's tensor maps and launches. Compiled, never run on a Blackwell GPU.
#include "sm100_layer.h"

#include <cuda_runtime_api.h>

#include "kernel_check.h"
#include "sm100_launch.h"
#include "tensor_map.h"

namespace moe {

namespace {
using Layer = Sm100Layer<CUtensorMap>;
}

Status sm100_check_device() {
  int device = 0, major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return failed("cudaDeviceGetAttribute", error);
  if (major == 10) return {};
  return {"the device has compute capability " + std::to_string(major) + ".x, must be 10.x (B200, GB200, B300, GB300) for these kernels"};
}

Status sm100_prepare_weight(const void* master, bool fp32, int64_t matrices, int64_t rows, int64_t columns, void* fprop, uint8_t* fprop_codes,
                            void* dgrad, uint8_t* dgrad_codes, cudaStream_t stream) {
  if (rows % 32 != 0) return {"rows is " + std::to_string(rows) + ", must be a multiple of 32 (a scale block of MXFP8)"};
  QuantizeSource source;
  source.data = master;
  source.fp32 = fp32;
  source.batch = matrices;
  source.rows = rows;
  source.columns = columns;
  MxOutput along_row, along_rows;
  along_row.form = along_rows.form = Form::kMx;
  along_row.layout = along_rows.layout = CodeLayout::kInterleaved;
  along_row.elements = fprop, along_row.codes = fprop_codes;
  along_rows.elements = dgrad, along_rows.codes = dgrad_codes;
  return quantize(source, along_row, along_rows, stream);
}

size_t sm100_forward_workspace_bytes(const LayerShape& shape, const Sm100Options& options) {
  Layer layer(shape, {}, options, {}, nullptr, nullptr);
  layer.take_forward();
  return layer.used();
}

Status sm100_forward(const LayerShape& shape, const Activation& act, const Sm100Options& options, const uint16_t* x_TxD,
                     const float* weight_TxK, const Plan& plan, const Sm100Weights& weights, uint16_t* y_TxD, uint16_t* gate_up_2xMxF,
                     void* workspace, cudaStream_t stream) {
  for (const Status& status : {sm100_check_shape(shape, options), sm100_check_device()}) {
    if (!status.ok()) return status;
  }
  return Layer(shape, act, options, plan, workspace, stream).forward(x_TxD, weight_TxK, weights, y_TxD, gate_up_2xMxF);
}

size_t sm100_backward_workspace_bytes(const LayerShape& shape, const Sm100Options& options, bool recompute) {
  Layer layer(shape, {}, options, {}, nullptr, nullptr);
  layer.take_backward(recompute, false);
  return layer.used();
}

Status sm100_backward(const LayerShape& shape, const Activation& act, const Sm100Options& options, const uint16_t* x_TxD,
                      const float* weight_TxK, const uint16_t* dy_TxD, const Plan& plan, const Sm100Weights& weights,
                      const uint16_t* gate_up_2xMxF, uint16_t* dx_TxD, float* d_weight_TxK, float* dw_gate_up, float* dw_down,
                      bool accumulate, void* workspace, cudaStream_t stream) {
  for (const Status& status : {sm100_check_shape(shape, options), sm100_check_device()}) {
    if (!status.ok()) return status;
  }
  return Layer(shape, act, options, plan, workspace, stream)
      .backward(x_TxD, weight_TxK, dy_TxD, weights, gate_up_2xMxF, dx_TxD, d_weight_TxK, dw_gate_up, dw_down, accumulate);
}

}  // namespace moe
