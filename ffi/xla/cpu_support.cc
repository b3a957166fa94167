#include "xla/cpu_support.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace moejax::xla_ffi {

void CheckGroups(Checker& check, const ffi::AnyBuffer& count_E, const ffi::AnyBuffer& start_E, int64_t experts, int64_t rows) {
  check.Array("count_E", count_E, {ffi::DataType::S32}, {{"E", experts}}, kInt32Max);
  check.Array("start_E", start_E, {ffi::DataType::S32}, {{"E", experts}}, kInt32Max);
  check.Require(rows <= kInt32Max, "M is " + std::to_string(rows) + "; row indices are int32");
  if (!check.ok()) return;
  const cpu::Groups groups = GroupsOf(count_E, start_E, rows);
  int64_t end = 0, total = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t count = groups.count[e], start = groups.start[e];
    total += count;
    const std::string expert = "expert " + std::to_string(e);
    if (count < 0) {
      check.Fail("count_E holds " + std::to_string(count) + " for " + expert + "; group sizes are not negative");
    } else if (count > 0 && (start < end || start % cpu::kTile != 0)) {
      check.Fail("start_E holds " + std::to_string(start) + " for " + expert + "; expected a multiple of 128 from " +
                 std::to_string(end) + " up");
    } else if (count > 0 && start + count > rows) {
      for (int64_t rest = e + 1; rest < experts; ++rest) total += groups.count[rest];
      check.Fail("the group sizes sum to " + std::to_string(total) + " and " + expert + " would end at row " +
                 std::to_string(start + count) + ", but there are " + std::to_string(rows) + " rows");
    }
    if (!check.ok()) return;
    if (count > 0) end = cpu::CeilDiv(start + count, cpu::kTile) * cpu::kTile;
  }
}

cpu::Groups GroupsOf(const ffi::AnyBuffer& count_E, const ffi::AnyBuffer& start_E, int64_t rows) {
  return {DimOf(count_E, 0), rows, static_cast<const int32_t*>(count_E.untyped_data()),
          static_cast<const int32_t*>(start_E.untyped_data())};
}

void CheckPermutation(Checker& check, const ffi::AnyBuffer& slot_M, const ffi::AnyBuffer& row_TxK, const cpu::Groups& groups,
                      int64_t tokens, int64_t top_k) {
  check.Array("slot_M", slot_M, {ffi::DataType::S32}, {{"M", groups.rows}}, kInt32Max);
  check.Array("row_TxK", row_TxK, {ffi::DataType::S32}, {{"T", tokens}, {"K", top_k}}, kInt32Max);
  if (!check.ok()) return;
  check.Require(tokens == 0 || top_k <= kInt32Max / tokens, "T K is " + std::to_string(tokens) + " x " + std::to_string(top_k) +
                                                                "; slot indices are int32");
  if (!check.ok()) return;
  const int64_t slots = tokens * top_k;
  const auto* slot = static_cast<const int32_t*>(slot_M.untyped_data());
  const auto* row = static_cast<const int32_t*>(row_TxK.untyped_data());
  int64_t in_groups = 0, with_row = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    for (int64_t r = groups.start[e]; r < static_cast<int64_t>(groups.start[e]) + groups.count[e]; ++r) {
      if (slot[r] < 0 || slot[r] >= slots || row[slot[r]] != r) {
        check.Fail("slot_M holds " + std::to_string(slot[r]) + " at row " + std::to_string(r) + " of expert " + std::to_string(e) +
                   "; expected the slot in 0.." + std::to_string(slots - 1) + " whose row_TxK is this row");
        return;
      }
    }
    in_groups += groups.count[e];
  }
  for (int64_t s = 0; s < slots; ++s) with_row += row[s] != -1;
  check.Require(in_groups == with_row, "row_TxK has rows for " + std::to_string(with_row) + " slots, but the groups hold " +
                                           std::to_string(in_groups) + " rows: the others must be -1");
}

void AdviseHugePages(const ffi::AnyBuffer& result) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  if (Empty(result) || result.size_bytes() < 4 * kPage) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(result.untyped_data());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + result.size_bytes()) / kPage * kPage;
  // A system without huge pages refuses, and then nothing is lost.
  (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)result;
#endif
}

}  // namespace moejax::xla_ffi
