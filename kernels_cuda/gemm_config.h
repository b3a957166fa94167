// The shape of a GEMM block on Hopper, and its shared memory. Read gemm_roles.h next.
//
// A block owns a 128 x kTileN output tile. Warp 0 fills a ring of stages with bulk tensor copies; two consumer warpgroups own 64
// rows each; warps 1 and 2 store what the consumers leave in shared memory, so that a warpgroup goes on to its next tile while the
// last one drains; warp 3 brings rows of A from tokens, where they are not dispatched. Two blocks form a cluster and share either the A or the B operand of every stage.
//
// Results leave through stages of the same ring (three panels per consumer) and two staging panels per consumer.
#pragma once

#include "gemm_arguments.h"

namespace moe {

template <int kTileN_>
struct GemmConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kTileN_;
  static constexpr int kBlockK = 64;
  static constexpr int kElementBytes = 2;
  static constexpr bool kOnlyKMajor = false;
  static constexpr bool kMulticast = true;   // the blocks of a cluster share an operand
  static constexpr int kBlocks = 1;          // that compute a tile together
  static constexpr int kRowsA = kTileM;      // of a stage
  static constexpr int kRowsB = kTileN;
  static constexpr int kBoxRowsB = 64;
  static constexpr int kBytesA = kRowsA * kPanelRowBytes;
  static constexpr int kScaleAtoms = 0;      // scales are not the tensor core's business here
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

}  // namespace moe
