// What the handlers of the expert layers on a GPU check and decode alike: the indices of the plan, aligned addresses, workspaces, status.
#pragma once

#include <string>

#include "moe.h"
#include "xla/check.h"

namespace moejax::xla_ffi {

inline constexpr int64_t kInt32Max = 0x7FFFFFFF;

template <class T>
T* DataOf(const ffi::AnyBuffer& buffer) {
  return Absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

// Indices of the plan, in the order of the handlers' operands.
struct PlanArguments {
  ffi::AnyBuffer slot_M, row_TxK, count_E, start_E;
};

inline moe::Plan DecodePlan(const PlanArguments& a) {
  moe::Plan plan;
  plan.count_E = DataOf<int32_t>(a.count_E);
  plan.start_E = DataOf<int32_t>(a.start_E);
  plan.row_TxK = DataOf<int32_t>(a.row_TxK);
  plan.slot_M = DataOf<int32_t>(a.slot_M);
  return plan;
}

// w_down: (E, D, F).
inline moe::LayerShape DecodeShape(const PlanArguments& a, const ffi::AnyBuffer& w_down) {
  moe::LayerShape shape;
  shape.tokens = DimOf(a.row_TxK, 0);
  shape.top_k = DimOf(a.row_TxK, 1);
  shape.experts = DimOf(w_down, 0);
  shape.rows = DimOf(a.slot_M, 0);
  shape.d_model = DimOf(w_down, 1);
  shape.width = DimOf(w_down, 2);
  return shape;
}

inline void CheckPlan(Checker& check, const PlanArguments& a, const moe::LayerShape& s) {
  constexpr auto kS32 = ffi::DataType::S32;
  check.Array("row_TxK", a.row_TxK, {kS32}, {{"T"}, {"K"}}, kInt32Max);
  check.Array("slot_M", a.slot_M, {kS32}, {{"M"}}, kInt32Max);
  check.Array("count_E", a.count_E, {kS32}, {{"E", s.experts}});
  check.Array("start_E", a.start_E, {kS32}, {{"E", s.experts}});
  check.Require(s.rows > 0 && s.rows % moe::kGroupRows == 0, "M is " + std::to_string(s.rows) + "; expected a positive multiple of 128");
}

// XLA's own allocations are aligned to 256 bytes; what is cut out of them need not be.
inline void CheckAddress(Checker& check, const char* name, const ffi::AnyBuffer& buffer, uintptr_t bytes) {
  check.Require(Empty(buffer) || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % bytes == 0,
                std::string(name) + " lies at an address that is not a multiple of " + std::to_string(bytes));
}

inline void CheckWorkspaceSize(Checker& check, const ffi::AnyBuffer& workspace, size_t bytes) {
  check.Array("workspace", workspace, {ffi::DataType::U8}, {{"bytes"}});
  check.Require(DimOf(workspace, 0) >= static_cast<int64_t>(bytes), "workspace has " + std::to_string(DimOf(workspace, 0)) +
                                                                        " bytes; this shape needs " + std::to_string(bytes));
  CheckAddress(check, "workspace", workspace, 256);
}

inline ffi::Error ToError(const char* target, const moe::Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(target) + ": " + status.message);
}

}  // namespace moejax::xla_ffi
