// The instruction layer for the FP8 products on Hopper: Sm90 and what they add to it. See sm90.cuh.
#pragma once

#include "sm90.cuh"

namespace moe {
struct Sm90Mx : Sm90 {
  // 64 x 2 kCount x 32: D = A B (kFirst) or D += A B with E4M3 operands, both K-major in shared memory; FP32 accumulators, of which the tensor
  // core keeps about 14 bits while it adds, so a caller promotes them every 128 of K.
  template <bool kFirst, int kCount>
  static MOE_FN void mma_e4m3(float (&acc)[kCount], uint64_t desc_a, uint64_t desc_b) {
    constexpr int kN = 2 * kCount;
    static_assert(kN == 32 || kN == 48 || kN == 64 || kN == 72 || kN == 80 || kN == 88 || kN == 96 || kN == 128, "no product of this width");
    if constexpr (kN == 32) sm90::wgmma_m64n32k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 48) sm90::wgmma_m64n48k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 64) sm90::wgmma_m64n64k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 72) sm90::wgmma_m64n72k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 80) sm90::wgmma_m64n80k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 88) sm90::wgmma_m64n88k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 96) sm90::wgmma_m64n96k32_e4m3<kFirst>(acc, desc_a, desc_b);
    if constexpr (kN == 128) sm90::wgmma_m64n128k32_e4m3<kFirst>(acc, desc_a, desc_b);
  }
  static MOE_FN uint32_t load_code(const uint8_t* address) { return __ldg(address); }
  // `bytes` neighbouring ones, a multiple of 16 like both addresses, counted on the barrier.
  static MOE_FN void load_bytes(const void* from, uint32_t bar, uint32_t dst, uint32_t bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(from), "r"(bytes),
                 "r"(bar)
                 : "memory");
  }
  static MOE_FN uint32_t load_shared_byte(uint32_t address) {
    uint16_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
  }
  static MOE_FN void store_short(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(value)) : "memory");
  }

  // --- from block to block of a cluster: words at the same shared address in block `rank`, arrivals that hand them over, and the wait for those ---
  static MOE_FN void store_word_cluster(uint32_t address, uint32_t rank, uint32_t x) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nst.shared::cluster.u32 [remote], %2;\n}" ::"r"(address), "r"(rank),
                 "r"(x)
                 : "memory");
  }
  static MOE_FN void barrier_release_cluster(uint32_t bar, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
        "r"(rank)
        : "memory");
  }
  static MOE_FN void barrier_acquire_cluster(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
  }
};

}  // namespace moe
