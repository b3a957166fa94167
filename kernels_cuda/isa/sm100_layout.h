// Bits and layouts of Blackwell's tensor core (tcgen05), as constexpr functions: shared-memory descriptors, instruction descriptors,
// tensor-memory addresses, the scale-factor interleave. Device code, the host emulator and the CuTe cross-check
// (tests/cuda/cute_check.cc) use the same functions; the emulator decodes with the functions at the end of this file. Plain C++17.
//
// Source: PTX ISA 9.0, "tcgen05 matrix descriptor", "instruction descriptor", "block scaling"; every encoder is compared with
// CuTe's over all supported shapes. Nothing here has run on a Blackwell GPU. Read sm100.cuh next.
#pragma once

#include "portable.h"

namespace moe::sm100 {

constexpr int kTmemLanes = 128;
constexpr int kTmemColumns = 512;   // of 32 bits
constexpr int kScaleAtomRows = 128;  // an atom: scales of 128 rows by 4 blocks of 32 columns
constexpr int kScaleAtomBytes = 512;
constexpr int kMxBlock = 32;        // elements that share a scale

// --- shared-memory descriptors ----------------------------------------------------------------------------------------------
// [0,14) address >> 4; [16,30) leading offset >> 4; [32,46) stride offset >> 4; [46,48) version, 1 here; [49,52) base offset, 0
// because every panel starts at a multiple of 1024; [52] leading offset absolute, 0; [61,64) layout. Hopper's descriptor
// has no version and a layout field of two bits with other codes (portable.h): two encoders.
enum Swizzle : uint32_t { kSwizzleNone = 0, kSwizzle128 = 2, kSwizzle64 = 4, kSwizzle32 = 6 };

MOE_HOST_FN constexpr uint64_t matrix_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  return static_cast<uint64_t>((address >> 4) & 0x3FFFu) | (static_cast<uint64_t>((leading_bytes >> 4) & 0x3FFFu) << 16) |
         (static_cast<uint64_t>((stride_bytes >> 4) & 0x3FFFu) << 32) | (static_cast<uint64_t>(1) << 46) |
         (static_cast<uint64_t>(swizzle) << 61);
}

// Operand made of 128-byte rows under the 128-byte swizzle.
// K-major: a row is one M/N index and holds `128 / element bytes` of K. Groups of 8 rows lie 1024 bytes apart; the leading offset is
// not read (CuTe writes 16, so do we).
// MN-major: a row is one K index and holds `128 / element bytes` of M/N. Groups of 8 K lie 1024 bytes apart, the next 128 bytes of
// M/N `mn_stride_bytes` (128 bytes times the K of a stage).
MOE_HOST_FN constexpr uint64_t operand_descriptor(uint32_t address, bool mn_major, uint32_t mn_stride_bytes) {
  return matrix_descriptor(address, mn_major ? mn_stride_bytes : 16, 1024, kSwizzle128);
}
// What to add to a descriptor for the next 32 bytes of K (32 E4M3 or 16 BF16 values), in units of 16 bytes.
MOE_HOST_FN constexpr uint64_t operand_k_step(bool mn_major, int element_bytes) {
  return mn_major ? static_cast<uint64_t>(32 / element_bytes) * kPanelRowBytes >> 4 : 32 >> 4;
}
// One scale atom for tcgen05.cp.32x128b: 32 rows of 16 bytes, no swizzle.
MOE_HOST_FN constexpr uint64_t scale_descriptor(uint32_t address) { return matrix_descriptor(address, 0, 128, kSwizzleNone); }

// --- instruction descriptors ------------------------------------------------------------------------------------------------
enum Format : uint32_t { kE4m3 = 0, kE5m2 = 1 };

// kind::mxf8f6f4.block_scale, scales UE8M0, FP32 accumulators. [4,6) B scale id; [7,10), [10,13) formats; [15], [16] A, B MN-major;
// [17,23) N / 8; [23] scales are UE8M0; [24,29) M / 16; [29,31) A scale id.
MOE_HOST_FN constexpr uint32_t mx_instruction(int m, int n, bool mn_major_a, bool mn_major_b, Format a = kE4m3, Format b = kE4m3) {
  return static_cast<uint32_t>(a) << 7 | static_cast<uint32_t>(b) << 10 | static_cast<uint32_t>(mn_major_a) << 15 |
         static_cast<uint32_t>(mn_major_b) << 16 | static_cast<uint32_t>(n / 8) << 17 | 1u << 23 | static_cast<uint32_t>(m / 16) << 24;
}
// A scale id is the byte of the 32-bit column that holds the scale: the K block 0..3 inside 128 of K.
MOE_HOST_FN constexpr uint32_t with_scale_ids(uint32_t instruction, int a, int b) {
  return instruction | static_cast<uint32_t>(b) << 4 | static_cast<uint32_t>(a) << 29;
}
// kind::f16 with BF16 operands and FP32 accumulators. [4,6) accumulator format, 1 = FP32; [7,10), [10,13) formats, 1 = BF16; the
// rest as above.
MOE_HOST_FN constexpr uint32_t bf16_instruction(int m, int n, bool mn_major_a, bool mn_major_b) {
  return 1u << 4 | 1u << 7 | 1u << 10 | static_cast<uint32_t>(mn_major_a) << 15 | static_cast<uint32_t>(mn_major_b) << 16 |
         static_cast<uint32_t>(n / 8) << 17 | static_cast<uint32_t>(m / 16) << 24;
}

// Shapes the tensor core takes, per pair for two blocks. M is the whole M: 128 rows in each block.
MOE_HOST_FN constexpr bool mx_shape_supported(int blocks, int m, int n) {
  return m == 128 * blocks && n % (8 * blocks) == 0 && n >= 8 * blocks && n <= 256;
}
MOE_HOST_FN constexpr bool bf16_shape_supported(int blocks, int m, int n) {
  return m == 128 * blocks && n % (16 * blocks) == 0 && n >= 16 * blocks && n <= 256;
}

// --- tensor memory ----------------------------------------------------------------------------------------------------------
MOE_HOST_FN constexpr uint32_t tmem_address(uint32_t base, uint32_t lane, uint32_t column) { return base + (lane << 16) + column; }
MOE_HOST_FN constexpr int tmem_allocation(int columns) {  // a power of two from 32 on
  int size = 32;
  while (size < columns) size *= 2;
  return size;
}

// Scale atoms in memory: mx::interleaved_offset (quantize_math.h). In tensor memory an atom is four columns: the scales of row m are in
// lane m % 32 (repeated in every quarter of the lanes), column m / 32 % 4, byte K block % 4.

// --- decoders: what the emulator reads back out of the bits -------------------------------------------------------------------
struct MatrixFields {
  uint32_t address, leading_bytes, stride_bytes, version, base_offset, leading_absolute, swizzle;
};
MOE_HOST_FN constexpr MatrixFields decode_matrix(uint64_t d) {
  return {static_cast<uint32_t>(d & 0x3FFF) << 4,       static_cast<uint32_t>(d >> 16 & 0x3FFF) << 4,
          static_cast<uint32_t>(d >> 32 & 0x3FFF) << 4, static_cast<uint32_t>(d >> 46 & 3),
          static_cast<uint32_t>(d >> 49 & 7),           static_cast<uint32_t>(d >> 52 & 1),
          static_cast<uint32_t>(d >> 61 & 7)};
}
struct InstructionFields {
  int m, n, a_format, b_format, a_scale_id, b_scale_id, accumulator;
  bool mn_major_a, mn_major_b, ue8m0, negate_a, negate_b, sparse;
};
MOE_HOST_FN constexpr InstructionFields decode_instruction(uint32_t i) {
  return {static_cast<int>(i >> 24 & 31) * 16, static_cast<int>(i >> 17 & 63) * 8, static_cast<int>(i >> 7 & 7),
          static_cast<int>(i >> 10 & 7),       static_cast<int>(i >> 29 & 3),      static_cast<int>(i >> 4 & 3),
          static_cast<int>(i >> 4 & 3),        (i >> 15 & 1) != 0,                 (i >> 16 & 1) != 0,
          (i >> 23 & 1) != 0,                  (i >> 13 & 1) != 0,                 (i >> 14 & 1) != 0,
          (i >> 2 & 1) != 0};
}

static_assert(mx_instruction(128, 256, false, false) == 0x08c00000u, "equal to CuTe's");
static_assert(with_scale_ids(mx_instruction(128, 256, false, false), 1, 3) == 0x28c00030u, "equal to CuTe's");

}  // namespace moe::sm100
