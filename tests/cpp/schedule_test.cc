// The schedule: order, alignment, capacity, foreign and masked experts, refusals.
#include "check.h"
#include "cpu/schedule.h"

namespace moejax::cpu {
namespace {

struct Result {
  std::string problem;
  std::vector<int32_t> count, start, row, slot, routed;
};

Result Run(const std::vector<int32_t>& ids, int64_t num_experts, int64_t first, int64_t local, int64_t rows, int64_t capacity) {
  constexpr int32_t kDirty = 0x5A5A5A5A;
  Result r{"", std::vector<int32_t>(local, kDirty), std::vector<int32_t>(local, kDirty), std::vector<int32_t>(ids.size(), kDirty),
           std::vector<int32_t>(rows, kDirty), std::vector<int32_t>(local, kDirty)};
  r.problem = Schedule({ids.data(), r.count.data(), r.start.data(), r.row.data(), r.slot.data(), r.routed.data()},
                       int64_t(ids.size()), num_experts, first, local, rows, capacity);
  return r;
}

void RowsFollowTokenOrderAndStartOnTiles() {
  const Result r = Run({2, 0, -1, 2, 0, 2}, 3, 0, 3, 384, -1);
  CHECK(r.problem.empty(), "%s", r.problem.c_str());
  CHECK(r.count == (std::vector<int32_t>{2, 0, 3}), "counts");
  CHECK(r.start == (std::vector<int32_t>{0, 128, 128}), "starts");
  CHECK(r.row == (std::vector<int32_t>{128, 0, -1, 129, 1, 130}), "rows");
  for (int row = 0; row < 384; ++row) {
    const int expected = row == 0 ? 1 : row == 1 ? 4 : row == 128 ? 0 : row == 129 ? 3 : row == 130 ? 5 : -1;
    CHECK(r.slot[row] == expected, "row %d holds slot %d", row, r.slot[row]);
  }
}

void CapacityDropsTheLast() {
  const Result r = Run({1, 1, 0, 1, 1}, 2, 0, 2, 256, 2);
  CHECK(r.routed == (std::vector<int32_t>{1, 4}) && r.count == (std::vector<int32_t>{1, 2}), "counts");
  CHECK(r.row == (std::vector<int32_t>{128, 129, 0, -1, -1}), "the first two of expert 1 keep their rows");
}

void ForeignExpertsGetNoRow() {
  const Result r = Run({0, 3, 2, 1}, 4, 2, 2, 256, -1);
  CHECK(r.row == (std::vector<int32_t>{-1, 128, 0, -1}), "only experts 2 and 3 live here");
}

void BadInputIsRefused() {
  CHECK(Run({0, 4}, 4, 0, 4, 512, -1).problem.find("holds 4 at flat slot 1") != std::string::npos, "id too large");
  CHECK(Run({-2}, 4, 0, 4, 512, -1).problem.find("holds -2") != std::string::npos, "id too small");
  CHECK(Run({0, 1}, 2, 0, 2, 128, -1).problem.find("would end at 256") != std::string::npos, "too few rows");
}

}  // namespace
}  // namespace moejax::cpu

int main() {
  using namespace moejax::cpu;
  RowsFollowTokenOrderAndStartOnTiles();
  CapacityDropsTheLast();
  ForeignExpertsGetNoRow();
  BadInputIsRefused();
  std::puts("schedule: ok");
}
