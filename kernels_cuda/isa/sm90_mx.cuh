// The instruction layer for the FP8 products on Hopper: Sm90 and what they add to it. See sm90.cuh.
#pragma once

#include "sm90.cuh"

namespace moe {
namespace sm90 {

// D = A B (kFirst) or D += A B with E4M3 operands, both K-major in shared memory; FP32 accumulators, of which the tensor core keeps
// about 14 bits while it adds, so a caller promotes them every 128 of K.
// clang-format off
template <bool kFirst>
MOE_FN void wgmma_m64n128k32_e4m3(float (&d)[64], uint64_t desc_a, uint64_t desc_b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
      "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
      "%64, %65, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(desc_a), "l"(desc_b), "r"(kFirst ? 0 : 1));
}
// clang-format on

}  // namespace sm90

struct Sm90Mx : Sm90 {
  template <bool kFirst>
  static MOE_FN void mma_e4m3(float (&acc)[64], uint64_t desc_a, uint64_t desc_b) {
    sm90::wgmma_m64n128k32_e4m3<kFirst>(acc, desc_a, desc_b);
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
};

}  // namespace moe
