// The expert layers of kernels_cuda/layer.cc and mx_layer.cc on the host machine: their tile programs on the emulator, the launches around them
// as plain loops. A shared library for test_layer_host.py.
#include <cstdio>

#include "gemm_kernels.h"
#include "gemm_resident.h"
#include "gemm_resident_rows.h"
#include "gemm_tokens_n.h"
#include "host_launches.h"
#include "host_memory.h"
#include "host_overlap.h"
#include "isa/host/host_mx.h"
#include "mma_sm90.h"
#include "mx_gemm_kernels.h"
#include "mx_moe.h"
#include "tensor_map.h"

namespace moe {
namespace {

uint32_t seed = 0;  // of the next launch
uint32_t cluster = 0, clusters = 1;  // of this launch: which one runs, one after the other

template <class Base>
struct Launched : Base {
  static uint32_t cluster_index() { return cluster; }
  static uint32_t num_clusters() { return clusters; }
};
using Isa = Launched<Host>;
using IsaMx = Launched<HostMx>;

template <class Roles, class On, class Batch>
cudaError_t run(const Batch& batch) {
  clusters = 1 + ++seed % 4;  // changes no result
  for (cluster = 0; cluster < clusters; ++cluster) {
    host::run_cluster(Roles::Config::kThreads, Roles::Config::kSharedBytes, seed, [&] { run_roles<Roles, On>(batch); });
  }
  return cudaSuccess;
}

using Bf16Batch = GemmBatch<CUtensorMap, 1>;
template <Kind kKind, bool kPlain = true>
cudaError_t on_m(const Bf16Batch& batch) {
  return run<TokensM<KindSet<kKind>, kPlain, Isa, GemmConfig<256>>, Isa>(batch);
}
template <Kind kKind, bool kPlain = true>
cudaError_t on_n(const Bf16Batch& batch) {
  return run<TokensN<kKind, kPlain, Isa>, Isa>(batch);
}
template <template <Kind, class, class> class Roles, class Config>
cudaError_t strips(Kind kind, const Bf16Batch& batch) {
  return kind == kWgradDown ? run<Roles<kWgradDown, Isa, Config>, Isa>(batch) : run<Roles<kWgradGateUp, Isa, Config>, Isa>(batch);
}

template <Kind kKind, bool kPlain = true>
cudaError_t mx_on_m(const MxBatch<CUtensorMap>& batch) {
  return run<MxRoles<kKind, kPlain, IsaMx>, IsaMx>(batch);
}
template <Kind kKind, bool kPlain = true>
cudaError_t mx_on_n(const MxBatch<CUtensorMap>& batch) {
  return run<MxTokensN<kKind, kPlain, IsaMx>, IsaMx>(batch);
}

}  // namespace

cudaError_t count_blocks(int* blocks) {
  *blocks = 8;
  return cudaSuccess;
}

cudaError_t launch_gemm(Kind kind, const Bf16Batch& batch, cudaStream_t, Layout layout, int spare) {
  if (spare > 0 && (kind != kGateUp || layout != Layout::kTokensM)) return cudaErrorInvalidValue;
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  if (layout == Layout::kTokensN) {
    switch (kind) {
      case kGateUp: return plain ? on_n<kGateUp>(batch) : on_n<kGateUp, false>(batch);
      case kDown: return on_n<kDown>(batch);
      case kDgradDown: return plain ? on_n<kDgradDown>(batch) : on_n<kDgradDown, false>(batch);
      case kDgradGateUp: return on_n<kDgradGateUp>(batch);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout != Layout::kTokensM && !is_wgrad(kind)) return cudaErrorInvalidValue;
  if (layout == Layout::kResident512) return strips<Resident, ResidentConfig>(kind, batch);
  if (layout == Layout::kResidentRows) return strips<ResidentRows, ResidentRowsConfig>(kind, batch);
  switch (kind) {
    case kGateUp: return plain ? on_m<kGateUp>(batch) : on_m<kGateUp, false>(batch);
    case kDown: return on_m<kDown>(batch);
    case kDgradDown: return plain ? on_m<kDgradDown>(batch) : on_m<kDgradDown, false>(batch);
    case kDgradGateUp: return on_m<kDgradGateUp>(batch);
    case kWgradDown: return on_m<kWgradDown>(batch);
    default: return on_m<kWgradGateUp>(batch);
  }
}

cudaError_t launch_mx_gemm(Kind kind, const MxBatch<CUtensorMap>& batch, cudaStream_t, Layout layout) {
  const bool plain = is_plain_swiglu(batch.kinds[0].act);
  if (layout == Layout::kTokensN) {
    switch (kind) {
      case kGateUp: return plain ? mx_on_n<kGateUp>(batch) : mx_on_n<kGateUp, false>(batch);
      case kDown: return mx_on_n<kDown>(batch);
      case kDgradGateUp: return mx_on_n<kDgradGateUp>(batch);
      default: return cudaErrorInvalidValue;
    }
  }
  if (layout == Layout::kResidentFp8 && is_wgrad(kind)) {
    return kind == kWgradDown ? run<MxResident<kWgradDown, IsaMx>, IsaMx>(batch) : run<MxResident<kWgradGateUp, IsaMx>, IsaMx>(batch);
  }
  if (layout != Layout::kTokensM) return cudaErrorInvalidValue;
  switch (kind) {
    case kGateUp: return plain ? mx_on_m<kGateUp>(batch) : mx_on_m<kGateUp, false>(batch);
    case kDown: return mx_on_m<kDown>(batch);
    case kDgradDown: return plain ? mx_on_m<kDgradDown>(batch) : mx_on_m<kDgradDown, false>(batch);
    case kDgradGateUp: return mx_on_m<kDgradGateUp>(batch);
    case kWgradDown: return mx_on_m<kWgradDown>(batch);
    default: return mx_on_m<kWgradGateUp>(batch);
  }
}

Status encode_tensor_map(CUtensorMap* map, const char* name, Element element, const void* address, const TensorShape& shape, int box_rows,
                         int) {
  map->box_rows = box_rows;
  return describe_tensor(map, name, element, address, shape);
}

Status encode_joint_map(CUtensorMap* map, const char* name, const void* address, const TensorShape& shape) {
  return encode_tensor_map(map, name, Element::kE4m3, address, shape, 8, 256);
}

namespace {

// What both recipes are given and give, all of it in an arena.
struct Case {
  LayerShape shape;
  Activation act;
  Plan plan;
  const uint16_t *x, *dy;
  const float *weight, *w_gate_up, *w_down;  // the masters in FP32
  const float *b_gate_up = nullptr, *b_down = nullptr;
  uint16_t *y, *dx;
  float* d_weight;
  WeightGradients dw;
  bool accumulate;
  int saves;  // 0: nothing, 1: gate and up in BF16, 2: in MXFP8
};

uint16_t* rounded(Arena& arena, const float* master, size_t count) {
  uint16_t* bits = arena.make<uint16_t>(count);
  for (size_t i = 0; i < count; ++i) bits[i] = Host::bf16(master[i]);
  return bits;
}

Status run_bf16(Arena& arena, const Case& c) {
  const LayerShape& s = c.shape;
  const size_t EDF = static_cast<size_t>(s.experts * s.d_model * s.width);
  const Weights weights = {rounded(arena, c.w_gate_up, 2 * EDF), rounded(arena, c.w_down, EDF), c.b_gate_up, c.b_down};
  uint16_t* gate_up = c.saves != 0 ? arena.make<uint16_t>(static_cast<size_t>(2 * s.rows * s.width)) : nullptr;
  uint8_t* space = arena.make<uint8_t>(forward_workspace_bytes(s));
  if (Status status = forward(s, c.act, c.x, c.weight, c.plan, weights, c.y, gate_up, space, nullptr); !status.ok()) return status;
  space = arena.make<uint8_t>(backward_workspace_bytes(s, c.saves == 0));
  return backward(s, c.act, c.x, c.weight, c.dy, c.plan, weights, gate_up, c.dx, c.d_weight, c.dw, c.accumulate, space, nullptr);
}

struct MxWeight {  // both orientations
  void *fprop, *dgrad;
  uint8_t *fprop_codes, *dgrad_codes;
};
MxWeight prepare(Arena& arena, MxMode mode, const float* master, int64_t matrices, int64_t rows, int64_t columns) {
  const size_t bytes = static_cast<size_t>(matrices * rows * columns) * (mode == MxMode::kExact ? 2 : 1);
  const size_t tiles = static_cast<size_t>(matrices * div_up(static_cast<int>(rows), 128) * div_up(static_cast<int>(columns), 128));
  const MxWeight w = {arena.make<uint8_t>(bytes), arena.make<uint8_t>(bytes), arena.make<uint8_t>(tiles), arena.make<uint8_t>(tiles)};
  prepare_mx_weight(mode, master, true, matrices, rows, columns, w.fprop, w.fprop_codes, w.dgrad, w.dgrad_codes, nullptr);
  return w;
}

Status run_mx(Arena& arena, const Case& c, const MxOptions& options) {
  const LayerShape& s = c.shape;
  const MxWeight up = prepare(arena, options.mode, c.w_gate_up, 2 * s.experts, s.width, s.d_model);
  const MxWeight down = prepare(arena, options.mode, c.w_down, s.experts, s.d_model, s.width);
  const MxWeights weights = {up.fprop,       up.dgrad,       down.fprop,       down.dgrad,
                             up.fprop_codes, up.dgrad_codes, down.fprop_codes, down.dgrad_codes};
  const size_t elements = static_cast<size_t>(2 * s.rows * s.width);
  MxSaved saved;
  if (c.saves == 1) saved.gate_up_2xMxF = arena.make<uint16_t>(elements);
  if (c.saves == 2) {
    saved.elements_2xMxF = arena.make<uint8_t>(elements);
    saved.codes = arena.make<uint8_t>(static_cast<size_t>(2 * s.rows * ((s.width + 127) / 128)));
  }
  uint8_t* space = arena.make<uint8_t>(mx_forward_workspace_bytes(s, options));
  if (Status status = mx_forward(s, c.act, options, c.x, c.weight, c.plan, weights, c.y, saved, space, nullptr); !status.ok()) return status;
  space = arena.make<uint8_t>(mx_backward_workspace_bytes(s, options));
  return mx_backward(s, c.act, options, c.x, c.weight, c.dy, c.plan, weights, saved, c.dx, c.d_weight, c.dw.gate_up_Ex2xFxD, c.dw.down_ExDxF,
                     c.accumulate, space, nullptr);
}

}  // namespace
}  // namespace moe

// Forward and backward of one layer. Sizes: T, K, E, M, D, F. Activation: alpha, beta, gamma, limit. Options: recipe (0: BF16, 1: MXFP8 aligned,
// 2: exact), weight gradients from BF16 operands, what is saved (Case), whether gradients continue what is in their buffers, the first seed, the
// order of the backward's steps and which of them is weakened (host_overlap.h).
// Biases and their gradients may be null. Returns 0, or 1 with a message.
extern "C" int expert_layer(const int64_t* sizes, const uint8_t* ways, const float* activation, const int32_t* options, int32_t* count_E,
                            int32_t* start_E, int32_t* row_TxK, int32_t* slot_M, const uint16_t* x_TxD, const float* weight_TxK,
                            const uint16_t* dy_TxD, const float* w_gate_up, const float* w_down, const float* b_gate_up, const float* b_down,
                            uint16_t* y_TxD, uint16_t* dx_TxD, float* d_weight_TxK, float* dw_gate_up, float* dw_down, float* db_gate_up,
                            float* db_down, char* message, int message_bytes) {
  using namespace moe;
  Arena arena;
  Case c;
  LayerShape& s = c.shape;
  s.tokens = sizes[0], s.top_k = sizes[1], s.experts = sizes[2], s.rows = sizes[3], s.d_model = sizes[4], s.width = sizes[5];
  for (int kind = 0; kind < kNumProducts; ++kind) s.way[kind] = static_cast<Way>(ways[kind]);
  c.act = {activation[0], activation[1], activation[2], activation[3]};
  c.plan = {count_E, start_E, row_TxK, slot_M, nullptr};
  c.saves = options[2];
  c.accumulate = options[3] != 0;
  seed = static_cast<uint32_t>(options[4]);
  step_order = static_cast<uint32_t>(options[5]);
  weakened_step = options[6];

  const size_t TD = static_cast<size_t>(s.tokens * s.d_model), TK = static_cast<size_t>(s.tokens * s.top_k);
  const size_t EF = static_cast<size_t>(2 * s.experts * s.width), ED = static_cast<size_t>(s.experts * s.d_model);
  const size_t EFD = EF * static_cast<size_t>(s.d_model), EDF = ED * static_cast<size_t>(s.width);
  c.x = arena.put(x_TxD, TD), c.dy = arena.put(dy_TxD, TD), c.weight = arena.put(weight_TxK, TK);
  c.w_gate_up = w_gate_up, c.w_down = w_down;
  c.y = arena.make<uint16_t>(TD), c.dx = arena.make<uint16_t>(TD), c.d_weight = arena.make<float>(TK);
  c.dw.gate_up_Ex2xFxD = arena.put(dw_gate_up, EFD), c.dw.down_ExDxF = arena.put(dw_down, EDF);
  if (b_gate_up != nullptr) {
    c.b_gate_up = arena.put(b_gate_up, EF), c.b_down = arena.put(b_down, ED);
    c.dw.b_gate_up_Ex2xF = arena.put(db_gate_up, EF), c.dw.b_down_ExD = arena.put(db_down, ED);
  }

  const MxOptions mx = {options[0] == 2 ? MxMode::kExact : MxMode::kAligned, options[1] != 0};
  Status status = options[0] == 0 ? run_bf16(arena, c) : run_mx(arena, c, mx);
  if (status.ok() && !arena.intact()) status = {"something was written past the end of its memory"};
  std::snprintf(message, static_cast<size_t>(message_bytes), "%s", status.message.c_str());
  std::copy_n(c.y, TD, y_TxD);
  std::copy_n(c.dx, TD, dx_TxD);
  std::copy_n(c.d_weight, TK, d_weight_TxK);
  std::copy_n(c.dw.gate_up_Ex2xFxD, EFD, dw_gate_up);
  std::copy_n(c.dw.down_ExDxF, EDF, dw_down);
  if (b_gate_up != nullptr) {
    std::copy_n(c.dw.b_gate_up_Ex2xF, EF, db_gate_up);
    std::copy_n(c.dw.b_down_ExD, ED, db_down);
  }
  return status.ok() ? 0 : 1;
}
