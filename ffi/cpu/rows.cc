#include "cpu/rows.h"

#include <algorithm>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/parallel.h"

namespace moejax::cpu {
namespace {

constexpr int64_t kDecodeBlock = 256;  // outputs decoded at a time: with K of a few thousand this stays in the second-level cache
constexpr int kDecodeScratch = kScratchSlots - 1;

// Elements [first, first + n) of row `row` of matrix e, as FP32. `first` and `n` are multiples of 32 in kMxfp8.
void DecodeRow(const Matrices& w, int64_t e, int64_t row, int64_t first, int64_t n, float* out) {
  const int64_t at = Offset(Offset(e, w.rows, row), w.columns, first);
  const VectorOps& vector = Vector();
  if (w.format == Format::kBf16) {
    vector.widen_bf16(static_cast<const uint16_t*>(w.data) + at, out, n);
  } else if (w.codes_down) {
    const int64_t code = Offset(Offset(e, w.rows / kBlock, row / kBlock), w.columns, first);
    vector.mx_decode_down(static_cast<const uint8_t*>(w.data) + at, w.codes + code, out, n);
  } else {
    const int64_t code = Offset(Offset(e, w.rows, row), w.columns / kBlock, first / kBlock);
    vector.mx_decode_row(static_cast<const uint8_t*>(w.data) + at, w.codes + code, out, n);
  }
}

}  // namespace

std::vector<Tile> Tiles(const Groups& groups) {
  std::vector<Tile> tiles;
  int64_t packed = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    for (int64_t done = 0; done < groups.count[e];) {
      const int64_t left = groups.count[e] - done, rows = left <= kMaxTile ? left : kTile;
      tiles.push_back({e, groups.start[e] + done, rows, packed + done});
      done += rows;
    }
    packed += groups.count[e];
  }
  return tiles;
}

std::vector<int64_t> PaddingBefore(const Groups& groups) {
  std::vector<int64_t> padding(CeilDiv(groups.rows, kTile), 0);
  int64_t packed = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    for (int64_t done = 0; done < groups.count[e]; done += kTile) padding[(groups.start[e] + done) / kTile] = groups.start[e] - packed;
    packed += groups.count[e];
  }
  return padding;
}

void ReadRow(const RowsIn& in, int64_t row, int64_t width, bool bf16, float* out) {
  const int64_t at = Offset(row, width);
  if (in.format == Format::kBf16) {
    Vector().widen_bf16(static_cast<const uint16_t*>(in.data) + at, out, width);
  } else {
    std::memcpy(out, static_cast<const float*>(in.data) + at, static_cast<size_t>(width) * sizeof(float));
    if (bf16) Vector().round_bf16(out, width);
  }
}

void WriteRow(const float* values, int64_t row, int64_t width, const RowsOut& out) {
  const int64_t at = Offset(row, width);
  if (out.format == Format::kBf16) {
    Vector().narrow_bf16(values, static_cast<uint16_t*>(out.data) + at, width);
  } else {
    std::memcpy(static_cast<float*>(out.data) + at, values, static_cast<size_t>(width) * sizeof(float));
  }
}

void ZeroRow(int64_t row, int64_t width, const RowsOut& out) {
  const int64_t size = out.format == Format::kBf16 ? 2 : 4;
  std::memset(static_cast<char*>(out.data) + Offset(row, width) * size, 0, static_cast<size_t>(width * size));
}

void ProductWithTranspose(const float* x, int64_t rows, const Matrices& w, int64_t e, float* y) {
  const int64_t n = w.rows, k = w.columns;
  if (w.format == Format::kFp32) {
    GemmNT(rows, n, k, x, k, static_cast<const float*>(w.data) + Offset(e, n * k), k, y, n, false);
    return;
  }
  float* block = Scratch(kDecodeScratch, kDecodeBlock * k);
  for (int64_t first = 0; first < n; first += kDecodeBlock) {
    const int64_t size = std::min(kDecodeBlock, n - first);
    for (int64_t i = 0; i < size; ++i) DecodeRow(w, e, first + i, 0, k, block + i * k);
    GemmNT(rows, size, k, x, k, block, k, y + first, n, false);
  }
}

void Product(const float* x, int64_t rows, const Matrices& w, int64_t e, float* y) {
  const int64_t k = w.rows, n = w.columns;
  if (w.format == Format::kFp32) {
    GemmNN(rows, n, k, x, k, static_cast<const float*>(w.data) + Offset(e, n * k), n, y, n, false);
    return;
  }
  float* block = Scratch(kDecodeScratch, kDecodeBlock * k);
  for (int64_t first = 0; first < n; first += kDecodeBlock) {
    const int64_t size = std::min(kDecodeBlock, n - first);
    for (int64_t i = 0; i < k; ++i) DecodeRow(w, e, i, first, size, block + i * size);
    GemmNN(rows, size, k, x, k, block, size, y + first, n, false);
  }
}

void MxRoundRows(float* values, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row) Vector().mx_round_row(values + Offset(row, width), width);
}

void MxRoundColumns(float* values, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; row += kBlock) {
    Vector().mx_round_down(values + Offset(row, width), width, std::min(kBlock, rows - row), width);
  }
}

}  // namespace moejax::cpu
