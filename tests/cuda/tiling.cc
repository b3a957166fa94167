// Task lists by their definition: every output tile of every expert belongs to one task, neighbours of a pair included; no list is longer
// than max_tasks says; experts follow one another from round to round, and no cluster has more work than there must be. Prints the number of
// lists; exits with 1 at the first fault.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <tuple>

#include "host_tasks.h"
#include "row_copy.h"

namespace {

using namespace moe;

// Tiles of 64 rows by step_n columns: how often each is some task's. 64 divides every tile height.
using Tiles = std::map<std::tuple<int, int, int, int>, int>;  // expert, matrix, row / 64, column tile

std::string check(const Tiling& t, const std::vector<int>& count_E, int clusters) {
  std::vector<int> start_E;
  int rows = 0;
  for (int count : count_E) {
    start_E.push_back(rows);
    rows += (count + 127) / 128 * 128;
  }
  const auto tasks = list_tasks(t, count_E, start_E, clusters);
  if (static_cast<int64_t>(tasks.size()) > max_tasks(t, rows, static_cast<int>(count_E.size()))) return "longer than max_tasks";
  Tiles found;
  int last = 0, last_of_round = 0;  // of the round before
  for (size_t i = 0; i < tasks.size(); ++i) {
    const Task& task = tasks[i];
    const bool wgrad = is_wgrad(t.kind);
    if (i % clusters == 0) last_of_round = last;
    if (task.expert < last_of_round) return "experts out of order";
    last = std::max(last, task.expert);
    const int first = wgrad ? task.m0 : task.row0 - start_E[task.expert];
    if (task.row0 + task.rows != start_E[task.expert] + count_E[task.expert]) return "rows end in another expert";
    const bool strips = t.pairs == Pairs::kStrips;
    const int extent = strips ? (t.kind == kWgradGateUp ? 2 : 1) * t.m_extent : wgrad ? t.m_extent : count_E[task.expert];
    const int height = t.pairs == Pairs::kRows && task.pair == kPairN ? t.tile_m / 2 : t.tile_m;
    for (int m = first; m < first + height && m < extent; m += 64) {
      for (int n = 0; n < (task.pair == kPairN ? 2 : 1); ++n) {
        const int column = task.n0 / t.step_n + n;
        if (column * t.step_n < t.n_extent) ++found[{task.expert, strips ? m / t.m_extent : task.half, (strips ? m % t.m_extent : m) / 64, column}];
      }
    }
  }
  for (int e = 0; e < static_cast<int>(count_E.size()); ++e) {
    const bool wgrad = is_wgrad(t.kind);
    if (wgrad && count_E[e] == 0 && t.skip_empty) continue;
    const int extent = wgrad ? t.m_extent : count_E[e];
    for (int matrix = 0; matrix < (t.kind == kWgradGateUp ? 2 : 1); ++matrix) {
      for (int m = 0; m * 64 < extent; ++m) {
        for (int n = 0; n * t.step_n < t.n_extent; ++n) {
          const auto at = found.find({e, matrix, m, n});
          if (at == found.end()) return "a tile is nobody's";
          if (at->second != 1) return "a tile is computed twice";
          found.erase(at);
        }
      }
    }
  }
  return found.empty() ? "" : "a tile outside the output";
}

// The two parts of a list: each task has a place of its own in the room, every row that a task of the first reads lies in front of the row that the
// copy of the others begins with, and what a launch covers is enough.
std::string check_cut(const Tiling& t, const std::vector<int>& count_E, int front, int round, int provides) {
  std::vector<int> start_E;
  int rows = 0;
  for (int count : count_E) {
    start_E.push_back(rows);
    rows += (count + 127) / 128 * 128;
  }
  const auto tasks = list_tasks(t, count_E, start_E);
  const int count = static_cast<int>(tasks.size()), room = static_cast<int>(max_tasks(t, rows, static_cast<int>(count_E.size())));
  const ListCut cut = {std::min(front, room), room, round, provides};
  std::vector<Task> list(static_cast<size_t>(2 * room));
  std::vector<bool> taken(list.size());
  for (int i = 0; i < count; ++i) {
    const size_t place = static_cast<size_t>(cut.place(i, count));
    if (taken.at(place)) return "two tasks in one place";
    taken[place] = true;
    list[place] = tasks[static_cast<size_t>(i)];
  }
  const int in_front = cut.in_front(count);
  RowCopy copy = {};
  copy.front = list.data() + cut.at;
  copy.num_front = &in_front;
  copy.rows = rows;
  copy.tile_m = t.tile_m;
  const int row = cut_row(copy);
  if (in_front == 0 && (row != rows || rows > most_rows(t, cut.front))) return "a list of one part whose rows are not all in it";
  const int wanted = std::min((count + provides - 1) / provides * round, cut.front);
  if (in_front != (count > wanted ? wanted : 0)) return "not as many tasks in front of the cut as rounds provide for";
  if (in_front > 0 && row > most_rows(t, cut.front)) return "more rows in front of the cut than most_rows says";
  for (int i = 0; i < in_front; ++i) {
    const Task& task = copy.front[i];
    if (std::memcmp(&task, &tasks[static_cast<size_t>(i)], sizeof(Task)) != 0) return "the first part is not the first tasks";
    if (task.row0 + std::min(task.rows, task.pair == kPairM ? t.tile_m : t.tile_m / 2) > row) return "a task in front of the cut reads behind it";
  }
  return "";
}

// Work of the busiest of 66 clusters, and the mean, for Qwen3-30B's kDgradDown: a light task is two thirds of another.
struct Load {
  double busiest, mean;
};
Load load(std::mt19937& random, int clusters) {
  std::vector<int> count_E(128), start_E(128);
  for (int i = 0; i < 65536; ++i) ++count_E[random() % 128];
  const Tiling t = {kDgradDown, 256, 256, 0, 768, false, Pairs::kRows, true};
  const auto tasks = list_tasks(t, count_E, start_E, clusters);
  std::vector<double> work(66);
  double all = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const double own = tasks[i].pair == kPairN && tasks[i].rows <= 64 ? 2.0 / 3 : 1;
    work[i % 66] += own;
    all += own;
  }
  return {*std::max_element(work.begin(), work.end()), all / 66};
}

}  // namespace

int main() {
  std::mt19937 random(3);
  for (int i = 0; i < 20; ++i) {
    const auto state = random;
    const Load plain = load(random, 1);
    random = state;
    const Load ours = load(random, 66);
    if (ours.busiest > ours.mean + 0.55 || ours.busiest > plain.busiest - 0.3) {
      std::printf("the busiest cluster has %.2f tasks' work, by experts %.2f, the mean is %.2f\n", ours.busiest, plain.busiest, ours.mean);
      return 1;
    }
  }
  int lists = 0;
  for (int i = 0; i < 4000; ++i) {
    Tiling t = {};
    t.kind = static_cast<Kind>(random() % kNumKinds);
    t.pairs = static_cast<Pairs>(random() % (is_wgrad(t.kind) ? 4 : 3));
    const int heights[] = {128, 192, 256, 2048};
    t.tile_m = t.pairs == Pairs::kRows ? 256 : heights[random() % 4];
    if (t.pairs == Pairs::kNone && t.tile_m % 128 != 0) t.tile_m = 128;
    t.step_n = 64 << random() % 3;
    t.m_extent = 8 * (1 + static_cast<int>(random() % 400));
    if (t.pairs == Pairs::kStrips) t.m_extent = div_up(t.m_extent, 64) * 64;
    t.n_extent = 8 * (1 + static_cast<int>(random() % 400));
    t.skip_empty = random() % 2;
    t.level = random() % 4 > 0;
    std::vector<int> count_E;
    const unsigned experts = 1 + random() % (random() % 2 ? 6 : 40);
    for (unsigned e = 0; e < experts; ++e) count_E.push_back(random() % 3 == 0 ? 0 : static_cast<int>(random() % 2600));
    const int clusters = 1 + static_cast<int>(random() % 70);
    const std::string wrong = check(t, count_E, clusters);
    if (!wrong.empty()) {
      std::printf("kind %d, pairs %d, tile %d x %d, extents %d x %d, %d clusters: %s\n", t.kind, static_cast<int>(t.pairs), t.tile_m, t.step_n,
                  t.m_extent, t.n_extent, clusters, wrong.c_str());
      return 1;
    }
    if (t.kind == kGateUp && t.pairs == Pairs::kRows) {
      Tiling plain = t;
      plain.level = false;
      const int front = 1 + static_cast<int>(random() % 900), round = 1 + static_cast<int>(random() % 66);
      const std::string wrong_cut = check_cut(plain, count_E, front, round, round + static_cast<int>(random() % 300));
      if (!wrong_cut.empty()) {
        std::printf("%d columns of %d: %s\n", t.n_extent, t.step_n, wrong_cut.c_str());
        return 1;
      }
    }
    ++lists;
  }
  std::printf("%d lists\n", lists);
  return 0;
}
