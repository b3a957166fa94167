// Argument checks of the XLA handlers, before any work. A violation becomes one InvalidArgument line: the argument, what it is, what it
// must be. The first one wins; later checks are skipped.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace moejax::xla_ffi {

namespace ffi = ::xla::ffi;

// One expected dimension: its letter in the docs and its size, or kAny.
// Raised when the operands, results or attributes of a handler change, here and in `moejax/native/__init__.py`: so a module that was not
// built again is named, instead of failing with whatever its old checks make of the new arguments.
inline constexpr int kHandlersVersion = 3;

struct Dim {
  static constexpr int64_t kAny = -1;
  const char* letter;
  int64_t size = kAny;
};

class Checker {
 public:
  explicit Checker(const char* target) : target_(target) {}

  bool ok() const { return message_.empty(); }
  ffi::Error error() const {
    return ok() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(target_) + ": " + message_);
  }

  // Records a violation in free form.
  void Fail(const std::string& message) {
    if (ok()) message_ = message;
  }
  void Require(bool condition, const std::string& message) {
    if (!condition) Fail(message);
  }

  // dtype, rank and sizes; also that the data are aligned to their element, and that no size exceeds `limit`.
  void Array(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<ffi::DataType> dtypes,
             std::initializer_list<Dim> dims, int64_t limit = INT64_MAX);

  // The same, or absent.
  void Optional(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<ffi::DataType> dtypes,
                std::initializer_list<Dim> dims, int64_t limit = INT64_MAX);

  // An integer attribute in [low, high].
  void Range(const char* name, int64_t value, int64_t low, int64_t high);

 private:
  const char* target_;
  std::string message_;
};

// "F32[4,16]"
std::string Describe(const ffi::AnyBuffer& buffer);

// Size of dimension i, or 0 if the rank is lower (a check reports that).
inline int64_t DimOf(const ffi::AnyBuffer& buffer, size_t i) {
  return i < buffer.dimensions().size() ? buffer.dimensions()[i] : 0;
}

// An optional argument that is not given is an array of shape [0].
inline bool Absent(const ffi::AnyBuffer& buffer) { return buffer.dimensions().size() == 1 && buffer.dimensions()[0] == 0; }

// Whether there are no elements: such a buffer may have no address.
inline bool Empty(const ffi::AnyBuffer& buffer) {
  for (int64_t size : buffer.dimensions()) {
    if (size == 0) return true;
  }
  return false;
}

}  // namespace moejax::xla_ffi
