// kernels_cuda/quantize_math.h over arrays, for test_mx_math.py.
#include "quantize_math.h"

extern "C" {

void scale_codes(const uint32_t* amax, uint8_t* code, int64_t n) {
  for (int64_t i = 0; i < n; ++i) code[i] = static_cast<uint8_t>(moe::mx::scale_code(amax[i]));
}

void to_e4m3(const uint32_t* bits, uint8_t* byte, int64_t n) {
  for (int64_t i = 0; i < n; ++i) byte[i] = static_cast<uint8_t>(moe::mx::to_e4m3(moe::mx::float_of(bits[i])));
}

// Rows of `width` FP32 values in blocks of 32; if `aligned`, re-based to a code per 128. One code per 32 either way.
void quantize_rows(const uint32_t* bits, uint8_t* byte, uint8_t* code, int64_t rows, int64_t width, int aligned) {
  using namespace moe::mx;
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t* x = bits + r * width;
    for (int64_t b = 0; b < width / kBlock; ++b) {
      uint32_t amax = 0;
      for (int k = 0; k < kBlock; ++k) amax = amax > (x[kBlock * b + k] & 0x7FFFFFFFu) ? amax : x[kBlock * b + k] & 0x7FFFFFFFu;
      const uint32_t s = scale_code(amax);
      code[r * (width / kBlock) + b] = static_cast<uint8_t>(s);
      for (int k = 0; k < kBlock; k += 2) {
        const int64_t at = kBlock * b + k;
        const uint32_t pair = pack_e4m3(float_of(x[at]) * reciprocal_scale(s), float_of(x[at + 1]) * reciprocal_scale(s));
        byte[r * width + at] = pair & 0xFF;
        byte[r * width + at + 1] = pair >> 8;
      }
    }
    if (!aligned) continue;
    for (int64_t b0 = 0; b0 < width / kBlock; b0 += 4) {
      const int64_t end = b0 + 4 < width / kBlock ? b0 + 4 : width / kBlock;
      uint32_t common = 0;
      for (int64_t b = b0; b < end; ++b) {
        const uint32_t s = code[r * (width / kBlock) + b];
        if (s != kPoison && s > common) common = s;
      }
      for (int64_t b = b0; b < end; ++b) {
        uint8_t& s = code[r * (width / kBlock) + b];
        const uint32_t factor = rebase_factor(s, common);
        for (int64_t at = kBlock * b; at < kBlock * (b + 1); at += 2) {
          uint8_t* q = byte + r * width + at;
          const uint32_t pair = rebase_e4m3(q[0] | static_cast<uint32_t>(q[1]) << 8, factor);
          q[0] = pair & 0xFF;
          q[1] = pair >> 8;
        }
        s = static_cast<uint8_t>(common);
      }
    }
  }
}

// The same of BF16 values by pairs, as the kernels take them: two blocks share a TwoScales, eight elements are made at once, and, if `aligned` is 2,
// two blocks have their factors in one word.
void quantize_bf16_rows(const uint16_t* bits, uint8_t* byte, uint8_t* code, int64_t rows, int64_t width, int aligned) {
  using namespace moe::mx;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t first = 0; first < width; first += kAligned) {
      uint32_t pairs[4][16] = {}, largest[4] = {};
      const int blocks = static_cast<int>((width - first < kAligned ? width - first : kAligned) / kBlock);
      for (int b = 0; b < blocks; ++b) {
        const uint16_t* x = bits + r * width + first + kBlock * b;
        for (int i = 0; i < 16; ++i) pairs[b][i] = x[2 * i] | static_cast<uint32_t>(x[2 * i + 1]) << 16;
        for (int i = 0; i < 16; i += 4) largest[b] = max_pairs(largest[b], largest_pair(pairs[b][i], pairs[b][i + 1], pairs[b][i + 2], pairs[b][i + 3]));
      }
      TwoScales scales[2];
      two_scales({larger_halves(largest[0], largest[1]), larger_halves(largest[2], largest[3])}, scales);
      const uint32_t common = raised_common(scales[0], scales[1]);
      uint32_t factors[2];
      for (int k = 0; k < 2; ++k) factors[k] = rebase_factors(scales[k].raised, raised_commons(scales[0], scales[1]));
      for (int b = 0; b < blocks; ++b) {
        code[(r * width + first) / kBlock + b] = static_cast<uint8_t>(aligned ? common - 8 : scales[b / 2].code(b % 2));
        for (int i = 0; i < 16; i += 4) {
          const uint32_t* p = &pairs[b][i];
          const uint32_t scale = scales[b / 2].scale[b % 2];
          uint32_t q[2];
          if (aligned == 2) {
            const uint32_t zeros = signed_zeros(scale);
            (b % 2 == 0 ? quantize_rebased<0> : quantize_rebased<1>)(p[0], p[1], p[2], p[3], scale, zeros, factors[b / 2], q);
          } else if (aligned) {
            quantize_eight<true>(p[0], p[1], p[2], p[3], scale, half_of(scales[b / 2].raised, b % 2), common, q);
          } else {
            quantize_eight<false>(p[0], p[1], p[2], p[3], scale, 0, 0, q);
          }
          for (int k = 0; k < 8; ++k) byte[r * width + first + kBlock * b + 2 * i + k] = static_cast<uint8_t>(q[k / 4] >> 8 * (k % 4));
        }
      }
    }
  }
}

// Every BF16 value under every pair of a block's code and a group's that differ by up to `apart`: elements rounded once against twice. Counts, of
// values that the block's code allows: all, those that differ, and those that differ though even_or_normal says that they cannot.
void rounded_once(int apart, int64_t* counts) {
  using namespace moe::mx;
  counts[0] = counts[1] = counts[2] = 0;
  for (uint32_t x = 0; x < 0x10000; ++x) {
    if ((x & 0x7FFFu) >= 0x7F80u) continue;
    const uint32_t smallest = scale_code_by_integers((x & 0x7FFFu) << 16), pair = x | x << 16;
    for (uint32_t block = smallest; block < smallest + 26 && block < 248; ++block) {
      for (uint32_t group = block; group <= block + static_cast<uint32_t>(apart) && group < 248; ++group) {
        uint32_t twice[2];
        quantize_eight<true>(pair, pair, pair, pair, reciprocal_bf16(block + 8), block + 8, group + 8, twice);
        const uint32_t once = quantize_quad(pair, pair, reciprocal_bf16(group + 8));
        const bool differ = once != twice[0], flagged = (even_or_normal(once) & 0x80808080u) != 0x80808080u && block != group;
        ++counts[0];
        counts[1] += differ;
        counts[2] += differ && !flagged;
      }
    }
  }
}

// Factors of two blocks at once against those of each, for all differences of codes: how many do not make the same elements of every E4M3 value.
int64_t factors_that_differ() {
  using namespace moe::mx;
  int64_t differ = 0;
  for (uint32_t lo = 0; lo < 248; ++lo) {
    for (uint32_t hi = 0; hi < 248; ++hi) {
      const uint32_t down[2] = {lo, hi}, factors = rebase_factors((255 - hi) << 16 | (255 - lo), 0x00FF00FFu);
      for (int k = 0; k < 2; ++k) {
        const uint32_t factor = half_of(factors, k) * 0x10001u, one = rebase_factor(255 - down[k], 255);
        if (factor == one) continue;
        for (uint32_t q = 0; q < 0x100; ++q) differ += rebase_e4m3(q, factor) != rebase_e4m3(q, one);
      }
    }
  }
  return differ;
}

void product_scales(const uint8_t* a, const uint8_t* b, uint32_t* bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) bits[i] = moe::mx::bits_of(moe::mx::product_scale(a[i], b[i]));
}

int64_t interleaved_offset(int64_t row, int64_t block, int64_t columns) { return moe::mx::interleaved_offset(row, block, columns); }
int fragment_position(int column) { return moe::mx::fragment_position(column); }

}  // extern "C"
