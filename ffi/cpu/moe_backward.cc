// Backward of the expert layer. A window of tiles goes through the dgrad products, which leave the operands of the weight gradients
// behind; then every block of the weight gradients adds the window's tiles in row order.
#include <algorithm>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/moe.h"
#include "cpu/moe_tile.h"
#include "cpu/rows.h"

namespace moejax::cpu {
namespace {

constexpr int64_t kOwnedRows = 256;       // output rows of a weight gradient that one task owns
constexpr int64_t kTilesPerThread = 12;   // tiles of a window per thread

// Consecutive tiles of one expert in the window, by position in the window.
struct Segment {
  int64_t expert;
  int64_t first_tile, last_tile;
  bool starts;  // the expert's first tile is among them
};

// The operands of the weight gradients, one row for each row of the window.
struct Window {
  Window(float* data, int64_t D, int64_t F, int64_t rows)
      : x(data), dy(x + rows * D), d_gate_up(dy + rows * D), weighted_h(d_gate_up + rows * 2 * F),
        bias(weighted_h + rows * F) {}
  float *x, *dy, *d_gate_up, *weighted_h;
  float* bias;  // per tile: 2F sums of d_gate_up, D sums of weight * dy
};

void RoundForWgrad(Format format, float* values, int64_t rows, int64_t width) {
  if (format == Format::kMxfp8) MxRoundColumns(values, rows, width);
}

// Everything up to dx for one tile, and the window's rows of it.
void BackwardTile(const Layer& layer, const BackwardBuffers& buffers, const Window& window, const Tile& tile, int64_t position) {
  const int64_t D = layer.shape.d_model, F = layer.shape.width, rows = tile.rows;
  const bool bf16 = layer.recipe != Recipe::kFp32, mx = layer.recipe == Recipe::kMxfp8;
  const int64_t at = position * kMaxTile;
  float* x = window.x + at * D;
  float* dy = window.dy + at * D;
  float* d_gate_up = window.d_gate_up + at * 2 * F;
  float* weighted_h = window.weighted_h + at * F;
  float* gate_up = Scratch(0, kMaxTile * 2 * F);
  float* dh0 = Scratch(1, kMaxTile * F);
  float* dx = Scratch(2, kMaxTile * D);
  float* rounded = Scratch(3, kMaxTile * std::max(D, 2 * F));  // row-wise MX rounding of x, dy or d_gate_up

  GatherRows(layer, buffers.x, tile, x);
  GatherRows(layer, buffers.dy, tile, dy);
  const auto row_operand = [&](float* values, int64_t width) {
    if (!mx) return values;
    std::memcpy(rounded, values, static_cast<size_t>(rows * width) * sizeof(float));
    MxRoundRows(rounded, rows, width);
    return rounded;
  };

  if (buffers.saved.data != nullptr) {
    for (int64_t i = 0; i < rows; ++i) ReadRow(buffers.saved, tile.packed_row + i, 2 * F, false, gate_up + i * 2 * F);
  } else if (mx) {
    std::memcpy(rounded, x, static_cast<size_t>(rows * D) * sizeof(float));
    GateUp(layer, tile, rounded, gate_up);
  } else {
    GateUp(layer, tile, x, gate_up);
  }

  Product(row_operand(dy, D), rows, buffers.down_down, tile.expert, dh0);
  float* bias = window.bias + position * (2 * F + D);
  const bool has_bias = buffers.db_gate_up != nullptr;
  if (has_bias) std::fill_n(bias, 2 * F + D, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = tile.first_row + i;
    const int64_t slot = layer.shape.top_k == 0 ? row : layer.slot_M[row];
    const float weight = buffers.weight[slot];
    const float* gate = gate_up + i * 2 * F;
    float* d_gate = d_gate_up + i * 2 * F;
    float d_weight = Vector().activate_backward(layer.act, gate, gate + F, dh0 + i * F, weight, bf16, d_gate, d_gate + F,
                                                weighted_h + i * F, F);
    if (bf16) {
      Vector().round_bf16(d_gate, 2 * F);
      Vector().round_bf16(weighted_h + i * F, F);
    }
    if (layer.b_down != nullptr) d_weight += Vector().dot(dy + i * D, layer.b_down + Offset(tile.expert, D), D);
    buffers.d_weight[slot] = d_weight;
    if (has_bias) {
      Vector().add(d_gate, bias, 2 * F);
      Vector().add_scaled(weight, dy + i * D, bias + 2 * F, D);
    }
  }

  Product(row_operand(d_gate_up, 2 * F), rows, buffers.gate_up_down, tile.expert, dx);
  for (int64_t i = 0; i < rows; ++i) WriteRow(dx + i * D, ResultRow(layer, tile) + i, D, buffers.dx_rows);

  RoundForWgrad(buffers.wgrad, x, rows, D);
  RoundForWgrad(buffers.wgrad, dy, rows, D);
  RoundForWgrad(buffers.wgrad, d_gate_up, rows, 2 * F);
  RoundForWgrad(buffers.wgrad, weighted_h, rows, F);
}

// Rows [first, first + size) of dw_e (N x K) plus the segment's left^T right, tile by tile.
void AddBlock(const std::vector<Tile>& tiles, int64_t window_first, const Segment& segment, const float* left, int64_t n,
              const float* right, int64_t k, int64_t first, int64_t size, bool zero_first, float* dw) {
  float* block = dw + Offset(Offset(segment.expert, n, first), k);
  if (zero_first) std::memset(block, 0, static_cast<size_t>(size * k) * sizeof(float));
  for (int64_t position = segment.first_tile; position < segment.last_tile; ++position) {
    const int64_t at = position * kMaxTile;
    const int64_t rows = tiles[window_first + position].rows;
    for (int64_t done = 0; done < rows; done += kTile) {
      const int64_t row = at + done;
      GemmTN(size, k, std::min(kTile, rows - done), left + row * n + first, n, right + row * k, k, block, k, true);
    }
  }
}

std::vector<Segment> Segments(const std::vector<Tile>& tiles, int64_t first, int64_t last) {
  std::vector<Segment> segments;
  for (int64_t i = first; i < last; ++i) {
    const bool new_expert = i == 0 || tiles[i].expert != tiles[i - 1].expert;
    if (i == first || new_expert) segments.push_back({tiles[i].expert, i - first, i - first, new_expert});
    segments.back().last_tile = i - first + 1;
  }
  return segments;
}

void AddBiases(const Layer& layer, const BackwardBuffers& buffers, const Window& window, const Segment& segment) {
  const int64_t D = layer.shape.d_model, G = 2 * layer.shape.width;
  float* db_gate_up = buffers.db_gate_up + Offset(segment.expert, G);
  float* db_down = buffers.db_down + Offset(segment.expert, D);
  if (segment.starts && !buffers.accumulate) {
    std::fill_n(db_gate_up, G, 0.0f);
    std::fill_n(db_down, D, 0.0f);
  }
  for (int64_t position = segment.first_tile; position < segment.last_tile; ++position) {
    const float* bias = window.bias + position * (G + D);
    Vector().add(bias, db_gate_up, G);
    Vector().add(bias + G, db_down, D);
  }
}

void WeightGradients(Pool& pool, const Layer& layer, const BackwardBuffers& buffers, const Window& window,
                     const std::vector<Tile>& tiles, int64_t first, int64_t last) {
  const int64_t D = layer.shape.d_model, F = layer.shape.width;
  const std::vector<Segment> segments = Segments(tiles, first, last);
  const int64_t gate_up_blocks = CeilDiv(2 * F, kOwnedRows), down_blocks = CeilDiv(D, kOwnedRows);
  const int64_t blocks = gate_up_blocks + down_blocks;
  ParallelFor(pool, static_cast<int64_t>(segments.size()) * blocks, [&](int64_t task) {
    const Segment& segment = segments[task / blocks];
    const bool zero_first = segment.starts && !buffers.accumulate;
    const int64_t block = task % blocks;
    if (block < gate_up_blocks) {
      const int64_t begin = block * kOwnedRows, size = std::min(kOwnedRows, 2 * F - begin);
      AddBlock(tiles, first, segment, window.d_gate_up, 2 * F, window.x, D, begin, size, zero_first, buffers.dw_gate_up);
    } else {
      const int64_t begin = (block - gate_up_blocks) * kOwnedRows, size = std::min(kOwnedRows, D - begin);
      AddBlock(tiles, first, segment, window.dy, D, window.weighted_h, F, begin, size, zero_first, buffers.dw_down);
    }
    if (block == 0 && buffers.db_gate_up != nullptr) AddBiases(layer, buffers, window, segment);
  });
}

// Experts without rows have gradients of exactly zero; d_weight is zero wherever no row writes it.
void ZeroWhatNoRowWrites(Pool& pool, const Layer& layer, const BackwardBuffers& buffers) {
  const int64_t D = layer.shape.d_model, F = layer.shape.width, K = layer.shape.top_k;
  if (!buffers.accumulate) {
    ParallelFor(pool, layer.groups.experts, [&](int64_t e) {
      if (layer.groups.count[e] > 0) return;
      std::fill_n(buffers.dw_gate_up + Offset(e, 2 * F * D), 2 * F * D, 0.0f);
      std::fill_n(buffers.dw_down + Offset(e, F * D), F * D, 0.0f);
      if (buffers.db_gate_up != nullptr) {
        std::fill_n(buffers.db_gate_up + Offset(e, 2 * F), 2 * F, 0.0f);
        std::fill_n(buffers.db_down + Offset(e, D), D, 0.0f);
      }
    });
  }
  std::fill_n(buffers.d_weight, K == 0 ? layer.groups.rows : layer.shape.tokens * K, 0.0f);
}

}  // namespace

void MoeBackward(Pool& pool, const Layer& layer, const BackwardBuffers& buffers) {
  const int64_t D = layer.shape.d_model, F = layer.shape.width;
  const std::vector<Tile> tiles = Tiles(layer.groups);
  const int64_t tile_count = static_cast<int64_t>(tiles.size());
  // As many tiles in flight as keep the threads busy, and no more: the window's memory stays in the cache and, being fresh on every
  // call, costs a page fault per 4 KiB touched. It never changes a sum.
  const int64_t window_tiles = std::min(buffers.window_tiles, kTilesPerThread * (pool.num_threads() + 1));
  const Window window(buffers.window, D, F, buffers.window_tiles * kMaxTile);
  ZeroWhatNoRowWrites(pool, layer, buffers);
  for (int64_t first = 0; first < tile_count; first += window_tiles) {
    const int64_t last = std::min(first + window_tiles, tile_count);
    ParallelFor(pool, last - first, [&](int64_t i) { BackwardTile(layer, buffers, window, tiles[first + i], i); });
    WeightGradients(pool, layer, buffers, window, tiles, first, last);
  }
  if (layer.shape.top_k == 0) {
    ZeroPadding(pool, layer.groups, D, buffers.dx_rows);
  } else {
    CombinePacked(pool, layer, buffers.dx_rows, nullptr, buffers.dx);
  }
}

void GroupedWgrad(Pool& pool, const Groups& groups, const RowsIn& dy, const RowsIn& x, int64_t n, int64_t k, bool accumulate, float* dw) {
  const int64_t blocks = CeilDiv(n, kOwnedRows);
  ParallelFor(pool, groups.experts * blocks, [&](int64_t task) {
    const int64_t e = task / blocks, first = task % blocks * kOwnedRows, size = std::min(kOwnedRows, n - first);
    float* block = dw + Offset(Offset(e, n, first), k);
    float* dy_tile = Scratch(0, kTile * n);
    float* x_tile = Scratch(1, kTile * k);
    if (!accumulate) std::memset(block, 0, static_cast<size_t>(size * k) * sizeof(float));
    for (int64_t done = 0; done < groups.count[e]; done += kTile) {
      const int64_t rows = std::min<int64_t>(kTile, groups.count[e] - done);
      for (int64_t i = 0; i < rows; ++i) {
        ReadRow(dy, groups.start[e] + done + i, n, false, dy_tile + i * n);
        ReadRow(x, groups.start[e] + done + i, k, false, x_tile + i * k);
      }
      GemmTN(size, k, rows, dy_tile + first, n, x_tile, k, block, k, true);
    }
  });
}

}  // namespace moejax::cpu
