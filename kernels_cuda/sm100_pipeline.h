// What the roles of a Blackwell block share: the ring of stages, the accumulators, and where the next task comes from.
//
// Barriers (in a pair those of the leading block are the ones that count, except where "each" is said):
//   full[s]    one arrival, the leader's loader, with the bytes of all blocks; the issuer waits. Every operand of a pair's product, the
//              peer's scales too, is counted here (cutlass #3643).
//   empty[s]   each: one arrival by commit, when the products that read the stage are done; the loaders wait.
//   acc_full[a]  each: one arrival by commit; the epilogue warps wait.
//   acc_empty[a] 4 epilogue warps of every block arrive when they have read the accumulators; the issuer waits. One for both
//              accumulators where they share columns: arrivals then mean that the shared columns have been read.
//   clc_full[c]  each: one arrival, the block's scheduler, with the 16 bytes of an answer; everybody waits who takes tasks.
//   clc_empty[c] everybody who took the answer arrives; the leader's scheduler waits.
#pragma once

#include "sm100_config.h"

namespace moe {

template <class Config>
struct Sm100Barriers {  // those of the operand stages: Ring
  uint32_t base;
  MOE_HOST_FN explicit Sm100Barriers(uint32_t shared_base) : base(shared_base + Config::kBarrierOffset) {}
  MOE_HOST_FN uint32_t acc_full(uint32_t a) const { return base + 8 * (2 * Config::kStages + a); }
  MOE_HOST_FN uint32_t acc_empty(uint32_t a) const { return base + 8 * (2 * Config::kStages + 2 + a); }
  MOE_HOST_FN uint32_t clc_full(uint32_t c) const { return base + 8 * (2 * Config::kStages + 4 + c); }
  MOE_HOST_FN uint32_t clc_empty(uint32_t c) const { return base + 8 * (2 * Config::kStages + 4 + Config::kClcSlots + c); }
  // Loader, scheduler and 4 epilogue warps of every block, and the issuer.
  static constexpr uint32_t kTakers = 6 * Config::kBlocks + 1;
};

// Tasks in the order this cluster runs them, the same for all of its roles. Without stealing: every num_clusters-th. With stealing: the
// cluster's own index first, then whatever Cluster Launch Control hands over, until it refuses; ids past the list have no work and are
// drained. Which cluster runs a task changes no result: a tile has one owner and a fixed order along K. A task may only wait for tasks
// with a smaller index.
template <class Isa, class Config, bool kWholeWarp>
struct Sm100Tasks {
  const Task* tasks;
  int count;
  uint32_t shared_base;
  uint32_t next;
  bool first = true;
  RingPosition<Config::kClcSlots> answer;

  template <class Batch>
  MOE_FN Sm100Tasks(const Batch& batch, uint32_t base)
      : tasks(batch.tasks), count(*batch.num_tasks), shared_base(base), next(Isa::template cluster_id<Config::kBlocks>()) {}

  MOE_FN bool take(Task& task) {
    MOE_NO_UNROLL
    while (advance()) {
      if (next < static_cast<uint32_t>(count)) {
        task = tasks[next];
        return true;
      }
      if (!Config::kStealing) return false;
    }
    return false;
  }

  // Moves `next` on; false when there is nothing more to ask for.
  MOE_FN bool advance() {
    if (first) {
      first = false;
      return true;
    }
    if constexpr (!Config::kStealing) {
      next += Isa::template cluster_count<Config::kBlocks>();
      return true;
    } else {
      const Sm100Barriers<Config> bars(shared_base);
      Isa::template wait_cluster<Config::kBlocks>(bars.clc_full(answer.index), answer.phase);
      uint32_t first_block = 0;
      const bool granted = Isa::stolen(shared_base + Config::kClcOffset + 16 * answer.index, first_block);
      Isa::fence_async_shared();  // the next answer is written there by the asynchronous proxy
      if (kWholeWarp) Isa::warp_sync();
      if (!kWholeWarp || Isa::lane_index() == 0) Isa::template arrive_leader<Config::kBlocks>(bars.clc_empty(answer.index));
      answer.advance();
      next = first_block / Config::kBlocks;
      return granted;
    }
  }
};

// Products in a block of K: the last one issues only what it needs.
template <class Config>
MOE_FN int sm100_products(int k_extent, int half_block) {
  const int left = (k_extent - half_block * Config::kBlockK + Config::kProductK - 1) / Config::kProductK;
  return left < Config::kProducts ? left : Config::kProducts;
}

}  // namespace moe
