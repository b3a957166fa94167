// The expert layer as a sequence of launches, some of which overlap (overlap.h). Read moe.h for the contract.
#include <algorithm>
#include <initializer_list>

#include "bias.h"
#include "gemm_kernels.h"
#include "gemm_resident.h"
#include "gemm_tokens_n.h"
#include "kernel_check.h"
#include "overlap.h"
#include "row_copy.h"
#include "rows.h"
#include "shape_check.h"
#include "strips.h"
#include "task_list.h"
#include "tensor_map.h"
#include "workspace.h"

namespace moe {
namespace {

constexpr int kMaxExperts = 65536;  // the builder of task lists reads the counts of all experts in every block
constexpr int kTileM = 128;         // rows of a block's tile
constexpr int kTileN = 256;         // accumulator columns of a block

Status check_biases(const Weights& w) {
  if ((w.b_gate_up_Ex2xF == nullptr) == (w.b_down_ExD == nullptr)) return {};
  return {"b_gate_up and b_down must be given together, or neither"};
}

Status check_shape(const LayerShape& s) {
  return check_sizes(s, false, kMaxExperts, "1 to 65536 (those of all layers of a stack together)");
}

// A gathering warp counts bytes of x in 32 bits.
bool gather_reaches(const LayerShape& s) { return 2 * s.tokens * s.d_model <= UINT32_MAX; }
// With one expert per token these products scatter to the tokens themselves, which only tokens on the M side can.
bool scatters(const LayerShape& s, Kind kind) { return s.top_k == 1 && (kind == kDown || kind == kDgradGateUp); }

int tile_columns(Kind kind) { return kind == kGateUp ? kTileN / 2 : kTileN; }

// Output extents of each kind: rows (weight gradients only) and columns.
int m_extent(const LayerShape& s, Kind kind) { return static_cast<int>(kind == kWgradDown ? s.d_model : s.width); }
int n_extent(const LayerShape& s, Kind kind) {
  const bool width = kind == kGateUp || kind == kDgradDown || kind == kWgradDown;
  return static_cast<int>(width ? s.width : s.d_model);
}
int k_extent(const LayerShape& s, Kind kind) {
  const bool width = kind == kDown || kind == kDgradGateUp;
  return static_cast<int>(width ? s.width : s.d_model);
}

// The default: tokens on the N side where most experts fit one tile of them, and one operand of a weight gradient at rest where most experts'
// rows fit. A dispatch costs as much as T K D, gathering (in slower products) as T K D F: they were measured to break even near F = 1900
// (NOTES.md, v7). A dispatch in two parts was measured with one expert per token, of which it reads no row twice (v19).
Way way_of(const LayerShape& s, Kind kind) {
  constexpr int64_t kGatherWidth = 1536, kBesideWidth = 4096, kBesideTokens = 32768;
  if (s.way[kind] != kWayAuto) return s.way[kind];
  const int64_t rows = rows_per_expert(s);
  if (is_wgrad(kind)) return resident_way(rows, m_extent(s, kind), n_extent(s, kind));
  const bool few = rows <= TokensNConfig::kTokens;
  if (few && has_way(s, kind, kWayGatheredN)) return kWayGatheredN;
  if (few && has_way(s, kind, kWayTokensN)) return kWayTokensN;
  if (s.width <= kGatherWidth && has_way(s, kind, kWayGathered)) return kWayGathered;
  const bool many = rows > 1024 && s.top_k == 1 && s.tokens >= kBesideTokens && s.width <= kBesideWidth;
  return many && has_way(s, kind, kWayBeside) ? kWayBeside : kWayDispatched;
}

bool gathers(const LayerShape& s, Kind kind) { return way_of(s, kind) == kWayGathered || way_of(s, kind) == kWayGatheredN; }

Layout layout_of(const LayerShape& s, Kind kind, bool accumulate) {
  switch (way_of(s, kind)) {
    case kWayTokensN:
    case kWayGatheredN: return Layout::kTokensN;
    case kWayResident512: return accumulate ? Layout::kTokensM : Layout::kResident512;
    case kWayResidentRows: return accumulate ? Layout::kTokensM : Layout::kResidentRows;
    default: return Layout::kTokensM;
  }
}

Status check_ways(const LayerShape& s) {
  for (int kind = 0; kind < kNumKinds; ++kind) {
    if (!has_way(s, kind, s.way[kind])) {
      return {"way " + std::to_string(s.way[kind]) + " is not one that the " + product_name(kind) + " product of this shape has"};
    }
  }
  return {};
}

Tiling tiling(const LayerShape& s, Kind kind, bool accumulate, Layout layout) {
  Tiling t = {};
  t.kind = kind;
  t.m_extent = m_extent(s, kind);
  t.n_extent = n_extent(s, kind);
  t.skip_empty = accumulate;
  t.step_n = tile_columns(kind);
  t.pairs = Pairs::kColumns;
  switch (layout) {
    case Layout::kTokensM: t.tile_m = 2 * kTileM, t.pairs = Pairs::kRows; break;
    case Layout::kTokensN: t.tile_m = TokensNConfig::kTokens; break;
    case Layout::kResident512: return in_strips<ResidentConfig>(t);
    case Layout::kResidentRows: return in_row_strips(t);
  }
  return t;
}

struct List : TaskList {
  Layout layout;
  int64_t room;  // tasks, of each part where there are two
};

List take_list(Workspace& workspace, const LayerShape& s, Kind kind, bool accumulate = false) {
  List list = {};
  list.layout = layout_of(s, kind, accumulate);
  static_cast<Tiling&>(list) = tiling(s, kind, accumulate, list.layout);
  // The workspace does not depend on the way: the longest list of any.
  int64_t longest = max_tasks(s, tiling(s, kind, accumulate, Layout::kTokensM));
  if (can_put_tokens_on_n(kind)) longest = std::max(longest, max_tasks(s, tiling(s, kind, accumulate, Layout::kTokensN)));
  if (is_wgrad(kind)) {
    for (Layout layout : {Layout::kResident512, Layout::kResidentRows}) longest = std::max(longest, max_tasks(s, tiling(s, kind, accumulate, layout)));
  }
  list.tasks = workspace.take<Task>(can_dispatch_beside(kind) ? 2 * longest : longest);
  list.room = longest;
  list.num_tasks = workspace.take<int32_t>(3);
  return list;
}

GemmArguments<CUtensorMap> arguments(const LayerShape& s, Kind kind, const Activation& act) {
  GemmArguments<CUtensorMap> args = {};
  args.num_rows = s.rows;
  args.k_extent = k_extent(s, kind);
  args.m_extent = m_extent(s, kind);
  args.n_extent = n_extent(s, kind);
  args.zero_to = kind == kGateUp ? kPanelRows : TokensNConfig::kBoxRows;  // nobody reads padding of y or dx; that of gate and up is saved
  args.act = act;
  return args;
}

// `spare`: multiprocessors that the part in front of a cut leaves free.
Status run_gemm(const List& list, const GemmArguments<CUtensorMap>& args, cudaStream_t stream, Part part = kWhole, int spare = 0) {
  GemmBatch<CUtensorMap, 1> batch = {{args}, list.tasks + (part == kFront ? list.cut.at : 0), list.num_tasks + part};
  cudaError_t error = launch_gemm(list.kind, batch, stream, list.layout, spare);
  return error == cudaSuccess ? Status{} : failed(product_name(list.kind), error);
}

// Cuts the list so that its first part is as long as the copy of the rows of its second part by `spare` multiprocessors, an eighth of all. For each of
// them 220 rows are copied while another one computes a tile, whatever D is: 128 x 256 x 2 D operations at 5.2 TFLOP/s, 2 D bytes at 35 GB/s. What it
// copies in fact is a little less; longer first parts were slower.
Status cut(List& list, int* spare) {
  int blocks = 0;
  const cudaError_t error = count_blocks(&blocks);
  if (error != cudaSuccess) return failed("count_blocks", error);
  *spare = std::max(blocks / 16 * 2, 2);
  const int clusters = (blocks - *spare) / 2, copied = 220 * *spare * div_up(list.n_extent, list.step_n) / list.tile_m;  // tasks, in a round
  list.cut.round = clusters;
  list.cut.provides = clusters + copied;
  const int64_t rounds = (list.room + list.cut.provides - 1) / list.cut.provides;
  list.cut.front = static_cast<int>(std::min(rounds * clusters, list.room));
  list.cut.at = static_cast<int>(list.room);
  return {};
}

// Whether this product dispatches rows for those after it.
bool can_carry(const List& list) { return can_carry(list.kind) && list.layout == Layout::kTokensM; }

struct ForwardMemory {
  uint16_t* x_MxD;
  uint16_t* h_MxF;
  uint16_t* y_MxD;
  List gate_up, down;
};

ForwardMemory forward_memory(Workspace& workspace, const LayerShape& s) {
  ForwardMemory m;
  m.x_MxD = workspace.take<uint16_t>(s.rows * s.d_model);
  m.h_MxF = workspace.take<uint16_t>(s.rows * s.width);
  m.y_MxD = workspace.take<uint16_t>(s.rows * s.d_model);
  m.gate_up = take_list(workspace, s, kGateUp);
  m.down = take_list(workspace, s, kDown);
  return m;
}

int64_t weight_chunks(const LayerShape& s) { return (s.width + 127) / 128; }

struct BackwardMemory {
  uint16_t* x_MxD;
  uint16_t* dy_MxD;
  uint16_t* d_gate_up_2xMxF;
  uint16_t* scaled_h_MxF;
  uint16_t* gate_up_2xMxF;
  uint16_t* dx_MxD;
  float* partial_CxM;
  List gate_up, dgrad_down, dgrad_gate_up, wgrad_down, wgrad_gate_up;
};

BackwardMemory backward_memory(Workspace& workspace, const LayerShape& s, bool recompute, bool accumulate) {
  BackwardMemory m;
  m.x_MxD = workspace.take<uint16_t>(s.rows * s.d_model);
  m.dy_MxD = workspace.take<uint16_t>(s.rows * s.d_model);
  m.d_gate_up_2xMxF = workspace.take<uint16_t>(2 * s.rows * s.width);
  m.scaled_h_MxF = workspace.take<uint16_t>(s.rows * s.width);
  m.gate_up_2xMxF = recompute ? workspace.take<uint16_t>(2 * s.rows * s.width) : nullptr;
  m.dx_MxD = workspace.take<uint16_t>(s.rows * s.d_model);
  m.partial_CxM = workspace.take<float>((weight_chunks(s) + 1) * s.rows);  // the last one for biases
  m.dgrad_down = take_list(workspace, s, kDgradDown);
  m.dgrad_gate_up = take_list(workspace, s, kDgradGateUp);
  m.wgrad_down = take_list(workspace, s, kWgradDown, accumulate);
  m.wgrad_gate_up = take_list(workspace, s, kWgradGateUp, accumulate);
  if (recompute) m.gate_up = take_list(workspace, s, kGateUp);
  return m;
}

TensorShape rows_shape(const LayerShape& s, int64_t width, int64_t halves = 1) { return {width, s.rows, halves, 1}; }
TensorShape gate_up_shape(const LayerShape& s) { return {s.d_model, s.width, 2, s.experts}; }
TensorShape down_shape(const LayerShape& s) { return {s.width, s.d_model, 1, s.experts}; }

// With tokens on the N side a row's next 128 bytes are often out of L2 again before somebody comes for them (NOTES.md, v15).
int l2_bytes(const List& list) { return list.layout == Layout::kTokensN ? 128 : 256; }

// Of what a row kind reads and writes, but for weights.
Status row_map(CUtensorMap* map, const char* name, const LayerShape& s, const List& list, const void* data, int64_t width, int64_t halves = 1) {
  const int box_rows = list.layout == Layout::kTokensN ? TokensNConfig::kBoxRows : kPanelRows;
  return encode_tensor_map(map, name, Element::kBf16, data, rows_shape(s, width, halves), box_rows, l2_bytes(list));
}
Status weight_map(CUtensorMap* map, const char* name, const List& list, const uint16_t* data, const TensorShape& shape) {
  return encode_tensor_map(map, name, Element::kBf16, data, shape, kPanelRows, l2_bytes(list));
}

}  // namespace

int64_t routed_experts(const LayerShape& s) {
  const int64_t padding = s.rows - s.tokens * s.top_k;
  return std::clamp<int64_t>(padding / (kGroupRows - 1), 1, std::max<int64_t>(s.experts, 1));  // no experts are refused elsewhere
}

bool has_way(const LayerShape& s, int product, Way way) {
  const Kind kind = static_cast<Kind>(product);
  switch (way) {
    case kWayAuto:
    case kWayDispatched: return true;
    case kWayGathered: return can_gather(kind) && gather_reaches(s);
    case kWayTokensN: return can_put_tokens_on_n(kind) && !scatters(s, kind);
    case kWayResident512:
    case kWayResidentRows: return is_wgrad(kind);
    case kWayGatheredN: return can_gather(kind) && can_put_tokens_on_n(kind) && gather_reaches(s);
    case kWayBeside: return can_dispatch_beside(kind) && s.experts <= kMostOrdered && 2 * s.d_model <= RowCopyConfig::kMostRowBytes;
    default: return false;
  }
}

size_t forward_workspace_bytes(const LayerShape& shape) {
  Workspace measure(nullptr);
  forward_memory(measure, shape);
  return measure.used();
}

Status forward(const LayerShape& s, const Activation& act, const uint16_t* x_TxD, const float* weight_TxK, const Plan& plan,
               const Weights& w, uint16_t* y_TxD, uint16_t* gate_up_2xMxF, void* workspace, cudaStream_t stream) {
  for (const Status& status : {check_shape(s), check_ways(s), check_biases(w)}) MOE_RETURN_IF_ERROR(status);
  Workspace space(workspace);
  ForwardMemory m = forward_memory(space, s);
  int spare = 0;
  if (way_of(s, kGateUp) == kWayBeside) MOE_RETURN_IF_ERROR(cut(m.gate_up, &spare));
  const bool beside = m.gate_up.cut.front > 0;  // not where nothing is left to multiply meanwhile
  TaskList lists[] = {m.gate_up, m.down};
  MOE_RETURN_IF_ERROR(build_tasks(s, plan, lists, 2, stream));
  if (!gathers(s, kGateUp) && !beside) MOE_RETURN_IF_ERROR(dispatch_rows(s, x_TxD, plan, m.x_MxD, stream));

  auto up = arguments(s, kGateUp, act);
  MOE_RETURN_IF_ERROR(row_map(&up.a, "x", s, m.gate_up, m.x_MxD, s.d_model));
  if (gathers(s, kGateUp)) {
    up.gather = reinterpret_cast<const uint8_t*>(x_TxD);
    up.slot_M = plan.slot_M;
    up.top_k = static_cast<int>(s.top_k);
    up.gather_vectors = static_cast<int>(s.d_model / 8);
  }
  MOE_RETURN_IF_ERROR(weight_map(&up.b, "w_gate_up", m.gate_up, w.gate_up_Ex2xFxD, gate_up_shape(s)));
  up.bias = w.b_gate_up_Ex2xF;
  MOE_RETURN_IF_ERROR(row_map(&up.out, "h", s, m.gate_up, m.h_MxF, s.width));
  up.write_out = 1;
  if (gate_up_2xMxF != nullptr) {
    MOE_RETURN_IF_ERROR(row_map(&up.gate_up, "gate_up", s, m.gate_up, gate_up_2xMxF, s.width, 2));
    up.save_gate_up = 1;
  }
  if (beside) {
    // The second part of the product begins on the multiprocessors that copied, once they have.
    Overlap steps(stream);
    MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&](cudaStream_t lane) { return dispatch_front(s, x_TxD, plan, m.x_MxD, m.gate_up, lane); }));
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) { return dispatch_back(s, x_TxD, plan, m.x_MxD, m.gate_up, spare, lane); }));
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) { return run_gemm(m.gate_up, up, lane, kFront, spare); }));
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) { return run_gemm(m.gate_up, up, lane, kBack); }));
    MOE_RETURN_IF_ERROR(steps.join());
  } else {
    MOE_RETURN_IF_ERROR(run_gemm(m.gate_up, up, stream));
  }

  auto down = arguments(s, kDown, act);
  MOE_RETURN_IF_ERROR(row_map(&down.a, "h", s, m.down, m.h_MxF, s.width));
  MOE_RETURN_IF_ERROR(weight_map(&down.b, "w_down", m.down, w.down_ExDxF, down_shape(s)));
  down.bias = w.b_down_ExD;
  down.slot_M = plan.slot_M;
  down.weight_TxK = weight_TxK;
  if (s.top_k == 1) {  // the combine is a product per row: the down product does it and writes to the tokens
    down.scatter = reinterpret_cast<uint8_t*>(y_TxD);
    MOE_RETURN_IF_ERROR(zero_unrouted(s, plan, y_TxD, stream));
    return run_gemm(m.down, down, stream);
  }
  MOE_RETURN_IF_ERROR(row_map(&down.out, "y", s, m.down, m.y_MxD, s.d_model));
  MOE_RETURN_IF_ERROR(run_gemm(m.down, down, stream));
  return combine_rows(s, m.y_MxD, weight_TxK, plan, y_TxD, stream);
}

size_t backward_workspace_bytes(const LayerShape& shape, bool recompute) {
  Workspace measure(nullptr);
  backward_memory(measure, shape, recompute, false);
  return measure.used();
}

Status backward(const LayerShape& s, const Activation& act, const uint16_t* x_TxD, const float* weight_TxK, const uint16_t* dy_TxD,
                const Plan& plan, const Weights& w, const uint16_t* gate_up_2xMxF, uint16_t* dx_TxD, float* d_weight_TxK,
                const WeightGradients& dw, bool accumulate, void* workspace, cudaStream_t stream) {
  for (const Status& status : {check_shape(s), check_ways(s), check_biases(w)}) MOE_RETURN_IF_ERROR(status);
  const bool recompute = gate_up_2xMxF == nullptr;
  Workspace space(workspace);
  BackwardMemory m = backward_memory(space, s, recompute, accumulate);
  TaskList lists[] = {m.dgrad_down, m.dgrad_gate_up, m.wgrad_down, m.wgrad_gate_up, m.gate_up};
  Overlap steps(stream, overlaps(s));
  // Of padded rows only a weight gradient multiplies any with others.
  MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&](cudaStream_t lane) {
    return dispatch_rows(s, dy_TxD, plan, m.dy_MxD, lane, multiplied_rows(m.wgrad_down.layout));
  }));
  MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) {
    const Status built = build_tasks(s, plan, lists, recompute ? 5 : 4, lane);
    return built.ok() && s.top_k == 1 ? zero_unrouted(s, plan, dx_TxD, lane) : built;
  }));
  const auto dispatch_x = [&](cudaStream_t lane) {
    return dispatch_rows(s, x_TxD, plan, m.x_MxD, lane, multiplied_rows(m.wgrad_gate_up.layout));
  };

  CUtensorMap dw_up_map, dw_down_map;
  if (recompute) gate_up_2xMxF = m.gate_up_2xMxF;
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_up_map, "dw_gate_up", Element::kFp32, dw.gate_up_Ex2xFxD, gate_up_shape(s)));
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_down_map, "dw_down", Element::kFp32, dw.down_ExDxF, down_shape(s)));

  if (recompute) {
    auto up = arguments(s, kGateUp, act);
    MOE_RETURN_IF_ERROR(row_map(&up.a, "x", s, m.gate_up, m.x_MxD, s.d_model));
    MOE_RETURN_IF_ERROR(weight_map(&up.b, "w_gate_up", m.gate_up, w.gate_up_Ex2xFxD, gate_up_shape(s)));
    up.bias = w.b_gate_up_Ex2xF;
    MOE_RETURN_IF_ERROR(row_map(&up.gate_up, "gate_up", s, m.gate_up, gate_up_2xMxF, s.width, 2));
    up.save_gate_up = 1;
    MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, dispatch_x));
    MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&, up](cudaStream_t lane) { return run_gemm(m.gate_up, up, lane); }));
  }

  auto dh = arguments(s, kDgradDown, act);
  MOE_RETURN_IF_ERROR(row_map(&dh.a, "dy", s, m.dgrad_down, m.dy_MxD, s.d_model));
  MOE_RETURN_IF_ERROR(weight_map(&dh.b, "w_down", m.dgrad_down, w.down_ExDxF, down_shape(s)));
  MOE_RETURN_IF_ERROR(row_map(&dh.gate_up, "gate_up", s, m.dgrad_down, gate_up_2xMxF, s.width, 2));
  MOE_RETURN_IF_ERROR(row_map(&dh.out, "d_gate_up", s, m.dgrad_down, m.d_gate_up_2xMxF, s.width, 2));
  MOE_RETURN_IF_ERROR(row_map(&dh.scaled_h, "weight * h", s, m.dgrad_down, m.scaled_h_MxF, s.width));
  dh.zero_to = std::max(multiplied_rows(m.wgrad_down.layout), multiplied_rows(m.wgrad_gate_up.layout));
  dh.weight_TxK = weight_TxK;
  dh.slot_M = plan.slot_M;
  dh.weight_partial = m.partial_CxM;
  MOE_RETURN_IF_ERROR(steps.step(After::kAll, [&](cudaStream_t lane) { return run_gemm(m.dgrad_down, dh, lane); }));

  auto dw_down_args = arguments(s, kWgradDown, act);
  const int box_down = box_rows(m.wgrad_down.layout), box_up = box_rows(m.wgrad_gate_up.layout);
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_down_args.a, "dy", Element::kBf16, m.dy_MxD, rows_shape(s, s.d_model), box_down));
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_down_args.b, "weight * h", Element::kBf16, m.scaled_h_MxF, rows_shape(s, s.width), box_down));
  dw_down_args.out = dw_down_map;
  dw_down_args.dw = dw.down_ExDxF;
  dw_down_args.accumulate = accumulate;

  auto dx_args = arguments(s, kDgradGateUp, act);
  MOE_RETURN_IF_ERROR(row_map(&dx_args.a, "d_gate_up", s, m.dgrad_gate_up, m.d_gate_up_2xMxF, s.width, 2));
  MOE_RETURN_IF_ERROR(weight_map(&dx_args.b, "w_gate_up", m.dgrad_gate_up, w.gate_up_Ex2xFxD, gate_up_shape(s)));
  if (s.top_k == 1) {
    dx_args.scatter = reinterpret_cast<uint8_t*>(dx_TxD);
    dx_args.slot_M = plan.slot_M;
  } else {
    MOE_RETURN_IF_ERROR(row_map(&dx_args.out, "dx", s, m.dgrad_gate_up, m.dx_MxD, s.d_model));
  }

  auto dw_up_args = arguments(s, kWgradGateUp, act);
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_up_args.a, "d_gate_up", Element::kBf16, m.d_gate_up_2xMxF, rows_shape(s, s.width, 2), box_up));
  MOE_RETURN_IF_ERROR(encode_tensor_map(&dw_up_args.b, "x", Element::kBf16, m.x_MxD, rows_shape(s, s.d_model), box_up));
  dw_up_args.out = dw_up_map;
  dw_up_args.dw = dw.gate_up_Ex2xFxD;
  dw_up_args.accumulate = accumulate;
  // Only wgrad_gate_up, which comes last, reads rows of x, but for a recomputed gate and up.
  const bool carries_x = !recompute && can_carry(m.dgrad_gate_up);
  if (carries_x) {
    dx_args.carry = {reinterpret_cast<const uint8_t*>(x_TxD), reinterpret_cast<uint8_t*>(m.x_MxD), plan.row_TxK, plan.count_E, plan.start_E,
                     static_cast<int>(s.tokens), static_cast<int>(s.top_k), static_cast<int>(s.experts), static_cast<int>(s.d_model / 8),
                     multiplied_rows(m.wgrad_gate_up.layout)};
  }
  // None of these reads what the one before it writes. The data gradient comes first: then there is time for its rows before they are combined.
  if (!recompute && !carries_x) MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, dispatch_x));
  const After dgrad = !recompute && !carries_x ? After::kAllButOne : After::kAll;
  const auto product = [&](After after, const List& list, const GemmArguments<CUtensorMap>& args) {
    return steps.step(after, [&list, &args](cudaStream_t lane) { return run_gemm(list, args, lane); });
  };
  MOE_RETURN_IF_ERROR(product(dgrad, m.dgrad_gate_up, dx_args));
  MOE_RETURN_IF_ERROR(product(After::kAllButOne, m.wgrad_down, dw_down_args));
  MOE_RETURN_IF_ERROR(product(After::kAllButOne, m.wgrad_gate_up, dw_up_args));
  MOE_RETURN_IF_ERROR(steps.step(After::kAllButOne, [&](cudaStream_t lane) -> Status {
    if (w.b_down_ExD != nullptr) {
      MOE_RETURN_IF_ERROR(bias_gradients(s, plan, m.d_gate_up_2xMxF, dy_TxD, weight_TxK, dw.b_gate_up_Ex2xF, dw.b_down_ExD, accumulate, lane));
      MOE_RETURN_IF_ERROR(bias_weight_partial(s, plan, dy_TxD, w.b_down_ExD, m.partial_CxM + weight_chunks(s) * s.rows, lane));
    }
    MOE_RETURN_IF_ERROR(sum_weight_partials(s, m.partial_CxM, plan, d_weight_TxK, lane, w.b_down_ExD != nullptr ? 1 : 0));
    return s.top_k == 1 ? Status{} : combine_rows(s, m.dx_MxD, nullptr, plan, dx_TxD, lane);
  }));
  return steps.join();
}

}  // namespace moe
