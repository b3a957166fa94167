// The ring of shared-memory stages through which operands reach the products, and what a block needs to know to walk it: its own tile of
// a task, and how many stages that is. On every architecture; phases persist across tasks.
//
// full[s]: the loader arrives with the number of bytes, which its copies (and a peer's) complete; whoever multiplies waits. empty[s]: those
// who have read the stage arrive; the loader waits. How many arrive on which block's barrier is the MMA role's business (mma_sm90.h,
// mma_sm100.h).
#pragma once

#include "isa/portable.h"
#include "task.h"

namespace moe {

// A position in a ring of kSize, with the parity of its current round.
template <int kSize>
struct RingPosition {
  uint32_t stage = 0;
  uint32_t phase = 0;

  MOE_FN void advance() {
    if (++stage == kSize) {
      stage = 0;
      phase ^= 1;
    }
  }
  MOE_FN void skip(int steps) {
    const uint32_t to = stage + steps;
    phase ^= (to / kSize) & 1;
    stage = to % kSize;
  }
};

template <class Isa, class Config>
struct Ring : RingPosition<Config::kStages> {
  uint32_t base;

  MOE_FN explicit Ring(uint32_t shared_base) : base(shared_base) {}
  MOE_FN uint32_t data() const { return base + this->stage * Config::kStageBytes; }
  MOE_FN uint32_t full() const { return base + Config::kBarrierOffset + this->stage * 8; }
  MOE_FN uint32_t empty() const { return base + Config::kBarrierOffset + (Config::kStages + this->stage) * 8; }
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
      task.m0 += Config::kTileM * rank;
    } else {
      task.row0 += Config::kTileM * rank;
      task.rows -= Config::kTileM * rank;
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

// After a task's last store, by each store warp of a block, after a warp_sync that orders all lanes' stores. Once they are complete the task's counter
// goes on by one, which the lane that sends them does (`one`).
template <class Isa, class Arguments>
MOE_FN void signal_done(const Task& task, const Arguments& args, bool one) {
  if (task.signal >= 0 && one) {
    Isa::store_wait_done();
    Isa::add_release(args.signals + task.signal, 1);
  }
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
