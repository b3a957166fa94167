// The second part of a dispatch (kWayBeside): rows that only tasks behind a list's cut read (ListCut in tiling.h), copied on a few multiprocessors
// beside the product of the tasks in front of it. Launched by row_copy.cu; which tasks those are, layer.cc says.
//
// A multiprocessor copies about 25 bytes a clock each way, by bulk copies as by its lanes: up to 50 GB/s, beside products 30 to 34 (NOTES.md, v19).
#pragma once

#include "isa/portable.h"
#include "task_list.h"

namespace moe {

// A ring of rows for each warp of a block: one warp alone takes 300 ns for a row, as long as its bytes take.
struct RowCopyConfig {
  static constexpr int kStages = 4;
  static constexpr int kLoads = 3;  // rows of a ring that are on their way in; the others are on their way out
  static constexpr int kMostWarps = 8;
  static constexpr int kRoom = 224 << 10;  // for the rows of all rings; with so much nothing else runs on the multiprocessor
  static constexpr int kMostRowBytes = kRoom / kStages;
  // Behind the rows, for each warp and stage: a barrier, by which the row has landed (one arrival, that of the warp, with its bytes); which row it is.
  static constexpr uint32_t kBarrierOffset = kRoom;
  static constexpr uint32_t kRowOffset = kBarrierOffset + 8 * kMostWarps * kStages;
  static constexpr uint32_t kSharedBytes = 1024 + kRowOffset + 4 * kMostWarps * kStages;
  static_assert(kSharedBytes <= 232448, "a block has 227 KB of shared memory");

  static constexpr int warps(int row_bytes) {
    const int fit = kMostRowBytes / row_bytes;
    return fit < kMostWarps ? fit : kMostWarps;
  }
};

// rows_MxD[r] = tokens_TxD[slot_M[r] / top_k] for every row from the cut on that has a slot.
struct RowCopy {
  const uint8_t* from;
  uint8_t* to;
  const int* slot_M;
  const Task* front;      // tasks in front of the cut
  const int* num_front;   // how many
  int rows;               // M
  int row_bytes, top_k;
  int tile_m;             // rows of a task
};

inline RowCopy row_copy(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list) {
  RowCopy copy = {};
  copy.from = reinterpret_cast<const uint8_t*>(x_TxD);
  copy.to = reinterpret_cast<uint8_t*>(rows_MxD);
  copy.slot_M = plan.slot_M;
  copy.front = list.tasks + list.cut.at;
  copy.num_front = list.num_tasks + kFront;
  copy.rows = static_cast<int>(s.rows);
  copy.row_bytes = static_cast<int>(2 * s.d_model);
  copy.top_k = static_cast<int>(s.top_k);
  copy.tile_m = list.tile_m;
  return copy;
}

// The first row that no task in front of the cut reads. The rows of a list only go on from one group of row tiles to the next, and all tiles of a group
// stand together in its first tasks.
MOE_HOST_FN int cut_row(const RowCopy& copy) {
  const int count = *copy.num_front;
  int cut = 0;
  for (int i = count > kGroupTiles ? count - kGroupTiles : 0; i < count; ++i) {
    const int end = copy.front[i].row0 + copy.tile_m;
    cut = end > cut ? end : cut;
  }
  return count > 0 && cut < copy.rows ? cut : copy.rows;
}

// One warp, the `part`-th of `parts`: 32 rows at a time. A single lane sends them on their way.
template <class Isa, class Config>
MOE_FN void copy_rows(const RowCopy& copy, int part, int parts) {
  const int lane = static_cast<int>(Isa::lane_index());
  const uint32_t bytes = static_cast<uint32_t>(copy.row_bytes), base = Isa::shared_base(), first_stage = Config::kStages * Isa::warp_index();
  const uint32_t ring = base + first_stage * bytes;
  const uint32_t landed = base + Config::kBarrierOffset + 8 * first_stage, row_of = base + Config::kRowOffset + 4 * first_stage;
  if (lane == 0) {
    for (int s = 0; s < Config::kStages; ++s) Isa::barrier_init(landed + 8 * s, 1);
    Isa::barrier_init_fence();
  }
  Isa::warp_sync();
  uint32_t in = 0, out = 0, out_phase = 0;  // stages
  int under_way = 0;
  auto send = [&] {
    Isa::barrier_wait(landed + 8 * out, out_phase);
    Isa::store_bytes_once(copy.to + static_cast<int64_t>(Isa::load_word(row_of + 4 * out)) * bytes, ring + out * bytes, bytes);
    Isa::store_commit();
    --under_way;
    if (++out == Config::kStages) out = 0, out_phase ^= 1;
  };
  auto fetch = [&](int token, int row) {
    if (under_way == Config::kLoads) send();
    Isa::template store_wait_read<Config::kStages - Config::kLoads>();  // the stage's row before this one has left
    Isa::store_word(row_of + 4 * in, static_cast<uint32_t>(row));
    Isa::barrier_expect_bytes(landed + 8 * in, bytes);
    Isa::load_bytes(copy.from + static_cast<int64_t>(token) * bytes, landed + 8 * in, ring + in * bytes, bytes);
    ++under_way;
    if (++in == Config::kStages) in = 0;
  };
  auto token_of = [&](int row) {
    const int slot = row < copy.rows ? copy.slot_M[row] : -1;
    return slot < 0 ? -1 : slot / copy.top_k;
  };
  int first = cut_row(copy) + 32 * part;
  int mine = token_of(first + lane);
  MOE_NO_UNROLL
  for (; first < copy.rows; first += 32 * parts) {
    const int coming = token_of(first + 32 * parts + lane);
    MOE_NO_UNROLL
    for (int i = 0; i < 32; ++i) {
      const int token = Isa::shuffle(mine, static_cast<uint32_t>(i));
      if (lane == 0 && token >= 0) fetch(token, first + i);
    }
    mine = coming;
  }
  if (lane == 0) {
    while (under_way > 0) send();
    Isa::store_wait_done();
  }
}

}  // namespace moe
