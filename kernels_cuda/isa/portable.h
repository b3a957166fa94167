// Portable helpers shared by every implementation of the instruction layer: function markers, BF16 bits, shared-memory
// descriptors and swizzles. Plain C++17: compiles with g++ and without CUDA headers. Read sm90.cuh next.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MOE_FN __device__ __forceinline__
#define MOE_HOST_FN __host__ __device__ __forceinline__
#define MOE_UNROLL _Pragma("unroll")
#define MOE_NO_UNROLL _Pragma("unroll 1")
#define MOE_PRAGMA(text) _Pragma(#text)
#define MOE_UNROLL_BY(count) MOE_PRAGMA(unroll (count))
#else
#define MOE_FN inline
#define MOE_HOST_FN inline
#define MOE_UNROLL
#define MOE_NO_UNROLL
#define MOE_UNROLL_BY(count)
#endif

namespace moe {

// A panel is what one bulk tensor copy moves: 64 rows of 128 bytes (64 BF16 or 32 FP32 values), 128-byte swizzle.
// Every operand is made of panels, whichever of its dimensions is contiguous, so one tensor map per buffer serves all uses.
constexpr int kPanelRows = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kPanelBytes = kPanelRows * kPanelRowBytes;

// Byte offset of 16-byte chunk `chunk` of row `row` inside a panel under the 128-byte swizzle (panels start at 1024-byte
// boundaries, so address bits 7..9 are row % 8).
MOE_HOST_FN constexpr uint32_t panel_offset(uint32_t row, uint32_t chunk) {
  return row * kPanelRowBytes + ((chunk ^ (row & 7u)) << 4);
}

// wgmma shared-memory descriptor, 128-byte swizzle. Fields: [0,14) address >> 4, [16,30) leading offset >> 4,
// [32,46) stride offset >> 4, [62,64) layout, 1 = 128-byte swizzle. (PTX ISA, "Matrix descriptor".)
MOE_HOST_FN constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  return static_cast<uint64_t>((address >> 4) & 0x3FFFu) | (static_cast<uint64_t>((leading_bytes >> 4) & 0x3FFFu) << 16) |
         (static_cast<uint64_t>((stride_bytes >> 4) & 0x3FFFu) << 32) | (static_cast<uint64_t>(1) << 62);
}

// Operand made of stacked panels. K-major: a panel row is one M/N index, panels stack along M/N; groups of 8 rows lie 1024 bytes
// apart. MN-major: a panel row is one K index and holds 64 M/N values; the next 64 lie one panel further (leading offset).
MOE_HOST_FN constexpr uint64_t panel_descriptor(uint32_t address, bool mn_major) {
  return wgmma_descriptor(address, mn_major ? kPanelBytes : 16, 1024);
}

// Descriptor step (in 16-byte units) for the next 16 of K.
MOE_HOST_FN constexpr uint64_t panel_k16_step(bool mn_major) { return (mn_major ? 16 * kPanelRowBytes : 32) >> 4; }

}  // namespace moe
