// The single-GPU expert layer for Blackwell (compute capability 10.x), BF16 and MXFP8, after moe.h: the same plan, row order and rounding
// points, no allocation, no host synchronisation. MXFP8 is exact: the tensor core applies a scale per 32 elements, and the numbers are
// those of moejax/ops/mxfp8.py. The launches are those of sm100_layer.h, which runs on the host emulator as well.
//
// Nothing of this has run on a Blackwell GPU (docs/blackwell.md). Letters as in moe.h. D and F: multiples of 8, of 32 in MXFP8.
#pragma once

#include "moe.h"

namespace moe {

struct Sm100Options {
  bool mx = false;  // MXFP8, else BF16
  int blocks = 0;   // that compute a tile together: 1, 2 (a pair), or 0 for what suits the shape. Changes speed, never bits
};

// BF16: the weights, given twice, and no codes. MXFP8: E4M3 in the layout of the masters, with blocks along the last axis (fprop) and along
// the one before it (dgrad); codes in the order that tcgen05 reads, a table per matrix (mx::interleaved_offset).
struct Sm100Weights {
  const void* gate_up_fprop = nullptr;           // (E, 2, F, D)
  const void* gate_up_dgrad = nullptr;
  const void* down_fprop = nullptr;              // (E, D, F)
  const void* down_dgrad = nullptr;
  const uint8_t* gate_up_fprop_codes = nullptr;  // 2 E tables of sm100_code_bytes(F, D)
  const uint8_t* gate_up_dgrad_codes = nullptr;  // 2 E of sm100_code_bytes(D, F)
  const uint8_t* down_fprop_codes = nullptr;     // E of sm100_code_bytes(D, F)
  const uint8_t* down_dgrad_codes = nullptr;     // E of sm100_code_bytes(F, D)
};

// Bytes of the codes of a matrix of `lines`, whose blocks lie along `elements`.
inline int64_t sm100_code_bytes(int64_t lines, int64_t elements) { return (lines + 127) / 128 * ((elements + 127) / 128) * 512; }

// An error unless the current device can run these kernels.
Status sm100_check_device();

// Both orientations of FP32 (or BF16) weights of `matrices` x `rows` x `columns`, in MXFP8.
Status sm100_prepare_weight(const void* master, bool fp32, int64_t matrices, int64_t rows, int64_t columns, void* fprop, uint8_t* fprop_codes,
                            void* dgrad, uint8_t* dgrad_codes, cudaStream_t stream);

// As `forward` and `backward` of moe.h; the layer has no biases.
size_t sm100_forward_workspace_bytes(const LayerShape& shape, const Sm100Options& options);
Status sm100_forward(const LayerShape& shape, const Activation& act, const Sm100Options& options, const uint16_t* x_TxD,
                     const float* weight_TxK, const Plan& plan, const Sm100Weights& weights, uint16_t* y_TxD, uint16_t* gate_up_2xMxF,
                     void* workspace, cudaStream_t stream);

size_t sm100_backward_workspace_bytes(const LayerShape& shape, const Sm100Options& options, bool recompute);
Status sm100_backward(const LayerShape& shape, const Activation& act, const Sm100Options& options, const uint16_t* x_TxD,
                      const float* weight_TxK, const uint16_t* dy_TxD, const Plan& plan, const Sm100Weights& weights,
                      const uint16_t* gate_up_2xMxF, uint16_t* dx_TxD, float* d_weight_TxK, float* dw_gate_up_Ex2xFxD,
                      float* dw_down_ExDxF, bool accumulate, void* workspace, cudaStream_t stream);

}  // namespace moe
