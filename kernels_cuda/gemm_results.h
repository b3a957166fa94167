// What becomes of a tile's sums, on every architecture: rounding to BF16, the activation and its gradient, the combine weight, partial
// sums of d(weight), padding as zeros. Rounding points are those of docs/design.md section 2. A pair is two neighbouring columns of a row,
// BF16, the left one in the low half. Weight gradients are written as they are, by the MMA role.
//
// The loops at the end visit a tile's sums through `Tile`, which knows where they are: mma_sm90.h in registers, mma_sm100.h in tensor
// memory. What a thread sees of a tile:
//   kRows                rows it has values of: live(i) if real, row(i) in the whole matrix; pair j of a piece is in row j % kRows
//   keep(i, pair)        pair(), or zeros if row i is padding
//   kChunk, kUnroll      the loops go over chunks of columns, unrolled where sums are in registers
//   kPieces, kParts, kWords   a chunk's pairs leave in pieces of kWords per thread, and come in kParts parts
//   kSavedPairs          pairs of saved gate and up that load_gate_up brings at once
//   Dot                  how a thread adds up d(weight)
//   piece<N>(i, n)       first column of the i-th N of n columns; load(v, column, piece, part) their sums; loaded() when they are all
//                        read, so that others may be written there
//   open, put, close     before a chunk's results, for pieces of result r (place_of), after them
// `column` is relative to the tile.
#pragma once

#include "activation.h"
#include "isa/portable.h"
#include "task.h"

namespace moe {

// Where result r of a tile goes: three matrices at the same place for the kinds that have gate and up.
template <class TensorMap>
struct Place {
  const TensorMap* map;
  int half;
};
template <Kind kKind, class Arguments>
MOE_FN auto place_of(const Arguments& args, int r) {
  using Found = Place<decltype(args.out)>;
  if (kKind == kGateUp) return r < 2 ? Found{&args.gate_up, r} : Found{&args.out, 0};
  if (kKind == kDgradDown) return r < 2 ? Found{&args.out, r} : Found{&args.scaled_h, 0};
  return Found{&args.out, 0};
}

// --- one pair ------------------------------------------------------------------------------------------------------------------
template <class Isa>
MOE_FN uint32_t scale_pair(uint32_t pair, float weight_lo, float weight_hi) {
  return Isa::pack_bf16(Isa::mul(weight_lo, Isa::bf16_lo(pair)), Isa::mul(weight_hi, Isa::bf16_hi(pair)));
}
template <class Isa>
MOE_FN uint32_t scale_pair(uint32_t pair, float weight) {
  return scale_pair<Isa>(pair, weight, weight);
}
template <bool kPlain, class Isa>
MOE_FN uint32_t activate_pair(uint32_t gate, uint32_t up, const Activation& act) {
  return Isa::pack_bf16(activation_forward<kPlain, Isa>(Isa::bf16_lo(gate), Isa::bf16_lo(up), act),
                        activation_forward<kPlain, Isa>(Isa::bf16_hi(gate), Isa::bf16_hi(up), act));
}

struct GradPair {
  uint32_t d_gate, d_up, scaled_h;
};
// From dh0 = dY Wd: d(gate), d(up) and weight * h. dot(h, dh0 of the low half, h, dh0 of the high half): what d(weight) is made of. keep: makes
// zeros of padding (Tile::keep of the pair's row).
template <bool kPlain, class Isa, class Dot, class Keep>
MOE_FN GradPair grad_pair(float dh0_lo, float dh0_hi, uint32_t gate, uint32_t up, float weight_lo, float weight_hi, const Activation& act, Dot dot,
                          Keep keep) {
  const ActivationGrad lo = activation_backward<kPlain, Isa>(Isa::bf16_lo(gate), Isa::bf16_lo(up), act);
  const ActivationGrad hi = activation_backward<kPlain, Isa>(Isa::bf16_hi(gate), Isa::bf16_hi(up), act);
  const uint32_t h = Isa::pack_bf16(lo.h, hi.h);  // the forward's operand
  dot(Isa::bf16_lo(h), dh0_lo, Isa::bf16_hi(h), dh0_hi);
  const float dh_lo = Isa::mul(weight_lo, dh0_lo), dh_hi = Isa::mul(weight_hi, dh0_hi);
  GradPair grad;
  grad.d_gate = keep([&] { return Isa::pack_bf16(Isa::mul(dh_lo, lo.d_gate), Isa::mul(dh_hi, hi.d_gate)); });
  grad.d_up = keep([&] { return Isa::pack_bf16(Isa::mul(dh_lo, lo.d_up), Isa::mul(dh_hi, hi.d_up)); });
  grad.scaled_h = keep([&] { return scale_pair<Isa>(h, weight_lo, weight_hi); });
  return grad;
}

// A thread's part of the sum of h * dh0 over a row, given its pairs of columns from left to right, `block` counting those of a piece.
//
// Column by column.
template <class Isa>
struct DotByColumn {
  float sum = 0.0f;
  MOE_FN void add(int, float h_lo, float dh0_lo, float h_hi, float dh0_hi) {
    sum = Isa::fma(h_lo, dh0_lo, sum);
    sum = Isa::fma(h_hi, dh0_hi, sum);
  }
};
// 16 columns at a time, each with the one that is 8 further, then neighbours: an order that tiles with tokens on either side can keep. A pair's
// block of eight columns is even or odd as `block` is.
template <class Isa>
struct DotBySixteen {
  float sum = 0.0f;
  float even[2];
  MOE_FN void add(int block, float h_lo, float dh0_lo, float h_hi, float dh0_hi) {
    if (block % 2 == 0) {
      even[0] = Isa::mul(h_lo, dh0_lo);
      even[1] = Isa::mul(h_hi, dh0_hi);
    } else {
      sum = Isa::add(sum, Isa::add(Isa::fma(h_lo, dh0_lo, even[0]), Isa::fma(h_hi, dh0_hi, even[1])));
    }
  }
};

// --- a tile --------------------------------------------------------------------------------------------------------------------
// Combine weights of this thread's rows; 0 for padding.
template <class Tile, class Arguments>
MOE_FN void load_weights(const Tile& tile, const Arguments& args, float (&weight)[Tile::kRows]) {
  MOE_UNROLL
  for (int i = 0; i < Tile::kRows; ++i) {
    const int slot = tile.live(i) ? args.slot_M[tile.row(i)] : -1;
    weight[i] = slot >= 0 ? args.weight_TxK[slot] : 0.0f;
  }
}

// y or dx, rounded once to BF16. With one expert per token the combine is a product and a second rounding, done here where rows go
// straight to their tokens.
template <class Isa, class Tile, class Arguments>
MOE_FN void write_rows(Tile& tile, const Arguments& args) {
  const bool weighted = tile.scatters(args) && args.weight_TxK != nullptr;
  float weight[Tile::kRows] = {};
  if (weighted) load_weights(tile, args, weight);
  tile.begin();
  MOE_UNROLL_BY(Tile::kUnroll)
  for (int c = 0; c < Tile::kColumns / Tile::kChunk; ++c) {
    const int column = tile.template piece<Tile::kChunk>(c, Tile::kColumns);
    tile.open(column);
    MOE_UNROLL
    for (int p = 0; p < Tile::kPieces; ++p) {
      uint32_t words[Tile::kWords];
      MOE_UNROLL
      for (int part = 0; part < Tile::kParts; ++part) {
        constexpr int kPart = Tile::kWords / Tile::kParts;
        float v[2 * kPart];
        tile.load(v, column, p, part);
        MOE_UNROLL
        for (int j = 0; j < kPart; ++j) {
          uint32_t pair = Isa::pack_bf16(v[2 * j], v[2 * j + 1]);
          if (weighted) pair = scale_pair<Isa>(pair, weight[j % Tile::kRows]);
          words[kPart * part + j] = tile.keep(j % Tile::kRows, [&] { return pair; });
        }
      }
      if (p == Tile::kPieces - 1) tile.loaded();
      tile.put(args, 0, column, p, words);
    }
    tile.close(args, column);
  }
}

// Gate and up are rounded to BF16 before the activation; the first half of the tile's columns is gate.
template <bool kPlain, class Isa, class Tile, class Arguments>
MOE_FN void write_gate_up(Tile& tile, const Arguments& args) {
  constexpr int kHalf = Tile::kColumns / 2;
  tile.begin();
  MOE_UNROLL_BY(Tile::kUnroll)
  for (int c = 0; c < kHalf / Tile::kChunk; ++c) {
    const int column = tile.template piece<Tile::kChunk>(c, kHalf);
    tile.open(column);
    MOE_UNROLL
    for (int p = 0; p < Tile::kPieces; ++p) {
      uint32_t gate[Tile::kWords], up[Tile::kWords];
      MOE_UNROLL
      for (int part = 0; part < Tile::kParts; ++part) {
        constexpr int kPart = Tile::kWords / Tile::kParts;
        float g[2 * kPart], u[2 * kPart];
        tile.load(g, column, p, part);
        tile.load(u, kHalf + column, p, part);
        MOE_UNROLL
        for (int j = 0; j < kPart; ++j) {
          gate[kPart * part + j] = tile.keep(j % Tile::kRows, [&] { return Isa::pack_bf16(g[2 * j], g[2 * j + 1]); });
          up[kPart * part + j] = tile.keep(j % Tile::kRows, [&] { return Isa::pack_bf16(u[2 * j], u[2 * j + 1]); });
        }
      }
      if (p == Tile::kPieces - 1) tile.loaded();
      if (args.save_gate_up) {
        tile.put(args, 0, column, p, gate);
        tile.put(args, 1, column, p, up);
      }
      if (tile.writes_h(args)) {
        uint32_t h[Tile::kWords];
        MOE_UNROLL
        for (int j = 0; j < Tile::kWords; ++j) {
          h[j] = activate_pair<kPlain, Isa>(gate[j], up[j], args.act);  // of padding: of zeros, so zero
        }
        tile.put(args, 2, column, p, h);
      }
    }
    tile.close(args, column);
  }
}

// d(gate), d(up), weight * h, and per kWeightChunk columns a partial sum of d(weight). Gate and up are the forward's.
template <bool kPlain, class Isa, class Tile, class Arguments>
MOE_FN void write_dgrad_down(Tile& tile, const Arguments& args) {
  float weight[Tile::kRows];
  load_weights(tile, args, weight);
  tile.begin();
  MOE_UNROLL_BY(Tile::kUnroll)
  for (int w = 0; w < Tile::kColumns / Tile::kWeightChunk; ++w) {
    const int first = tile.template piece<Tile::kWeightChunk>(w, Tile::kColumns);
    typename Tile::Dot dot[Tile::kRows] = {};
    MOE_UNROLL_BY(Tile::kUnroll)
    for (int c = 0; c < Tile::kWeightChunk / Tile::kChunk; ++c) {
      const int column = first + Tile::kChunk * c;
      tile.open(column);
      MOE_UNROLL
      for (int p = 0; p < Tile::kPieces; ++p) {
        uint32_t d_gate[Tile::kWords], d_up[Tile::kWords], scaled_h[Tile::kWords];
        MOE_UNROLL
        for (int part = 0; part < Tile::kParts; ++part) {
          constexpr int kPart = Tile::kWords / Tile::kParts;
          constexpr int kAtOnce = Tile::kSavedPairs;
          float dh0[2 * kPart];
          tile.load(dh0, column, p, part);
          if (column + Tile::kChunk == first + Tile::kWeightChunk && p == Tile::kPieces - 1 && part == Tile::kParts - 1) tile.loaded();
          MOE_UNROLL
          for (int group = 0; group < kPart / kAtOnce; ++group) {
            uint32_t gate[kAtOnce], up[kAtOnce];
            tile.load_gate_up(args, gate, up, column, p, part, group);
            MOE_UNROLL
            for (int k = 0; k < kAtOnce; ++k) {
              const int j = kAtOnce * group + k, i = j % Tile::kRows, at = kPart * part + j;
              const GradPair grad = grad_pair<kPlain, Isa>(
                  dh0[2 * j], dh0[2 * j + 1], gate[k], up[k], weight[i], weight[i], args.act,
                  [&](float h_lo, float lo, float h_hi, float hi) { dot[i].add(j / Tile::kRows, h_lo, lo, h_hi, hi); },
                  [&](auto value) { return tile.keep(i, value); });
              d_gate[at] = grad.d_gate;
              d_up[at] = grad.d_up;
              scaled_h[at] = grad.scaled_h;
            }
          }
        }
        tile.put(args, 0, column, p, d_gate);
        tile.put(args, 1, column, p, d_up);
        tile.put(args, 2, column, p, scaled_h);
      }
      if (column + Tile::kChunk == first + Tile::kWeightChunk) {
        MOE_UNROLL
        for (int i = 0; i < Tile::kRows; ++i) {
          const float sum = tile.sum_of_row(dot[i].sum);
          const int at = tile.first_column() + first;
          if (tile.speaks_for_row() && tile.live(i) && at < args.n_extent) {
            args.weight_partial[at / Tile::kWeightChunk * args.num_rows + tile.row(i)] = sum;
          }
        }
      }
      tile.close(args, column);
    }
  }
}

// A row kind's tile.
template <Kind kKind, bool kPlain, class Isa, class Tile, class Arguments>
MOE_FN void write_tile(Tile& tile, const Arguments& args) {
  if constexpr (kKind == kGateUp) {
    write_gate_up<kPlain, Isa>(tile, args);
  } else if constexpr (kKind == kDgradDown) {
    write_dgrad_down<kPlain, Isa>(tile, args);
  } else {
    write_rows<Isa>(tile, args);
  }
}

}  // namespace moe
