// What the handlers of the expert layers on a GPU check and decode alike: the indices of the plan, aligned addresses, workspaces, status.
#pragma once

#include <string>

#include "moe.h"
#include "xla/check.h"

namespace moejax::xla_ffi {

inline constexpr int64_t kInt32Max = 0x7FFFFFFF;

template <class T>
T* Data(const ffi::AnyBuffer& buffer) {
  return Absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

// The plan, in the order of the handlers' operands.
struct Indices {
  ffi::AnyBuffer slot_M, row_TxK, count_E, start_E;
};

inline moe::Plan PlanOf(const Indices& a) {
  moe::Plan plan;
  plan.count_E = Data<int32_t>(a.count_E);
  plan.start_E = Data<int32_t>(a.start_E);
  plan.row_TxK = Data<int32_t>(a.row_TxK);
  plan.slot_M = Data<int32_t>(a.slot_M);
  return plan;
}

// w_down: (E, D, F).
inline moe::LayerShape ShapeOf(const Indices& a, const ffi::AnyBuffer& w_down) {
  moe::LayerShape shape;
  shape.tokens = DimOf(a.row_TxK, 0);
  shape.top_k = DimOf(a.row_TxK, 1);
  shape.experts = DimOf(w_down, 0);
  shape.rows = DimOf(a.slot_M, 0);
  shape.d_model = DimOf(w_down, 1);
  shape.width = DimOf(w_down, 2);
  return shape;
}

// Indices, and that D and F are multiples of what the recipe needs (`why` says of what).
inline void CheckIndices(Checker& check, const Indices& a, const moe::LayerShape& s, int64_t unit_d, int64_t unit_f, const char* why) {
  constexpr auto kS32 = ffi::DataType::S32;
  check.Array("row_TxK", a.row_TxK, {kS32}, {{"T"}, {"K"}}, kInt32Max);
  check.Array("slot_M", a.slot_M, {kS32}, {{"M"}}, kInt32Max);
  check.Array("count_E", a.count_E, {kS32}, {{"E", s.experts}});
  check.Array("start_E", a.start_E, {kS32}, {{"E", s.experts}});
  check.Require(s.rows > 0 && s.rows % moe::kGroupRows == 0, "M is " + std::to_string(s.rows) + "; expected a positive multiple of 128");
  const bool fits = s.d_model > 0 && s.width > 0 && s.d_model % unit_d == 0 && s.width % unit_f == 0;
  const std::string units = unit_d == unit_f ? std::to_string(unit_d) : std::to_string(unit_d) + " and " + std::to_string(unit_f);
  check.Require(fits, "D is " + std::to_string(s.d_model) + " and F is " + std::to_string(s.width) + "; expected positive multiples of " + units + why);
}

// The copy engine needs 16 bytes. XLA's own allocations are aligned to 256; what is cut out of them need not be.
inline void CheckAligned(Checker& check, const char* name, const ffi::AnyBuffer& buffer, uintptr_t bytes = 16) {
  check.Require(Empty(buffer) || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % bytes == 0,
                std::string(name) + " lies at an address that is not a multiple of " + std::to_string(bytes));
}

inline void CheckWorkspace(Checker& check, const ffi::AnyBuffer& workspace, size_t bytes) {
  check.Array("workspace", workspace, {ffi::DataType::U8}, {{"bytes"}});
  check.Require(DimOf(workspace, 0) >= static_cast<int64_t>(bytes), "workspace has " + std::to_string(DimOf(workspace, 0)) +
                                                                        " bytes; this shape needs " + std::to_string(bytes));
  CheckAligned(check, "workspace", workspace, 256);
}

inline ffi::Error ErrorOf(const char* target, const moe::Status& status) {
  if (status.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(target) + ": " + status.message);
}

}  // namespace moejax::xla_ffi
