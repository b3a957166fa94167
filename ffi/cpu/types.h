// The words shared by the CPU kernels: precision recipes, operand formats, views of weights and of the schedule.
//
// Letters as everywhere in moejax: T tokens, K experts per token, E experts, D model width, F expert width, M padded rows.
// Read `moe.h` next.
#pragma once

#include <cstdint>

namespace moejax::cpu {

inline constexpr int64_t kTile = 128;   // groups start at multiples of this many rows, and weight gradients add this many at a time
// Most rows of one product. A remainder of up to 64 rows joins the tile before it: alone it would read and pack a whole weight matrix for
// few rows, and experts with about 128 rows leave one half of the time.
inline constexpr int64_t kMaxTile = 192;
inline constexpr int64_t kBlock = 32;   // elements that share one MX scale

// Position of element `column` of row `row`. 64-bit: width 7168 passes 2^31 elements at 299,594 rows
// (NVIDIA/TransformerEngine#2908 and others wrapped here).
constexpr int64_t Offset(int64_t row, int64_t width, int64_t column = 0) { return row * width + column; }

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class Recipe : int32_t { kFp32 = 0, kBf16 = 1, kMxfp8 = 2 };

// How a tensor is stored. kMxfp8 is E4M3 bytes with E8M0 codes beside them.
enum class Format : int32_t { kFp32, kBf16, kMxfp8 };

enum class ActivationKind : int32_t { kSwiglu = 0, kSwigluClamped = 1, kSwigluOai = 2, kGeglu = 3 };

struct Activation {
  ActivationKind kind = ActivationKind::kSwiglu;
  float limit = 0.0f;   // clamp of the clamped variants
  float alpha = 1.0f;   // slope inside swiglu_oai's sigmoid
};

// A rows x columns tensor of activations in FP32 or BF16, row-major.
struct RowsIn {
  const void* data = nullptr;
  Format format = Format::kFp32;
};

struct RowsOut {
  void* data = nullptr;
  Format format = Format::kFp32;
};

// E matrices of `rows` x `columns`, row-major. In kMxfp8, `codes` holds one E8M0 code per 32 elements along the columns
// (E x rows x columns/32) or, with `codes_down`, along the rows (E x rows/32 x columns).
struct Matrices {
  const void* data = nullptr;
  const uint8_t* codes = nullptr;
  Format format = Format::kFp32;
  int64_t rows = 0;
  int64_t columns = 0;
  bool codes_down = false;
};

// The schedule of `moejax/ops/schedule.py`, validated: groups start at multiples of 128, are disjoint and lie inside M.
struct Groups {
  int64_t experts = 0;            // E
  int64_t rows = 0;               // M
  const int32_t* count = nullptr; // E
  const int32_t* start = nullptr; // E
};

}  // namespace moejax::cpu
