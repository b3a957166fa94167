// The task lists of host tests, as the device's builder would write them.
#pragma once

#include <vector>

#include "tiling.h"

namespace moe {

template <class Integers>
std::vector<Task> list_tasks(const Tiling& tiling, const Integers& count_E, const Integers& start_E) {
  std::vector<Task> tasks;
  int expert = 0;
  for (int rows : count_E) {
    const TaskGrid grid = task_grid(tiling, rows);
    for (int i = 0; i < grid.total; ++i) tasks.push_back(make_task(tiling, grid, i, expert, start_E[expert], rows));
    ++expert;
  }
  return tasks;
}

}  // namespace moe
