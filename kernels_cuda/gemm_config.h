// The shape of a GEMM block on Hopper, its shared memory and its arguments. Read gemm_roles.h next.
//
// A block owns a 128 x kTileN output tile. Warp 0 fills a ring of stages with bulk tensor copies; two consumer warpgroups own 64
// rows each; warps 1 and 2 store what the consumers leave in shared memory, so that a warpgroup goes on to its next tile while the
// last one drains; warp 3 brings rows of A from tokens, where they are not dispatched. Two blocks form a cluster and share either the A or the B operand of every stage.
//
// Results leave through stages of the same ring (three panels per consumer) and two staging panels per consumer.
#pragma once

#include "activation.h"
#include "isa/portable.h"
#include "task.h"

namespace moe {

template <int kTileN_>
struct GemmConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kBlockK = 64;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kPanelsA = kTileM / 64;
  static constexpr int kPanelsB = kTileN / 64;
  static constexpr int kStageBytes = (kPanelsA + kPanelsB) * kPanelBytes;
  static constexpr int kStages = kTileN == 256 ? 4 : 6;
  static constexpr int kAcc = kTileN / 2;       // FP32 accumulators per consumer thread
  static constexpr int kColumns64 = kTileN / 64;  // 64-column chunks of the epilogue
  static constexpr int kWeightChunk = 128;      // columns of F in one partial sum of d(weight): the same in every configuration
  static constexpr int kProducerRegisters = 72;
  static constexpr int kConsumerRegisters = 216;

  static constexpr int kMaxUnits = kColumns64;  // pieces in which a consumer hands its tile to its store warp

  // Shared memory: stages, then two staging panels per consumer, then the barriers: full[stage], empty[stage],
  // written[consumer][unit], credit[consumer], lead, followed.
  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + kConsumers * 2 * kPanelBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * kStages * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kSharedBytes = kLeadOffset + 16;

  static_assert(kTileN % kWeightChunk == 0, "a partial sum of d(weight) must not cross tiles");
  static constexpr int kSlotPanels = (kPanelsA + kPanelsB) / kConsumers;  // panels of a stage that belong to one consumer

  static constexpr int kStagedPanels = 2;  // of a weight gradient's tile, per consumer

  static_assert(kSlotPanels >= 3, "a stage carries three panels per consumer in the epilogues");
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 65536, "the register file has 64 Ki registers");
};

template <class TensorMap>
struct GemmArguments {
  TensorMap a;        // operand A
  TensorMap b;        // operand B
  TensorMap out;      // h | y | d(gate, up) | dx | dW (FP32); also where a continued dW comes from
  TensorMap gate_up;  // kGateUp: where gate and up are saved; kDgradDown: where they come from
  TensorMap scaled_h; // kDgradDown: weight * h
  const uint8_t* gather;  // kinds that can: rows of tokens are read here, instead of from `a`; null: from `a`
  uint8_t* scatter;   // kDown, kDgradGateUp with K = 1: rows go straight to their token here, instead of to `out`
  const int* counters;        // task dependencies, when several kinds share a launch; null otherwise
  const int* targets;
  int* signals;
  const float* weight_TxK;    // kDgradDown, kDown with scatter: combine weights, by slot
  const int* slot_M;          // kDgradDown, gather, scatter: slot of each row, -1 for padding
  const float* bias;          // kGateUp: FP32 [E][2][F]; kDown: FP32 [E][D]; null: none
  float* weight_partial;      // kDgradDown: FP32 [ceil(F / 128)][M] partial sums of d(weight)
  float* dw;                  // weight gradients: where they go
  int64_t num_rows;           // M
  int m_extent;               // weight gradients: output rows of one matrix
  int k_blocks;               // row kinds: 64-wide blocks along the contraction (of one half, for kDgradGateUp)
  int n_extent;               // output columns
  int top_k;                  // gather: slots of a token
  int gather_vectors;         // gather: 16-byte pieces of a token's row
  int save_gate_up;           // kGateUp: write gate and up
  int write_out;              // kGateUp: write h
  int accumulate;             // weight gradients: continue from the values already there
  Activation act;
};

// What a launch works on: one task list, and the arguments of every kind in it.
template <class TensorMap, int kCount>
struct GemmBatch {
  GemmArguments<TensorMap> kinds[kCount];
  const Task* tasks;
  const int* num_tasks;
};

}  // namespace moe
