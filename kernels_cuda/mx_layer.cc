// The MXFP8 expert layer as a sequence of launches: forward on one stream, backward in steps that overlap (overlap.h). Read mx_moe.h for the
// contract and layer.cc for the BF16 layer, whose tasks, epilogues, dispatch and combine these are.
//
// kAligned: x and dY are quantised while their tokens are dispatched, or as tokens where dgrad-down gathers them, h in the epilogue of gate/up,
// d(gate), d(up) and weight * h in that of dgrad-down; no pass over rows only quantises, but for gate and up that are saved in MXFP8. kExact does it
// in passes of their own. Weight gradients contract over rows: their operands are quantised along rows and, for FP8, stored transposed.
#include "kernel_check.h"
#include "mx_gemm_kernels.h"
#include "mx_layer_memory.h"
#include "mx_moe.h"
#include "overlap.h"
#include "quantize.h"
#include "rows.h"
#include "tensor_map.h"

namespace moe {
namespace {

using namespace mx_layer;

MxArguments<CUtensorMap> arguments(const LayerShape& s, Kind kind, const Activation& act) {
  MxArguments<CUtensorMap> args = {};
  args.num_rows = s.rows;
  args.m_extent = m_extent(s, kind);
  args.n_extent = n_extent(s, kind);
  args.k_extent = static_cast<int>(kind == kDown || kind == kDgradGateUp ? s.width : s.d_model);
  args.zero_to = MxTokensNConfig::kBoxRows;  // nobody reads padding of y or dx
  args.act = act;
  return args;
}

Status run_gemm(const LayerShape& s, const Plan& plan, const List& list, const MxArguments<CUtensorMap>& given, bool fp8, cudaStream_t stream) {
  MxArguments<CUtensorMap> args = given;
  cudaError_t error;
  if (list.layout == Layout::kTokensN) {
    MOE_RETURN_IF_ERROR(lane_scales(s, plan, args.a_codes, code_lines(s, list.kind), list.a_scales, stream));
    args.a_scales = list.a_scales;
  }
  if (fp8) {
    error = launch_mx_gemm(list.kind, {{args}, list.tasks, list.num_tasks}, stream, list.layout);
  } else {
    const GemmArguments<CUtensorMap>& plain = args;
    error = launch_gemm(list.kind, {{plain}, list.tasks, list.num_tasks}, stream, list.layout);
  }
  return error == cudaSuccess ? Status{} : failed(product_name(list.kind), error);
}

TensorShape rows_shape(const LayerShape& s, int64_t width, int64_t halves = 1) { return {width, s.rows, halves, 1}; }

// As in layer.cc: rows of a box of tokens, and what memory gives at once.
int token_box(const List& list) { return list.layout == Layout::kTokensN ? MxTokensNConfig::kBoxRows : kPanelRows; }
int l2_bytes(const List& list) { return list.layout == Layout::kTokensN ? 128 : 256; }

// Rows that a product reads or writes.
Status row_map(CUtensorMap* map, const char* name, const LayerShape& s, const List& list, const Operand& o, int64_t width, int64_t halves = 1) {
  const Element element = o.fp8 ? Element::kE4m3 : Element::kBf16;
  return encode_tensor_map(map, name, element, o.data, rows_shape(s, width, halves), token_box(list), l2_bytes(list));
}
// Of an operand of a weight gradient: transposed in FP8, as rows in BF16.
Status column_map(CUtensorMap* map, const char* name, const LayerShape& s, const Operand& o, Layout layout, int64_t width, int64_t halves = 1) {
  if (!o.fp8) return encode_tensor_map(map, name, Element::kBf16, o.data, rows_shape(s, width, halves), box_rows(layout));
  return encode_tensor_map(map, name, Element::kE4m3, o.data, {s.rows, width, halves, 1});
}
Status bf16_map(CUtensorMap* map, const char* name, const LayerShape& s, const void* data, int64_t width, int64_t halves = 1) {
  return encode_tensor_map(map, name, Element::kBf16, data, rows_shape(s, width, halves));
}

Status weight_map(CUtensorMap* map, const char* name, bool fp8, const List& list, const void* data, const TensorShape& shape) {
  if (list.layout == Layout::kTokensN && list.kind == kGateUp) return encode_joint_map(map, name, data, shape);
  return encode_tensor_map(map, name, fp8 ? Element::kE4m3 : Element::kBf16, data, shape, kPanelRows, l2_bytes(list));
}

// Rows in memory, or gathered from tokens.
QuantizeSource rows_source(const LayerShape& s, const Plan& plan, const uint16_t* data, int64_t width, int64_t halves = 1) {
  QuantizeSource source;
  source.data = data;
  source.batch = halves;
  source.rows = s.rows;
  source.columns = width;
  source.slot_M = plan.slot_M;
  return source;
}
QuantizeSource token_source(const LayerShape& s, const Plan& plan, const uint16_t* tokens) {
  QuantizeSource source = rows_source(s, plan, tokens, s.d_model);
  source.gather = s.top_k;
  source.tokens = s.tokens;
  return source;
}

Status quantize_gate_up(const LayerShape& s, const Plan& plan, const uint16_t* gate_up_2xMxF, const MxSaved& saved, cudaStream_t stream) {
  MxOutput out;
  out.form = Form::kAligned;
  out.elements = saved.elements_2xMxF;
  out.codes = saved.codes;
  return quantize(rows_source(s, plan, gate_up_2xMxF, s.width, 2), out, {}, stream);
}

// Tokens as A of a product of `list`; with `rows` also dispatched in BF16, as a weight gradient of that layout reads them.
Status quantize_tokens(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, const List& list, const TokenOperand& x, void* rows,
                       Layout layout, cudaStream_t stream) {
  uint16_t* const rows_MxD = static_cast<uint16_t*>(rows);
  const int zero_to = multiplied_rows(layout);
  if (x.fp8) {
    const QuantizedTokens out = {x.by_token, static_cast<uint8_t*>(x.data), x.codes, x.token_codes, token_box(list), rows_MxD, zero_to};
    return dispatch_quantized(s, x_TxD, plan, out, stream);
  }
  if (rows != nullptr) MOE_RETURN_IF_ERROR(dispatch_rows(s, x_TxD, plan, rows_MxD, stream, zero_to));
  return quantize(token_source(s, plan, x_TxD), x.output(Form::kAligned, false), {}, stream);
}
Status quantize_tokens(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, const List& list, const TokenOperand& x, cudaStream_t stream) {
  return quantize_tokens(s, x_TxD, plan, list, x, nullptr, Layout::kTokensM, stream);
}

}  // namespace

Status prepare_mx_weight(MxMode mode, const void* master, bool fp32, int64_t matrices, int64_t rows, int64_t columns, void* fprop,
                         uint8_t* fprop_codes, void* dgrad, uint8_t* dgrad_codes, cudaStream_t stream) {
  QuantizeSource source;
  source.data = master;
  source.fp32 = fp32;
  source.batch = matrices;
  source.rows = rows;
  source.columns = columns;
  if (rows % 32 != 0) return {"rows is " + std::to_string(rows) + ", must be a multiple of 32 (a scale block of MXFP8)"};
  const bool fp8 = mode == MxMode::kAligned;
  const Operand a = {fprop, fprop_codes, fp8}, b = {dgrad, dgrad_codes, fp8};
  return quantize(source, a.output(Form::kAlignedTile, false), b.output(Form::kAlignedTile, true), stream);
}

size_t mx_forward_workspace_bytes(const LayerShape& s, const MxOptions& options) {
  Workspace measure(nullptr);
  forward_memory(measure, s, options.mode == MxMode::kAligned, true);
  return measure.used();
}

Status mx_forward(const LayerShape& s, const Activation& act, const MxOptions& options, const uint16_t* x_TxD, const float* weight_TxK,
                  const Plan& plan, const MxWeights& weights, uint16_t* y_TxD, const MxSaved& saved, void* workspace,
                  cudaStream_t stream) {
  MOE_RETURN_IF_ERROR(check_shape(s, options));
  const bool fp8 = options.mode == MxMode::kAligned;
  const bool save_mx = saved.elements_2xMxF != nullptr;
  const int64_t D = s.d_model, F = s.width;
  Workspace space(workspace);
  ForwardMemory m = forward_memory(space, s, fp8, save_mx);
  TaskList lists[] = {m.gate_up, m.down};
  MOE_RETURN_IF_ERROR(build_tasks(s, plan, lists, 2, stream));
  MOE_RETURN_IF_ERROR(quantize_tokens(s, x_TxD, plan, m.gate_up, m.x, stream));

  auto up = arguments(s, kGateUp, act);
  MOE_RETURN_IF_ERROR(row_map(&up.a, "x", s, m.gate_up, m.x, D));
  MOE_RETURN_IF_ERROR(weight_map(&up.b, "gate_up_fprop", fp8, m.gate_up, weights.gate_up_fprop, {D, F, 2, s.experts}));
  up.a_codes = m.x.codes;
  up.b_codes = weights.gate_up_fprop_codes;
  if (m.h_MxF == nullptr) {  // quantised in the epilogue
    MOE_RETURN_IF_ERROR(row_map(&up.out, "h", s, m.gate_up, m.h_operand, F));
    up.h_MxF = static_cast<uint8_t*>(m.h_operand.data);
    up.row_codes = m.h_operand.codes;
  } else {
    MOE_RETURN_IF_ERROR(bf16_map(&up.out, "h", s, m.h_MxF, F));
  }
  up.write_out = 1;
  const uint16_t* gate_up = save_mx ? m.gate_up_2xMxF : saved.gate_up_2xMxF;
  if (gate_up != nullptr) {
    MOE_RETURN_IF_ERROR(bf16_map(&up.gate_up, "gate_up", s, gate_up, F, 2));
    up.save_gate_up = 1;
  }
  MOE_RETURN_IF_ERROR(run_gemm(s, plan, m.gate_up, up, fp8, stream));
  if (save_mx) MOE_RETURN_IF_ERROR(quantize_gate_up(s, plan, gate_up, saved, stream));
  if (m.h_MxF != nullptr) {
    MOE_RETURN_IF_ERROR(quantize(rows_source(s, plan, m.h_MxF, s.width), m.h_operand.output(Form::kAligned, false), {}, stream));
  }

  auto down = arguments(s, kDown, act);
  MOE_RETURN_IF_ERROR(row_map(&down.a, "h", s, m.down, m.h_operand, F));
  MOE_RETURN_IF_ERROR(weight_map(&down.b, "down_fprop", fp8, m.down, weights.down_fprop, {F, D, 1, s.experts}));
  down.a_codes = m.h_operand.codes;
  down.b_codes = weights.down_fprop_codes;
  down.slot_M = plan.slot_M;
  down.weight_TxK = weight_TxK;
  if (s.top_k == 1) {  // the combine is a product per row: the down product does it and writes to the tokens
    down.scatter = reinterpret_cast<uint8_t*>(y_TxD);
    MOE_RETURN_IF_ERROR(zero_unrouted(s, plan, y_TxD, stream));
    return run_gemm(s, plan, m.down, down, fp8, stream);
  }
  MOE_RETURN_IF_ERROR(row_map(&down.out, "y", s, m.down, {m.y_MxD}, D));
  MOE_RETURN_IF_ERROR(run_gemm(s, plan, m.down, down, fp8, stream));
  return combine_rows(s, m.y_MxD, weight_TxK, plan, y_TxD, stream);
}

size_t mx_backward_workspace_bytes(const LayerShape& s, const MxOptions& options) {
  Workspace measure(nullptr);
  backward_memory(measure, s, options, false);
  return measure.used();
}

Status mx_backward(const LayerShape& s, const Activation& act, const MxOptions& options, const uint16_t* x_TxD, const float* weight_TxK,
                   const uint16_t* dy_TxD, const Plan& plan, const MxWeights& weights, const MxSaved& saved, uint16_t* dx_TxD,
                   float* d_weight_TxK, float* dw_gate_up, float* dw_down, bool accumulate, void* workspace, cudaStream_t stream) {
  MOE_RETURN_IF_ERROR(check_shape(s, options));
  const bool fp8 = options.mode == MxMode::kAligned;
  const bool fp8_wgrad = has_fp8_wgrad(options);
  const bool recompute = saved.gate_up_2xMxF == nullptr && saved.elements_2xMxF == nullptr;
  const int64_t D = s.d_model, F = s.width;
  Workspace space(workspace);
  BackwardMemory m = backward_memory(space, s, options, accumulate);
  TaskList lists[] = {m.dgrad_down, m.dgrad_gate_up, m.wgrad_down, m.wgrad_gate_up, m.gate_up};

  // dY as A of dgrad-down, and what else is made of it in the same pass. Rows or columns of x are for wgrad_gate_up, the last of the products.
  const QuantizeSource dy = token_source(s, plan, dy_TxD), x = token_source(s, plan, x_TxD);
  const MxOutput dy_columns = m.dy_columns.output(Form::kAligned, true), x_columns = m.x_columns.output(Form::kAligned, true, CodeLayout::kFragment);
  uint16_t* const x_MxD = static_cast<uint16_t*>(m.x_columns.data);  // if BF16
  const bool carries_x = options.wgrad_bf16 && can_carry(kDgradGateUp) && m.dgrad_gate_up.layout == Layout::kTokensM;
  const auto make_dy = [&](cudaStream_t lane) {
    if (options.wgrad_bf16) return quantize_tokens(s, dy_TxD, plan, m.dgrad_down, m.dy, m.dy_columns.data, m.wgrad_down.layout, lane);
    if (m.dy.by_token) return quantize_tokens(s, dy_TxD, plan, m.dgrad_down, m.dy, lane);
    return quantize(dy, m.dy.output(Form::kAligned, false), dy_columns, lane);
  };
  const auto make_x = [&](cudaStream_t lane) {
    if (options.wgrad_bf16) return dispatch_rows(s, x_TxD, plan, x_MxD, lane, multiplied_rows(m.wgrad_gate_up.layout));
    if (m.dy.by_token) return quantize_two({dy, x}, {dy_columns, x_columns}, lane);
    return quantize(x, {}, x_columns, lane);
  };
  Overlap steps(stream, overlaps(s));
  MOE_RETURN_IF_ERROR(steps.step(After::kAll, make_dy));
  MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) {
    const Status built = build_tasks(s, plan, lists, recompute ? 5 : 4, lane);
    return built.ok() && s.top_k == 1 ? zero_unrouted(s, plan, dx_TxD, lane) : built;
  }));

  const uint16_t* gate_up_rows = saved.gate_up_2xMxF != nullptr ? saved.gate_up_2xMxF : m.gate_up_2xMxF;
  CUtensorMap gate_up;
  MOE_RETURN_IF_ERROR(bf16_map(&gate_up, "gate_up", s, gate_up_rows, F, 2));
  if (recompute) {
    auto up = arguments(s, kGateUp, act);
    MOE_RETURN_IF_ERROR(row_map(&up.a, "x", s, m.gate_up, m.x, D));
    MOE_RETURN_IF_ERROR(weight_map(&up.b, "gate_up_fprop", fp8, m.gate_up, weights.gate_up_fprop, {D, F, 2, s.experts}));
    up.a_codes = m.x.codes;
    up.b_codes = weights.gate_up_fprop_codes;
    up.gate_up = gate_up;
    up.save_gate_up = 1;
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) { return quantize_tokens(s, x_TxD, plan, m.gate_up, m.x, lane); }));
    MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&, up](cudaStream_t lane) { return run_gemm(s, plan, m.gate_up, up, fp8, lane); }));
  } else if (saved.elements_2xMxF != nullptr) {
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) {
      return dequantize_aligned_rows(s, plan, saved.elements_2xMxF, saved.codes, F, 2, m.gate_up_2xMxF, lane);
    }));
  }

  auto dh = arguments(s, kDgradDown, act);
  MOE_RETURN_IF_ERROR(row_map(&dh.a, "dy", s, m.dgrad_down, m.dy, D));
  const TensorShape down_dgrad = fp8 ? TensorShape{D, F, 1, s.experts} : TensorShape{F, D, 1, s.experts};
  MOE_RETURN_IF_ERROR(weight_map(&dh.b, "down_dgrad", fp8, m.dgrad_down, weights.down_dgrad, down_dgrad));
  dh.a_codes = m.dy.codes;
  dh.b_codes = weights.down_dgrad_codes;
  dh.gate_up = gate_up;
  dh.weight_TxK = weight_TxK;
  dh.slot_M = plan.slot_M;
  if (m.dy.by_token) {
    dh.gather = static_cast<const uint8_t*>(m.dy.data);
    dh.top_k = static_cast<int>(s.top_k);
    dh.gather_vectors = static_cast<int>(D / 16);
  }
  dh.weight_partial = m.partial_CxM;
  if (fp8) {  // quantised in the epilogue
    MOE_RETURN_IF_ERROR(row_map(&dh.out, "d_gate_up", s, m.dgrad_down, m.d_gate_up, F, 2));
    MOE_RETURN_IF_ERROR(column_map(&dh.d_gate_up, "d_gate_up", s, m.d_gate_up_columns, m.dgrad_down.layout, F, 2));
    MOE_RETURN_IF_ERROR(column_map(&dh.scaled_h, "weight * h", s, m.scaled_h_columns, m.dgrad_down.layout, F));
    dh.row_codes = m.d_gate_up.codes;
    dh.column_codes = m.d_gate_up_columns.codes;
    dh.scaled_h_scales = reinterpret_cast<uint16_t*>(m.scaled_h_columns.codes);
  } else {
    MOE_RETURN_IF_ERROR(bf16_map(&dh.out, "d_gate_up", s, m.d_gate_up_2xMxF, F, 2));
    MOE_RETURN_IF_ERROR(bf16_map(&dh.scaled_h, "weight * h", s, m.scaled_h_MxF, F));
  }
  MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&](cudaStream_t lane) { return run_gemm(s, plan, m.dgrad_down, dh, fp8, lane); }));
  if (!carries_x) MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, make_x));
  if (!fp8) {
    MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&](cudaStream_t lane) -> Status {
      const MxOutput columns = options.wgrad_bf16 ? MxOutput{} : m.d_gate_up_columns.output(Form::kAligned, true);
      MOE_RETURN_IF_ERROR(quantize(rows_source(s, plan, m.d_gate_up_2xMxF, F, 2), m.d_gate_up.output(Form::kAligned, false), columns, lane));
      if (options.wgrad_bf16) return {};
      return quantize(rows_source(s, plan, m.scaled_h_MxF, F), {}, m.scaled_h_columns.output(Form::kAligned, true), lane);
    }));
  }

  auto dw_down_args = arguments(s, kWgradDown, act);
  MOE_RETURN_IF_ERROR(column_map(&dw_down_args.a, "dy", s, m.dy_columns, m.wgrad_down.layout, D));
  MOE_RETURN_IF_ERROR(column_map(&dw_down_args.b, "weight * h", s, m.scaled_h_columns, m.wgrad_down.layout, F));
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_down_args.out, "dw_down", Element::kFp32, dw_down, {F, D, 1, s.experts}));
  dw_down_args.a_codes = m.dy_columns.codes;
  dw_down_args.b_scales = reinterpret_cast<const uint16_t*>(m.scaled_h_columns.codes);
  dw_down_args.dw = dw_down;
  dw_down_args.accumulate = accumulate;

  auto dx_args = arguments(s, kDgradGateUp, act);
  MOE_RETURN_IF_ERROR(row_map(&dx_args.a, "d_gate_up", s, m.dgrad_gate_up, m.d_gate_up, F, 2));
  const TensorShape gate_up_dgrad = fp8 ? TensorShape{F, D, 2, s.experts} : TensorShape{D, F, 2, s.experts};
  MOE_RETURN_IF_ERROR(weight_map(&dx_args.b, "gate_up_dgrad", fp8, m.dgrad_gate_up, weights.gate_up_dgrad, gate_up_dgrad));
  dx_args.a_codes = m.d_gate_up.codes;
  dx_args.b_codes = weights.gate_up_dgrad_codes;
  if (s.top_k == 1) {
    dx_args.scatter = reinterpret_cast<uint8_t*>(dx_TxD);
    dx_args.slot_M = plan.slot_M;
  } else {
    MOE_RETURN_IF_ERROR(row_map(&dx_args.out, "dx", s, m.dgrad_gate_up, {m.dx_MxD}, D));
  }
  if (carries_x) {
    dx_args.carry = {reinterpret_cast<const uint8_t*>(x_TxD), reinterpret_cast<uint8_t*>(x_MxD), plan.row_TxK, plan.count_E, plan.start_E,
                     static_cast<int>(s.tokens), static_cast<int>(s.top_k), static_cast<int>(s.experts), static_cast<int>(D / 8),
                     multiplied_rows(m.wgrad_gate_up.layout)};
  }

  auto dw_up_args = arguments(s, kWgradGateUp, act);
  MOE_RETURN_IF_ERROR(column_map(&dw_up_args.a, "d_gate_up", s, m.d_gate_up_columns, m.wgrad_gate_up.layout, F, 2));
  MOE_RETURN_IF_ERROR(column_map(&dw_up_args.b, "x", s, m.x_columns, m.wgrad_gate_up.layout, D));
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_up_args.out, "dw_gate_up", Element::kFp32, dw_gate_up, {D, F, 2, s.experts}));
  dw_up_args.a_codes = m.d_gate_up_columns.codes;
  dw_up_args.b_scales = reinterpret_cast<const uint16_t*>(m.x_columns.codes);
  dw_up_args.dw = dw_gate_up;
  dw_up_args.accumulate = accumulate;

  // None of these reads what the one before it writes. The data gradient comes first: then there is time for its rows before they are combined.
  const After dgrad = fp8 && !carries_x ? After::kAllButOne : After::kAll;
  const auto product = [&](After after, const List& list, const MxArguments<CUtensorMap>& args, bool in_fp8) {
    return steps.step(after, [&s, &plan, &list, &args, in_fp8](cudaStream_t lane) { return run_gemm(s, plan, list, args, in_fp8, lane); });
  };
  MOE_RETURN_IF_ERROR(product(dgrad, m.dgrad_gate_up, dx_args, fp8));
  MOE_RETURN_IF_ERROR(product(After::kAllButOne, m.wgrad_down, dw_down_args, fp8_wgrad));
  MOE_RETURN_IF_ERROR(product(After::kAllButOne, m.wgrad_gate_up, dw_up_args, fp8_wgrad));
  MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) {
    const Status summed = sum_weight_partials(s, m.partial_CxM, plan, d_weight_TxK, lane);
    return summed.ok() && s.top_k > 1 ? combine_rows(s, m.dx_MxD, nullptr, plan, dx_TxD, lane) : summed;
  }));
  return steps.join();
}

}  // namespace moe
