// What the MXFP8 layer (mx_layer.cc) derives from a shape before it launches anything: which ways its products take, their task lists, and the
// pieces of its workspaces.
#pragma once

#include <algorithm>

#include "gemm_kernels.h"
#include "mx_gemm_kernels.h"
#include "mx_moe.h"
#include "quantize.h"
#include "rows.h"
#include "shape_check.h"
#include "strips.h"
#include "task_list.h"
#include "workspace.h"

namespace moe::mx_layer {

constexpr int kTileM = 128;  // rows of a block's tile
constexpr int kTileN = 256;  // accumulator columns of a block

inline bool has_fp8_wgrad(const MxOptions& options) { return options.mode == MxMode::kAligned && !options.wgrad_bf16; }

inline int64_t blocks_of_128(int64_t n) { return (n + 127) / 128; }

// Whether a product can have its tokens on the N side: of FP8 operands, and not where rows go straight to their tokens.
inline bool has_tokens_n(const LayerShape& s, bool fp8, Kind kind) {
  return fp8 && can_put_tokens_on_n(kind) && kind != kDgradDown && (kind == kGateUp || s.top_k > 1);
}

// Whether a product can read quantised tokens where they are: a gathering warp counts their bytes in 32 bits, and they take the space of rows.
inline bool has_gathered(const LayerShape& s, bool fp8, Kind kind) {
  return fp8 && can_gather_fp8(kind) && s.tokens * s.d_model <= UINT32_MAX && s.tokens <= s.rows;
}
// By default where experts are narrow, as in layer.cc, and where a dispatch would write more than the tokens.
inline bool gathers(const LayerShape& s, bool fp8, Kind kind) {
  constexpr int64_t kGatherWidth = 1536;
  if (s.way[kind] != kWayAuto) return s.way[kind] == kWayGathered;
  return has_gathered(s, fp8, kind) && s.top_k > 1 && s.width <= kGatherWidth;
}

inline Status check_shape(const LayerShape& s, const MxOptions& options) {
  if (Status status = check_sizes(s, true, 4096, "1 to 4096"); !status.ok()) return status;
  for (int kind = 0; kind < kNumKinds; ++kind) {
    const Way way = s.way[kind];
    const bool aligned = options.mode == MxMode::kAligned;
    if (way == kWayTokensN && has_tokens_n(s, aligned, static_cast<Kind>(kind))) continue;
    if (way == kWayGathered && has_gathered(s, aligned, static_cast<Kind>(kind))) continue;
    const bool strips = is_wgrad(static_cast<Kind>(kind)) && (has_fp8_wgrad(options) ? way == kWayResidentFp8 : is_resident(way));
    if (way != kWayAuto && way != kWayDispatched && !strips) {
      return {"way " + std::to_string(way) + " is not one that the " + product_name(kind) + " product of this shape has in MXFP8"};
    }
  }
  return {};
}

inline int m_extent(const LayerShape& s, Kind kind) { return static_cast<int>(kind == kWgradDown ? s.d_model : s.width); }
inline int n_extent(const LayerShape& s, Kind kind) {
  const bool width = kind == kGateUp || kind == kDgradDown || kind == kWgradDown;
  return static_cast<int>(width ? s.width : s.d_model);
}

// Lines of scale codes of a row kind's A: a code per row in each.
inline int64_t code_lines(const LayerShape& s, Kind kind) {
  return kind == kDgradGateUp ? 2 * blocks_of_128(s.width) : blocks_of_128(kind == kDown ? s.width : s.d_model);
}

struct List : TaskList {
  Layout layout;
  uint16_t* a_scales;  // tokens on the N side: space for those of A
};

// As in layer.cc: tokens are on the N side where most experts fit one tile of them; of weight gradients one operand is at rest where most experts'
// rows fit, unless they continue a buffer.
inline Layout layout_of(const LayerShape& s, Kind kind, bool fp8, bool accumulate) {
  const bool few = rows_per_expert(s) <= MxTokensNConfig::kTokens;
  if (s.way[kind] == kWayTokensN || (s.way[kind] == kWayAuto && few && has_tokens_n(s, fp8, kind))) return Layout::kTokensN;
  if (!is_wgrad(kind) || accumulate) return Layout::kTokensM;
  const Way by_default = fp8 ? resident_fp8_way(rows_per_expert(s), n_extent(s, kind))
                             : resident_way(rows_per_expert(s), m_extent(s, kind), n_extent(s, kind));
  switch (s.way[kind] != kWayAuto ? s.way[kind] : by_default) {
    case kWayResident512: return Layout::kResident512;
    case kWayResidentRows: return Layout::kResidentRows;
    case kWayResidentFp8: return Layout::kResidentFp8;
    default: return Layout::kTokensM;
  }
}

inline Tiling tiling(const LayerShape& s, Kind kind, bool skip_empty, Layout layout) {
  using OnN = MxTokensNConfig;
  const Tiling t = {kind, 2 * kTileM, kind == kGateUp ? kTileN / 2 : kTileN, m_extent(s, kind), n_extent(s, kind), skip_empty, Pairs::kRows, true};
  switch (layout) {
    case Layout::kTokensN: return {kind, OnN::kTokens, step_n<OnN>(kind), t.m_extent, t.n_extent, skip_empty, Pairs::kColumns};
    case Layout::kResident512: return in_strips<ResidentConfig>(t);
    case Layout::kResidentFp8: return in_strips<MxResidentConfig>(t);
    case Layout::kResidentRows: return in_row_strips(t);
    default: return t;
  }
}

inline List take_list(Workspace& workspace, const LayerShape& s, Kind kind, bool fp8, bool accumulate = false) {
  List list = {};
  list.layout = layout_of(s, kind, fp8, accumulate);
  static_cast<Tiling&>(list) = tiling(s, kind, accumulate, list.layout);
  // The workspace does not depend on whether a buffer is continued.
  list.tasks = workspace.take<Task>(std::max(max_tasks(s, list), max_tasks(s, tiling(s, kind, false, Layout::kTokensM))));
  list.num_tasks = workspace.take<int32_t>(1);
  list.a_scales = list.layout == Layout::kTokensN ? workspace.take<uint16_t>(code_lines(s, kind) * s.rows) : nullptr;
  return list;
}

// An operand of a product, as bytes and codes, or BF16.
struct Operand {
  void* data = nullptr;
  uint8_t* codes = nullptr;
  bool fp8 = false;

  MxOutput output(Form aligned, bool transposed, CodeLayout layout = CodeLayout::kPlain) const {
    MxOutput out;
    out.form = data == nullptr ? Form::kNone : fp8 ? aligned : Form::kDequantized;
    out.transposed = fp8 && transposed;
    out.layout = layout;
    out.elements = data;
    out.codes = codes;
    return out;
  }
};

// Space for `halves` matrices of rows of `width`, quantised along rows (a product's A) or columns (an operand of a weight gradient).
inline Operand take_operand(Workspace& w, const LayerShape& s, bool fp8, int64_t width, int64_t halves = 1) {
  Operand o;
  o.fp8 = fp8;
  const int64_t elements = halves * s.rows * width;
  o.data = fp8 ? static_cast<void*>(w.take<uint8_t>(elements)) : static_cast<void*>(w.take<uint16_t>(elements));
  if (fp8) o.codes = w.take<uint8_t>(2 * halves * s.rows * blocks_of_128(width));  // two bytes: scales of an operand B of a weight gradient
  return o;
}

// Operand A of a product, made of tokens: their rows, or, where it gathers, the tokens.
struct TokenOperand : Operand {
  uint8_t* token_codes = nullptr;
  bool by_token = false;
};
inline TokenOperand take_tokens(Workspace& w, const LayerShape& s, bool fp8, Kind kind) {
  TokenOperand o = {take_operand(w, s, fp8, s.d_model)};
  if (fp8) o.token_codes = w.take<uint8_t>(s.tokens * token_code_pitch(s.d_model));
  o.by_token = gathers(s, fp8, kind);
  return o;
}

struct ForwardMemory {
  TokenOperand x;
  Operand h_operand;
  uint16_t* h_MxF;          // kExact: as gate/up gives it
  uint16_t* y_MxD;
  uint16_t* gate_up_2xMxF;  // on its way to MXFP8
  List gate_up, down;
};

inline ForwardMemory forward_memory(Workspace& w, const LayerShape& s, bool fp8, bool save_mx) {
  ForwardMemory m;
  m.x = take_tokens(w, s, fp8, kGateUp);
  m.h_operand = take_operand(w, s, fp8, s.width);
  m.gate_up = take_list(w, s, kGateUp, fp8);
  m.h_MxF = fp8 ? nullptr : w.take<uint16_t>(s.rows * s.width);
  m.y_MxD = w.take<uint16_t>(s.rows * s.d_model);
  m.gate_up_2xMxF = save_mx ? w.take<uint16_t>(2 * s.rows * s.width) : nullptr;
  m.down = take_list(w, s, kDown, fp8);
  return m;
}

struct BackwardMemory {
  TokenOperand dy;                                     // A of the data gradients
  Operand d_gate_up;
  Operand dy_columns, scaled_h_columns, x_columns, d_gate_up_columns;  // of the weight gradients
  TokenOperand x;                                      // A of gate_up when it is computed again
  uint16_t* d_gate_up_2xMxF;
  uint16_t* scaled_h_MxF;
  uint16_t* gate_up_2xMxF;
  uint16_t* dx_MxD;
  float* partial_CxM;
  List gate_up, dgrad_down, dgrad_gate_up, wgrad_down, wgrad_gate_up;
};

inline BackwardMemory backward_memory(Workspace& w, const LayerShape& s, const MxOptions& options, bool accumulate) {
  BackwardMemory m = {};
  const bool fp8 = options.mode == MxMode::kAligned;
  const bool fp8_wgrad = has_fp8_wgrad(options);
  m.dy = take_tokens(w, s, fp8, kDgradDown);
  m.d_gate_up = take_operand(w, s, fp8, s.width, 2);
  m.x = take_tokens(w, s, fp8, kGateUp);
  m.dy_columns = take_operand(w, s, fp8_wgrad, s.d_model);
  m.x_columns = take_operand(w, s, fp8_wgrad, s.d_model);
  if (!fp8_wgrad) {
    m.d_gate_up_2xMxF = w.take<uint16_t>(2 * s.rows * s.width);
    m.scaled_h_MxF = w.take<uint16_t>(s.rows * s.width);
  }
  if (options.wgrad_bf16) {  // read as they are
    m.scaled_h_columns.data = m.scaled_h_MxF;
    m.d_gate_up_columns.data = m.d_gate_up_2xMxF;
  } else {
    m.scaled_h_columns = take_operand(w, s, fp8_wgrad, s.width);
    m.d_gate_up_columns = take_operand(w, s, fp8_wgrad, s.width, 2);
  }
  m.gate_up_2xMxF = w.take<uint16_t>(2 * s.rows * s.width);
  m.dx_MxD = w.take<uint16_t>(s.rows * s.d_model);
  m.partial_CxM = w.take<float>(blocks_of_128(s.width) * s.rows);
  m.dgrad_down = take_list(w, s, kDgradDown, fp8);
  m.dgrad_gate_up = take_list(w, s, kDgradGateUp, fp8);
  m.wgrad_down = take_list(w, s, kWgradDown, fp8_wgrad, accumulate);
  m.wgrad_gate_up = take_list(w, s, kWgradGateUp, fp8_wgrad, accumulate);
  m.gate_up = take_list(w, s, kGateUp, fp8);
  return m;
}

}  // namespace moe::mx_layer
