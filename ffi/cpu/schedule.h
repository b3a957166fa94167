// The schedule of an expert layer: a stable counting sort of (token, slot) by expert. Equal to `moejax/ops/schedule.py`.
#pragma once

#include <cstdint>
#include <string>

namespace moejax::cpu {

struct ScheduleBuffers {
  const int32_t* expert_TxK = nullptr;  // ids over all ranks, -1 for a masked slot
  int32_t* count_E = nullptr;           // E local experts
  int32_t* start_E = nullptr;
  int32_t* row_TxK = nullptr;
  int32_t* slot_M = nullptr;
  int32_t* routed_E = nullptr;
};

// Args: slots T K; num_experts over all ranks, of which first..first + local - 1 are ours; rows M; capacity rows per expert, or -1.
// Returns an empty string, or what is wrong (an id out of range, rows that do not hold the groups).
std::string Schedule(const ScheduleBuffers& buffers, int64_t slots, int64_t num_experts, int64_t first, int64_t local, int64_t rows,
                     int64_t capacity);

}  // namespace moejax::cpu
