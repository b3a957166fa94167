// How the output of a grouped product is cut into tasks, on every architecture: expert by expert; inside an expert, groups of up to
// kGroupTiles row tiles, all column tiles of a group before the next, row tiles innermost. So what runs together reads few distinct rows
// and columns from memory. What a thread of the device's builder computes (task_list.cu), and what host tests use. Plain C++17.
#pragma once

#include "task.h"

namespace moe {

// What the two blocks of a cluster do with a task.
enum class Pairs : uint8_t {
  kNone,     // a tile per task: one block's, or one that a pair of blocks computes together (Blackwell)
  kRows,     // two neighbouring row tiles share columns; an odd last one shares its rows between two column tiles (Hopper)
  kColumns,  // two column tiles share rows
  kStrips,   // the same, and the rows of both matrices of kWgradGateUp follow one another, each to a whole number of tiles
};

struct Tiling {
  Kind kind;
  int tile_m;       // rows of a task; with kRows half of that for an odd last one
  int step_n;       // output columns of a tile (of F for kGateUp: half its width)
  int m_extent;     // weight gradients: output rows of one matrix
  int n_extent;     // output columns
  bool skip_empty;  // weight gradients: experts without rows get no task (accumulation)
  Pairs pairs;
  bool level = false;  // kRows: clusters get about the same work (ListOrder)
};

constexpr int kGroupTiles = 8;

// The tasks of one expert, per matrix: `rows` row tiles by `columns` column tiles, then `shared_rows` row tiles by pairs of column tiles.
struct TaskGrid {
  int rows, columns, shared_rows, matrices, total;
  int light;  // the last so many have rows for one warpgroup alone, and take two thirds of the time
};
MOE_HOST_FN TaskGrid task_grid(const Tiling& t, int rows) {
  const bool wgrad = is_wgrad(t.kind);
  const bool strips = t.pairs == Pairs::kStrips;
  const int matrices = t.kind == kWgradGateUp ? 2 : 1;
  const int extent = strips ? matrices * t.m_extent : wgrad ? t.m_extent : rows;
  TaskGrid g;
  g.columns = div_up(t.n_extent, t.step_n);
  g.rows = t.pairs == Pairs::kRows ? div_up(extent, t.tile_m / 2) / 2 : t.pairs == Pairs::kNone ? div_up(extent, t.tile_m) : 0;
  g.shared_rows = t.pairs == Pairs::kRows ? div_up(extent, t.tile_m / 2) % 2 : t.pairs == Pairs::kNone ? 0 : div_up(extent, t.tile_m);
  g.matrices = strips ? 1 : matrices;
  g.total = wgrad && rows == 0 && t.skip_empty ? 0 : g.matrices * (g.rows * g.columns + g.shared_rows * div_up(g.columns, 2));
  g.light = t.level && !wgrad && t.pairs == Pairs::kRows && g.shared_rows > 0 && rows - t.tile_m * g.rows <= 64 ? div_up(g.columns, 2) : 0;
  return g;
}

// Task i of an expert whose `rows` rows begin at `start`.
MOE_HOST_FN Task make_task(const Tiling& t, const TaskGrid& g, int i, int expert, int start, int rows) {
  const bool wgrad = is_wgrad(t.kind);
  const int per_matrix = g.total / g.matrices, at = i % per_matrix;
  int m_tile, n_tile;
  const bool whole = at < g.rows * g.columns;
  if (whole) {
    const int group = at / (kGroupTiles * g.columns), in_group = at % (kGroupTiles * g.columns);
    const int left = g.rows - group * kGroupTiles;
    const int tiles = left < kGroupTiles ? left : kGroupTiles;
    m_tile = group * kGroupTiles + in_group % tiles;
    n_tile = in_group / tiles;
  } else {
    const int rest = at - g.rows * g.columns;
    m_tile = g.rows + rest % g.shared_rows;
    n_tile = 2 * (rest / g.shared_rows);
  }
  const int m0 = t.tile_m * m_tile;
  Task task = {};
  task.kind = t.kind;
  task.pair = whole ? kPairM : kPairN;
  task.half = static_cast<uint8_t>(i / per_matrix);
  task.expert = expert;
  task.row0 = start + (wgrad ? 0 : m0);
  task.rows = rows - (wgrad ? 0 : m0);
  task.m0 = wgrad ? m0 : 0;
  task.n0 = n_tile * t.step_n;
  task.wait = -1;
  task.signal = -1;
  return task;
}

// A whole list: expert by expert, but for the order inside a round.
//
// Clusters take every clusters-th task, so a round is as many neighbouring tasks, which run at about the same time and share what they read. In which
// order they stand is free, and with it who gets the light ones: first those clusters that have a task more than the others, kLightPerTask times each
// (as often as what a light task saves makes a task), then all in turn. In the order of the experts the busiest cluster of Qwen3-30B has 14.0
// tasks' work of kDgradDown where the mean is 12.9; so it has 13.0.
struct ListOrder {
  static constexpr int kLightPerTask = 3;
  const int* first;  // [experts + 1] tasks of the experts before
  const int* light;  // [experts + 1] light ones of them
  int experts, clusters;

  MOE_HOST_FN int count() const { return first[experts]; }
  MOE_HOST_FN int expert_of(int task) const {
    int low = 0, high = experts;  // first[low] <= task < first[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first[middle] <= task ? low : high) = middle;
    }
    return low;
  }
  MOE_HOST_FN int first_light(int expert) const { return first[expert + 1] - (light[expert + 1] - light[expert]); }
  MOE_HOST_FN int light_before(int task, int expert) const {
    const int begin = first_light(expert);
    return light[expert] + (task > begin ? task - begin : 0);
  }
  // Where `task`, of `expert`, stands.
  MOE_HOST_FN int place(int task, int expert) const {
    const int round = task / clusters * clusters, next = round + clusters;
    if (light[experts] == 0 || next > count()) return task;
    const int heavy = count() % clusters, to_heavy = heavy * kLightPerTask;
    auto cluster_of = [&](int j) { return j < to_heavy ? j % heavy : (heavy + j - to_heavy) % clusters; };  // of light task j of the list
    const int begin = light_before(round, expert_of(round)), end = next == count() ? light[experts] : light_before(next, expert_of(next));
    const int split = begin > to_heavy ? begin : end < to_heavy ? end : to_heavy;
    if (split - begin > heavy) return task;  // two of the round would meet
    const int at = light_before(task, expert);
    if (task >= first_light(expert)) return round + cluster_of(at);
    // Full tasks take the places left: light ones stand in two runs, each of which may go on at the front.
    int cluster = task - round - (at - begin);
    auto pass = [&](int from, int length) {
      if (from <= cluster) cluster += length;
    };
    const int a = split > begin ? cluster_of(begin) : 0, b = end > split ? cluster_of(split) : 0;
    const int a_in_front = a + split - begin > heavy ? a + split - begin - heavy : 0, b_in_front = b + end - split > clusters ? b + end - split - clusters : 0;
    const int a_length = split - begin - a_in_front, b_length = end - split - b_in_front;
    pass(0, a_in_front + b_in_front);
    pass(a <= b ? a : b, a <= b ? a_length : b_length);
    pass(a <= b ? b : a, a <= b ? b_length : a_length);
    return round + cluster;
  }
};

// A list in two parts, each of which has a place that the host knows: the first tasks stand behind the room of the others. A list that would have no
// second part has no first one.
struct ListCut {
  int front = 0;  // tasks in front of the cut at most; 0: a list of one part
  int at = 0;     // where they stand
  // Whole rounds of tasks, and as many of them as a list of `count` needs if each provides for so many: experts elsewhere have rows too, of which only the
  // device knows how many.
  int round = 1, provides = 1;

  MOE_HOST_FN int in_front(int count) const {
    if (front == 0) return 0;
    const int wanted = div_up(count, provides) * round, tasks = wanted < front ? wanted : front;
    return count > tasks ? tasks : 0;
  }
  MOE_HOST_FN int place(int task, int count) const { return task < in_front(count) ? at + task : task - in_front(count); }
};

// Upper bound of the rows from the first one to the last one that the first `tasks` tasks of a row kind in pairs of rows read: their own, and those of a
// group of row tiles of which only a part is among them.
MOE_HOST_FN int64_t most_rows(const Tiling& t, int64_t tasks) {
  return tasks * t.tile_m / div_up(t.n_extent, t.step_n) + (kGroupTiles + 1) * t.tile_m;
}

// Upper bound of the list's length for any counts of `experts` experts whose groups, padded to 128 rows each, fit in `padded_rows`.
MOE_HOST_FN int64_t max_tasks(const Tiling& t, int64_t padded_rows, int experts) {
  if (is_wgrad(t.kind)) return static_cast<int64_t>(experts) * task_grid(t, 1).total;
  const int64_t columns = div_up(t.n_extent, t.step_n);
  // Every expert may end in an odd tile, whose pairs along the columns round up once more.
  if (t.pairs == Pairs::kRows) return (padded_rows / (t.tile_m / 2) * columns + 1) / 2 + experts;
  const int64_t partial = t.tile_m > 128 ? experts : 0;  // last tiles that no padded group fills
  return (padded_rows / t.tile_m + partial) * (t.pairs == Pairs::kColumns ? (columns + 1) / 2 : columns);
}

}  // namespace moe
