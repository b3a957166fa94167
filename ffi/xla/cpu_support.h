// What the CPU handlers share: XLA's thread pool, checks of the schedule, error handling.
#pragma once

#include <exception>
#include <functional>
#include <new>
#include <string>
#include <utility>

#include "cpu/parallel.h"
#include "cpu/types.h"
#include "xla/check.h"

namespace moejax::xla_ffi {

inline constexpr int64_t kInt32Max = 0x7FFFFFFF;

class XlaPool : public cpu::Pool {
 public:
  explicit XlaPool(ffi::ThreadPool pool) : pool_(pool) {}
  // The thread that called the handler works too, so one less: more would only fight over the cores.
  int64_t num_threads() const override { return pool_.num_threads() - 1; }
  void Schedule(std::function<void()> work) override { pool_.Schedule(std::move(work)); }

 private:
  ffi::ThreadPool pool_;
};

// FP32 or BF16 arrays as the kernels see them.
inline cpu::Format FormatOf(const ffi::AnyBuffer& buffer) {
  return buffer.element_type() == ffi::DataType::BF16 ? cpu::Format::kBf16 : cpu::Format::kFp32;
}
inline cpu::RowsIn In(const ffi::AnyBuffer& buffer) { return {buffer.untyped_data(), FormatOf(buffer)}; }
inline cpu::RowsOut Out(const ffi::AnyBuffer& buffer) { return {buffer.untyped_data(), FormatOf(buffer)}; }
template <typename T>
T* DataOrNull(const ffi::AnyBuffer& buffer) {
  return Absent(buffer) ? nullptr : static_cast<T*>(buffer.untyped_data());
}

// Checks shapes, then contents: counts are not negative, groups start at multiples of 128, follow one another and fit into M rows.
void CheckGroups(Checker& check, const ffi::AnyBuffer& count_E, const ffi::AnyBuffer& start_E, int64_t experts, int64_t rows);
cpu::Groups GroupsOf(const ffi::AnyBuffer& count_E, const ffi::AnyBuffer& start_E, int64_t rows);

// Checks that slot_M and row_TxK are inverse to each other on the rows of the groups, so no row is read or written twice or outside.
// Requires CheckGroups to have passed.
void CheckPermutation(Checker& check, const ffi::AnyBuffer& slot_M, const ffi::AnyBuffer& row_TxK, const cpu::Groups& groups,
                      int64_t tokens, int64_t top_k);

// Asks for 2 MiB pages under a large result. XLA allocates results afresh on every call, and first touching 64 MiB in 4 KiB pages takes
// 25 ms here, in 2 MiB pages 6 ms. Only advice: what the system makes of it changes no value.
void AdviseHugePages(const ffi::AnyBuffer& result);

// Runs the work of a handler; a C++ exception becomes an error that names the target.
template <typename Work>
ffi::Error Run(const char* target, Work&& work) {
  try {
    work();
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(target) + ": out of memory for scratch buffers");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(target) + ": " + error.what());
  }
}

}  // namespace moejax::xla_ffi
