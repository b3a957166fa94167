#include "cpu/schedule.h"

#include <algorithm>
#include <vector>

#include "cpu/types.h"

namespace moejax::cpu {

std::string Schedule(const ScheduleBuffers& buffers, int64_t slots, int64_t num_experts, int64_t first, int64_t local, int64_t rows,
                     int64_t capacity) {
  std::fill_n(buffers.routed_E, local, 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t expert = buffers.expert_TxK[slot];
    if (expert < -1 || expert >= num_experts) {
      return "expert_TxK holds " + std::to_string(expert) + " at flat slot " + std::to_string(slot) + "; expected 0.." +
             std::to_string(num_experts - 1) + ", or -1 for a masked slot";
    }
    if (expert >= first && expert < first + local) ++buffers.routed_E[expert - first];
  }
  std::vector<int64_t> next(local);
  int64_t start = 0;
  for (int64_t e = 0; e < local; ++e) {
    const int64_t count = capacity < 0 ? buffers.routed_E[e] : std::min<int64_t>(buffers.routed_E[e], capacity);
    const int64_t end = start + CeilDiv(count, kTile) * kTile;
    if (end > rows) {
      return "slot_M has " + std::to_string(rows) + " rows, which do not hold the groups: expert " + std::to_string(e) + " with " +
             std::to_string(count) + " rows would end at " + std::to_string(end);
    }
    buffers.count_E[e] = static_cast<int32_t>(count);
    buffers.start_E[e] = static_cast<int32_t>(start);
    next[e] = start;
    start = end;
  }
  std::fill_n(buffers.slot_M, rows, -1);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t e = buffers.expert_TxK[slot] - first;
    buffers.row_TxK[slot] = -1;
    if (buffers.expert_TxK[slot] < 0 || e < 0 || e >= local) continue;
    if (next[e] - buffers.start_E[e] >= buffers.count_E[e]) continue;  // over capacity: the last in token order go
    buffers.slot_M[next[e]] = static_cast<int32_t>(slot);
    buffers.row_TxK[slot] = static_cast<int32_t>(next[e]++);
  }
  return "";
}

}  // namespace moejax::cpu
