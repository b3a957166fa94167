// The whole Blackwell expert layer on the host machine: the source of kernels_cuda/sm100_layer.h, with the tile programs on the emulator
// and the launches around them as plain loops. A shared library for test_sm100_layer.py.
#include "sm100_layer.h"

#include <cstdio>
#include <set>
#include <tuple>

#include "host_launches.h"
#include "host_memory.h"
#include "isa/host/sm100_host.h"
#include "mma_sm100.h"

namespace moe {

using machine::Map;

namespace {

uint32_t seed = 0;
int launches = 0, refused = -1;  // of this layer; the one that is refused, as an error of the driver would

// Every block's tile once: a list that was cut for other blocks computes some twice, which results show only where they are added to.
template <class Config>
Status check_tiles(Kind kind, const Sm100Batch<Map>& batch) {
  std::set<std::tuple<int, int, int, int, int>> tiles;
  for (int i = 0; i < *batch.num_tasks; ++i) {
    for (int rank = 0; rank < Config::kBlocks; ++rank) {
      const Task t = block_tile<Config>(batch.tasks[i], kind, static_cast<uint32_t>(rank));
      if (!is_wgrad(kind) && t.rows <= 0 && rank > 0) continue;
      if (!tiles.insert({t.expert, t.half, t.row0, t.m0, t.n0}).second) return {"kind " + std::to_string(kind) + ": a tile is computed twice"};
    }
  }
  return {};
}

template <Kind kKind, bool kPlain, class Config>
Status run_program(const Sm100Batch<Map>& batch, int max_tasks) {
  if (++launches == refused) return {"launch " + std::to_string(launches) + " was refused"};
  if (max_tasks <= 0) return {};
  if (Status status = check_tiles<Config>(kKind, batch); !status.ok()) return status;
  machine::Launch launch;
  launch.blocks = Config::kBlocks;
  launch.clusters = max_tasks;
  launch.stealing = Config::kStealing;
  launch.threads = Config::kThreads;
  launch.shared_bytes = Config::kSharedBytes;
  launch.seed = ++seed;
  const std::string stopped = machine::run(launch, [&] { sm100_run_block<kKind, kPlain, HostSm100, Config>(batch); });
  return stopped.empty() ? Status{} : Status{"machine, kind " + std::to_string(kKind) + ": " + stopped};
}

template <Kind kKind, bool kPlain = true>
Status run_kind(Sm100Tile tile, const Sm100Batch<Map>& batch, int max_tasks) {
  if (tile.mx) {
    return tile.blocks == 1 ? run_program<kKind, kPlain, Sm100Config<1, kSm100TileN, true, true>>(batch, max_tasks)
                            : run_program<kKind, kPlain, Sm100Config<2, kSm100TileN, true, true>>(batch, max_tasks);
  }
  return tile.blocks == 1 ? run_program<kKind, kPlain, Sm100Config<1, kSm100TileN, false, true>>(batch, max_tasks)
                          : run_program<kKind, kPlain, Sm100Config<2, kSm100TileN, false, true>>(batch, max_tasks);
}
template <Kind kKind>  // with an activation in its epilogue
Status run_activated(Sm100Tile tile, const Sm100Batch<Map>& batch, int max_tasks) {
  return is_plain_swiglu(batch.args.act) ? run_kind<kKind>(tile, batch, max_tasks) : run_kind<kKind, false>(tile, batch, max_tasks);
}

}  // namespace

Status launch_sm100_gemm(Kind kind, Sm100Tile tile, const Sm100Batch<Map>& batch, int max_tasks, cudaStream_t) {
  switch (kind) {
    case kGateUp: return run_activated<kGateUp>(tile, batch, max_tasks);
    case kDown: return run_kind<kDown>(tile, batch, max_tasks);
    case kDgradDown: return run_activated<kDgradDown>(tile, batch, max_tasks);
    case kDgradGateUp: return run_kind<kDgradGateUp>(tile, batch, max_tasks);
    case kWgradDown: return run_kind<kWgradDown>(tile, batch, max_tasks);
    default: return run_kind<kWgradGateUp>(tile, batch, max_tasks);
  }
}

Status encode_tensor_map(Map* map, const char* name, Element element, const void* address, const TensorShape& shape, int box_rows) {
  map->swizzle = element != Element::kScaleAtom;
  map->box_inner = map->swizzle ? 128 / element_bytes(element) : 128;
  map->box_outer = box_rows;
  return describe_tensor(map, name, element, address, shape);
}

}  // namespace moe

namespace {

using namespace moe;

// The FP32 master as the recipe's operands: BF16, or both orientations of MXFP8.
struct Weight {
  const void *fprop, *dgrad;
  const uint8_t *fprop_codes = nullptr, *dgrad_codes = nullptr;
};
Weight prepare(Arena& arena, bool mx, const float* master, int64_t matrices, int64_t rows, int64_t columns) {
  const size_t count = static_cast<size_t>(matrices * rows * columns);
  if (!mx) {
    uint16_t* bits = arena.make<uint16_t>(count);
    for (size_t i = 0; i < count; ++i) bits[i] = Host::bf16(master[i]);
    return {bits, bits};
  }
  QuantizeSource source;
  source.data = master;
  source.fp32 = true;
  source.batch = matrices;
  source.rows = rows;
  source.columns = columns;
  MxOutput out[2];
  for (MxOutput& o : out) {
    o.form = Form::kMx;
    o.layout = CodeLayout::kInterleaved;
    o.elements = arena.make<uint8_t>(count);
  }
  out[0].codes = arena.make<uint8_t>(static_cast<size_t>(matrices * sm100_code_bytes(rows, columns)));
  out[1].codes = arena.make<uint8_t>(static_cast<size_t>(matrices * sm100_code_bytes(columns, rows)));
  quantize(source, out[0], out[1], nullptr);
  return {out[0].elements, out[1].elements, out[0].codes, out[1].codes};
}

}  // namespace

// Forward and backward of one layer. Sizes: T, K, E, M, D, F. Activation: alpha, beta, gamma, limit. `refused_launch`: the product whose
// launch fails, from 1 on, or 0. Returns how many products were launched, or -1 less that number with a message.
extern "C" int sm100_layer(const int64_t* sizes, const float* activation, int mx, int blocks, int recompute, int accumulate,
                           int refused_launch, uint32_t first_seed, const uint16_t* x_TxD,
                           const float* weight_TxK, const uint16_t* dy_TxD, int32_t* count_E, int32_t* start_E, int32_t* row_TxK,
                           int32_t* slot_M, const float* w_gate_up, const float* w_down, uint16_t* y_TxD, uint16_t* dx_TxD,
                           float* d_weight_TxK, float* dw_gate_up, float* dw_down, char* message, int message_bytes) {
  LayerShape s;
  s.tokens = sizes[0], s.top_k = sizes[1], s.experts = sizes[2], s.rows = sizes[3], s.d_model = sizes[4], s.width = sizes[5];
  const Sm100Options options = {mx != 0, blocks};
  const Plan plan = {count_E, start_E, row_TxK, slot_M, nullptr};
  const Activation act = {activation[0], activation[1], activation[2], activation[3]};
  seed = first_seed;
  launches = 0, refused = refused_launch;
  Status status = sm100_check_shape(s, options);
  if (!status.ok()) {
    std::snprintf(message, static_cast<size_t>(message_bytes), "%s", status.message.c_str());
    return -1;
  }
  Arena arena;
  const size_t TD = static_cast<size_t>(s.tokens * s.d_model), EDF = static_cast<size_t>(s.experts * s.d_model * s.width);
  const Weight up = prepare(arena, options.mx, w_gate_up, 2 * s.experts, s.width, s.d_model);
  const Weight down = prepare(arena, options.mx, w_down, s.experts, s.d_model, s.width);
  const Sm100Weights weights = {up.fprop,       up.dgrad,       down.fprop,       down.dgrad,
                                up.fprop_codes, up.dgrad_codes, down.fprop_codes, down.dgrad_codes};
  const uint16_t *x = arena.put(x_TxD, TD), *dy = arena.put(dy_TxD, TD);
  uint16_t *y = arena.make<uint16_t>(TD), *dx = arena.make<uint16_t>(TD);
  uint16_t* gate_up = recompute ? nullptr : arena.make<uint16_t>(static_cast<size_t>(2 * s.rows * s.width));
  float *dw_up = arena.put(dw_gate_up, 2 * EDF), *dw_d = arena.put(dw_down, EDF);

  using Layer = Sm100Layer<machine::Map>;
  {
    Layer measure(s, act, options, plan, nullptr, nullptr);
    measure.take_forward();
    Layer layer(s, act, options, plan, arena.make<uint8_t>(measure.used()), nullptr);
    status = layer.forward(x, weight_TxK, weights, y, gate_up);
  }
  if (status.ok()) {
    Layer measure(s, act, options, plan, nullptr, nullptr);
    measure.take_backward(recompute != 0, accumulate != 0);
    Layer layer(s, act, options, plan, arena.make<uint8_t>(measure.used()), nullptr);
    status = layer.backward(x, weight_TxK, dy, weights, gate_up, dx, d_weight_TxK, dw_up, dw_d, accumulate != 0);
  }
  std::snprintf(message, static_cast<size_t>(message_bytes), "%s", status.message.c_str());
  std::memcpy(y_TxD, y, TD * sizeof(uint16_t));
  std::memcpy(dx_TxD, dx, TD * sizeof(uint16_t));
  std::memcpy(dw_gate_up, dw_up, 2 * EDF * sizeof(float));
  std::memcpy(dw_down, dw_d, EDF * sizeof(float));
  return status.ok() ? launches : -1 - launches;
}
