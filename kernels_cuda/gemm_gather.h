// Rows of tokens, read and written where they are. The gathering warp brings rows of tokens (operand A of kGateUp in BF16, of kDgradDown in FP8)
// straight into the ring, so that no dispatched copy of them is needed. The copy engine of sm_90 can't gather rows; here each lane copies 16 bytes at a time, four
// rows of 128 bytes an instruction, into the same swizzled panels. With one expert per token a store warp scatters rows of y or dx to
// their tokens. mma_sm90.h says how stages are counted, and what happens to the rest.
//
// In kinds that can carry the warp has no stages to fill, and dispatches rows for a later launch while the others multiply.
#pragma once

#include "gemm_arguments.h"
#include "gemm_ring.h"

namespace moe {

constexpr uint32_t kGatherLanes = 32;  // lanes of the gathering warp

template <class Config>
MOE_HOST_FN constexpr bool can_gather(Kind kind) {
  return Config::kElementBytes == 1 ? can_gather_fp8(kind) : can_gather(kind);
}

// The part of an instruction that depends on the lane alone: it copies piece lane % 8 of row 4 i + lane / 8 in instruction i.
template <class Isa>
struct GatherLane {
  uint32_t lane, row, piece;
  uint32_t offset[2];  // in a panel, for even and odd instructions: the swizzle has a period of 8 rows
  MOE_FN GatherLane() : lane(Isa::lane_index()), row(lane / 8), piece(lane % 8) {
    offset[0] = panel_offset(row, piece);
    offset[1] = panel_offset(row + 4, piece) - 4 * kPanelRowBytes;
  }
  MOE_FN uint32_t address(uint32_t panel, int instruction) const {
    return panel + offset[instruction % 2] + static_cast<uint32_t>(instruction) * 4 * kPanelRowBytes;
  }
};

// One task: up to 128 rows, 128 bytes of K at a time. Which rows they are is the same for every K block, so where they start is kept: in registers, in
// bytes from the start of the tokens, or, where a warp has few, in shared memory (Config::kOffsetTable), in vectors. Rows past the expert's count read
// the first token: rows of a product do not meet, and the epilogue writes zeros for them.
template <class Isa, class Config, class Arguments>
MOE_FN void gather_rows(const Task& tile, int k_blocks, const Arguments& args, Ring<Isa, Config>& ring) {
  constexpr bool kTable = Config::kOffsetTable > 0;
  constexpr int kInstructions = Config::kTileM / 4;
  constexpr int kFours = kInstructions / 8;  // of instructions, for a panel
  constexpr uint32_t kTablePitch = 4 * kInstructions + 16;  // of a row of four; those of all four are read without bank conflicts
  const GatherLane<Isa> mine;
  uint32_t offset[kTable ? 1 : kInstructions];
  if (kTable) Isa::warp_sync();  // all lanes have read those of the tile before
  MOE_UNROLL_BY(kTable ? 1 : Config::kTileM / 32)
  for (int q = 0; q < Config::kTileM / 32; ++q) {
    const int row = 32 * q + static_cast<int>(mine.lane);
    const int slot = row < tile.rows ? args.slot_M[tile.row0 + row] : 0;
    const int token = slot / args.top_k;
    if constexpr (kTable) {
      Isa::store_word(ring.base + Config::kOffsetTable + mine.lane % 4 * kTablePitch + 4 * (8 * q + mine.lane / 4),
                      static_cast<uint32_t>(token) * static_cast<uint32_t>(args.gather_vectors));
    } else {
      MOE_UNROLL
      for (int i = 0; i < 8; ++i) {
        offset[8 * q + i] = (static_cast<uint32_t>(Isa::shuffle(token, 4 * i + mine.row)) * static_cast<uint32_t>(args.gather_vectors) + mine.piece) * 16u;
      }
    }
  }
  if (kTable) Isa::warp_sync();
  const bool two_panels = tile.rows > 64;
  const int whole_blocks = args.gather_vectors / 8;  // the last block may stand over the end of a row
  const uint8_t* from = args.gather;
  // A panel of the current stage; inside: whether this lane's piece exists.
  auto gather_panel = [&](uint32_t dst, int p, bool inside) {
    MOE_UNROLL
    for (int i = kInstructions / 2 * p; i < kInstructions / 2 * (p + 1); ++i) {
      Isa::gather_vector(mine.address(dst, i), inside ? from + offset[i] : args.gather, inside ? 16u : 0u);
    }
  };
  // The same by the table. Four places are read while the copies of the four before are issued. The base is hidden from the compiler, which would add it
  // to each place in two steps; in one, there are registers for several addresses, and no copy waits until the one before has read its own.
  auto gather_by_table = [&](uint32_t panel, uint32_t table, const uint8_t* base, bool inside) {
    auto next = Isa::load_vector(table);
    MOE_UNROLL
    for (int four = 0; four < kFours; ++four) {
      const uint32_t places[4] = {next.x, next.y, next.z, next.w};
      if (four + 1 < kFours) next = Isa::load_vector(table + 16 * (four + 1));
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) Isa::gather_vector(mine.address(panel, 4 * four + i), base + uint64_t{16} * places[i], inside ? 16u : 0u);
    }
  };
  MOE_NO_UNROLL
  for (int kb = 0; kb < k_blocks; ++kb) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    const uint32_t dst = ring.data();
    const bool inside = 8 * kb + static_cast<int>(mine.piece) < args.gather_vectors;
    if constexpr (kTable) {
      const uint8_t* base = Isa::not_before(args.gather + (inside ? 128u * static_cast<uint32_t>(kb) + 16u * mine.piece : 0u));
      const uint32_t table = ring.base + Config::kOffsetTable + mine.row * kTablePitch;
      MOE_NO_UNROLL
      for (int p = 0; p < (two_panels ? 2 : 1); ++p) gather_by_table(dst + p * kPanelBytes, table + 16 * kFours * p, base, inside);
    } else if (kb < whole_blocks) {
      gather_panel(dst, 0, true);
      if (two_panels) gather_panel(dst, 1, true);
    } else {
      gather_panel(dst, 0, inside);
      gather_panel(dst, 1, inside);
    }
    Isa::gather_arrive(ring.full());
    if (!kTable) from += 128;
    ring.advance();
  }
}

// Stages that others fill: the warp arrives all the same, as it could otherwise fall two phases behind and wait for ever.
template <class Isa, class Config>
MOE_FN void follow(int stages, Ring<Isa, Config>& ring) {
  MOE_NO_UNROLL
  for (int i = 0; i < stages; ++i) {
    Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
    Isa::barrier_arrive(ring.full());
    ring.advance();
  }
}

// Whether a launch of kinds that can gather does. If not, its fourth warp has nothing to do, and no stage waits for it.
template <class Batch>
MOE_FN bool gathers(const Batch& batch) {
  bool any = false;
  for (const auto& args : batch.kinds) any = any || args.gather != nullptr;
  return any;
}

// Gathering warp, one task: the K blocks of operand A.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void gather_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int k_blocks = task_k_blocks<kKind, Config>(task, args);
  wait_ready<Isa>(tile, args);
  if (can_gather<Config>(kKind) && args.gather != nullptr) {
    gather_rows<Isa, Config>(tile, k_blocks, args, ring);
  } else {
    if (is_wgrad(kKind) && args.accumulate) follow(Config::kColumns64, ring);
    follow(k_blocks, ring);
  }
  follow(Config::drain_stages(kKind), ring);
}

// One warp writes a BF16 panel to the tokens of its rows: 16 bytes a lane, full 128-byte lines. Lane l holds the tokens of rows l and
// l + 32, -1 for padding.
template <class Isa, class Arguments>
MOE_FN void scatter_panel(const Arguments& args, const int (&tokens)[2], int column, uint32_t panel) {
  const uint32_t lane = Isa::lane_index();
  const int at = column + static_cast<int>(lane % 8) * 8;
  MOE_UNROLL
  for (int half = 0; half < 2; ++half) {
    MOE_NO_UNROLL
    for (int part = 0; part < 32; part += 16) {
      typename Isa::Vector values[4];
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) values[i] = Isa::load_vector(panel + panel_offset(32 * half + part + 4 * i + lane / 8, lane % 8));
      MOE_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int token = Isa::shuffle(tokens[half], part + 4 * i + lane / 8);
        if (token >= 0 && at < args.n_extent) {
          Isa::store_vector(args.scatter + 2 * (static_cast<int64_t>(token) * args.n_extent + at), values[i]);
        }
      }
    }
  }
}

// --- a dispatch that a product carries -------------------------------------------------------------------------------------------
// Nothing in the launch waits for it. Values are only moved, so the rows are those of dispatch_rows (rows.cu).
//
// One token to every row that it has.
template <class Isa>
MOE_FN void carry_token(const Carry& carry, int token) {
  constexpr int kAtOnce = 8;  // vectors in flight per lane
  const int lane = static_cast<int>(Isa::lane_index());
  const int* rows = carry.row_TxK + static_cast<int64_t>(token) * carry.top_k;
  const int64_t pitch = 16 * static_cast<int64_t>(carry.vectors);
  const uint8_t* from = carry.from + token * pitch + 16 * lane;
  uint8_t* to = carry.to + 16 * lane;
  MOE_NO_UNROLL
  for (int left = carry.vectors - lane; left > 0; left -= 32 * kAtOnce) {  // of this lane's columns
    typename Isa::Vector values[kAtOnce];
    MOE_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      if (32 * i < left) values[i] = Isa::load_global_vector(from + 512 * i);
    }
    MOE_NO_UNROLL
    for (int s = 0; s < carry.top_k; ++s) {
      if (rows[s] < 0) continue;
      uint8_t* out = to + rows[s] * pitch;
      MOE_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        if (32 * i < left) Isa::store_vector(out + 512 * i, values[i]);
      }
    }
    from += 512 * kAtOnce;
    to += 512 * kAtOnce;
  }
}

template <class Isa>
MOE_FN void carry_padding(const Carry& carry, int expert) {
  const int count = carry.count_E[expert];
  const int total = (-count & carry.zero_to - 1) * carry.vectors;
  uint8_t* out = carry.to + 16 * ((static_cast<int64_t>(carry.start_E[expert]) + count) * carry.vectors);
  MOE_NO_UNROLL
  for (int at = static_cast<int>(Isa::lane_index()); at < total; at += 32) {
    Isa::store_vector(out + 16 * static_cast<int64_t>(at), typename Isa::Vector{});
  }
}

// The warp of block `block` of `blocks`.
template <class Isa>
MOE_FN void carry_rows(const Carry& carry, int block, int blocks) {
  if (carry.from == nullptr) return;
  MOE_NO_UNROLL
  for (int token = block; token < carry.tokens; token += blocks) carry_token<Isa>(carry, token);
  MOE_NO_UNROLL
  for (int expert = block; expert < carry.experts; expert += blocks) carry_padding<Isa>(carry, expert);
}
// Of all blocks of the launch, in clusters of two.
template <class Isa>
MOE_FN void carry_rows(const Carry& carry) {
  carry_rows<Isa>(carry, static_cast<int>(2 * Isa::cluster_index() + Isa::cluster_rank()), static_cast<int>(2 * Isa::num_clusters()));
}

}  // namespace moe
