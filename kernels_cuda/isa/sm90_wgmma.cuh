// The warpgroup products, D += A B with FP32 accumulators in registers and both operands in shared memory. Inline PTX needs every register
// by name, so the widths are made of groups of eight by one macro a type. kTransA/kTransB: 1 when the operand is MN-major.
// Included by sm90.cuh alone.
#pragma once

#include "portable.h"

namespace moe::sm90 {

// clang-format off
#define MOE_NAMES_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define MOE_NAMES_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define MOE_NAMES_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define MOE_NAMES_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define MOE_NAMES_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define MOE_NAMES_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define MOE_NAMES_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define MOE_NAMES_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define MOE_NAMES_8 "%64,%65,%66,%67,%68,%69,%70,%71"
#define MOE_NAMES_9 "%72,%73,%74,%75,%76,%77,%78,%79"
#define MOE_NAMES_10 "%80,%81,%82,%83,%84,%85,%86,%87"
#define MOE_NAMES_11 "%88,%89,%90,%91,%92,%93,%94,%95"
#define MOE_NAMES_12 "%96,%97,%98,%99,%100,%101,%102,%103"
#define MOE_NAMES_13 "%104,%105,%106,%107,%108,%109,%110,%111"
#define MOE_NAMES_14 "%112,%113,%114,%115,%116,%117,%118,%119"
#define MOE_NAMES_15 "%120,%121,%122,%123,%124,%125,%126,%127"
#define MOE_REGS_0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MOE_REGS_1 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MOE_REGS_2 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MOE_REGS_3 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MOE_REGS_4 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MOE_REGS_5 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MOE_REGS_6 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MOE_REGS_7 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MOE_REGS_8 "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MOE_REGS_9 "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MOE_REGS_10 "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define MOE_REGS_11 "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define MOE_REGS_12 "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define MOE_REGS_13 "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define MOE_REGS_14 "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define MOE_REGS_15 "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define MOE_NAMES_TO_2 MOE_NAMES_0 "," MOE_NAMES_1
#define MOE_NAMES_TO_3 MOE_NAMES_TO_2 "," MOE_NAMES_2
#define MOE_NAMES_TO_4 MOE_NAMES_0 "," MOE_NAMES_1 "," MOE_NAMES_2 "," MOE_NAMES_3
#define MOE_NAMES_TO_4_HALF MOE_NAMES_TO_4 ",%32,%33,%34,%35"
#define MOE_NAMES_TO_5 MOE_NAMES_TO_4 "," MOE_NAMES_4
#define MOE_NAMES_TO_5_HALF MOE_NAMES_TO_5 ",%40,%41,%42,%43"
#define MOE_NAMES_TO_6 MOE_NAMES_TO_4 "," MOE_NAMES_4 "," MOE_NAMES_5
#define MOE_NAMES_TO_8 MOE_NAMES_TO_6 "," MOE_NAMES_6 "," MOE_NAMES_7
#define MOE_NAMES_TO_9 MOE_NAMES_TO_8 "," MOE_NAMES_8
#define MOE_NAMES_TO_10 MOE_NAMES_TO_8 "," MOE_NAMES_8 "," MOE_NAMES_9
#define MOE_NAMES_TO_11 MOE_NAMES_TO_10 "," MOE_NAMES_10
#define MOE_NAMES_TO_12 MOE_NAMES_TO_10 "," MOE_NAMES_10 "," MOE_NAMES_11
#define MOE_NAMES_TO_16 MOE_NAMES_TO_12 "," MOE_NAMES_12 "," MOE_NAMES_13 "," MOE_NAMES_14 "," MOE_NAMES_15
#define MOE_REGS_TO_2 MOE_REGS_0, MOE_REGS_1
#define MOE_REGS_TO_3 MOE_REGS_TO_2, MOE_REGS_2
#define MOE_REGS_TO_4 MOE_REGS_0, MOE_REGS_1, MOE_REGS_2, MOE_REGS_3
#define MOE_REGS_TO_4_HALF MOE_REGS_TO_4, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define MOE_REGS_TO_5 MOE_REGS_TO_4, MOE_REGS_4
#define MOE_REGS_TO_5_HALF MOE_REGS_TO_5, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define MOE_REGS_TO_6 MOE_REGS_TO_4, MOE_REGS_4, MOE_REGS_5
#define MOE_REGS_TO_8 MOE_REGS_TO_6, MOE_REGS_6, MOE_REGS_7
#define MOE_REGS_TO_9 MOE_REGS_TO_8, MOE_REGS_8
#define MOE_REGS_TO_10 MOE_REGS_TO_8, MOE_REGS_8, MOE_REGS_9
#define MOE_REGS_TO_11 MOE_REGS_TO_10, MOE_REGS_10
#define MOE_REGS_TO_12 MOE_REGS_TO_10, MOE_REGS_10, MOE_REGS_11
#define MOE_REGS_TO_16 MOE_REGS_TO_12, MOE_REGS_12, MOE_REGS_13, MOE_REGS_14, MOE_REGS_15

// N columns take N / 2 registers, so the descriptors and flags are operands N / 2 and on.
#define MOE_WGMMA(N, GROUPS, A, B, TRANS_A, TRANS_B)                                                                  \
  template <int kTransA, int kTransB, int kCount>                                                                     \
  MOE_FN void wgmma_m64n##N##k16(float (&d)[kCount], uint64_t desc_a, uint64_t desc_b) {                              \
    static_assert(2 * kCount >= N, "too few accumulators");                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOE_NAMES_TO_##GROUPS "}, %" #A ", %" #B \
                 ", 1, 1, 1, %" #TRANS_A ", %" #TRANS_B ";"                                                           \
                 : MOE_REGS_TO_##GROUPS                                                                               \
                 : "l"(desc_a), "l"(desc_b), "n"(kTransA), "n"(kTransB));                                             \
  }
MOE_WGMMA(64, 4, 32, 33, 34, 35)
MOE_WGMMA(96, 6, 48, 49, 50, 51)
MOE_WGMMA(128, 8, 64, 65, 66, 67)
MOE_WGMMA(144, 9, 72, 73, 74, 75)
MOE_WGMMA(160, 10, 80, 81, 82, 83)
MOE_WGMMA(176, 11, 88, 89, 90, 91)
MOE_WGMMA(192, 12, 96, 97, 98, 99)
MOE_WGMMA(256, 16, 128, 129, 130, 131)

// Operand A in registers: of 64 x 16, lane l of warp w has rows 16 w + l / 4 and 8 below, columns 2 (l % 4) and the next, then those 8 on.
#define MOE_WGMMA_REGISTERS(N, GROUPS, A0, A1, A2, A3, B, TRANS_B)                                                     \
  template <int kTransB, int kCount>                                                                                  \
  MOE_FN void wgmma_m64n##N##k16_registers(float (&d)[kCount], const uint32_t (&a)[4], uint64_t desc_b) {             \
    static_assert(2 * kCount >= N, "too few accumulators");                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MOE_NAMES_TO_##GROUPS "}, {%" #A0 ",%" #A1 \
                 ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1, %" #TRANS_B ";"                                               \
                 : MOE_REGS_TO_##GROUPS                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b), "n"(kTransB));                            \
  }
MOE_WGMMA_REGISTERS(128, 8, 64, 65, 66, 67, 68, 69)

// E4M3 operands, which are K-major: D = A B (kFirst) or D += A B.
#define MOE_WGMMA_E4M3(N, GROUPS, A, B, ADDS)                                                                       \
  template <bool kFirst>                                                                                            \
  MOE_FN void wgmma_m64n##N##k32_e4m3(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b) {                        \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADDS ", 0;\n"                                               \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" MOE_NAMES_TO_##GROUPS "}, %" #A ", %" #B \
                 ", p, 1, 1;\n}"                                                                                    \
                 : MOE_REGS_TO_##GROUPS                                                                             \
                 : "l"(desc_a), "l"(desc_b), "r"(kFirst ? 0 : 1));                                                  \
  }
MOE_WGMMA_E4M3(32, 2, 16, 17, 18)
MOE_WGMMA_E4M3(48, 3, 24, 25, 26)
MOE_WGMMA_E4M3(64, 4, 32, 33, 34)
MOE_WGMMA_E4M3(72, 4_HALF, 36, 37, 38)
MOE_WGMMA_E4M3(80, 5, 40, 41, 42)
MOE_WGMMA_E4M3(88, 5_HALF, 44, 45, 46)
MOE_WGMMA_E4M3(96, 6, 48, 49, 50)
MOE_WGMMA_E4M3(128, 8, 64, 65, 66)

#undef MOE_WGMMA
#undef MOE_WGMMA_REGISTERS
#undef MOE_WGMMA_E4M3
#undef MOE_NAMES_0
#undef MOE_NAMES_1
#undef MOE_NAMES_2
#undef MOE_NAMES_3
#undef MOE_NAMES_4
#undef MOE_NAMES_5
#undef MOE_NAMES_6
#undef MOE_NAMES_7
#undef MOE_NAMES_8
#undef MOE_NAMES_9
#undef MOE_NAMES_10
#undef MOE_NAMES_11
#undef MOE_NAMES_12
#undef MOE_NAMES_13
#undef MOE_NAMES_14
#undef MOE_NAMES_15
#undef MOE_NAMES_TO_2
#undef MOE_NAMES_TO_3
#undef MOE_NAMES_TO_4
#undef MOE_NAMES_TO_5
#undef MOE_NAMES_TO_6
#undef MOE_NAMES_TO_8
#undef MOE_NAMES_TO_9
#undef MOE_NAMES_TO_10
#undef MOE_NAMES_TO_11
#undef MOE_NAMES_TO_12
#undef MOE_NAMES_TO_16
#undef MOE_REGS_0
#undef MOE_REGS_1
#undef MOE_REGS_2
#undef MOE_REGS_3
#undef MOE_REGS_4
#undef MOE_REGS_5
#undef MOE_REGS_6
#undef MOE_REGS_7
#undef MOE_REGS_8
#undef MOE_REGS_9
#undef MOE_REGS_10
#undef MOE_REGS_11
#undef MOE_REGS_12
#undef MOE_REGS_13
#undef MOE_REGS_14
#undef MOE_REGS_15
#undef MOE_REGS_TO_2
#undef MOE_REGS_TO_3
#undef MOE_REGS_TO_4
#undef MOE_REGS_TO_5
#undef MOE_REGS_TO_6
#undef MOE_REGS_TO_8
#undef MOE_REGS_TO_9
#undef MOE_REGS_TO_10
#undef MOE_REGS_TO_11
#undef MOE_REGS_TO_12
#undef MOE_REGS_TO_16
// clang-format on

}  // namespace moe::sm90
