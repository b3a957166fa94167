// What the GEMM tile programs work on: a device-resident list of tasks. A task is the work of a cluster of two blocks on one tile
// pair; nothing about it depends on grid indices, so lists of several kinds can be joined in one launch. The lists are built by
// task_list.cu and read through scheduler.h.
#pragma once

#include "isa/portable.h"

namespace moe {

enum Kind : uint8_t {
  kGateUp,         // h_MxF = act(x_MxD Wg^T, x_MxD Wu^T), and gate/up themselves
  kDown,           // y_MxD = h_MxF Wd^T
  kDgradDown,      // dh0 = dy_MxD Wd; then d(gate), d(up), weight * h, and the partial sums of d(weight)
  kDgradGateUp,    // dx_MxD = d(gate) Wg + d(up) Wu
  kWgradDown,      // dWd_DxF = dy^T (weight * h) over an expert's rows
  kWgradGateUp,    // dWgu_2xFxD = d(gate, up)^T x over an expert's rows
  kNumKinds,
};

MOE_HOST_FN constexpr int div_up(int a, int b) { return (a + b - 1) / b; }

MOE_HOST_FN constexpr bool is_wgrad(Kind kind) { return kind == kWgradDown || kind == kWgradGateUp; }

// Kinds whose output has a bias per column.
MOE_HOST_FN constexpr bool has_bias(Kind kind) { return kind == kGateUp || kind == kDown; }

// Kinds that can read rows of tokens where they are, instead of dispatched ones. In BF16 the backward needs dispatched rows of x and dy for its
// weight gradients, so the others would gain nothing. In FP8 a row of dy is read by kDgradDown alone; kGateUp loses more than the dispatch takes.
MOE_HOST_FN constexpr bool can_gather(Kind kind) { return kind == kGateUp; }
MOE_HOST_FN constexpr bool can_gather_fp8(Kind kind) { return kind == kDgradDown; }

// Kinds whose rows can be dispatched in two parts, one of them while the kind runs (row_copy.h). It gains in the forward alone (NOTES.md, v19).
MOE_HOST_FN constexpr bool can_dispatch_beside(Kind kind) { return kind == kGateUp; }

// Kinds whose idle warp can dispatch rows for products after it: wgrad_gate_up needs those of x, and this product, bound by the tensor
// cores, does not read them.
MOE_HOST_FN constexpr bool can_carry(Kind kind) { return kind == kDgradGateUp; }

// How the two blocks of a cluster split a tile pair, and so which operand they share by multicast.
enum Pair : uint8_t {
  kPairM,  // neighbours along M: B is shared
  kPairN,  // neighbours along N: A is shared
};

struct alignas(32) Task {
  uint8_t kind;
  uint8_t pair;
  uint8_t half;    // weight gradients of gate/up: 0 gate, 1 up
  uint8_t unused;
  int32_t expert;
  int32_t row0;    // first row of the tile (row kinds) or of the expert (weight gradients)
  int32_t rows;    // rows of the expert from row0 on; may exceed the tile
  int32_t m0;      // weight gradients: first output row
  int32_t n0;      // first output column of the first block
  int32_t wait;    // counter that must reach its target before the first load, or -1
  int32_t signal;  // counter to advance once the stores are complete, or -1
};
static_assert(sizeof(Task) == 32, "a task is read as two 16-byte words");

// The kinds that one kernel can run, as template arguments; `visit` calls f with the kind of a task as a type and its place in the
// list of arguments.
template <Kind kKind>
struct KindTag {
  static constexpr Kind value = kKind;
};
template <Kind... kKinds>
struct KindSet {
  static constexpr int kCount = sizeof...(kKinds);
  static constexpr bool kCanGather = (can_gather(kKinds) || ...);
  static constexpr bool kCanCarry = (can_carry(kKinds) || ...);
  template <class F>
  static MOE_FN void visit(int kind, F f) {
    if constexpr (kCount == 1) {
      (f(KindTag<kKinds>{}, 0), ...);
    } else {
      int at = 0;
      ((kind == kKinds ? f(KindTag<kKinds>{}, at) : void(), ++at), ...);
    }
  }
};

}  // namespace moe
