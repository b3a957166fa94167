// Handlers of the expert layer on the CPU: moejax_moe_forward and moejax_moe_backward. Their Python side is `moejax/native/calls.py`.
//
// Optional arguments that are not given have shape [0]. With attribute top_k = 0 the arrays hold rows (M) and there is no schedule index;
// with top_k > 0 they hold tokens (T), and rows are gathered and combined here.
#include "cpu/moe.h"
#include "xla/cpu_support.h"
#include "xla/handlers.h"

namespace moejax::xla_ffi {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Result = ffi::Result<AnyBuffer>;

// Attributes both handlers take.
struct LayerAttributes {
  int32_t recipe;
  int32_t activation;
  float limit;
  float alpha;
  int64_t top_k;
};

struct LayerArguments {
  AnyBuffer x, weight, slot_M, row_TxK, count_E, start_E, b_gate_up, b_down;
};

// The weight operands of one orientation.
struct WeightArguments {
  AnyBuffer gate_up, gate_up_codes, down, down_codes;
};

DataType ComputeDtype(int32_t recipe) { return recipe == static_cast<int32_t>(cpu::Recipe::kFp32) ? DataType::F32 : DataType::BF16; }

void CheckAttributes(Checker& check, const LayerAttributes& attributes) {
  check.Range("recipe", attributes.recipe, 0, 2);
  check.Range("activation", attributes.activation, 0, 3);
  check.Range("top_k", attributes.top_k, 0, kInt32Max);
  const bool clamped = attributes.activation == 1 || attributes.activation == 2;
  check.Require(!clamped || attributes.limit > 0.0f,
                "attribute limit is " + std::to_string(attributes.limit) + "; a clamped activation needs a positive limit");
}

// Rows of the schedule (M), and rows of buffers in which they lie packed.
int64_t RowsOf(const LayerAttributes& attributes, const LayerArguments& arguments) {
  return DimOf(attributes.top_k == 0 ? arguments.x : arguments.slot_M, 0);
}
Dim PackedRowsOf(const LayerAttributes& attributes, const LayerArguments& arguments, const cpu::LayerShape& shape) {
  if (attributes.top_k == 0) return {"M", DimOf(arguments.x, 0)};
  return {"T K", shape.tokens * shape.top_k};
}

// Sizes, from the arguments that define them: E, F and D from w_down, T and K from the row indices.
cpu::LayerShape ShapeOf(const LayerAttributes& attributes, const LayerArguments& arguments, const AnyBuffer& down) {
  cpu::LayerShape shape;
  shape.tokens = attributes.top_k == 0 ? 0 : DimOf(arguments.row_TxK, 0);
  shape.top_k = attributes.top_k;
  shape.d_model = DimOf(down, 1);
  shape.width = DimOf(down, 2);
  return shape;
}

void CheckWeights(Checker& check, const WeightArguments& w, const cpu::LayerShape& shape, int64_t experts, int32_t recipe,
                  bool codes_down, const char* name_gate_up, const char* name_down) {
  const int64_t D = shape.d_model, F = shape.width;
  const auto kFp8 = DataType::F8E4M3FN;
  const int64_t unit = recipe == 0 ? 1 : recipe == 1 ? 8 : 32;
  check.Require(D > 0 && F > 0 && D % unit == 0 && F % unit == 0,
                "D is " + std::to_string(D) + " and F is " + std::to_string(F) + "; this recipe needs positive multiples of " +
                    std::to_string(unit));
  check.Require(F <= cpu::CeilDiv(kInt32Max, 4) && D <= cpu::CeilDiv(kInt32Max, 4), "D or F is too large for a BLAS call");
  const std::string codes = std::string(name_gate_up) + "_codes", codes_of_down = std::string(name_down) + "_codes";
  if (recipe == 2) {
    check.Array(name_gate_up, w.gate_up, {kFp8}, {{"E", experts}, {"2", 2}, {"F", F}, {"D", D}});
    check.Array(name_down, w.down, {kFp8}, {{"E", experts}, {"D", D}, {"F", F}});
    if (codes_down) {
      check.Array(codes.c_str(), w.gate_up_codes, {DataType::U8}, {{"E", experts}, {"2", 2}, {"F/32", F / 32}, {"D", D}});
      check.Array(codes_of_down.c_str(), w.down_codes, {DataType::U8}, {{"E", experts}, {"D/32", D / 32}, {"F", F}});
    } else {
      check.Array(codes.c_str(), w.gate_up_codes, {DataType::U8}, {{"E", experts}, {"2", 2}, {"F", F}, {"D/32", D / 32}});
      check.Array(codes_of_down.c_str(), w.down_codes, {DataType::U8}, {{"E", experts}, {"D", D}, {"F/32", F / 32}});
    }
  } else {
    check.Array(name_gate_up, w.gate_up, {ComputeDtype(recipe)}, {{"E", experts}, {"2", 2}, {"F", F}, {"D", D}});
    check.Array(name_down, w.down, {ComputeDtype(recipe)}, {{"E", experts}, {"D", D}, {"F", F}});
    check.Array(codes.c_str(), w.gate_up_codes, {DataType::U8}, {{"0", 0}});
    check.Array(codes_of_down.c_str(), w.down_codes, {DataType::U8}, {{"0", 0}});
  }
}

void CheckLayer(Checker& check, const LayerAttributes& attributes, const LayerArguments& arguments, const cpu::LayerShape& shape,
                int64_t experts, int64_t rows) {
  const int64_t D = shape.d_model;
  CheckGroups(check, arguments.count_E, arguments.start_E, experts, rows);
  if (attributes.top_k == 0) {
    check.Array("x", arguments.x, {DataType::F32, DataType::BF16}, {{"M", rows}, {"D", D}});
    check.Array("slot_M", arguments.slot_M, {DataType::S32}, {{"0", 0}});
    check.Array("row_TxK", arguments.row_TxK, {DataType::S32}, {{"0", 0}});
  } else {
    check.Array("x", arguments.x, {DataType::F32, DataType::BF16}, {{"T", shape.tokens}, {"D", D}});
    check.Array("weight", arguments.weight, {DataType::F32}, {{"T", shape.tokens}, {"K", shape.top_k}});
    if (check.ok()) {
      CheckPermutation(check, arguments.slot_M, arguments.row_TxK, GroupsOf(arguments.count_E, arguments.start_E, rows), shape.tokens,
                       shape.top_k);
    }
  }
  check.Optional("b_gate_up", arguments.b_gate_up, {DataType::F32}, {{"E", experts}, {"2", 2}, {"F", shape.width}});
  check.Optional("b_down", arguments.b_down, {DataType::F32}, {{"E", experts}, {"D", D}});
  check.Require(Absent(arguments.b_gate_up) == Absent(arguments.b_down), "b_gate_up and b_down must be given together, or neither");
}

cpu::Matrices MatricesOf(const AnyBuffer& data, const AnyBuffer& codes, int32_t recipe, int64_t rows, int64_t columns, bool codes_down) {
  const cpu::Format formats[] = {cpu::Format::kFp32, cpu::Format::kBf16, cpu::Format::kMxfp8};
  return {data.untyped_data(), static_cast<const uint8_t*>(codes.untyped_data()), formats[recipe], rows, columns, codes_down};
}

cpu::Layer LayerOf(const LayerAttributes& attributes, const LayerArguments& arguments, const WeightArguments& fprop,
                   const cpu::LayerShape& shape, int64_t rows) {
  cpu::Layer layer;
  layer.recipe = static_cast<cpu::Recipe>(attributes.recipe);
  layer.act = {static_cast<cpu::ActivationKind>(attributes.activation), attributes.limit, attributes.alpha};
  layer.shape = shape;
  layer.groups = GroupsOf(arguments.count_E, arguments.start_E, rows);
  layer.slot_M = DataOrNull<const int32_t>(arguments.slot_M);
  layer.row_TxK = DataOrNull<const int32_t>(arguments.row_TxK);
  layer.gate_up = MatricesOf(fprop.gate_up, fprop.gate_up_codes, attributes.recipe, 2 * shape.width, shape.d_model, false);
  layer.down = MatricesOf(fprop.down, fprop.down_codes, attributes.recipe, shape.d_model, shape.width, false);
  layer.b_gate_up = DataOrNull<const float>(arguments.b_gate_up);
  layer.b_down = DataOrNull<const float>(arguments.b_down);
  return layer;
}

ffi::Error Forward(ffi::ThreadPool thread_pool, AnyBuffer x, AnyBuffer weight, AnyBuffer slot_M, AnyBuffer row_TxK, AnyBuffer count_E,
                   AnyBuffer start_E, AnyBuffer b_gate_up, AnyBuffer b_down, AnyBuffer gate_up, AnyBuffer gate_up_codes, AnyBuffer down,
                   AnyBuffer down_codes, Result y, Result y_rows, Result saved, int32_t recipe, int32_t activation, float limit,
                   float alpha, int64_t top_k) {
  constexpr const char* kTarget = "moejax_moe_forward";
  Checker check(kTarget);
  const LayerAttributes attributes{recipe, activation, limit, alpha, top_k};
  const LayerArguments arguments{x, weight, slot_M, row_TxK, count_E, start_E, b_gate_up, b_down};
  const WeightArguments weights{gate_up, gate_up_codes, down, down_codes};
  CheckAttributes(check, attributes);
  check.Array("w_down", down, {down.element_type()}, {{"E"}, {"D"}, {"F"}}, kInt32Max);
  if (!check.ok()) return check.error();
  const cpu::LayerShape shape = ShapeOf(attributes, arguments, down);
  const int64_t experts = DimOf(down, 0), rows = RowsOf(attributes, arguments), D = shape.d_model, F = shape.width;
  CheckWeights(check, weights, shape, experts, recipe, false, "w_gate_up", "w_down");
  const Dim packed = PackedRowsOf(attributes, arguments, shape);
  check.Array("y_rows", *y_rows, {ComputeDtype(recipe)}, {packed, {"D", D}}, kInt32Max);
  CheckLayer(check, attributes, arguments, shape, experts, rows);
  if (top_k == 0) {
    check.Array("y", *y, {x.element_type()}, {{"0", 0}});
    check.Array("weight", weight, {DataType::F32}, {{"0", 0}});
  } else {
    check.Array("y", *y, {x.element_type()}, {{"T", shape.tokens}, {"D", D}});
  }
  check.Optional("saved", *saved, {ComputeDtype(recipe)}, {packed, {"2F", 2 * F}});
  if (!check.ok()) return check.error();

  AdviseHugePages(*saved);
  AdviseHugePages(*y_rows);
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    cpu::ForwardBuffers buffers;
    buffers.x = In(x);
    buffers.weight = DataOrNull<const float>(weight);
    buffers.y = Out(*y);
    buffers.y_rows = Out(*y_rows);
    if (!Absent(*saved)) buffers.saved = Out(*saved);
    cpu::MoeForward(pool, LayerOf(attributes, arguments, weights, shape, rows), buffers);
  });
}

// An accumulator: absent, or the same buffer as the result it continues in (XLA guarantees that for a declared alias).
void CheckAccumulator(Checker& check, const char* name, const AnyBuffer& accumulator, const AnyBuffer& result, bool accumulate) {
  if (!check.ok()) return;
  if (!accumulate) {
    check.Require(Absent(accumulator), std::string(name) + " is " + Describe(accumulator) + ", but attribute accumulate is false");
  } else {
    check.Require(Empty(result) || accumulator.untyped_data() == result.untyped_data(),
                  std::string(name) + " must be aliased to its gradient (input_output_aliases)");
  }
}

ffi::Error Backward(ffi::ThreadPool thread_pool, AnyBuffer x, AnyBuffer dy, AnyBuffer weight, AnyBuffer saved, AnyBuffer slot_M,
                    AnyBuffer row_TxK, AnyBuffer count_E, AnyBuffer start_E, AnyBuffer b_gate_up, AnyBuffer b_down, AnyBuffer gate_up,
                    AnyBuffer gate_up_codes, AnyBuffer gate_up_dgrad, AnyBuffer gate_up_dgrad_codes, AnyBuffer down_dgrad,
                    AnyBuffer down_dgrad_codes, AnyBuffer acc_gate_up, AnyBuffer acc_down, AnyBuffer acc_b_gate_up,
                    AnyBuffer acc_b_down, Result dx, Result dx_rows, Result d_weight, Result dw_gate_up, Result dw_down,
                    Result db_gate_up, Result db_down, Result window, int32_t recipe, int32_t activation, float limit, float alpha,
                    int64_t top_k, bool wgrad_bf16, bool accumulate) {
  constexpr const char* kTarget = "moejax_moe_backward";
  Checker check(kTarget);
  const LayerAttributes attributes{recipe, activation, limit, alpha, top_k};
  const LayerArguments arguments{x, weight, slot_M, row_TxK, count_E, start_E, b_gate_up, b_down};
  const WeightArguments dgrad{gate_up_dgrad, gate_up_dgrad_codes, down_dgrad, down_dgrad_codes};
  CheckAttributes(check, attributes);
  check.Array("w_down_dgrad", down_dgrad, {down_dgrad.element_type()}, {{"E"}, {"D"}, {"F"}}, kInt32Max);
  if (!check.ok()) return check.error();
  const cpu::LayerShape shape = ShapeOf(attributes, arguments, down_dgrad);
  const int64_t experts = DimOf(down_dgrad, 0), rows = RowsOf(attributes, arguments), D = shape.d_model, F = shape.width;
  CheckWeights(check, dgrad, shape, experts, recipe, true, "w_gate_up_dgrad", "w_down_dgrad");
  // The forward operand of gate_up; its down twin is not needed, so the dgrad one stands in for it in the check.
  if (recipe == 2) {
    check.Array("w_gate_up", gate_up, {DataType::F8E4M3FN}, {{"E", experts}, {"2", 2}, {"F", F}, {"D", D}});
    check.Array("w_gate_up_codes", gate_up_codes, {DataType::U8}, {{"E", experts}, {"2", 2}, {"F", F}, {"D/32", D / 32}});
  } else {
    check.Array("w_gate_up", gate_up, {ComputeDtype(recipe)}, {{"E", experts}, {"2", 2}, {"F", F}, {"D", D}});
  }
  const Dim packed = PackedRowsOf(attributes, arguments, shape);
  check.Array("dx_rows", *dx_rows, {ComputeDtype(recipe)}, {packed, {"D", D}}, kInt32Max);
  CheckLayer(check, attributes, arguments, shape, experts, rows);
  check.Optional("saved", saved, {ComputeDtype(recipe)}, {packed, {"2F", 2 * F}});
  if (top_k == 0) {
    check.Array("dy", dy, {x.element_type()}, {{"M", rows}, {"D", D}});
    check.Array("weight", weight, {DataType::F32}, {{"M", rows}});
    check.Array("dx", *dx, {x.element_type()}, {{"0", 0}});
    check.Array("d_weight", *d_weight, {DataType::F32}, {{"M", rows}});
  } else {
    check.Array("dy", dy, {x.element_type()}, {{"T", shape.tokens}, {"D", D}});
    check.Array("dx", *dx, {x.element_type()}, {{"T", shape.tokens}, {"D", D}});
    check.Array("d_weight", *d_weight, {DataType::F32}, {{"T", shape.tokens}, {"K", top_k}});
  }
  check.Array("dw_gate_up", *dw_gate_up, {DataType::F32}, {{"E", experts}, {"2", 2}, {"F", F}, {"D", D}});
  check.Array("dw_down", *dw_down, {DataType::F32}, {{"E", experts}, {"D", D}, {"F", F}});
  if (Absent(b_gate_up)) {
    check.Array("db_gate_up", *db_gate_up, {DataType::F32}, {{"0", 0}});
    check.Array("db_down", *db_down, {DataType::F32}, {{"0", 0}});
  } else {
    check.Array("db_gate_up", *db_gate_up, {DataType::F32}, {{"E", experts}, {"2", 2}, {"F", F}});
    check.Array("db_down", *db_down, {DataType::F32}, {{"E", experts}, {"D", D}});
  }
  CheckAccumulator(check, "acc_gate_up", acc_gate_up, *dw_gate_up, accumulate);
  CheckAccumulator(check, "acc_down", acc_down, *dw_down, accumulate);
  CheckAccumulator(check, "acc_b_gate_up", acc_b_gate_up, *db_gate_up, accumulate);
  CheckAccumulator(check, "acc_b_down", acc_b_down, *db_down, accumulate);
  check.Array("window", *window, {DataType::F32}, {{"tiles"}, {"floats per tile", cpu::FloatsPerTile(D, F)}}, kInt32Max);
  check.Require(DimOf(*window, 0) > 0, "window has no tiles");
  if (!check.ok()) return check.error();

  for (const Result& result : {dx_rows, dw_gate_up, dw_down, window}) AdviseHugePages(*result);
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    cpu::BackwardBuffers buffers;
    buffers.x = In(x);
    buffers.dy = In(dy);
    buffers.weight = static_cast<const float*>(weight.untyped_data());
    if (!Absent(saved)) buffers.saved = In(saved);
    buffers.gate_up_down = MatricesOf(gate_up_dgrad, gate_up_dgrad_codes, recipe, 2 * F, D, true);
    buffers.down_down = MatricesOf(down_dgrad, down_dgrad_codes, recipe, D, F, true);
    buffers.wgrad = recipe == 2 && !wgrad_bf16 ? cpu::Format::kMxfp8 : recipe == 0 ? cpu::Format::kFp32 : cpu::Format::kBf16;
    buffers.dx = Out(*dx);
    buffers.dx_rows = Out(*dx_rows);
    buffers.d_weight = static_cast<float*>(d_weight->untyped_data());
    buffers.dw_gate_up = static_cast<float*>(dw_gate_up->untyped_data());
    buffers.dw_down = static_cast<float*>(dw_down->untyped_data());
    buffers.db_gate_up = DataOrNull<float>(*db_gate_up);
    buffers.db_down = DataOrNull<float>(*db_down);
    buffers.accumulate = accumulate;
    buffers.window = static_cast<float*>(window->untyped_data());
    buffers.window_tiles = DimOf(*window, 0);
    const WeightArguments fprop{gate_up, gate_up_codes, down_dgrad, down_dgrad_codes};
    cpu::MoeBackward(pool, LayerOf(attributes, arguments, fprop, shape, rows), buffers);
  });
}

}  // namespace

MOEJAX_DEFINE_HANDLER(MoeForward, Forward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<AnyBuffer>()   // x
                           .Arg<AnyBuffer>()   // weight
                           .Arg<AnyBuffer>()   // slot_M
                           .Arg<AnyBuffer>()   // row_TxK
                           .Arg<AnyBuffer>()   // count_E
                           .Arg<AnyBuffer>()   // start_E
                           .Arg<AnyBuffer>()   // b_gate_up
                           .Arg<AnyBuffer>()   // b_down
                           .Arg<AnyBuffer>()   // w_gate_up
                           .Arg<AnyBuffer>()   // w_gate_up_codes
                           .Arg<AnyBuffer>()   // w_down
                           .Arg<AnyBuffer>()   // w_down_codes
                           .Ret<AnyBuffer>()   // y
                           .Ret<AnyBuffer>()   // y_rows
                           .Ret<AnyBuffer>()   // saved
                           .Attr<int32_t>("recipe")
                           .Attr<int32_t>("activation")
                           .Attr<float>("limit")
                           .Attr<float>("alpha")
                           .Attr<int64_t>("top_k"))

MOEJAX_DEFINE_HANDLER(MoeBackward, Backward,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<AnyBuffer>()   // x
                           .Arg<AnyBuffer>()   // dy
                           .Arg<AnyBuffer>()   // weight
                           .Arg<AnyBuffer>()   // saved
                           .Arg<AnyBuffer>()   // slot_M
                           .Arg<AnyBuffer>()   // row_TxK
                           .Arg<AnyBuffer>()   // count_E
                           .Arg<AnyBuffer>()   // start_E
                           .Arg<AnyBuffer>()   // b_gate_up
                           .Arg<AnyBuffer>()   // b_down
                           .Arg<AnyBuffer>()   // w_gate_up
                           .Arg<AnyBuffer>()   // w_gate_up_codes
                           .Arg<AnyBuffer>()   // w_gate_up_dgrad
                           .Arg<AnyBuffer>()   // w_gate_up_dgrad_codes
                           .Arg<AnyBuffer>()   // w_down_dgrad
                           .Arg<AnyBuffer>()   // w_down_dgrad_codes
                           .Arg<AnyBuffer>()   // acc_gate_up
                           .Arg<AnyBuffer>()   // acc_down
                           .Arg<AnyBuffer>()   // acc_b_gate_up
                           .Arg<AnyBuffer>()   // acc_b_down
                           .Ret<AnyBuffer>()   // dx
                           .Ret<AnyBuffer>()   // dx_rows
                           .Ret<AnyBuffer>()   // d_weight
                           .Ret<AnyBuffer>()   // dw_gate_up
                           .Ret<AnyBuffer>()   // dw_down
                           .Ret<AnyBuffer>()   // db_gate_up
                           .Ret<AnyBuffer>()   // db_down
                           .Ret<AnyBuffer>()   // window
                           .Attr<int32_t>("recipe")
                           .Attr<int32_t>("activation")
                           .Attr<float>("limit")
                           .Attr<float>("alpha")
                           .Attr<int64_t>("top_k")
                           .Attr<bool>("wgrad_bf16")
                           .Attr<bool>("accumulate"))

}  // namespace moejax::xla_ffi
