// The instruction layer for Blackwell (sm_100f): what Hopper has (identity, mbarriers, bulk copies, ordinary memory, arithmetic; sm90.cuh)
// and tcgen05: tensor memory, scale copies, products, commits, fences, and Cluster Launch Control. Inline PTX, no state; the host twin
// is host/sm100_host.h. Compiled by nvcc 13.0; never run, for want of a Blackwell GPU.
//
// kBlocks is 1 or 2: every tcgen05 instruction of a kernel must carry the same cta_group.
#pragma once

#include "sm100_layout.h"
#include "sm90.cuh"

namespace moe {

struct Sm100 : Sm90 {
  // --- who am I ------------------------------------------------------------------------------------------------------------
  template <int kBlocks>
  static MOE_FN uint32_t block_rank() {
    return kBlocks == 1 ? 0u : Sm90::cluster_rank();
  }
  template <int kBlocks>
  static MOE_FN uint32_t cluster_id() {
    return blockIdx.x / kBlocks;
  }
  template <int kBlocks>
  static MOE_FN uint32_t cluster_count() {
    return gridDim.x / kBlocks;
  }

  // --- barriers ------------------------------------------------------------------------------------------------------------
  // All threads of the cluster. Orders ordinary memory, not tensor memory: put the two fences below around it.
  template <int kBlocks>
  static MOE_FN void everyone() {
    if constexpr (kBlocks == 1) {
      asm volatile("barrier.sync 0;" ::: "memory");
    } else {
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  }
  // One arrival on the leader's barrier at this address. With cluster scope: a `.cta` arrival of the peer gave wrong results and launch
  // failures (cutlass #3643, #3647).
  template <int kBlocks>
  static MOE_FN void arrive_leader(uint32_t bar) {
    if constexpr (kBlocks == 1) {
      Sm90::barrier_arrive(bar);
    } else {
      asm volatile(
          "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, 0;\n"
          "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(bar)
          : "memory");
    }
  }
  // Waits for arrivals that may come from the peer.
  template <int kBlocks>
  static MOE_FN void wait_cluster(uint32_t bar, uint32_t parity) {
    if constexpr (kBlocks == 1) {
      Sm90::barrier_wait(bar, parity);
    } else {
      asm volatile(
          "{\n.reg .pred done;\nWAIT:\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
          "r"(parity)
          : "memory");
    }
  }

  // --- bulk tensor copies: the box is the tensor map's -----------------------------------------------------------------------
  // With two blocks the bytes are counted on the leader's barrier, whose address is this block's with the rank bit cleared.
  template <int kBlocks>
  static MOE_FN void load_box(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    if constexpr (kBlocks == 1) {
      Sm90::load_panel(map, bar, dst, c0, c1, c2, c3);
    } else {
      asm volatile(
          "cp.async.bulk.tensor.4d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
              dst),
          "l"(map), "r"(bar & 0xFEFFFFFFu), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
          : "memory");
    }
  }
  static MOE_FN void store_box(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
    Sm90::store_panel(map, src, c0, c1, c2, c3);
  }

  // --- tensor memory -------------------------------------------------------------------------------------------------------
  // One whole warp of each block; the address is written to shared memory.
  template <int kBlocks>
  static MOE_FN void tmem_alloc(uint32_t result, uint32_t columns) {
    if constexpr (kBlocks == 1) {
      asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns) : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    } else {
      asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(result), "r"(columns) : "memory");
      asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
  }
  template <int kBlocks>
  static MOE_FN void tmem_dealloc(uint32_t address, uint32_t columns) {
    if constexpr (kBlocks == 1) {
      asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    } else {
      asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "r"(columns) : "memory");
    }
  }
  // 32 columns of this warp's 32 lanes, a row per thread. The registers hold the values after tmem_wait_load.
  static MOE_FN void tmem_load(uint32_t address, uint32_t (&r)[32]) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8]), "=r"(r[9]),
          "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15]), "=r"(r[16]), "=r"(r[17]), "=r"(r[18]),
          "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23]), "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]),
          "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
        : "r"(address)
        : "memory");
  }
  // The registers are operands, so that no use of them moves above the wait.
  static MOE_FN void tmem_wait_load(uint32_t (&r)[32]) {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
    MOE_UNROLL
    for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(r[i]));
  }
  static MOE_FN void fence_before_sync() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
  static MOE_FN void fence_after_sync() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }

  // --- tensor cores: one thread of the leading block issues, everything stays in order -----------------------------------------
  template <int kBlocks>
  static MOE_FN void copy_scales(uint32_t tmem, uint64_t descriptor) {
    if constexpr (kBlocks == 1) {
      asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(descriptor) : "memory");
    } else {
      asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(tmem), "l"(descriptor) : "memory");
    }
  }
  template <int kBlocks>
  static MOE_FN void mma_mx(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a, uint32_t scale_b, bool accumulate) {
    if constexpr (kBlocks == 1) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
          "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%5], [%6], p;\n}" ::"r"(d),
          "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate)), "r"(scale_a), "r"(scale_b)
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\n"
          "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%5], [%6], p;\n}" ::"r"(d),
          "l"(a), "l"(b), "r"(instruction), "r"(static_cast<uint32_t>(accumulate)), "r"(scale_a), "r"(scale_b)
          : "memory");
    }
  }
  template <int kBlocks>
  static MOE_FN void mma_bf16(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, bool accumulate) {
    if constexpr (kBlocks == 1) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d), "l"(a), "l"(b),
          "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
          : "memory");
    } else {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(d), "l"(a), "l"(b),
          "r"(instruction), "r"(static_cast<uint32_t>(accumulate))
          : "memory");
    }
  }
  // One arrival on the barrier at this address, in both blocks of a pair, when all that was issued before has completed. Implies
  // fence_before_sync.
  template <int kBlocks>
  static MOE_FN void commit(uint32_t bar) {
    if constexpr (kBlocks == 1) {
      asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
    } else {
      asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(bar),
                   "h"(static_cast<uint16_t>(3))
                   : "memory");
    }
  }

  // --- Cluster Launch Control ------------------------------------------------------------------------------------------------
  // Asks for a cluster of this grid that has not started. 16 bytes arrive at the same address, and are counted on the same barrier, in
  // every block of the cluster.
  template <int kBlocks>
  static MOE_FN void steal(uint32_t response, uint32_t bar) {
    if constexpr (kBlocks == 1) {
      asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(response),
                   "r"(bar)
                   : "memory");
    } else {
      asm volatile(
          "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%0], [%1];" ::"r"(
              response),
          "r"(bar)
          : "memory");
    }
  }
  // Whether the request was granted, and the first block of the cluster that is ours now.
  static MOE_FN bool stolen(uint32_t response, uint32_t& first_block) {
    uint32_t granted;
    asm volatile(
        "{\n.reg .pred p;\n.reg .b128 answer;\nld.shared.b128 answer, [%2];\n"
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, answer;\nselp.u32 %0, 1, 0, p;\nmov.b32 %1, 0;\n"
        "@p clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, answer;\n}"
        : "=r"(granted), "=r"(first_block)
        : "r"(response)
        : "memory");
    return granted != 0;
  }

  // --- memory and arithmetic ---------------------------------------------------------------------------------------------------
  static MOE_FN uint32_t load_word(uint32_t address) {
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
  }
  static MOE_FN void store_words(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  }
  // 32 bytes of global memory, one sector.
  static MOE_FN void store_sector(void* address, const uint32_t (&v)[8]) {
    asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]),
                 "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7])
                 : "memory");
  }
  static MOE_FN void load_sector(const void* address, uint32_t (&v)[8]) {
    asm volatile("ld.global.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
                 : "l"(address)
                 : "memory");
  }
  // 16 bytes of global memory.
  static MOE_FN void load_chunk(const void* address, uint32_t* v) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "l"(address) : "memory");
  }
  // Every value becomes the largest of the warp's 32.
  static MOE_FN void warp_max(uint32_t (&v)[32]) {
    MOE_UNROLL
    for (int i = 0; i < 32; ++i) v[i] = __reduce_max_sync(0xffffffffu, v[i]);
  }
};

}  // namespace moe
