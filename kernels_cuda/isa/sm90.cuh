// The instruction layer for Hopper (sm_90a): one static function per operation, inline PTX, no state. Tile programs are templates
// over this struct, so a host implementation with the same members can run them. Shared memory is a 32-bit address throughout.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>

#include "portable.h"
#include "sm90_wgmma.cuh"

namespace moe {

struct Sm90 {
  using TensorMap = CUtensorMap;

  // --- who am I ------------------------------------------------------------------------------------------------------------
  static MOE_FN uint32_t thread_index() { return threadIdx.x; }
  static MOE_FN uint32_t warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }  // the shuffle makes it uniform
  static MOE_FN uint32_t lane_index() { return threadIdx.x % 32; }
  static MOE_FN uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
  }
  static MOE_FN uint32_t cluster_index() { return blockIdx.x / 2; }
  static MOE_FN uint32_t num_clusters() { return gridDim.x / 2; }
  static MOE_FN uint32_t shared_base() {
    extern __shared__ __align__(1024) uint8_t smem[];
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  }
  static MOE_FN bool elect_one() {
    uint32_t elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
  }

  // --- barriers ------------------------------------------------------------------------------------------------------------
  static MOE_FN void barrier_init(uint32_t bar, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
  }
  static MOE_FN void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  static MOE_FN void barrier_expect_bytes(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
  }
  static MOE_FN void barrier_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
  }
  // Arrives `count` times on the barrier at the same shared address in block `rank` of the cluster. What it hands back was only
  // read (by the tensor cores or ldmatrix, both complete), so the default semantics do; `.release.cluster` would put a
  // MEMBAR.GPU into the main loop.
  static MOE_FN void barrier_arrive_cluster(uint32_t bar, uint32_t rank, uint32_t count) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote], %2;\n}" ::"r"(bar),
        "r"(rank), "r"(count)
        : "memory");
  }
  static MOE_FN void barrier_wait(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
  }
  // Whether such a wait would end at once, and then that wait.
  static MOE_FN bool barrier_passed(uint32_t bar, uint32_t parity) {
    uint32_t passed;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
                 : "=r"(passed)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return passed != 0;
  }
  static MOE_FN void warp_sync() { __syncwarp(); }
  // The same value, but what depends on it is not computed before this point, and so not kept in registers up to here.
  static MOE_FN uint32_t not_before(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
  }
  // Until the card's clock, in nanoseconds, next passes a multiple of 2^kShift: at the same time on all SMs. Where that clock has a coarser step, for
  // as long as it takes at 2 GHz.
  template <int kShift>
  static MOE_FN void wait_tick() {
    auto tick = [] {
      uint32_t nanoseconds;
      asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds)::"memory");
      return nanoseconds >> kShift;
    };
    const uint32_t now = tick(), begin = clock();
    while (tick() == now && static_cast<uint32_t>(clock()) - begin < 2u << kShift) {
    }
  }
  template <class T>
  static MOE_FN T* not_before(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
  }
  static MOE_FN bool any(bool condition) { return __any_sync(0xffffffffu, condition); }
  static MOE_FN void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  }

  // --- bulk tensor copies: coordinates are (inner, outer, half, expert), innermost first ------------------------------------
  static MOE_FN void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  }
  // kOnce: it leaves L2 before what others read too (the policy is what createpolicy.fractional.L2::evict_first gives).
  template <bool kOnce = false>
  static MOE_FN void load_panel(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    if constexpr (kOnce) {
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
          "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
          "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(0x12F0000000000000ull)
          : "memory");
      return;
    }
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
  }
  // 32 rows of gate and the same of up, eight of each in turn (encode_joint_map).
  static MOE_FN void load_joint_panel(const TensorMap* map, uint32_t bar, uint32_t dst, int k, int row, int expert) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, 0, 0, %4, %5}], [%2];" ::"r"(dst),
        "l"(map), "r"(bar), "r"(k), "r"(row / 8), "r"(expert)
        : "memory");
  }
  // The same panel lands at the same shared address, and is counted on the same barrier, in both blocks of the cluster. kKeep: L2 is asked
  // to keep it, since others read it too (the policy is what createpolicy.fractional.L2::evict_last gives).
  template <bool kKeep = false>
  static MOE_FN void load_panel_both(const TensorMap* map, uint32_t bar, uint32_t dst, int c0, int c1, int c2, int c3) {
    if constexpr (kKeep) {
      asm volatile(
          "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
          "[%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
          "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(3)), "l"(0x14F0000000000000ull)
          : "memory");
      return;
    }
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<uint16_t>(3))
        : "memory");
  }
  static MOE_FN void store_panel(const TensorMap* map, uint32_t src, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(src), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
  }
  // `bytes` neighbouring ones, a multiple of 16 like both addresses. The first to leave L2, as with kOnce: nobody reads them soon.
  static MOE_FN void store_bytes_once(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(to), "r"(from), "r"(bytes),
                 "l"(0x12F0000000000000ull)
                 : "memory");
  }
  static MOE_FN void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
  template <int kPending>
  static MOE_FN void store_wait_read() {  // shared memory of all but the newest kPending groups may be overwritten
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
  }
  static MOE_FN void store_wait_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }  // writes are visible
  static MOE_FN void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
  static MOE_FN void fence_async_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

  // --- gathers: 16 bytes by each lane, past the copy engine. The writes are of the generic proxy: whoever waits on the barrier needs
  // fence_async_shared() before the tensor cores read them.
  static MOE_FN void gather_vector(uint32_t dst, const uint8_t* src, uint32_t bytes) {  // 16 bytes land, those past `bytes` zero
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
  }
  static MOE_FN void gather_arrive(uint32_t bar) {  // one arrival, once all gathers of this lane have landed
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
  }

  static MOE_FN void gather_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // until this lane's gathers have landed

  // --- tensor cores --------------------------------------------------------------------------------------------------------
  static MOE_FN void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  static MOE_FN void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  template <int kPending>
  static MOE_FN void mma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  }
  // 64 x kN x 16, in the first kN / 2 of the accumulators.
  template <int kN, bool kMnMajorA, bool kMnMajorB, int kCount>
  static MOE_FN void mma(float (&acc)[kCount], uint64_t desc_a, uint64_t desc_b) {
    static_assert(kN == 64 || kN == 96 || kN == 128 || kN == 144 || kN == 160 || kN == 176 || kN == 192 || kN == 256, "no product of this width");
    if constexpr (kN == 64) sm90::wgmma_m64n64k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 96) sm90::wgmma_m64n96k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 128) sm90::wgmma_m64n128k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 144) sm90::wgmma_m64n144k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 176) sm90::wgmma_m64n176k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 160) sm90::wgmma_m64n160k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 192) sm90::wgmma_m64n192k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
    if constexpr (kN == 256) sm90::wgmma_m64n256k16<kMnMajorA, kMnMajorB>(acc, desc_a, desc_b);
  }
  // The same of 128 columns with operand A in registers (sm90_wgmma.cuh says which lane has what), which must stay as they are until the product
  // is waited for.
  template <bool kMnMajorB, int kCount>
  static MOE_FN void mma_registers(float (&acc)[kCount], const uint32_t (&a)[4], uint64_t desc_b) {
    sm90::wgmma_m64n128k16_registers<kMnMajorB>(acc, a, desc_b);
  }
  template <int kRegisters>
  static MOE_FN void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }
  template <int kRegisters>
  static MOE_FN void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
  }

  // --- shared memory -------------------------------------------------------------------------------------------------------
  // Four 8x8 matrices of 16-bit values; lane l gives the row address of matrix l / 8, row l % 8.
  static MOE_FN void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
  }
  // The same with every matrix transposed: register pairs are two columns of one row, and a lane gives the address of a column.
  static MOE_FN void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                 "r"(r[3])
                 : "memory");
  }
  static MOE_FN void load_matrices(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
  // The same with every matrix transposed: lane 4 i + j gets rows 2 j and 2 j + 1 of column i.
  static MOE_FN void load_matrices_transposed(uint32_t address, uint32_t (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
  static MOE_FN void store_float2(uint32_t address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
  }
  static MOE_FN void load_float2(uint32_t address, float& a, float& b) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(address) : "memory");
  }

  static MOE_FN void store_float(uint32_t address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory"); }
  static MOE_FN void store_word(uint32_t address, uint32_t x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
  static MOE_FN uint32_t load_word(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
  }

  using Vector = uint4;
  static MOE_FN Vector load_vector(uint32_t address) {
    Vector v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
  }

  // --- global memory, flags ------------------------------------------------------------------------------------------------
  static MOE_FN Vector load_global_vector(const void* address) { return __ldg(static_cast<const Vector*>(address)); }
  static MOE_FN void store_vector(void* address, const Vector& v) { *static_cast<Vector*>(address) = v; }
  template <bool kStream>  // a line that is written and not read soon is the first to leave L2
  static MOE_FN void store_float4(float* address, float a, float b, float c, float d) {
    const float4 v = make_float4(a, b, c, d);
    if constexpr (kStream) {
      __stcs(reinterpret_cast<float4*>(address), v);
    } else {
      *reinterpret_cast<float4*>(address) = v;
    }
  }
  static MOE_FN int load_acquire(const int* address) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
  }
  static MOE_FN void add_release(int* address, int value) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
  }

  // --- arithmetic ----------------------------------------------------------------------------------------------------------
  // Two floats to packed BF16, round to nearest even; `lo` in the low half.
  static MOE_FN uint32_t pack_bf16(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
  }
  static MOE_FN float bf16_lo(uint32_t packed) { return __uint_as_float(packed << 16); }
  static MOE_FN float bf16_hi(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
  static MOE_FN float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  static MOE_FN float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // condition ? a : b in a new register. Left to the compiler, a select on accumulators becomes a move over one of them, and the
  // allocator then shuffles all accumulators around inside the product loop.
  static MOE_FN float select(uint32_t condition, float a, float b) {
    float y;
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\nselp.f32 %0, %1, %2, p;\n}" : "=f"(y) : "f"(a), "f"(b), "r"(condition));
    return y;
  }
  static MOE_FN float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static MOE_FN float mul(float a, float b) { return __fmul_rn(a, b); }
  static MOE_FN float add(float a, float b) { return __fadd_rn(a, b); }
  static MOE_FN int shuffle(int x, uint32_t from) { return __shfl_sync(0xffffffffu, x, from); }
  static MOE_FN float shuffle_xor(float x, uint32_t mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
};

}  // namespace moe
