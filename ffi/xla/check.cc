#include "xla/check.h"

#include <sstream>

namespace moejax::xla_ffi {
namespace {

std::string Name(ffi::DataType dtype) {
  std::ostringstream out;
  out << dtype;
  return out.str();
}

std::string Expected(std::initializer_list<ffi::DataType> dtypes, std::initializer_list<Dim> dims) {
  std::string text;
  for (ffi::DataType dtype : dtypes) text += (text.empty() ? "" : " or ") + Name(dtype);
  text += "[";
  bool first = true;
  for (const Dim& dim : dims) {
    if (!first) text += ", ";
    first = false;
    text += dim.letter;
    if (dim.size != Dim::kAny && std::to_string(dim.size) != dim.letter) text += "=" + std::to_string(dim.size);
  }
  return text + "]";
}

}  // namespace

std::string Describe(const ffi::AnyBuffer& buffer) {
  std::string text = Name(buffer.element_type()) + "[";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) text += (i ? "," : "") + std::to_string(buffer.dimensions()[i]);
  return text + "]";
}

void Checker::Array(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<ffi::DataType> dtypes,
                    std::initializer_list<Dim> dims, int64_t limit) {
  if (!ok()) return;
  bool fits = buffer.dimensions().size() == dims.size();
  bool dtype_fits = false;
  for (ffi::DataType dtype : dtypes) dtype_fits = dtype_fits || dtype == buffer.element_type();
  bool too_large = false;
  if (fits) {
    size_t i = 0;
    for (const Dim& dim : dims) {
      const int64_t size = buffer.dimensions()[i++];
      fits = fits && (dim.size == Dim::kAny || dim.size == size);
      too_large = too_large || size > limit;
    }
  }
  if (!fits || !dtype_fits) {
    Fail(std::string(name) + " is " + Describe(buffer) + "; expected " + Expected(dtypes, dims));
  } else if (too_large) {
    Fail(std::string(name) + " is " + Describe(buffer) + "; sizes above " + std::to_string(limit) + " are not supported");
  } else if (!Empty(buffer)) {
    const size_t width = ffi::ByteWidth(buffer.element_type());
    const uintptr_t address = reinterpret_cast<uintptr_t>(buffer.untyped_data());
    if (address == 0 || address % width != 0) {
      Fail(std::string(name) + " lies at an address that is not a multiple of its " + std::to_string(width) + "-byte elements");
    }
  }
}

void Checker::Optional(const char* name, const ffi::AnyBuffer& buffer, std::initializer_list<ffi::DataType> dtypes,
                       std::initializer_list<Dim> dims, int64_t limit) {
  if (!Absent(buffer)) Array(name, buffer, dtypes, dims, limit);
}

void Checker::Range(const char* name, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    Fail("attribute " + std::string(name) + " is " + std::to_string(value) + "; expected " + std::to_string(low) + ".." +
         std::to_string(high));
  }
}

}  // namespace moejax::xla_ffi
