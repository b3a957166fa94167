// Handlers of the single steps on the CPU: schedule, dispatch, combine, grouped products, and the MX format.
// Their Python side is `moejax/native/calls.py`.
#include <algorithm>
#include <string>

#include "cpu/moe.h"
#include "cpu/rows.h"
#include "cpu/schedule.h"
#include "xla/cpu_support.h"
#include "xla/handlers.h"

namespace moejax::xla_ffi {
namespace {

using ffi::AnyBuffer;
using ffi::DataType;
using Result = ffi::Result<AnyBuffer>;

constexpr auto kS32 = DataType::S32;
constexpr auto kF32 = DataType::F32;
constexpr auto kBf16 = DataType::BF16;
constexpr auto kFp8 = DataType::F8E4M3FN;
constexpr auto kU8 = DataType::U8;

ffi::Error ScheduleImpl(AnyBuffer expert_TxK, AnyBuffer first_expert, Result count_E, Result start_E, Result row_TxK, Result slot_M,
                        Result routed_E, int64_t num_experts, int64_t capacity) {
  constexpr const char* kTarget = "moejax_schedule";
  Checker check(kTarget);
  const int64_t tokens = DimOf(expert_TxK, 0), top_k = DimOf(expert_TxK, 1), local = DimOf(*count_E, 0);
  check.Array("expert_TxK", expert_TxK, {kS32}, {{"T"}, {"K"}}, kInt32Max);
  check.Array("first_expert", first_expert, {kS32}, {});
  check.Range("num_experts", num_experts, 1, kInt32Max);
  check.Range("capacity", capacity, -1, kInt32Max);
  check.Array("count_E", *count_E, {kS32}, {{"E", local}}, kInt32Max);
  check.Array("start_E", *start_E, {kS32}, {{"E", local}});
  check.Array("routed_E", *routed_E, {kS32}, {{"E", local}});
  check.Array("row_TxK", *row_TxK, {kS32}, {{"T", tokens}, {"K", top_k}});
  check.Array("slot_M", *slot_M, {kS32}, {{"M"}}, kInt32Max);
  check.Require(tokens == 0 || top_k <= kInt32Max / tokens, "T K is " + std::to_string(tokens) + " x " + std::to_string(top_k) +
                                                                "; slot indices are int32");
  if (!check.ok()) return check.error();
  const int64_t first = *static_cast<const int32_t*>(first_expert.untyped_data());
  check.Require(first >= 0 && local <= num_experts && first <= num_experts - local,
                "first_expert is " + std::to_string(first) + " with " + std::to_string(local) + " local experts; expected both within " +
                    std::to_string(num_experts) + " experts");
  if (!check.ok()) return check.error();
  std::string problem;
  const ffi::Error error = Run(kTarget, [&] {
    cpu::ScheduleBuffers buffers;
    buffers.expert_TxK = static_cast<const int32_t*>(expert_TxK.untyped_data());
    buffers.count_E = static_cast<int32_t*>(count_E->untyped_data());
    buffers.start_E = static_cast<int32_t*>(start_E->untyped_data());
    buffers.row_TxK = static_cast<int32_t*>(row_TxK->untyped_data());
    buffers.slot_M = static_cast<int32_t*>(slot_M->untyped_data());
    buffers.routed_E = static_cast<int32_t*>(routed_E->untyped_data());
    problem = cpu::Schedule(buffers, tokens * top_k, num_experts, first, local, DimOf(*slot_M, 0), capacity);
  });
  if (!problem.empty()) check.Fail(problem);
  return error.failure() ? error : check.error();
}

ffi::Error DispatchImpl(ffi::ThreadPool thread_pool, AnyBuffer x, AnyBuffer slot_M, Result rows, int64_t top_k) {
  constexpr const char* kTarget = "moejax_dispatch";
  Checker check(kTarget);
  const int64_t tokens = DimOf(x, 0), width = DimOf(x, 1), M = DimOf(slot_M, 0);
  check.Array("x", x, {kF32, kBf16}, {{"T"}, {"D"}}, kInt32Max);
  check.Array("slot_M", slot_M, {kS32}, {{"M"}}, kInt32Max);
  check.Array("rows", *rows, {kF32, kBf16}, {{"M", M}, {"D", width}});
  check.Range("top_k", top_k, 1, kInt32Max);
  if (!check.ok()) return check.error();
  const auto* slot = static_cast<const int32_t*>(slot_M.untyped_data());
  for (int64_t row = 0; row < M && check.ok(); ++row) {
    check.Require(slot[row] >= -1 && slot[row] / top_k < tokens, "slot_M holds " + std::to_string(slot[row]) + " at row " +
                                                                     std::to_string(row) + "; expected a slot of " +
                                                                     std::to_string(tokens) + " tokens, or -1");
  }
  if (!check.ok() || Empty(*rows)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    cpu::ParallelFor(pool, cpu::CeilDiv(M, cpu::kTile), [&](int64_t block) {
      float* row_values = cpu::Scratch(0, width);
      const int64_t last = std::min((block + 1) * cpu::kTile, M);
      for (int64_t row = block * cpu::kTile; row < last; ++row) {
        if (slot[row] < 0) {
          cpu::ZeroRow(row, width, Out(*rows));
        } else {
          cpu::ReadRow(In(x), slot[row] / top_k, width, false, row_values);
          cpu::WriteRow(row_values, row, width, Out(*rows));
        }
      }
    });
  });
}

ffi::Error CombineImpl(ffi::ThreadPool thread_pool, AnyBuffer rows, AnyBuffer weight, AnyBuffer row_TxK, Result y) {
  constexpr const char* kTarget = "moejax_combine";
  Checker check(kTarget);
  const int64_t M = DimOf(rows, 0), width = DimOf(rows, 1), tokens = DimOf(row_TxK, 0), top_k = DimOf(row_TxK, 1);
  check.Array("rows", rows, {kF32, kBf16}, {{"M"}, {"D"}}, kInt32Max);
  check.Array("row_TxK", row_TxK, {kS32}, {{"T"}, {"K"}}, kInt32Max);
  check.Optional("weight", weight, {kF32}, {{"T", tokens}, {"K", top_k}});
  check.Array("y", *y, {kF32, kBf16}, {{"T", tokens}, {"D", width}});
  check.Require(tokens == 0 || top_k <= kInt32Max / tokens, "T K does not fit int32 slot indices");
  if (!check.ok()) return check.error();
  const auto* row = static_cast<const int32_t*>(row_TxK.untyped_data());
  for (int64_t slot = 0; slot < tokens * top_k && check.ok(); ++slot) {
    check.Require(row[slot] >= -1 && row[slot] < M, "row_TxK holds " + std::to_string(row[slot]) + " at flat slot " +
                                                        std::to_string(slot) + "; expected a row below " + std::to_string(M) +
                                                        ", or -1");
  }
  if (!check.ok() || Empty(*y)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    cpu::Combine(pool, In(rows), nullptr, DataOrNull<const float>(weight), row, tokens, top_k, width, Out(*y));
  });
}

ffi::Error GroupedProductImpl(ffi::ThreadPool thread_pool, AnyBuffer x, AnyBuffer w, AnyBuffer count_E, AnyBuffer start_E, Result y,
                              bool transposed) {
  constexpr const char* kTarget = "moejax_grouped_product";
  Checker check(kTarget);
  check.Array("w", w, {kF32, kBf16}, {{"E"}, {transposed ? "N" : "K"}, {transposed ? "K" : "N"}}, kInt32Max);
  const int64_t M = DimOf(x, 0), E = DimOf(w, 0), K = DimOf(w, transposed ? 2 : 1), N = DimOf(w, transposed ? 1 : 2);
  check.Array("x", x, {kF32, kBf16}, {{"M"}, {"K", K}}, kInt32Max);
  check.Array("y", *y, {kF32, kBf16}, {{"M", M}, {"N", N}});
  CheckGroups(check, count_E, start_E, E, M);
  check.Require(K > 0, "K is 0: there is nothing to sum over");
  if (!check.ok() || Empty(*y)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    const cpu::Matrices matrices{w.untyped_data(), nullptr, FormatOf(w), DimOf(w, 1), DimOf(w, 2), false};
    cpu::GroupedProduct(pool, GroupsOf(count_E, start_E, M), In(x), matrices, transposed, Out(*y));
  });
}

ffi::Error GroupedWgradImpl(ffi::ThreadPool thread_pool, AnyBuffer dy, AnyBuffer x, AnyBuffer count_E, AnyBuffer start_E,
                            AnyBuffer accumulator, Result dw, bool accumulate) {
  constexpr const char* kTarget = "moejax_grouped_wgrad";
  Checker check(kTarget);
  const int64_t M = DimOf(x, 0), N = DimOf(dy, 1), K = DimOf(x, 1), E = DimOf(count_E, 0);
  check.Array("x", x, {kF32, kBf16}, {{"M"}, {"K"}}, kInt32Max);
  check.Array("dy", dy, {kF32, kBf16}, {{"M", M}, {"N"}}, kInt32Max);
  check.Array("dw", *dw, {kF32}, {{"E", E}, {"N", N}, {"K", K}});
  CheckGroups(check, count_E, start_E, E, M);
  check.Require(accumulate != Absent(accumulator), std::string("accumulator is ") + Describe(accumulator) + ", but attribute accumulate is " +
                                                       (accumulate ? "true" : "false"));
  check.Require(!accumulate || Empty(*dw) || accumulator.untyped_data() == dw->untyped_data(),
                "accumulator must be aliased to dw (input_output_aliases)");
  if (!check.ok() || Empty(*dw)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    cpu::GroupedWgrad(pool, GroupsOf(count_E, start_E, M), In(dy), In(x), N, K, accumulate, static_cast<float*>(dw->untyped_data()));
  });
}

// x as B matrices of R x C; blocks run along C, or down the R rows.
ffi::Error MxQuantizeImpl(ffi::ThreadPool thread_pool, AnyBuffer x, Result elements, Result codes, bool down) {
  constexpr const char* kTarget = "moejax_mx_quantize";
  Checker check(kTarget);
  const int64_t B = DimOf(x, 0), R = DimOf(x, 1), C = DimOf(x, 2);
  const int64_t blocks = cpu::CeilDiv(down ? R : C, cpu::kBlock);
  check.Array("x", x, {kF32, kBf16}, {{"B"}, {"R"}, {"C"}}, kInt32Max);
  check.Array("elements", *elements, {kFp8}, {{"B", B}, {"R", R}, {"C", C}});
  if (down) {
    check.Array("codes", *codes, {kU8}, {{"B", B}, {"R/32", blocks}, {"C", C}});
  } else {
    check.Array("codes", *codes, {kU8}, {{"B", B}, {"R", R}, {"C/32", blocks}});
  }
  if (!check.ok() || Empty(*elements)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    const int64_t strips = cpu::CeilDiv(R, cpu::kBlock);
    auto* out = static_cast<uint8_t*>(elements->untyped_data());
    auto* code = static_cast<uint8_t*>(codes->untyped_data());
    cpu::ParallelFor(pool, B * strips, [&](int64_t task) {
      const int64_t b = task / strips, first = task % strips * cpu::kBlock, rows = std::min(cpu::kBlock, R - first);
      float* strip = cpu::Scratch(0, cpu::kBlock * C);
      for (int64_t i = 0; i < rows; ++i) cpu::ReadRow(In(x), cpu::Offset(b, R, first + i), C, false, strip + i * C);
      uint8_t* strip_out = out + cpu::Offset(cpu::Offset(b, R, first), C);
      if (down) {
        cpu::Vector().mx_quantize_down(strip, C, rows, strip_out, C, code + cpu::Offset(cpu::Offset(b, blocks, task % strips), C), C);
        return;
      }
      for (int64_t i = 0; i < rows; ++i) {
        cpu::Vector().mx_quantize_row(strip + i * C, strip_out + i * C, code + cpu::Offset(cpu::Offset(b, R, first + i), blocks), C);
      }
    });
  });
}

ffi::Error MxDequantizeImpl(ffi::ThreadPool thread_pool, AnyBuffer elements, AnyBuffer codes, Result x, bool down) {
  constexpr const char* kTarget = "moejax_mx_dequantize";
  Checker check(kTarget);
  const int64_t B = DimOf(elements, 0), R = DimOf(elements, 1), C = DimOf(elements, 2);
  const int64_t blocks = cpu::CeilDiv(down ? R : C, cpu::kBlock);
  check.Array("elements", elements, {kFp8}, {{"B"}, {"R"}, {"C"}}, kInt32Max);
  check.Array("x", *x, {kF32, kBf16}, {{"B", B}, {"R", R}, {"C", C}});
  if (down) {
    check.Array("codes", codes, {kU8}, {{"B", B}, {"R/32", blocks}, {"C", C}});
  } else {
    check.Array("codes", codes, {kU8}, {{"B", B}, {"R", R}, {"C/32", blocks}});
  }
  if (!check.ok() || Empty(*x)) return check.error();
  return Run(kTarget, [&] {
    XlaPool pool(thread_pool);
    const int64_t strips = cpu::CeilDiv(R, cpu::kBlock);
    const auto* in = static_cast<const uint8_t*>(elements.untyped_data());
    const auto* code = static_cast<const uint8_t*>(codes.untyped_data());
    cpu::ParallelFor(pool, B * strips, [&](int64_t task) {
      const int64_t b = task / strips, first = task % strips * cpu::kBlock, rows = std::min(cpu::kBlock, R - first);
      float* values = cpu::Scratch(0, C);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = cpu::Offset(b, R, first + i);
        if (down) {
          cpu::Vector().mx_decode_down(in + cpu::Offset(row, C), code + cpu::Offset(cpu::Offset(b, blocks, task % strips), C), values, C);
        } else {
          cpu::Vector().mx_decode_row(in + cpu::Offset(row, C), code + cpu::Offset(row, blocks), values, C);
        }
        cpu::WriteRow(values, row, C, Out(*x));
      }
    });
  });
}

}  // namespace

MOEJAX_DEFINE_HANDLER(Schedule, ScheduleImpl,
                      ffi::Ffi::Bind()
                          .Arg<AnyBuffer>()  // expert_TxK
                          .Arg<AnyBuffer>()  // first_expert
                          .Ret<AnyBuffer>()  // count_E
                          .Ret<AnyBuffer>()  // start_E
                          .Ret<AnyBuffer>()  // row_TxK
                          .Ret<AnyBuffer>()  // slot_M
                          .Ret<AnyBuffer>()  // routed_E
                          .Attr<int64_t>("num_experts")
                          .Attr<int64_t>("capacity"))

MOEJAX_DEFINE_HANDLER(Dispatch, DispatchImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()  // x
                          .Arg<AnyBuffer>()  // slot_M
                          .Ret<AnyBuffer>()  // rows
                          .Attr<int64_t>("top_k"))

MOEJAX_DEFINE_HANDLER(Combine, CombineImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()   // rows
                          .Arg<AnyBuffer>()   // weight
                          .Arg<AnyBuffer>()   // row_TxK
                          .Ret<AnyBuffer>())  // y

MOEJAX_DEFINE_HANDLER(GroupedProduct, GroupedProductImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()  // x
                          .Arg<AnyBuffer>()  // w
                          .Arg<AnyBuffer>()  // count_E
                          .Arg<AnyBuffer>()  // start_E
                          .Ret<AnyBuffer>()  // y
                          .Attr<bool>("transposed"))

MOEJAX_DEFINE_HANDLER(GroupedWgrad, GroupedWgradImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()  // dy
                          .Arg<AnyBuffer>()  // x
                          .Arg<AnyBuffer>()  // count_E
                          .Arg<AnyBuffer>()  // start_E
                          .Arg<AnyBuffer>()  // accumulator
                          .Ret<AnyBuffer>()  // dw
                          .Attr<bool>("accumulate"))

MOEJAX_DEFINE_HANDLER(MxQuantize, MxQuantizeImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()  // x
                          .Ret<AnyBuffer>()  // elements
                          .Ret<AnyBuffer>()  // codes
                          .Attr<bool>("down"))

MOEJAX_DEFINE_HANDLER(MxDequantize, MxDequantizeImpl,
                      ffi::Ffi::Bind()
                          .Ctx<ffi::ThreadPool>()
                          .Arg<AnyBuffer>()  // elements
                          .Arg<AnyBuffer>()  // codes
                          .Ret<AnyBuffer>()  // x
                          .Attr<bool>("down"))

}  // namespace moejax::xla_ffi
