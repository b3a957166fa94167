// The MXFP8 maths of shared blocks, on integers and FP32 bits: scale codes, the element cast, re-basing to a common exponent. The same
// bits as moejax/ops/mxfp8.py. Plain C++ for the host; on the device the casts are the hardware's. Read quantize.h next.
//
// A block is 32 elements. Its E8M0 code s is the smallest with 448 * 2^(s - 127) >= amax (scales round up), 255 where a NaN or an Inf
// poisons the block; an element is E4M3(x * 2^(127 - s)), nearest even. No flushing of subnormals anywhere.
#pragma once

#include <cstring>

#include "isa/portable.h"

namespace moe::mx {

constexpr int kBlock = 32;          // elements that share a scale
constexpr int kAligned = 128;       // elements that share one after re-basing (Hopper's FP8 products)
constexpr uint32_t kPoison = 255;   // scale code of a block with a NaN or an Inf
constexpr uint32_t kNanByte = 0x7F;

MOE_HOST_FN float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}
MOE_HOST_FN uint32_t bits_of(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

// The conversion of sm_100, cvt.rp.satfinite.ue8m0x2.f32: codes of the powers of two at or above two magnitudes, lo in bits 0..7. 0 gives code 0,
// Inf 254, NaN 255.
MOE_HOST_FN uint32_t round_up_to_ue8m0(float lo, float hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  uint16_t codes;
  asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
  return codes;
#else
  uint32_t codes = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = bits_of(i == 0 ? hi : lo) & 0x7FFFFFFFu, exponent = bits >> 23, mantissa = bits & 0x7FFFFFu;
    uint32_t code = exponent == 0 ? mantissa > 0x400000u : exponent + (mantissa != 0);  // subnormal 0x400000 is 2^-127, code 0
    if (code > 254) code = 254;
    codes = codes << 8 | (bits > 0x7F800000u ? kPoison : code);
  }
  return codes;
#endif
}

// E8M0 codes from the FP32 bits of the largest magnitudes of two blocks, by the product with fl32(1/448) and the conversion: the form of
// sm_100. The conversion makes 254 of Inf, so poison is read off the bits.
MOE_HOST_FN uint32_t scale_codes_by_conversion(uint32_t lo, uint32_t hi) {
  const float inverse = float_of(0x3B124925u);
  const uint32_t codes = round_up_to_ue8m0(float_of(lo) * inverse, float_of(hi) * inverse);
  return codes | (lo >= 0x7F800000u ? kPoison : 0u) | (hi >= 0x7F800000u ? kPoison << 8 : 0u);
}

// The same code in integers, the form of every other platform. 448 = 1.75 * 2^8: the exponent minus 8, one more above 1.75.
MOE_HOST_FN uint32_t scale_code_by_integers(uint32_t amax) {
  const int code = static_cast<int>((amax + 0x1FFFFFu) >> 23) - 8;  // the sum carries into the exponent above 1.75
  if (amax >= 0x7F800000u) return kPoison;
  if (amax == 0x04600001u) return 0;  // its product with fl32(1/448) rounds down to 2^-127
  return code > 0 ? static_cast<uint32_t>(code) : 0u;
}

// Codes of two blocks, lo in bits 0..7, and of one.
MOE_HOST_FN uint32_t scale_codes(uint32_t lo, uint32_t hi) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  return scale_codes_by_conversion(lo, hi);
#else
  return scale_code_by_integers(lo) | scale_code_by_integers(hi) << 8;
#endif
}
MOE_HOST_FN uint32_t scale_code(uint32_t amax) { return scale_codes(amax, 0) & 0xFFu; }

// What elements are multiplied by, 2^(127 - s); NaN for a poisoned block, which makes every element NaN.
MOE_HOST_FN float reciprocal_scale(uint32_t code) { return float_of(code == kPoison ? 0x7FFFFFFFu : (254u - code) << 23); }

// 2^(s - 127); NaN for 255.
MOE_HOST_FN float scale_value(uint32_t code) {
  return float_of(code == kPoison ? 0x7FFFFFFFu : code == 0 ? 0x00400000u : code << 23);
}

// The same for a code that is not 255, as those of re-based groups are.
MOE_HOST_FN float finite_scale_value(uint32_t code) { return float_of(code > 0 ? code << 23 : 0x00400000u); }

// 2^(a - 127) * 2^(b - 127) as one FP32 factor of a product of two blocks: subnormal where it must be, 0 below 2^-149 (which no sum of
// such a product could show unless all of its terms were as small), Inf from 2^128 on. Neither code is 255.
MOE_HOST_FN float product_scale(uint32_t a, uint32_t b) {
  const int biased = static_cast<int>(a + b) - 127;
  uint32_t bits = static_cast<uint32_t>(biased) << 23;
  if (biased <= 0) bits = biased > -23 ? 0x00400000u >> -biased : 0u;
  if (biased >= 255) bits = 0x7F800000u;
  return float_of(bits);
}

// E4M3 byte nearest to x, ties to even, saturating at 448, the sign of zero kept, NaN to 0x7F.
MOE_HOST_FN uint32_t to_e4m3(float x) {
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu, sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7F800000u) return kNanByte;
  if (magnitude >= 0x43E00000u) return sign | 0x7Eu;          // 448 and above
  if (magnitude >= (127u - 6) << 23) {                        // normal: keep three mantissa bits
    return sign | (((magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20) - ((127u - 7) << 3));
  }
  return sign | (bits_of(float_of(magnitude) + 16384.0f) - 0x46800000u);  // multiples of 2^-9: adding 2^14 rounds to them
}

MOE_HOST_FN float from_e4m3(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7Fu, sign = (byte & 0x80u) << 24;
  if (magnitude == kNanByte) return float_of(0x7FC00000u | sign);
  if (magnitude < 8) return float_of(bits_of(static_cast<float>(magnitude) * 0.001953125f) | sign);
  return float_of(((magnitude << 20) + ((127u - 7) << 23)) | sign);
}

// Two values at once: lo in bits 0..7, hi in bits 8..15.
MOE_HOST_FN uint32_t pack_e4m3(float lo, float hi) {
#ifdef __CUDA_ARCH__
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(hi), "f"(lo));
  return packed;
#else
  return to_e4m3(lo) | to_e4m3(hi) << 8;
#endif
}

// Two values in FP16, nearest even: lo in bits 0..15. On the host, of positive ones below 2.
MOE_HOST_FN uint32_t pack_f16(float lo, float hi) {
#ifdef __CUDA_ARCH__
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  return packed;
#else
  uint32_t packed = 0;
  for (int i = 0; i < 2; ++i) {
    const float x = i == 0 ? hi : lo;
    const uint32_t bits = bits_of(x);
    const uint32_t normal = ((bits + 0xFFFu + (bits >> 13 & 1u)) >> 13) - ((127u - 15) << 10);
    const uint32_t subnormal = bits_of(x + 0.5f) - 0x3F000000u;  // multiples of 2^-24: adding 2^-1 rounds to them
    packed = packed << 16 | (bits >= (127u - 14) << 23 ? normal : subnormal);
  }
  return packed;
#endif
}

// Two halves of a word, both ways. Said so, the conversions around them read and fill halves of registers.
MOE_HOST_FN void split_halves(uint32_t word, uint32_t& lo, uint32_t& hi) {
#ifdef __CUDA_ARCH__
  uint16_t a, b;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(a), "=h"(b) : "r"(word));
  lo = a;
  hi = b;
#else
  lo = word & 0xFFFFu;
  hi = word >> 16;
#endif
}
MOE_HOST_FN uint32_t join_halves(uint32_t lo, uint32_t hi) {
#ifdef __CUDA_ARCH__
  uint32_t word;
  asm("mov.b32 %0, {%1, %2};" : "=r"(word) : "h"(static_cast<uint16_t>(lo)), "h"(static_cast<uint16_t>(hi)));
  return word;
#else
  return (lo & 0xFFFFu) | hi << 16;
#endif
}
// --- packed pairs of BF16 -----------------------------------------------------------------------------------------------------------
// Magnitudes of a pair as FP32 bits: integers order NaN > Inf > finite, subnormals kept.
MOE_HOST_FN uint32_t magnitude_lo(uint32_t pair) { return (pair & 0x7FFFu) << 16; }
MOE_HOST_FN uint32_t magnitude_hi(uint32_t pair) { return pair & 0x7FFF0000u; }
MOE_HOST_FN uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// The larger and the smaller of two, by unsigned 16-bit halves. Byte i of permute_bytes is the byte that digit i of the selector names: 0..3 of a, 4..7 of b.
MOE_HOST_FN uint32_t max_pairs(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vmaxu2(a, b);
#else
  const uint32_t lo = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
  return lo | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
#endif
}
MOE_HOST_FN uint32_t min_pairs(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __vminu2(a, b);
#else
  return ~max_pairs(~a, ~b);
#endif
}
MOE_HOST_FN uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, selector);
#else
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFFu) << 8 * i;
  return result;
#endif
}
MOE_HOST_FN uint32_t half_of(uint32_t pair, int i) { return i == 0 ? pair & 0xFFFFu : pair >> 16; }

// finite_scale_value of two codes, in halves of a word, as BF16, which holds every power of two from 2^-127 on.
MOE_HOST_FN uint32_t bf16_scales(uint32_t codes) { return max_pairs(codes << 7, 0x00400040u); }

// The larger magnitudes of two pairs, as pairs, with signs that mean nothing: one instruction, where taking them off first would be three.
MOE_HOST_FN uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return max_pairs(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}
// Largest magnitudes of eight and of sixteen values, as a pair.
MOE_HOST_FN uint32_t largest_signed(const uint32_t* v) { return larger_magnitudes(larger_magnitudes(v[0], v[1]), larger_magnitudes(v[2], v[3])); }
MOE_HOST_FN uint32_t largest_pair(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return larger_magnitudes(larger_magnitudes(a, b), larger_magnitudes(c, d)) & 0x7FFF7FFFu;
}
// The larger of each half of this lane's and another's.
template <class Isa>
MOE_FN uint32_t larger_of_lanes(uint32_t pairs, uint32_t mask) {
  return max_pairs(pairs, bits_of(Isa::shuffle_xor(float_of(pairs), mask)));
}
// Of two such pairs, the larger half of each.
MOE_HOST_FN uint32_t larger_halves(uint32_t a, uint32_t b) { return max_pairs(permute_bytes(a, b, 0x5410), permute_bytes(a, b, 0x7632)); }
// Of two of largest_signed.
MOE_HOST_FN uint32_t larger_signed_halves(uint32_t a, uint32_t b) {
  return larger_magnitudes(permute_bytes(a, b, 0x5410), permute_bytes(a, b, 0x7632)) & 0x7FFF7FFFu;
}

// What scale_half adds: +0 to the lower half and -0 to the upper one, so that signs stay where they belong. Of any scale: told a constant, the compiler
// makes it again for each product.
MOE_HOST_FN uint32_t signed_zeros(uint32_t scale) {
#ifdef __CUDA_ARCH__
  uint32_t zeros;
  asm("lop3.b32 %0, %1, 1, 0x80000000, 0xEA;" : "=r"(zeros) : "r"(scale));
  return zeros;
#else
  return 0x80000000u | (scale & 1);
#endif
}
// One of two BF16 values times a power of two, as FP32. Exact, but for results below 2^-126, all of which are 0 in E4M3. `scale` is the upper half of a
// word whose lower half is 0, so that the product of pairs is the FP32 number at once.
template <int kHalf>
MOE_HOST_FN float scale_half(uint32_t pair, uint32_t scale, uint32_t zeros) {
#ifdef __CUDA_ARCH__
  uint32_t half[2], product;
  split_halves(pair, half[0], half[1]);
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(join_halves(half[kHalf], half[kHalf])), "r"(scale), "r"(zeros));
  return float_of(product);
#else
  return float_of(half_of(pair, kHalf) << 16) * float_of(scale);
#endif
}
// Four elements from two pairs of one block, all under one scale, as scale_half takes it.
MOE_HOST_FN uint32_t quantize_quad(uint32_t lo, uint32_t hi, uint32_t scale, uint32_t zeros) {
  return join_halves(pack_e4m3(scale_half<0>(lo, scale, zeros), scale_half<1>(lo, scale, zeros)),
                     pack_e4m3(scale_half<0>(hi, scale, zeros), scale_half<1>(hi, scale, zeros)));
}
MOE_HOST_FN uint32_t quantize_quad(uint32_t lo, uint32_t hi, uint32_t scale) { return quantize_quad(lo, hi, scale, signed_zeros(scale)); }

// The same of one half of each of four pairs.
template <int kHalf>
MOE_HOST_FN uint32_t quantize_halves(const uint32_t* pairs, uint32_t scale) {
  const uint32_t zeros = signed_zeros(scale);
  return join_halves(pack_e4m3(scale_half<kHalf>(pairs[0], scale, zeros), scale_half<kHalf>(pairs[1], scale, zeros)),
                     pack_e4m3(scale_half<kHalf>(pairs[2], scale, zeros), scale_half<kHalf>(pairs[3], scale, zeros)));
}

// Codes of two blocks from their largest magnitudes, in halves and raised by 8, so that they stay unsigned: scale_code_by_integers in 16 bits.
MOE_HOST_FN uint32_t raised_codes(uint32_t maxima) { return max_pairs((maxima + 0x001F001Fu) >> 7 & 0x01FF01FFu, 0x00080008u); }
// What elements are multiplied by, 2^(127 - code), for scale_half, from one code in the lower half of a word, or two.
MOE_HOST_FN uint32_t reciprocal_bf16(uint32_t raised) { return (0x0106u - raised) << 23; }
MOE_HOST_FN uint32_t upper_reciprocal_bf16(uint32_t raised) { return (0x8300FF80u - 0x80u * raised) & 0xFFFF0000u; }  // of the code in the upper half
MOE_HOST_FN uint32_t poisoned_halves(uint32_t maxima) { return (maxima + 0x00800080u) & 0x80008000u; }

// Scales of two blocks from their largest magnitudes, BF16 bits in the halves of a word. Codes are 8 above what they should be until code() gives
// them out. Made by two_scales, which asks once for all whether a block is poisoned: a branch each would keep the compiler from interleaving what
// follows.
struct TwoScales {
  uint32_t raised;    // codes + 8 in halves; 8 for a poisoned block, so that the larger of these is the common code of a group
  uint32_t poisoned;  // bits 15 and 31
  uint32_t scale[2];  // what elements are multiplied by, for scale_half

  MOE_HOST_FN void set(uint32_t maxima) {
    raised = raised_codes(maxima);
    poisoned = poisoned_halves(maxima);
    scale[0] = reciprocal_bf16(raised);
    scale[1] = upper_reciprocal_bf16(raised);
  }
  MOE_HOST_FN void poison() {
    MOE_UNROLL
    for (int k = 0; k < 2; ++k) {
      if (half_of(poisoned, k) == 0) continue;
      scale[k] = 0x7FFF0000u;
      raised = k == 0 ? (raised & 0xFFFF0000u) | 8u : (raised & 0xFFFFu) | 8u << 16;
    }
  }
  MOE_HOST_FN uint32_t code(int k) const { return half_of(poisoned, k) != 0 ? kPoison : half_of(raised, k) - 8; }
};
template <int kCount>
MOE_HOST_FN void two_scales(const uint32_t (&maxima)[kCount], TwoScales (&scales)[kCount]) {
  uint32_t poisoned = 0;
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    scales[i].set(maxima[i]);
    poisoned |= scales[i].poisoned;
  }
  if (poisoned == 0) return;
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) scales[i].poison();
}
// The common code, raised, of the four blocks of a line, in both halves.
MOE_HOST_FN uint32_t raised_commons(const TwoScales& a, const TwoScales& b) {
  const uint32_t both = max_pairs(a.raised, b.raised);
  return max_pairs(both, permute_bytes(both, both, 0x1032));
}
// The common code, raised, of the four blocks of a line.
MOE_HOST_FN uint32_t raised_common(const TwoScales& a, const TwoScales& b) {
  const uint32_t both = max_pairs(a.raised, b.raised);
  return larger(half_of(both, 0), half_of(both, 1));
}

// Two elements; the scales are reciprocal_scale of their blocks.
template <class Isa>
MOE_FN uint32_t quantize_pair(uint32_t pair, float scale_lo, float scale_hi) {
  return pack_e4m3(Isa::mul(Isa::bf16_lo(pair), scale_lo), Isa::mul(Isa::bf16_hi(pair), scale_hi));
}

// 32 neighbouring values of a row under one scale; returns the code.
template <class Isa>
MOE_FN uint32_t quantize_row(const uint32_t (&pairs)[16], uint32_t (&bytes)[8]) {
  uint32_t amax = 0;
  MOE_UNROLL
  for (int i = 0; i < 16; ++i) amax = larger(larger(amax, magnitude_lo(pairs[i])), magnitude_hi(pairs[i]));
  const uint32_t code = scale_code(amax);
  const float scale = reciprocal_scale(code);
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    bytes[i] = quantize_pair<Isa>(pairs[2 * i], scale, scale) | quantize_pair<Isa>(pairs[2 * i + 1], scale, scale) << 16;
  }
  return code;
}

// The same values with blocks along a warp's 32 rows, a row per lane: each lane's bytes of its own row; returns, in lane l, the code of
// column l.
template <class Isa>
MOE_FN uint32_t quantize_columns(const uint32_t (&pairs)[16], uint32_t (&bytes)[8]) {
  uint32_t amax[32];
  MOE_UNROLL
  for (int i = 0; i < 16; ++i) {
    amax[2 * i] = magnitude_lo(pairs[i]);
    amax[2 * i + 1] = magnitude_hi(pairs[i]);
  }
  Isa::warp_max(amax);
  const uint32_t lane = Isa::lane_index();
  uint32_t own = 0;
  MOE_UNROLL
  for (int i = 0; i < 8; ++i) {
    float scale[4];
    MOE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      const uint32_t column = static_cast<uint32_t>(4 * i + j);
      const uint32_t codes = scale_codes(amax[column], amax[column + 1]), lo = codes & 0xFFu, hi = codes >> 8;
      if (lane == column) own = lo;
      if (lane == column + 1) own = hi;
      scale[j] = reciprocal_scale(lo);
      scale[j + 1] = reciprocal_scale(hi);
    }
    bytes[i] = quantize_pair<Isa>(pairs[2 * i], scale[0], scale[1]) | quantize_pair<Isa>(pairs[2 * i + 1], scale[2], scale[3]) << 16;
  }
  return own;
}

// --- re-basing ------------------------------------------------------------------------------------------------------------------
// Factor that re-bases elements from scale code `code` to a common one not below it, 2^(code - common), as FP16 bits in both halves. Below
// 2^-24 it is 0: the largest element, 448, would round to zero from 2^-19 on. Of a poisoned block: anything, its elements stay NaN.
MOE_HOST_FN uint32_t rebase_factor(uint32_t code, uint32_t common) {
  const int down = static_cast<int>(common) - static_cast<int>(code);
#ifdef __CUDA_ARCH__
  uint32_t factor;
  const float power = __uint_as_float(static_cast<uint32_t>(127 - min(down, 126)) << 23);
  asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(factor) : "f"(power));
  return factor;
#else
  const uint32_t half = down <= 14 ? static_cast<uint32_t>(15 - down) << 10 & 0x7C00u : down <= 24 ? 1u << (24 - down) : 0u;
  return half | half << 16;
#endif
}

// Those of two blocks, from codes in the halves of words, in halves. Instead of 0 it may be 2^-24 for a block 25 codes below: as good, all its elements
// become zeros.
MOE_HOST_FN uint32_t rebase_factors(uint32_t codes, uint32_t commons) {
  const uint32_t down = min_pairs(commons - codes, 0x001F001Fu);
  // The lower half leaves up to 31 << 7 in the upper one's number, which is less than half of FP16's last place.
  return pack_f16(float_of(0x3F800000u - (down << 23)), float_of(0x3F800F80u - 0x80u * down));
}

// Two elements re-based: E4M3(q * factor), nearest even. FP16 holds every product exactly that does not round to zero.
MOE_HOST_FN uint32_t rebase_e4m3(uint32_t pair, uint32_t factor) {
#ifdef __CUDA_ARCH__
  uint32_t wide, product;
  uint16_t packed;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(wide) : "h"(static_cast<uint16_t>(pair)));
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(wide), "r"(factor));
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(packed) : "r"(product));
  return packed;
#else
  const uint32_t half = factor & 0xFFFFu;
  const float scale = half >= 0x400u ? float_of(((half >> 10) + 112u) << 23) : static_cast<float>(half) * 5.9604644775390625e-8f;
  return to_e4m3(from_e4m3(pair & 0xFFu) * scale) | to_e4m3(from_e4m3(pair >> 8 & 0xFFu) * scale) << 8;
#endif
}

MOE_HOST_FN uint32_t rebase_quad(uint32_t bytes, uint32_t factor) {
  uint32_t lo, hi;
  split_halves(bytes, lo, hi);
  return join_halves(rebase_e4m3(lo, factor), rebase_e4m3(hi, factor));
}

// Eight elements from four pairs; `raised` is the block's of TwoScales and `common` the largest of its group.
template <bool kRebase>
MOE_HOST_FN void quantize_eight(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t scale, uint32_t raised, uint32_t common, uint32_t (&bytes)[2]) {
  bytes[0] = quantize_quad(a, b, scale);
  bytes[1] = quantize_quad(c, d, scale);
  if (kRebase) {
    const uint32_t factor = rebase_factor(raised, common);  // of a difference
    bytes[0] = rebase_quad(bytes[0], factor);
    bytes[1] = rebase_quad(bytes[1], factor);
  }
}

// The same, always re-based, under the factor in half kHalf of rebase_factors.
template <int kHalf>
MOE_HOST_FN void quantize_rebased(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t scale, uint32_t zeros, uint32_t factors, uint32_t (&bytes)[2]) {
  uint32_t half[2];
  split_halves(factors, half[0], half[1]);
  const uint32_t factor = join_halves(half[kHalf], half[kHalf]);
  bytes[0] = rebase_quad(quantize_quad(a, b, scale, zeros), factor);
  bytes[1] = rebase_quad(quantize_quad(c, d, scale, zeros), factor);
}

// Re-based elements are rounded twice by definition, to their block's scale and to the group's. Rounded once, to the group's, they have the same
// bits, but for odd multiples of 2^-9 below 2^-6 where the block's code is not the group's:
// * From 2^-6 on both steps are four significant bits, and the second changes nothing.
// * Below, the second step is 2^-9, and whatever lies halfway between two results is a number of the first step, which is finer by 2 at least and
//   has four significant bits at least. So the first rounding never goes past such a place but may stop there, and the second then goes to the even
//   neighbour. That differs from the nearest one only where this is odd.
// Bits 7, 15, 23 and 31 are 1 unless the byte is such an odd multiple.
MOE_HOST_FN uint32_t even_or_normal(uint32_t bytes) {
  uint32_t odd;  // 0 where it is odd and small
#ifdef __CUDA_ARCH__
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(odd) : "r"(bytes), "r"(0x79797979u), "r"(0x01010101u));  // two constants: one instruction, not two
#else
  odd = (bytes & 0x79797979u) ^ 0x01010101u;
#endif
  return odd + 0x7F7F7F7Fu;
}

// Where the scale of row m and block kb lies in the layout tcgen05 reads: atoms of 128 rows x 4 blocks, 512 bytes each, along K first.
MOE_HOST_FN int64_t interleaved_offset(int64_t row, int64_t block, int64_t columns) {
  const int64_t atoms = (columns + 127) / 128;
  return ((row / 128) * atoms + block / 4) * 512 + (row % 32) * 16 + (row % 128 / 32) * 4 + block % 4;
}

// Order of the codes of 128 neighbouring output columns in which a lane of a warpgroup product finds its own 32 side by side: the
// accumulators of lane l are columns 8 j + 2 (l % 4) + i (PTX ISA, wgmma D fragments).
MOE_HOST_FN constexpr int fragment_position(int column) { return column % 8 / 2 * 32 + column / 8 * 2 + column % 2; }

// Of 64 neighbouring rows, where they are the columns of a product (tokens on the N side): as fragment_position, 16 for each lane of a quad.
MOE_HOST_FN constexpr int lane_position(int row) { return row % 8 / 2 * 16 + row / 8 * 2 + row % 2; }

}  // namespace moe::mx
