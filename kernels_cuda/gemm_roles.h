// The roles of a GEMM block, for every kind: load_operands (producer), gather_operands (gathering warp; gemm_gather.h), compute_tiles
// (consumers) and store_results (store warps; what they do per task is in gemm_epilogue.h). The ring they share is in gemm_ring.h; gemm_kernels.cu sends each warp to
// its role.
#pragma once

#include "gemm_epilogue.h"
#include "gemm_gather.h"
#include "gemm_load.h"

namespace moe {

// Producer, one task. Fills one stage per K block, and for the kinds whose epilogue reads memory one stage per 64 columns.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  const bool gathered = can_gather(kKind) && args.gather != nullptr;
  const Task tile = block_tile<Config>(task, kKind, rank);

  // Two panels per consumer: gate and up, or 2 x 32 columns of an FP32 gradient.
  auto load_chunks = [&] {
    MOE_NO_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_expect_bytes(ring.full(), 4 * kPanelBytes);
      MOE_UNROLL
      for (int p = 0; p < 4; ++p) {
        int consumer = p / 2;
        uint32_t dst = slot_panel<Config>(ring.data(), consumer, p % 2);
        if (is_wgrad(kKind)) {
          Isa::load_panel(&args.out, ring.full(), dst, tile.n0 + 64 * chunk + 32 * (p % 2), tile.m0 + 64 * consumer, tile.half,
                          tile.expert);
        } else {
          Isa::load_panel(&args.gate_up, ring.full(), dst, tile.n0 + 64 * chunk, tile.row0 + 64 * consumer, p % 2, 0);
        }
      }
      ring.advance();
    }
  };

  wait_ready<Isa>(tile, args);
  if (is_wgrad(kKind) && args.accumulate) load_chunks();

  // Rows past the first 64 are never multiplied when the expert has none there.
  load_k_blocks<kKind, Isa>(tile, args, rank, gathered ? 0 : !is_wgrad(kKind) && tile.rows <= 64 ? 1 : 2, ring);
  if (kKind == kDgradDown) {
    load_chunks();
  } else {
    MOE_NO_UNROLL
    for (int drain = 0; drain < drain_stages<Config>(kKind); ++drain) {  // lend stages to the consumers' results
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_arrive(ring.full());
      ring.advance();
    }
  }
}

// Consumer warpgroup `consumer` (0 or 1), one task: rows 64 * consumer .. + 63 of the tile.
template <Kind kKind, bool kPlain, class Isa, class Config, class Arguments>
MOE_FN void compute_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring,
                         Epilogue<Isa, Config, kPlain>& epilogue) {
  constexpr bool kMnA = mn_major_a<Config>(kKind);
  constexpr bool kMnB = mn_major_b<Config>(kKind);
  const uint32_t consumer = epilogue.consumer;
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const int rows = tile.rows - 64 * static_cast<int>(consumer);  // real rows of this warpgroup; <= 0: all padding
  const bool live = (is_wgrad(kKind) || rows > 0) && tile.n0 < args.n_extent && k_blocks > 0;

  // Cleared here rather than by the first product's predicate, which would keep 128 dead registers live between tasks.
  float acc[Config::kAcc];
  if (has_bias(kKind) && args.bias != nullptr) {
    epilogue.template read_bias<kKind>(acc, tile, args);
  } else {
    MOE_UNROLL
    for (int i = 0; i < Config::kAcc; ++i) acc[i] = 0.0f;
  }
  if (is_wgrad(kKind) && args.accumulate) {
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.full(), ring.phase);
      epilogue.read_fp32_chunk(acc, chunk, ring.data());
      Isa::warp_sync();
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  }

  const bool pass_after = live && k_blocks <= Config::kStages;  // the tile fits the ring, whose stages are given back by both
  if (is_wgrad(kKind)) {
    epilogue.wait_turn();
    if (!pass_after) epilogue.pass_turn();
  }

  if (live) {
    uint32_t previous_empty = 0;
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
      Isa::barrier_wait(ring.full(), ring.phase);
      if (can_gather(kKind) && args.gather != nullptr) Isa::fence_async_shared();  // A was written by lanes, and is read by the tensor cores
      const uint64_t desc_a = panel_descriptor(ring.data() + consumer * kPanelBytes, kMnA);
      const uint64_t desc_b = panel_descriptor(ring.data() + Config::kPanelsA * kPanelBytes, kMnB);
      Isa::mma_fence();
      MOE_UNROLL
      for (int k16 = 0; k16 < Config::kBlockK / 16; ++k16) {
        Isa::template mma<Config::kTileN, kMnA, kMnB>(acc, desc_a + k16 * panel_k16_step(kMnA), desc_b + k16 * panel_k16_step(kMnB));
      }
      Isa::mma_commit();
      if (kb > 0) {
        Isa::template mma_wait<1>();  // the previous block's products have read their stage
        Ring<Isa, Config>::release(previous_empty);
      }
      previous_empty = ring.empty();
      ring.advance();
    }
    Isa::template mma_wait<0>();
    Ring<Isa, Config>::release(previous_empty);
    if (is_wgrad(kKind) && pass_after) epilogue.pass_turn();
  } else {
    MOE_NO_UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {  // keep step with the ring: a stage may only be given back once it is full
      Isa::barrier_wait(ring.full(), ring.phase);
      Isa::warp_sync();  // no lane may give the stage back while another has yet to see it full: it could miss the phase
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  }

  if constexpr (kKind == kGateUp) {
    epilogue.write_gate_up(acc, rows, args, ring);
  } else if constexpr (kKind == kDgradDown) {
    epilogue.write_dgrad_down(acc, tile, rows, args, ring);
  } else if constexpr (is_wgrad(kKind)) {
    epilogue.write_wgrad(acc, tile, kKind, args);
  } else {
    epilogue.write_rows(acc, tile, rows, args, ring);
  }
}

// The roles: every task of this block's cluster, in order.
template <class Kinds, class Isa, class Config, class Batch>
MOE_FN void load_operands(const Batch& batch, uint32_t shared_base) {
  Ring<Isa, Config> ring(shared_base);
  TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) {
    Kinds::visit(task.kind, [&](auto kind, int at) {
      load_task<decltype(kind)::value, Isa, Config>(task, batch.kinds[at], Isa::cluster_rank(), ring);
    });
  }
}

template <class Kinds, class Isa, class Config, class Batch>
MOE_FN void gather_operands(const Batch& batch, uint32_t shared_base) {
  Ring<Isa, Config> ring(shared_base);
  TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) {
    Kinds::visit(task.kind, [&](auto kind, int at) {
      gather_task<decltype(kind)::value, Isa, Config>(task, batch.kinds[at], Isa::cluster_rank(), ring);
    });
  }
}

template <class Kinds, bool kPlain, class Isa, class Config, class Batch>
MOE_FN void compute_tiles(const Batch& batch, uint32_t shared_base, uint32_t consumer) {
  Ring<Isa, Config> ring(shared_base);
  Epilogue<Isa, Config, kPlain> epilogue(shared_base, consumer);
  TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) {
    Kinds::visit(task.kind, [&](auto kind, int at) {
      compute_task<decltype(kind)::value, kPlain, Isa, Config>(task, batch.kinds[at], Isa::cluster_rank(), ring, epilogue);
    });
  }
}

template <class Kinds, class Isa, class Config, class Batch>
MOE_FN void store_results(const Batch& batch, uint32_t shared_base, uint32_t consumer) {
  Ring<Isa, Config> ring(shared_base);
  uint32_t tiles = 0;
  TaskStream stream(batch.tasks, *batch.num_tasks, Isa::cluster_index(), Isa::num_clusters());
  MOE_NO_UNROLL
  for (Task task; stream.take(task);) {
    Kinds::visit(task.kind, [&](auto kind, int at) {
      store_task<decltype(kind)::value, Isa, Config>(task, batch.kinds[at], shared_base, consumer, tiles, ring);
    });
  }
  if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
}

// The roles of a block with tokens on the M side, for run_roles.
template <class Kinds, bool kPlain, class Isa, class Config_>
struct TokensM {
  using Config = Config_;
  static constexpr bool kCanGather = Kinds::kCanGather;
  static MOE_FN void init(uint32_t) {}  // barriers of its own
  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    load_operands<Kinds, Isa, Config>(batch, base);
  }
  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    gather_operands<Kinds, Isa, Config>(batch, base);
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    store_results<Kinds, Isa, Config>(batch, base, consumer);
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    compute_tiles<Kinds, kPlain, Isa, Config>(batch, base, consumer);
  }
};

// A block: warp 0 loads, warps 1 and 2 store, warp 3 gathers, warps 4 to 11 multiply.
template <class Roles, class Isa, class Batch>
MOE_FN void run_roles(const Batch& batch) {
  using Config = typename Roles::Config;
  const uint32_t base = Isa::shared_base();
  const uint32_t warp = Isa::warp_index();
  if (warp == 0 && Isa::elect_one()) {
    for (int s = 0; s < Config::kStages; ++s) {
      Isa::barrier_init(base + Config::kBarrierOffset + 8 * s, 1 + (Roles::kCanGather ? kGatherLanes : 0));
      Isa::barrier_init(base + Config::kBarrierOffset + 8 * (Config::kStages + s), 2 * Config::kConsumers * 4);
    }
    for (uint32_t consumer = 0; consumer < Config::kConsumers; ++consumer) {
      for (int unit = 0; unit < Config::kMaxUnits; ++unit) Isa::barrier_init(written_barrier<Config>(base, consumer, unit), 4);
      Isa::barrier_init(credit_barrier<Config>(base, consumer), 1);
    }
    Isa::barrier_init(lead_barrier<Config>(base), 4);
    Isa::barrier_init(followed_barrier<Config>(base), 4);
    Roles::init(base);
    Isa::barrier_init_fence();
  }
  Isa::warp_sync();
  Isa::cluster_sync();  // the peer's copies arrive on these barriers

  if (warp < 4) {
    Isa::template registers_shrink<Config::kProducerRegisters>();
    if (warp == 0 && Isa::elect_one()) {
      for (const auto& args : batch.kinds) {
        Isa::prefetch_map(&args.a);
        Isa::prefetch_map(&args.b);
      }
      Roles::load(batch, base);
    } else if (warp == 1 || warp == 2) {
      Roles::store(batch, base, warp - 1);
    } else if (Roles::kCanGather && warp == 3) {
      Roles::gather(batch, base);
    }
  } else {
    Isa::template registers_grow<Config::kConsumerRegisters>();
    Roles::compute(batch, base, warp / 4 - 1);
  }
  Isa::warp_sync();     // the lanes that had no role wait for the one that had
  Isa::cluster_sync();  // a block must not exit while its peer still arrives on its barriers
}

}  // namespace moe
