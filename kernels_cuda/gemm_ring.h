// The ring of shared-memory stages that all roles of a block walk in step, and where things lie in shared memory.
//
// full[s]: one arrival (this block's producer, with the byte count), completed by bytes from this block's copies and the peer's
// multicast; in kernels that can gather, one more by each lane of the gathering warp, on every stage; consumers wait. empty[s]: 4 warps x 2 consumers x 2 blocks arrive, because the peer's multicast also writes here; the
// producer waits. Both blocks run the same number of stages for a task, so the rings stay in step; phases persist across tasks.
#pragma once

#include "gemm_config.h"

namespace moe {

template <class Config>
MOE_HOST_FN constexpr uint32_t written_barrier(uint32_t base, uint32_t consumer, int unit) {
  return base + Config::kWrittenOffset + (consumer * Config::kMaxUnits + unit) * 8;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t credit_barrier(uint32_t base, uint32_t consumer) {
  return base + Config::kCreditOffset + consumer * 8;
}
// lead: 4 warps of consumer 0 arrive once per tile of a weight gradient; consumer 1 waits before its products. followed: the 4 warps
// of consumer 1 arrive once they have seen that; consumer 0 waits before its next arrival, which could otherwise be a phase ahead.
template <class Config>
MOE_HOST_FN constexpr uint32_t lead_barrier(uint32_t base) {
  return base + Config::kLeadOffset;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t followed_barrier(uint32_t base) {
  return base + Config::kLeadOffset + 8;
}
template <class Config>
MOE_HOST_FN constexpr uint32_t staging_panel(uint32_t base, uint32_t consumer, int panel) {
  return base + Config::kStagingOffset + (2 * consumer + panel) * kPanelBytes;
}
// Panel of a stage that belongs to one consumer in the epilogues.
template <class Config>
MOE_HOST_FN constexpr uint32_t slot_panel(uint32_t stage, uint32_t consumer, int panel) {
  return stage + (Config::kSlotPanels * consumer + panel) * kPanelBytes;
}

constexpr uint32_t kGatherLanes = 32;  // lanes of the gathering warp

// A position in a ring of kSize, with the parity of its current round.
template <int kSize>
struct RingPosition {
  uint32_t index = 0;
  uint32_t phase = 0;

  MOE_FN void advance() {
    if (++index == kSize) {
      index = 0;
      phase ^= 1;
    }
  }
  MOE_FN void skip(int steps) {
    const uint32_t to = index + steps;
    phase ^= (to / kSize) & 1;
    index = to % kSize;
  }
};

template <class Isa, class Config>
struct Ring : RingPosition<Config::kStages> {
  uint32_t base;

  MOE_FN explicit Ring(uint32_t shared_base) : base(shared_base) {}
  MOE_FN uint32_t data() const { return base + this->index * Config::kStageBytes; }
  MOE_FN uint32_t full() const { return base + Config::kBarrierOffset + this->index * 8; }
  MOE_FN uint32_t empty() const { return base + Config::kBarrierOffset + (Config::kStages + this->index) * 8; }
  // One warp of a consumer gives a stage back to both producers of the cluster.
  static MOE_FN void release(uint32_t empty_bar) {
    uint32_t lane = Isa::lane_index();
    if (lane < 2) Isa::barrier_arrive_cluster(empty_bar, lane, 1);
  }
  // The store warp gives a stage back for the four warps of its consumer.
  static MOE_FN void release_warpgroup(uint32_t empty_bar) {
    Isa::barrier_arrive_cluster(empty_bar, 0, 4);
    Isa::barrier_arrive_cluster(empty_bar, 1, 4);
  }
};

// Output columns of a tile: of F for kGateUp, whose tile is half gate and half up.
template <class Config>
MOE_HOST_FN constexpr int step_n(Kind kind) {
  return kind == kGateUp ? Config::kTileN / 2 : Config::kTileN;
}

// Tile of this block: the cluster's task, moved by the block's rank along the paired dimension.
template <class Config>
MOE_FN Task block_tile(Task task, Kind kind, uint32_t rank) {
  if (task.pair == kPairM) {
    if (is_wgrad(kind)) {
      task.m0 += Config::kRowsA * rank;
    } else {
      task.row0 += Config::kRowsA * rank;
      task.rows -= Config::kRowsA * rank;
    }
  } else {
    task.n0 += step_n<Config>(kind) * rank;
  }
  return task;
}

// Before a task's first load, when several kinds share a launch.
template <class Isa, class Arguments>
MOE_FN void wait_ready(const Task& task, const Arguments& args) {
  if (task.wait < 0) return;
  while (Isa::load_acquire(args.counters + task.wait) < args.targets[task.wait]) {
  }
  Isa::fence_async_all();  // what the acquire made visible is read by the copy engine next
}

// Stages of the ring that a tile's results pass through after its K blocks (kDgradDown: those that brought gate and up).
template <class Config>
MOE_HOST_FN constexpr int drain_stages(Kind kind) {
  return kind == kDgradDown ? Config::kColumns64 : kind == kGateUp ? Config::kColumns64 / 2 : is_wgrad(kind) ? 0 : 1;
}

// Blocks of the contraction: of one half for kDgradGateUp, and of the whole task.
template <Kind kKind, class Config, class Arguments>
MOE_FN int half_k_blocks(const Task& task, const Arguments& args) {
  return ((is_wgrad(kKind) ? task.rows : args.k_extent) + Config::kBlockK - 1) / Config::kBlockK;
}
template <Kind kKind, class Config, class Arguments>
MOE_FN int task_k_blocks(const Task& task, const Arguments& args) {
  return (kKind == kDgradGateUp ? 2 : 1) * half_k_blocks<kKind, Config>(task, args);
}

}  // namespace moe
