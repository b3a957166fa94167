// The roles of a Blackwell block: load_operands, issue_products, ask_for_work, and the block that sends each warp to its role. The
// epilogue is in sm100_epilogue.h, the barriers in sm100_pipeline.h. One source for one block and for pairs, MXFP8 and BF16.
#pragma once

#include "sm100_epilogue.h"

namespace moe {

// Issuer, one thread of the leading block. Scale copies and products of one thread stay in order, so one set of scale columns serves.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void multiply_tile(const Task& task, const Arguments& args, uint32_t base, uint32_t tmem, Ring<Isa, Config>& ring,
                          RingPosition<Config::kAccumulators>& accumulator, RingPosition<Config::kEmptyBarriers>& drained) {
  constexpr int kBlocks = Config::kBlocks;
  constexpr bool kMnA = mn_major_a<Config>(kKind), kMnB = mn_major_b<Config>(kKind);
  // Halves of gate and up that do not fill an atom have their scales in different columns: two products.
  constexpr int kParts = Config::kMx && kKind == kGateUp && Config::kTileN / 2 % 128 != 0 ? 2 : 1;
  constexpr int kPartN = Config::kTileN / kParts;
  constexpr uint32_t kMnStride = Config::kBlockK * 128;
  constexpr uint32_t kInstruction = Config::kMx ? sm100::mx_instruction(Config::kTileM, kPartN, kMnA, kMnB)
                                                : sm100::bf16_instruction(Config::kTileM, kPartN, kMnA, kMnB);
  const Sm100Barriers<Config> bars(base);
  const int k_extent = is_wgrad(kKind) ? task.rows : args.k_extent;
  const int half_blocks = half_k_blocks<kKind, Config>(task, args);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  const uint32_t d = tmem + accumulator.index * Config::kAccumulatorStep;
  const uint32_t scale_a = tmem + Config::kScaleColumnA;
  const uint32_t scale_b = tmem + Config::kScaleColumnB;
  const uint32_t shift = task.n0 % 128 / 32;  // a tile may start in the middle of an atom

  Isa::template wait_cluster<kBlocks>(bars.acc_empty(drained.index), drained.phase ^ 1);
  Isa::fence_after_sync();
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    const int in_half = kKind == kDgradGateUp && kb >= half_blocks ? kb - half_blocks : kb;
    const int products = sm100_products<Config>(k_extent, in_half);
    Isa::barrier_wait(ring.full(), ring.phase);  // block scope: only bytes arrive here, and the tensor core reads them
    Isa::fence_after_sync();
    if constexpr (Config::kMx) {
      const uint32_t scales = base + Config::kScaleOffset + ring.index * Config::kScaleStageBytes;
      Isa::template copy_scales<kBlocks>(scale_a, sm100::scale_descriptor(scales));
      MOE_NO_UNROLL
      for (int i = 0; i < scale_atoms_b<kKind, Config>(task); ++i) {
        Isa::template copy_scales<kBlocks>(scale_b + 4 * i, sm100::scale_descriptor(scales + (1 + i) * sm100::kScaleAtomBytes));
      }
    }
    const uint32_t stage = ring.data();
    const uint64_t desc_a = sm100::operand_descriptor(stage, kMnA, kMnStride);
    const uint64_t desc_b = sm100::operand_descriptor(stage + Config::kBytesA, kMnB, kMnStride);
    MOE_UNROLL
    for (int i = 0; i < Config::kProducts; ++i) {
      if (i >= products) continue;
      const bool accumulate = kb > 0 || i > 0;
      const uint64_t a = desc_a + i * sm100::operand_k_step(kMnA, Config::kElementBytes);
      const uint64_t b = desc_b + i * sm100::operand_k_step(kMnB, Config::kElementBytes);
      MOE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const uint64_t b_part = b + part * (kPartN * 128 >> 4);
        if constexpr (Config::kMx) {
          Isa::template mma_mx<kBlocks>(d + part * kPartN, a, b_part, sm100::with_scale_ids(kInstruction, i, i), scale_a,
                                        scale_b + shift + 4 * part, accumulate);
        } else {
          Isa::template mma_bf16<kBlocks>(d + part * kPartN, a, b_part, kInstruction, accumulate);
        }
      }
    }
    Isa::template commit<kBlocks>(ring.empty());
    ring.advance();
  }
  Isa::template commit<kBlocks>(bars.acc_full(accumulator.index));  // an expert without rows has no products: an arrival all the same
  accumulator.advance();
  drained.advance();
}

template <Kind kKind, class Isa, class Config, class Batch>
MOE_FN void load_operands(const Batch& batch, uint32_t base) {
  const uint32_t rank = Isa::template block_rank<Config::kBlocks>();
  Ring<Isa, Config> ring(base);
  Sm100Tasks<Isa, Config, false> tasks(batch, base);
  MOE_NO_UNROLL
  for (Task task; tasks.take(task);) {
    wait_ready<Isa>(task, batch.args);
    load_k_blocks<kKind, Isa>(block_tile<Config>(task, kKind, rank), batch.args, rank, 2, ring);
  }
}

template <Kind kKind, class Isa, class Config, class Batch>
MOE_FN void issue_products(const Batch& batch, uint32_t base, uint32_t tmem) {
  Ring<Isa, Config> ring(base);
  RingPosition<Config::kAccumulators> accumulator;
  RingPosition<Config::kEmptyBarriers> drained;
  Sm100Tasks<Isa, Config, false> tasks(batch, base);
  MOE_NO_UNROLL
  for (Task task; tasks.take(task);) multiply_tile<kKind, Isa, Config>(task, batch.args, base, tmem, ring, accumulator, drained);
}

// Scheduler, one thread of every block: the leader asks, each counts the answer on its own barrier.
template <class Isa, class Config, class Batch>
MOE_FN void ask_for_work(const Batch& batch, uint32_t base) {
  const Sm100Barriers<Config> bars(base);
  const bool leads = Isa::template block_rank<Config::kBlocks>() == 0;
  Sm100Tasks<Isa, Config, false> tasks(batch, base);
  RingPosition<Config::kClcSlots> slot;
  tasks.advance();  // the cluster's own index
  bool granted = true;
  MOE_NO_UNROLL
  while (granted) {
    if (leads) Isa::template wait_cluster<Config::kBlocks>(bars.clc_empty(slot.index), slot.phase ^ 1);
    Isa::barrier_expect_bytes(bars.clc_full(slot.index), 16);
    if (leads) Isa::template steal<Config::kBlocks>(base + Config::kClcOffset + 16 * slot.index, bars.clc_full(slot.index));
    slot.advance();
    granted = tasks.advance();
  }
}

template <Kind kKind, bool kPlain, class Isa, class Config, class Batch>
MOE_FN void sm100_run_block(const Batch& batch) {
  constexpr int kBlocks = Config::kBlocks;
  static_assert(sm100_supports<Config>(kKind), "this kind does not run with this tile; see sm100_supports");
  const uint32_t base = Isa::shared_base();
  const uint32_t warp = Isa::warp_index();
  const Sm100Barriers<Config> bars(base);
  if (warp == 0 && Isa::elect_one()) {
    Ring<Isa, Config> ring(base);
    for (int s = 0; s < Config::kStages; ++s) {
      Isa::barrier_init(ring.full(), 1);
      Isa::barrier_init(ring.empty(), 1);
      ring.advance();
    }
    for (int a = 0; a < 2; ++a) {
      Isa::barrier_init(bars.acc_full(a), 1);
      Isa::barrier_init(bars.acc_empty(a), Config::kEpilogueWarps * kBlocks);
    }
    for (int c = 0; c < Config::kClcSlots; ++c) {
      Isa::barrier_init(bars.clc_full(c), 1);
      Isa::barrier_init(bars.clc_empty(c), Sm100Barriers<Config>::kTakers);
    }
    Isa::barrier_init_fence();
  }
  if (warp == 3) Isa::template tmem_alloc<kBlocks>(base + Config::kTmemAddressOffset, Config::kTmemColumns);
  // In a pair this also says that the peer has started and allocated, without which the address must not be used (cutlass #3316).
  Isa::warp_sync();
  Isa::fence_before_sync();
  Isa::template everyone<kBlocks>();
  Isa::fence_after_sync();
  const uint32_t tmem = Isa::load_word(base + Config::kTmemAddressOffset);

  if (warp == 0) {
    if (Isa::elect_one()) {
      Isa::prefetch_map(&batch.args.a);
      Isa::prefetch_map(&batch.args.b);
      load_operands<kKind, Isa, Config>(batch, base);
    }
  } else if (warp == 1) {
    if (Isa::template block_rank<kBlocks>() == 0 && Isa::elect_one()) issue_products<kKind, Isa, Config>(batch, base, tmem);
  } else if (warp == 2) {
    if (Config::kStealing && Isa::elect_one()) ask_for_work<Isa, Config>(batch, base);
  } else if (warp >= 4) {
    write_results<kKind, kPlain, Isa, Config>(batch, base, tmem, warp - 4);
  }

  Isa::warp_sync();  // the lanes that had no role wait for the one that had
  // All of tensor memory has been read; no block of a pair exits while the other still signals it (sglang #32907), and none
  // deallocates before the other has allocated (cutlass #3435).
  Isa::fence_before_sync();
  Isa::template everyone<kBlocks>();
  Isa::fence_after_sync();
  if (warp == 3) Isa::template tmem_dealloc<kBlocks>(tmem, Config::kTmemColumns);
}

}  // namespace moe
