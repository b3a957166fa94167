// Forward of the expert layer, the combine, and the stand-alone grouped product.
#include <algorithm>

#include "cpu/moe.h"
#include "cpu/moe_tile.h"
#include "cpu/rows.h"

namespace moejax::cpu {
namespace {

constexpr int64_t kTokensPerTask = 64;

}  // namespace

void GatherRows(const Layer& layer, const RowsIn& in, const Tile& tile, float* out) {
  const int64_t width = layer.shape.d_model;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = tile.first_row + i;
    const int64_t source = layer.shape.top_k == 0 ? row : layer.slot_M[row] / layer.shape.top_k;
    ReadRow(in, source, width, layer.recipe != Recipe::kFp32, out + i * width);
  }
}

void GateUp(const Layer& layer, const Tile& tile, float* x, float* gate_up) {
  const int64_t width = 2 * layer.shape.width;
  if (layer.recipe == Recipe::kMxfp8) MxRoundRows(x, tile.rows, layer.shape.d_model);
  ProductWithTranspose(x, tile.rows, layer.gate_up, tile.expert, gate_up);
  for (int64_t i = 0; i < tile.rows; ++i) {
    if (layer.b_gate_up != nullptr) Vector().add(layer.b_gate_up + Offset(tile.expert, width), gate_up + i * width, width);
    if (layer.recipe != Recipe::kFp32) Vector().round_bf16(gate_up + i * width, width);
  }
}

void ZeroPadding(Pool& pool, const Groups& groups, int64_t width, const RowsOut& out) {
  if (out.data == nullptr) return;
  // Row blocks of 128 belong to one expert or to none, because groups start at multiples of 128.
  const int64_t blocks = CeilDiv(groups.rows, kTile);
  std::vector<int64_t> used(blocks, 0);
  for (const Tile& tile : Tiles(groups)) {
    for (int64_t done = 0; done < tile.rows; done += kTile) {
      used[(tile.first_row + done) / kTile] = std::min(kTile, tile.rows - done);
    }
  }
  ParallelFor(pool, blocks, [&](int64_t block) {
    const int64_t last = std::min((block + 1) * kTile, groups.rows);
    for (int64_t row = block * kTile + used[block]; row < last; ++row) ZeroRow(row, width, out);
  });
}

void MoeForward(Pool& pool, const Layer& layer, const ForwardBuffers& buffers) {
  const int64_t D = layer.shape.d_model, F = layer.shape.width;
  const std::vector<Tile> tiles = Tiles(layer.groups);
  ParallelFor(pool, static_cast<int64_t>(tiles.size()), [&](int64_t task) {
    const Tile& tile = tiles[task];
    float* x = Scratch(0, kMaxTile * D);
    float* gate_up = Scratch(1, kMaxTile * 2 * F);
    float* h = Scratch(2, kMaxTile * F);
    float* y = Scratch(3, kMaxTile * D);
    GatherRows(layer, buffers.x, tile, x);
    GateUp(layer, tile, x, gate_up);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const float* row = gate_up + i * 2 * F;
      if (buffers.saved.data != nullptr) WriteRow(row, tile.packed_row + i, 2 * F, buffers.saved);
      Vector().activate(layer.act, row, row + F, h + i * F, F);
      if (layer.recipe != Recipe::kFp32) Vector().round_bf16(h + i * F, F);
    }
    if (layer.recipe == Recipe::kMxfp8) MxRoundRows(h, tile.rows, F);
    ProductWithTranspose(h, tile.rows, layer.down, tile.expert, y);
    for (int64_t i = 0; i < tile.rows; ++i) {
      if (layer.b_down != nullptr) Vector().add(layer.b_down + Offset(tile.expert, D), y + i * D, D);
      WriteRow(y + i * D, ResultRow(layer, tile) + i, D, buffers.y_rows);
    }
  });
  if (layer.shape.top_k == 0) {
    ZeroPadding(pool, layer.groups, D, buffers.y_rows);
  } else {
    CombinePacked(pool, layer, buffers.y_rows, buffers.weight, buffers.y);
  }
}

void CombinePacked(Pool& pool, const Layer& layer, const RowsOut& rows, const float* weight, const RowsOut& out) {
  const std::vector<int64_t> padding = PaddingBefore(layer.groups);
  Combine(pool, {rows.data, rows.format}, padding.data(), weight, layer.row_TxK, layer.shape.tokens, layer.shape.top_k,
          layer.shape.d_model, out);
}

void Combine(Pool& pool, const RowsIn& rows, const int64_t* padding, const float* weight_TxK, const int32_t* row_TxK, int64_t tokens,
             int64_t top_k, int64_t width, const RowsOut& out) {
  ParallelFor(pool, CeilDiv(tokens, kTokensPerTask), [&](int64_t task) {
    float* total = Scratch(0, width);
    const int64_t last = std::min((task + 1) * kTokensPerTask, tokens);
    for (int64_t token = task * kTokensPerTask; token < last; ++token) {
      std::fill_n(total, width, 0.0f);
      for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        if (row_TxK[slot] < 0) continue;
        const float weight = weight_TxK == nullptr ? 1.0f : weight_TxK[slot];
        const int64_t row = row_TxK[slot];
        const int64_t at = Offset(padding == nullptr ? row : row - padding[row / kTile], width);
        if (rows.format == Format::kBf16) {
          Vector().add_scaled_bf16(weight, static_cast<const uint16_t*>(rows.data) + at, total, width);
        } else {
          Vector().add_scaled(weight, static_cast<const float*>(rows.data) + at, total, width);
        }
      }
      WriteRow(total, token, width, out);
    }
  });
}

void GroupedProduct(Pool& pool, const Groups& groups, const RowsIn& x, const Matrices& w, bool transposed, const RowsOut& y) {
  const int64_t in = transposed ? w.columns : w.rows, out = transposed ? w.rows : w.columns;
  const std::vector<Tile> tiles = Tiles(groups);
  ParallelFor(pool, static_cast<int64_t>(tiles.size()), [&](int64_t task) {
    const Tile& tile = tiles[task];
    float* x_tile = Scratch(0, kMaxTile * in);
    float* y_tile = Scratch(1, kMaxTile * out);
    for (int64_t i = 0; i < tile.rows; ++i) ReadRow(x, tile.first_row + i, in, false, x_tile + i * in);
    if (transposed) {
      ProductWithTranspose(x_tile, tile.rows, w, tile.expert, y_tile);
    } else {
      Product(x_tile, tile.rows, w, tile.expert, y_tile);
    }
    for (int64_t i = 0; i < tile.rows; ++i) WriteRow(y_tile + i * out, tile.first_row + i, out, y);
  });
  ZeroPadding(pool, groups, out, y);
}

}  // namespace moejax::cpu
