// Task lists of the Blackwell programs: a task per tile of a cluster, expert by expert. The list is built on the device from the plan's
// counts (sm100_task_list.cu); the functions here are what a thread of it computes, and what the host tests use.
//
// Order inside an expert: groups of kGroupTiles row tiles, column tiles outside, row tiles inside, so that neighbours in the list share
// the columns' operand in the L2, and a group's rows stay there. (Per-expert grouping mattered most for weight gradients in
// public reports, blackwell.md section 7; the size is a guess.)
#pragma once

#include "task.h"

namespace moe {

struct Sm100TaskList {
  Kind kind;
  int tile_m;       // rows of a cluster's tile: 128 or 256
  int step_n;       // output columns of a tile (of F for kGateUp: half its width)
  int m_extent;     // weight gradients: output rows of one matrix
  int n_extent;     // output columns
  bool skip_empty;  // weight gradients: experts without rows get no task (accumulation)
};

constexpr int kGroupTiles = 8;

MOE_HOST_FN int sm100_div_up(int a, int b) { return (a + b - 1) / b; }

// Tasks of an expert with `rows` rows.
MOE_HOST_FN int sm100_count_tasks(const Sm100TaskList& list, int rows) {
  const bool wgrad = is_wgrad(list.kind);
  if (wgrad && rows == 0 && list.skip_empty) return 0;
  const int halves = list.kind == kWgradGateUp ? 2 : 1;
  return halves * sm100_div_up(wgrad ? list.m_extent : rows, list.tile_m) * sm100_div_up(list.n_extent, list.step_n);
}

// Task i of an expert whose rows begin at `start`.
MOE_HOST_FN Task sm100_make_task(const Sm100TaskList& list, int i, int expert, int start, int rows) {
  const bool wgrad = is_wgrad(list.kind);
  const int m_tiles = sm100_div_up(wgrad ? list.m_extent : rows, list.tile_m);
  const int n_tiles = sm100_div_up(list.n_extent, list.step_n);
  const int half = i / (m_tiles * n_tiles), in_half = i % (m_tiles * n_tiles);
  const int group = in_half / (kGroupTiles * n_tiles), in_group = in_half % (kGroupTiles * n_tiles);
  const int left = m_tiles - group * kGroupTiles;
  const int group_tiles = left < kGroupTiles ? left : kGroupTiles;
  const int m0 = (group * kGroupTiles + in_group % group_tiles) * list.tile_m;
  Task task = {};
  task.kind = list.kind;
  task.half = static_cast<uint8_t>(half);
  task.expert = expert;
  task.row0 = start + (wgrad ? 0 : m0);
  task.rows = rows - (wgrad ? 0 : m0);
  task.m0 = wgrad ? m0 : 0;
  task.n0 = in_group / group_tiles * list.step_n;
  task.wait = -1;
  task.signal = -1;
  return task;
}

// Upper bound of the list's length for any counts of `experts` experts whose padded rows fit in `padded_rows` (a multiple of 128).
MOE_HOST_FN int64_t sm100_max_tasks(const Sm100TaskList& list, int64_t padded_rows, int experts) {
  if (is_wgrad(list.kind)) return static_cast<int64_t>(experts) * sm100_count_tasks(list, 1);
  // An expert's last tile may be no more than half full.
  return (padded_rows / list.tile_m + (list.tile_m > 128 ? experts : 0)) * sm100_div_up(list.n_extent, list.step_n);
}

}  // namespace moe
