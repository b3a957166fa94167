// What the layers of every recipe and architecture ask of a shape.
#pragma once

#include <cstdint>
#include <string>

#include "moe.h"

namespace moe {

inline Status size_problem(const char* name, int64_t value, const std::string& rule) {
  return {std::string(name) + " is " + std::to_string(value) + ", must be " + rule};
}

// `mx`: widths are whole scale blocks, else whole 16-byte rows. `experts_rule`: what `max_experts` is, in words.
inline Status check_sizes(const LayerShape& s, bool mx, int64_t max_experts, const char* experts_rule) {
  const int unit = mx ? 32 : 8;
  const std::string whole = "a positive multiple of " + std::to_string(unit) + (mx ? " (a scale block of MXFP8)" : " (16-byte rows in BF16)");
  if (s.d_model < unit || s.d_model % unit != 0) return size_problem("d_model", s.d_model, whole);
  if (s.width < unit || s.width % unit != 0) return size_problem("width", s.width, whole);
  if (s.d_model > (1 << 24)) return size_problem("d_model", s.d_model, "at most 2^24");
  if (s.width > (1 << 24)) return size_problem("width", s.width, "at most 2^24");
  if (s.experts < 1 || s.experts > max_experts) return size_problem("experts", s.experts, experts_rule);
  if (s.top_k < 1 || s.top_k > 1024) return size_problem("top_k", s.top_k, "1 to 1024");
  if (s.rows < kGroupRows || s.rows % kGroupRows != 0 || s.rows > INT32_MAX) return size_problem("rows", s.rows, "a multiple of 128 below 2^31");
  if (s.tokens < 0 || s.tokens * s.top_k > INT32_MAX) return size_problem("tokens", s.tokens, "below 2^31 slots in all");
  return {};
}

}  // namespace moe
