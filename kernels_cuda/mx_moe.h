// The single-GPU expert layer for Hopper in MXFP8, after moe.h: the same plan, row order and rounding points, no allocation, no host
// synchronisation. moejax/ops/mxfp8*.py and docs define the numbers.
//
// Two ways to run it. kAligned: scales are re-based to one per 1 x 128 of rows and gradients and 128 x 128 of weights, and the products
// run on FP8 tensor cores; what is stored are the re-based bytes. kExact: operands keep their scales per 32 and are dequantised to BF16,
// exactly, for BF16 tensor cores: the numerics of block-scaled hardware up to FP32 summation.
//
// Letters as in moe.h. D and F: multiples of 32. Ways (LayerShape): dispatched; for weight gradients of BF16 operands resident_512 and
// resident_rows, of FP8 ones resident_fp8; kAligned: dgrad_down gathered (no more tokens than M, 4 GiB of them in FP8); and, but for down
// and dgrad_gate_up with one expert per token, gate_up, down and dgrad_gate_up with tokens on the N side. Unlike in moe.h a workspace is
// for the ways it was measured with.
#pragma once

#include "moe.h"

namespace moe {

enum class MxMode { kAligned, kExact };

// Weights, quantised once per optimizer step from FP32 masters, in both orientations: `fprop` has blocks along the last axis, `dgrad`
// along the one before it. kAligned: E4M3, dgrad stored transposed, and a code per 128 x 128. kExact: BF16 in the masters' layout, no codes.
struct MxWeights {
  const void* gate_up_fprop = nullptr;            // (E, 2, F, D)
  const void* gate_up_dgrad = nullptr;            // (E, 2, D, F); kExact (E, 2, F, D)
  const void* down_fprop = nullptr;               // (E, D, F)
  const void* down_dgrad = nullptr;               // (E, F, D); kExact (E, D, F)
  const uint8_t* gate_up_fprop_codes = nullptr;   // (E, 2, F/128, D/128), rounded up
  const uint8_t* gate_up_dgrad_codes = nullptr;   // (E, 2, D/128, F/128)
  const uint8_t* down_fprop_codes = nullptr;      // (E, D/128, F/128)
  const uint8_t* down_dgrad_codes = nullptr;      // (E, F/128, D/128)
};

// Both orientations of one FP32 (or BF16) weight of `matrices` x `rows` x `columns`.
Status prepare_mx_weight(MxMode mode, const void* master, bool fp32, int64_t matrices, int64_t rows, int64_t columns, void* fprop,
                         uint8_t* fprop_codes, void* dgrad, uint8_t* dgrad_codes, cudaStream_t stream);

struct MxOptions {
  MxMode mode = MxMode::kAligned;
  bool wgrad_bf16 = false;  // weight gradients from BF16 operands
};

// What a forward may save for its backward: gate and up in BF16, or in MXFP8 re-based per 1 x 128 (both modes), or nothing.
struct MxSaved {
  uint16_t* gate_up_2xMxF = nullptr;  // BF16, or
  uint8_t* elements_2xMxF = nullptr;  // E4M3 and
  uint8_t* codes = nullptr;           // (2, F/128, M)
};

size_t mx_forward_workspace_bytes(const LayerShape& shape, const MxOptions& options);
Status mx_forward(const LayerShape& shape, const Activation& act, const MxOptions& options, const uint16_t* x_TxD,
                  const float* weight_TxK, const Plan& plan, const MxWeights& weights, uint16_t* y_TxD, const MxSaved& saved,
                  void* workspace, cudaStream_t stream);

size_t mx_backward_workspace_bytes(const LayerShape& shape, const MxOptions& options);
Status mx_backward(const LayerShape& shape, const Activation& act, const MxOptions& options, const uint16_t* x_TxD,
                   const float* weight_TxK, const uint16_t* dy_TxD, const Plan& plan, const MxWeights& weights, const MxSaved& saved,
                   uint16_t* dx_TxD, float* d_weight_TxK, float* dw_gate_up_Ex2xFxD, float* dw_down_ExDxF, bool accumulate,
                   void* workspace, cudaStream_t stream);

}  // namespace moe
