// What a grouped product works on: tensor maps, tables and extents. Every kind reads some of them; docs/design.md section 2 names the
// matrices. TensorMap is CUtensorMap, or the host twin's.
#pragma once

#include "activation.h"
#include "isa/portable.h"
#include "task.h"

namespace moe {

// On both architectures. Boxes of the maps are 128 bytes wide under the 128-byte swizzle, 64 rows of an operand (kBoxRowsB of a K-major b).
template <class TensorMap>
struct ProductArguments {
  TensorMap a;         // rows_MxK, (2, M, F) for kDgradGateUp; weight gradients: (halves, M, m_extent)
  TensorMap b;         // weights (E, halves, N, K) or (E, halves, K, N); weight gradients: (M, n_extent)
  TensorMap out;       // h | y | d(gate, up) | dx | dW (FP32)
  TensorMap gate_up;   // kGateUp: where gate and up are saved; Hopper, kDgradDown: where they come from
  TensorMap scaled_h;  // kDgradDown: weight * h
  const int* counters;      // task dependencies, when several kinds share a launch; null otherwise
  const int* targets;
  int* signals;
  const float* weight_TxK;  // kDgradDown, kDown with scatter: combine weights, by slot
  const int* slot_M;        // kDgradDown, gather, scatter: slot of each row, -1 for padding
  float* weight_partial;    // kDgradDown: FP32 [ceil(F / 128)][M] partial sums of d(weight)
  float* dw;                // weight gradients: where they are
  int64_t num_rows;         // M
  int m_extent;             // weight gradients: output rows of one matrix
  int n_extent;             // output columns (F for kGateUp and kDgradDown)
  int k_extent;             // row kinds: contraction, of one half for kDgradGateUp
  int save_gate_up;         // kGateUp: write gate and up
  int accumulate;           // weight gradients: continue from the values already there
  Activation act;
};

// Rows of tokens to dispatch, padding with zeros (dispatch_rows in rows.h), by a kind that can carry (gemm_gather.h).
struct Carry {
  const uint8_t* from;  // tokens_TxD; null: nothing to do
  uint8_t* to;          // rows_MxD
  const int* row_TxK;
  const int* count_E;
  const int* start_E;
  int tokens, top_k, experts;
  int vectors;          // 16-byte pieces of a row
  int zero_to;          // padding is zero up to a multiple of so many rows, a power of two
};

// On Hopper. The map `out` is also where a continued dW comes from.
template <class TensorMap>
struct GemmArguments : ProductArguments<TensorMap> {
  const uint8_t* gather;  // kinds that can: rows of tokens are read here, instead of from `a`; null: from `a`
  uint8_t* scatter;       // kDown, kDgradGateUp with K = 1: rows go straight to their token here, instead of to `out`
  const float* bias;      // kGateUp: FP32 [E][2][F]; kDown: FP32 [E][D]; null: none
  int top_k;              // gather: slots of a token
  int gather_vectors;     // gather: 16-byte pieces of a token's row
  int write_out;          // kGateUp: write h
  int zero_to;            // tokens on the N side: padding is written as zeros up to the next multiple of this many rows, 16 to 64
  Carry carry;            // kinds that can
};

// What a launch works on: one task list, and the arguments of every kind in it.
template <class Arguments, int kCount>
struct Batch {
  Arguments kinds[kCount];
  const Task* tasks;
  const int* num_tasks;
};
template <class TensorMap, int kCount>
using GemmBatch = Batch<GemmArguments<TensorMap>, kCount>;

// Where a quantising epilogue writes: E4M3 elements in the layout of the source, and scale codes as tcgen05 reads them
// (mx::interleaved_offset), one table per matrix.
struct MxTarget {
  uint8_t* elements;
  uint8_t* codes;
};

// On Blackwell. Boxes of results have 32 rows; those of scales are atoms of 512 bytes (128 words) by one, without swizzle: coordinates
// (word, atom along K, atom along M or N, matrix).
template <class TensorMap>
struct Sm100Arguments : ProductArguments<TensorMap> {
  TensorMap scale_a;  // MX
  TensorMap scale_b;
  const uint16_t* gate_up_2xMxF;  // kDgradDown: gate and up, BF16
  MxTarget by_row;      // MX: h_MxF (kGateUp), d(gate, up)_2xMxF (kDgradDown), blocks along F; in place of `out`
  MxTarget by_column;   // MX, kDgradDown: d(gate, up)_2xMxF, blocks along M
  MxTarget scaled_h_by_column;  // MX, kDgradDown: weight * h, blocks along M
};

template <class TensorMap>
struct Sm100Batch {
  Sm100Arguments<TensorMap> args;
  const Task* tasks;
  const int* num_tasks;
};

}  // namespace moe
