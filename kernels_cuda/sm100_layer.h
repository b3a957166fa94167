// The Blackwell expert layer as a sequence of launches: forward and backward, BF16 and MXFP8. Read sm100_moe.h for the contract.
//
// One source for the GPU (sm100_layer.cc) and the host emulator (tests/cuda/sm100_layer_host.cc). What differs is the type of a tensor map, with
// the overloads of encode_tensor_map and launch_sm100_gemm for it, and, at link time, who defines build_tasks, dispatch_rows, quantize,
// combine_rows and sum_weight_partials: kernels, or plain loops.
//
// MXFP8: x and dY are quantised while they are gathered from their tokens, everything else in the epilogue that makes it. Weight gradients
// contract over rows, so their operands have blocks along rows: other numbers than those of the products before them, in buffers of their own. In BF16 both
// are one buffer.
#pragma once

#include "quantize.h"
#include "rows.h"
#include "shape_check.h"
#include "sm100_kernels.h"
#include "sm100_moe.h"
#include "task_list.h"
#include "tensor_shape.h"
#include "workspace.h"

namespace moe {

// An operand of a product: BF16, or E4M3 and its codes.
struct Sm100Matrix {
  void* elements = nullptr;
  uint8_t* codes = nullptr;
};

inline Status sm100_check_shape(const LayerShape& s, const Sm100Options& o) {
  if (Status status = check_sizes(s, o.mx, 4096, "1 to 4096"); !status.ok()) return status;
  if (o.blocks < 0 || o.blocks > 2) return size_problem("blocks", o.blocks, "0, 1 or 2");
  return {};
}

template <class TensorMap>
class Sm100Layer {
 public:
  Sm100Layer(const LayerShape& shape, const Activation& act, const Sm100Options& options, const Plan& plan, void* workspace, cudaStream_t stream)
      : s_(shape), act_(act), mx_(options.mx), blocks_(blocks_of(shape, options)), plan_(plan), stream_(stream), space_(workspace) {}

  // What is taken from the workspace, in order; with a null workspace this measures.
  void take_forward() {
    x_rows_ = take_operand(s_.d_model, kAlongRow);
    h_ = take_operand(s_.width, kAlongRow);
    y_MxD_ = space_.template take<uint16_t>(s_.rows * s_.d_model);
    for (Kind kind : {kGateUp, kDown}) take_list(kind);
  }
  void take_backward(bool recompute, bool accumulate) {
    dy_rows_ = take_operand(s_.d_model, kAlongRow);
    d_gate_up_rows_ = take_operand(s_.width, kAlongRow, 2);
    scaled_h_ = take_operand(s_.width, kAlongRows);
    if (recompute || !mx_) x_rows_ = take_operand(s_.d_model, kAlongRow);
    x_columns_ = mx_ ? take_operand(s_.d_model, kAlongRows) : x_rows_;
    dy_columns_ = mx_ ? take_operand(s_.d_model, kAlongRows) : dy_rows_;
    d_gate_up_columns_ = mx_ ? take_operand(s_.width, kAlongRows, 2) : d_gate_up_rows_;
    if (recompute) {
      h_ = take_operand(s_.width, kAlongRow);  // the epilogue computes it again; nobody reads it
      gate_up_2xMxF_ = space_.template take<uint16_t>(2 * s_.rows * s_.width);
      take_list(kGateUp);
    }
    dx_MxD_ = space_.template take<uint16_t>(s_.rows * s_.d_model);
    partial_CxM_ = space_.template take<float>((s_.width + 127) / 128 * s_.rows);
    for (Kind kind : {kDgradDown, kDgradGateUp}) take_list(kind);
    for (Kind kind : {kWgradDown, kWgradGateUp}) take_list(kind, accumulate);
  }
  size_t used() const { return space_.used(); }

  Status forward(const uint16_t* x_TxD, const float* weight_TxK, const Sm100Weights& w, uint16_t* y_TxD, uint16_t* gate_up_2xMxF) {
    take_forward();
    begin();
    bring_rows(x_TxD, &x_rows_, nullptr);
    gate_up(w, gate_up_2xMxF);
    Arguments down = arguments(kDown);
    operand(&down.a, &down.scale_a, "h", h_, false, {s_.width, s_.rows, 1, 1});
    operand(&down.b, &down.scale_b, "w_down", weight(w.down_fprop, w.down_fprop_codes), false,
            {s_.width, s_.d_model, 1, s_.experts});
    result(&down.out, "y", Element::kBf16, y_MxD_, {s_.d_model, s_.rows, 1, 1});
    run(kDown, down);
    step([&] { return combine_rows(s_, y_MxD_, weight_TxK, plan_, y_TxD, stream_); });
    return status_;
  }

  Status backward(const uint16_t* x_TxD, const float* weight_TxK, const uint16_t* dy_TxD, const Sm100Weights& w,
                  const uint16_t* gate_up_2xMxF, uint16_t* dx_TxD, float* d_weight_TxK, float* dw_gate_up, float* dw_down, bool accumulate) {
    const bool recompute = gate_up_2xMxF == nullptr;
    const int64_t D = s_.d_model, F = s_.width, M = s_.rows, E = s_.experts;
    take_backward(recompute, accumulate);
    begin();
    bring_rows(dy_TxD, &dy_rows_, &dy_columns_);
    bring_rows(x_TxD, recompute || !mx_ ? &x_rows_ : nullptr, &x_columns_);
    if (recompute) {
      gate_up(w, gate_up_2xMxF_);
      gate_up_2xMxF = gate_up_2xMxF_;
    }

    Arguments dh = arguments(kDgradDown);
    operand(&dh.a, &dh.scale_a, "dy", dy_rows_, false, {D, M, 1, 1});
    operand(&dh.b, &dh.scale_b, "w_down", weight(w.down_dgrad, w.down_dgrad_codes), true, {F, D, 1, E});
    dh.gate_up_2xMxF = gate_up_2xMxF;
    dh.weight_TxK = weight_TxK;
    dh.slot_M = plan_.slot_M;
    dh.weight_partial = partial_CxM_;
    if (mx_) {
      dh.by_row = target(d_gate_up_rows_);
      dh.by_column = target(d_gate_up_columns_);
      dh.scaled_h_by_column = target(scaled_h_);
    } else {
      result(&dh.out, "d_gate_up", Element::kBf16, d_gate_up_rows_.elements, {F, M, 2, 1});
      result(&dh.scaled_h, "weight * h", Element::kBf16, scaled_h_.elements, {F, M, 1, 1});
    }
    run(kDgradDown, dh);

    Arguments down = arguments(kWgradDown);
    operand(&down.a, &down.scale_a, "dy", dy_columns_, true, {D, M, 1, 1});
    operand(&down.b, &down.scale_b, "weight * h", scaled_h_, true, {F, M, 1, 1});
    weight_gradient(down, "dw_down", dw_down, {F, D, 1, E}, accumulate);
    run(kWgradDown, down);

    Arguments dx = arguments(kDgradGateUp);
    operand(&dx.a, &dx.scale_a, "d_gate_up", d_gate_up_rows_, false, {F, M, 2, 1});
    operand(&dx.b, &dx.scale_b, "w_gate_up", weight(w.gate_up_dgrad, w.gate_up_dgrad_codes), true,
            {D, F, 2, E});
    result(&dx.out, "dx", Element::kBf16, dx_MxD_, {D, M, 1, 1});
    run(kDgradGateUp, dx);

    Arguments up = arguments(kWgradGateUp);
    operand(&up.a, &up.scale_a, "d_gate_up", d_gate_up_columns_, true, {F, M, 2, 1});
    operand(&up.b, &up.scale_b, "x", x_columns_, true, {D, M, 1, 1});
    weight_gradient(up, "dw_gate_up", dw_gate_up, {D, F, 2, E}, accumulate);
    run(kWgradGateUp, up);

    step([&] { return sum_weight_partials(s_, partial_CxM_, plan_, d_weight_TxK, stream_); });
    step([&] { return combine_rows(s_, dx_MxD_, nullptr, plan_, dx_TxD, stream_); });
    return status_;
  }

 private:
  using Arguments = Sm100Arguments<TensorMap>;
  enum Along { kAlongRow, kAlongRows };  // where the scale blocks of an operand lie

  // Pairs read half of B from memory, but multiply and drop half of an expert's odd last tile. Where they start to pay is a guess
  // of benchmarks/gpu_model.py.
  static int blocks_of(const LayerShape& s, const Sm100Options& o) {
    return o.blocks != 0 ? o.blocks : s.tokens * s.top_k >= 512 * s.experts ? 2 : 1;
  }

  // Steps after a failed one are skipped.
  template <class F>
  void step(F f) {
    if (status_.ok()) status_ = f();
  }

  Sm100Matrix take_operand(int64_t width, Along along, int64_t halves = 1) {
    const int64_t elements = halves * s_.rows * width;
    if (!mx_) return {space_.template take<uint16_t>(elements), nullptr};
    const int64_t table = along == kAlongRow ? sm100_code_bytes(s_.rows, width) : sm100_code_bytes(width, s_.rows);
    void* const data = space_.template take<uint8_t>(elements);
    return {data, space_.template take<uint8_t>(halves * table)};
  }

  void take_list(Kind kind, bool skip_empty = false) {
    TaskList& list = lists_[kind];
    const bool width = kind == kGateUp || kind == kDgradDown || kind == kWgradDown;
    list.kind = kind;
    list.tile_m = sm100_tile_m({blocks_, mx_});
    list.step_n = kind == kGateUp ? kSm100TileN / 2 : kSm100TileN;
    list.m_extent = static_cast<int>(kind == kWgradDown ? s_.d_model : s_.width);
    list.n_extent = static_cast<int>(width ? s_.width : s_.d_model);
    list.skip_empty = skip_empty;
    list.pairs = Pairs::kNone;
    capacity_[kind] = max_tasks(s_, list);
    list.tasks = space_.template take<Task>(capacity_[kind]);
    list.num_tasks = space_.template take<int32_t>(1);
    wanted_[num_wanted_++] = kind;
  }

  // The task lists, all in one launch.
  void begin() {
    TaskList all[kMaxLists];
    for (int i = 0; i < num_wanted_; ++i) all[i] = lists_[wanted_[i]];
    step([&] { return build_tasks(s_, plan_, all, num_wanted_, stream_); });
  }

  // Tokens to the rows of their experts; MXFP8: in one or both orientations, from one read.
  void bring_rows(const uint16_t* tokens_TxD, const Sm100Matrix* along_row, const Sm100Matrix* along_rows) {
    if (!mx_) {
      const Sm100Matrix& to = along_row != nullptr ? *along_row : *along_rows;
      return step([&] { return dispatch_rows(s_, tokens_TxD, plan_, static_cast<uint16_t*>(to.elements), stream_); });
    }
    QuantizeSource source;
    source.data = tokens_TxD;
    source.rows = s_.rows;
    source.columns = s_.d_model;
    source.slot_M = plan_.slot_M;
    source.gather = s_.top_k;
    auto output = [](const Sm100Matrix* m) {
      MxOutput out;
      if (m == nullptr) return out;
      out.form = Form::kMx;
      out.layout = CodeLayout::kInterleaved;
      out.elements = m->elements;
      out.codes = m->codes;
      return out;
    };
    step([&] { return quantize(source, output(along_row), output(along_rows), stream_); });
  }

  void gate_up(const Sm100Weights& w, uint16_t* save_2xMxF) {
    Arguments args = arguments(kGateUp);
    operand(&args.a, &args.scale_a, "x", x_rows_, false, {s_.d_model, s_.rows, 1, 1});
    operand(&args.b, &args.scale_b, "w_gate_up", weight(w.gate_up_fprop, w.gate_up_fprop_codes), false,
            {s_.d_model, s_.width, 2, s_.experts});
    if (mx_) {
      args.by_row = target(h_);
    } else {
      result(&args.out, "h", Element::kBf16, h_.elements, {s_.width, s_.rows, 1, 1});
    }
    if (save_2xMxF != nullptr) {
      result(&args.gate_up, "gate_up", Element::kBf16, save_2xMxF, {s_.width, s_.rows, 2, 1});
      args.save_gate_up = 1;
    }
    run(kGateUp, args);
  }

  Arguments arguments(Kind kind) const {
    Arguments args = {};
    args.num_rows = s_.rows;
    args.m_extent = lists_[kind].m_extent;
    args.n_extent = lists_[kind].n_extent;
    args.k_extent = static_cast<int>(kind == kDown || kind == kDgradGateUp ? s_.width : s_.d_model);
    args.act = act_;
    return args;
  }
  static Sm100Matrix weight(const void* elements, const uint8_t* codes) {  // only read
    return {const_cast<void*>(elements), const_cast<uint8_t*>(codes)};
  }
  static MxTarget target(const Sm100Matrix& m) { return {static_cast<uint8_t*>(m.elements), m.codes}; }

  // Maps of an operand whose inner dimension is the contraction, or its rows (`mn_major`), and of its scale atoms.
  void operand(TensorMap* map, TensorMap* scales, const char* name, const Sm100Matrix& m, bool mn_major, const TensorShape& shape) {
    step([&] { return encode_tensor_map(map, name, mx_ ? Element::kE4m3 : Element::kBf16, m.elements, shape, kPanelRows); });
    if (!mx_) return;
    const int64_t k = mn_major ? shape.outer : shape.inner, lines = mn_major ? shape.inner : shape.outer;
    const TensorShape atoms = {128, (k + 127) / 128, (lines + 127) / 128, shape.halves * shape.experts};
    step([&] { return encode_tensor_map(scales, name, Element::kScaleAtom, m.codes, atoms, 1); });
  }
  void result(TensorMap* map, const char* name, Element element, void* data, const TensorShape& shape) {
    step([&] { return encode_tensor_map(map, name, element, data, shape, 32); });  // an epilogue warp stores 32 rows
  }
  void weight_gradient(Arguments& args, const char* name, float* dw, const TensorShape& shape, bool accumulate) {
    result(&args.out, name, Element::kFp32, dw, shape);
    args.dw = dw;
    args.accumulate = accumulate;
  }

  void run(Kind kind, const Arguments& args) {
    const TaskList& list = lists_[kind];
    const Sm100Batch<TensorMap> batch = {args, list.tasks, list.num_tasks};
    step([&] { return launch_sm100_gemm(kind, {blocks_, mx_}, batch, static_cast<int>(capacity_[kind]), stream_); });
  }

  LayerShape s_;
  Activation act_;
  bool mx_;
  int blocks_;
  Plan plan_;
  cudaStream_t stream_;
  Workspace space_;
  Status status_;
  Sm100Matrix x_rows_, x_columns_, h_, dy_rows_, dy_columns_, d_gate_up_rows_, d_gate_up_columns_, scaled_h_;
  uint16_t *y_MxD_ = nullptr, *dx_MxD_ = nullptr, *gate_up_2xMxF_ = nullptr;
  float* partial_CxM_ = nullptr;
  TaskList lists_[kNumKinds] = {};
  int64_t capacity_[kNumKinds] = {};
  Kind wanted_[kNumKinds] = {};
  int num_wanted_ = 0;
};

}  // namespace moe
