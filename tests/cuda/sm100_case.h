// A small grouped problem for one kind of product, its operands, its oracle in plain loops, and the run on the host machine.
// Oracle: products in FP64 of the decoded operands, rounded where the contract rounds (docs/design.md section 2).
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "host_tasks.h"
#include "isa/host/sm100_host.h"
#include "mma_sm100.h"

namespace sm100_test {

using namespace moe;
using machine::Map;

// Integers: every sum is exact, so results must be equal bit for bit, in every configuration: a tolerance can hide a wrong one (SonicMoE #63).
// Edges (MXFP8): integers under the scale codes 0 and 254, whose products are ordinary numbers, and a poisoned block (code 255), which must
// come out as NaN and nowhere else (TE #3262).
enum class Data { kIntegers, kRandom, kEdges };

// Buffers start where cudaMalloc would let them: the programs rely on 32 bytes.
template <class T>
struct Aligned {
  using value_type = T;
  Aligned() = default;
  template <class U>
  Aligned(const Aligned<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{256})); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{256}); }
  template <class U>
  bool operator==(const Aligned<U>&) const {
    return true;
  }
  template <class U>
  bool operator!=(const Aligned<U>&) const {
    return false;
  }
};
template <class T>
using Buffer = std::vector<T, Aligned<T>>;

struct Shape {
  std::vector<int> count;  // rows of each expert
  int d, f;
};

// One operand of a product: `rows` (of M or N) by `k`, in `experts` x `halves` matrices, E4M3 with codes or BF16.
struct Operand {
  bool mx, mn_major;
  int rows, k, halves, experts;
  Buffer<uint8_t> elements;
  Buffer<uint8_t> codes;
  std::vector<double> values;  // [matrix][row][k]

  int matrices() const { return halves * experts; }
  int64_t table_bytes() const { return mx::interleaved_offset((rows + 127) / 128 * 128, 0, k); }
  double at(int matrix, int row, int kk) const { return values[(static_cast<size_t>(matrix) * rows + row) * k + kk]; }
};

inline uint16_t bf16(float x) { return Host::bf16(x); }
inline float widen(uint16_t x) { return mx::float_of(static_cast<uint32_t>(x) << 16); }

// `zero(row, k)`: padding. `poison`: padding holds NaN instead, which must not come through.
enum Edges { kLeft, kRight };  // which operand has which edge codes
template <class Zero>
Operand make_operand(Edges edges, bool is_mx, bool mn_major, int rows, int k, int halves, int experts, Data data, std::mt19937& random, Zero zero,
                     bool poison = false) {
  Operand o = {is_mx, mn_major, rows, k, halves, experts, {}, {}, {}};
  const int bytes = is_mx ? 1 : 2;
  const size_t count = static_cast<size_t>(o.matrices()) * rows * k;
  o.elements.assign(count * bytes, 0);
  o.values.assign(count, 0.0);
  if (is_mx) o.codes.assign(static_cast<size_t>(o.matrices() * o.table_bytes()), 0);
  for (int matrix = 0; matrix < o.matrices(); ++matrix) {
    for (int row = 0; row < rows; ++row) {
      uint32_t code = 127;
      for (int kk = 0; kk < k; ++kk) {
        const bool padding = zero(row, kk);
        if (is_mx && kk % 32 == 0) {
          bool all = true;
          for (int j = kk; j < kk + 32 && j < k; ++j) all = all && zero(row, j);
          code = data == Data::kIntegers ? 126 + random() % 3 : 121 + random() % 12;
          if (data == Data::kEdges) {
            const uint32_t edge[3] = {edges == kLeft ? 0u : 254u, edges == kLeft ? 254u : 0u, 127u};
            code = row == 5 && kk == 32 && edges == kLeft ? 255u : edge[kk / 32 % 3];
          }
          if (all) code = 0;
          o.codes[static_cast<size_t>(matrix * o.table_bytes() + mx::interleaved_offset(row, kk / 32, k))] = static_cast<uint8_t>(code);
        }
        const size_t index = mn_major ? (static_cast<size_t>(matrix) * k + kk) * rows + row : (static_cast<size_t>(matrix) * rows + row) * k + kk;
        float v = data != Data::kRandom ? static_cast<float>(static_cast<int>(random() % 7) - 3) : std::normal_distribution<float>(0.0f, 1.0f)(random);
        if (padding) v = poison ? NAN : 0.0f;
        if (is_mx) {
          const uint32_t byte = mx::to_e4m3(padding ? v : data == Data::kRandom ? v * 100.0f : v);
          o.elements[index] = static_cast<uint8_t>(byte);
          v = mx::from_e4m3(byte);
        } else {
          const uint16_t bits = bf16(v);
          std::memcpy(&o.elements[2 * index], &bits, 2);
          v = widen(bits);
        }
        const double scaled = code == 255 ? NAN : std::ldexp(double{v}, is_mx ? static_cast<int>(code) - 127 : 0);
        o.values[(static_cast<size_t>(matrix) * rows + row) * k + kk] = padding ? 0.0 : scaled;
      }
    }
  }
  return o;
}

inline Map map_of(const void* data, int element_bytes, int64_t inner, int64_t outer, int64_t halves, int64_t experts, int box_rows) {
  Map map;
  map.data = static_cast<uint8_t*>(const_cast<void*>(data));
  map.element_bytes = element_bytes;
  const int64_t dims[4] = {inner, outer, halves, experts};
  std::memcpy(map.dims, dims, sizeof(dims));
  map.box_inner = 128 / element_bytes;
  map.box_outer = box_rows;
  return map;
}
inline Map operand_map(const Operand& o, int box_rows) {
  return map_of(o.elements.data(), o.mx ? 1 : 2, o.mn_major ? o.rows : o.k, o.mn_major ? o.k : o.rows, o.halves, o.experts, box_rows);
}
inline Map scale_map(const Operand& o) {
  if (!o.mx) return {};
  Map map = map_of(o.codes.data(), 4, 128, (o.k + 127) / 128, (o.rows + 127) / 128, o.matrices(), 1);
  map.box_inner = 128;
  map.swizzle = false;
  return map;
}

struct Target {  // a quantised result
  int matrices, rows, columns;
  Buffer<uint8_t> elements, codes;

  Target() : matrices(0), rows(0), columns(0) {}
  Target(int matrices_, int rows_, int columns_, bool by_column) : matrices(matrices_), rows(rows_), columns(columns_) {
    elements.assign(static_cast<size_t>(matrices) * rows * columns, 0xFF);
    const int64_t table = by_column ? mx::interleaved_offset((columns + 127) / 128 * 128, 0, rows) : mx::interleaved_offset(rows, 0, columns);
    codes.assign(static_cast<size_t>(matrices * table), 0xEE);
  }
  MxTarget target() { return {elements.data(), codes.data()}; }
};

// The scale rule by its definition: the smallest code with 448 * 2^(code - 127) >= amax.
inline uint32_t oracle_code(double amax) {
  uint32_t code = 0;
  while (448.0 * std::ldexp(1.0, static_cast<int>(code) - 127) < amax) ++code;
  return code;
}

// Bits of BF16 rows to E4M3, blocks along the row or along 32 rows; only rows of groups are written.
template <class Grouped>
void oracle_quantize(const Buffer<uint16_t>& values, Target& target, int matrix, bool by_column, Grouped grouped) {
  const int rows = target.rows, columns = target.columns, padded = (columns + 127) / 128 * 128;
  const int64_t table = by_column ? mx::interleaved_offset(padded, 0, rows) : mx::interleaved_offset(rows, 0, columns);
  const int block_rows = by_column ? 32 : 1, block_columns = by_column ? 1 : 32;
  for (int row = 0; row < rows; row += block_rows) {
    if (!grouped(row)) continue;
    for (int column = 0; column < padded; column += block_columns) {
      double amax = 0.0;
      auto value = [&](int r, int c) { return c < columns ? double{widen(values[static_cast<size_t>(r) * columns + c])} : 0.0; };
      for (int r = row; r < row + block_rows; ++r) {
        for (int c = column; c < column + block_columns; ++c) amax = std::fmax(amax, std::fabs(value(r, c)));
      }
      const uint32_t code = oracle_code(amax);
      const int64_t at = by_column ? mx::interleaved_offset(column, row / 32, rows) : mx::interleaved_offset(row, column / 32, columns);
      target.codes[static_cast<size_t>(matrix * table + at)] = static_cast<uint8_t>(code);
      for (int r = row; r < row + block_rows; ++r) {
        for (int c = column; c < column + block_columns && c < columns; ++c) {
          const float scaled = static_cast<float>(std::ldexp(value(r, c), 127 - static_cast<int>(code)));
          target.elements[(static_cast<size_t>(matrix) * rows + r) * columns + c] = static_cast<uint8_t>(mx::to_e4m3(scaled));
        }
      }
    }
  }
}

struct Results {
  Buffer<uint16_t> rows;     // BF16 h | y | dx | d(gate, up)
  Buffer<uint16_t> gate_up;  // saved
  Buffer<uint16_t> scaled_h;
  Buffer<float> dw, weight_partial;
  Target by_row, by_column, scaled_by_column;
};

// Everything that belongs to one kind, one configuration and one shape.
template <Kind kKind, class Config>
struct Case {
  static constexpr bool kMx = Config::kMx;
  Shape shape;
  Data data;
  bool accumulate;
  std::vector<int> start;
  int rows = 0;  // M: the padded groups, and 128 rows of nobody
  Operand a, b;
  Buffer<uint16_t> gate_up;  // kDgradDown
  Buffer<float> weight;
  std::vector<int> slot;
  Results before, expected;
  std::vector<Task> tasks;
  std::vector<int> signals, targets;
  bool dependent = false;  // tasks wait for earlier ones; needs one cluster without stealing

  // Without an oracle only the run is possible: for timing.
  Case(const Shape& shape_, Data data_, bool accumulate_ = false, bool oracle = true) : shape(shape_), data(data_), accumulate(accumulate_) {
    for (int count : shape.count) {
      start.push_back(rows);
      rows += (count + 127) / 128 * 128;
    }
    rows += 128;
    std::mt19937 random(11 + static_cast<int>(kKind));
    make_operands(random);
    make_buffers(random);
    make_tasks();
    if (oracle) compute();
  }

  int experts() const { return static_cast<int>(shape.count.size()); }
  bool is_row(int row) const {
    for (int e = 0; e < experts(); ++e) {
      if (row >= start[e] && row < start[e] + shape.count[e]) return true;
    }
    return false;
  }
  bool is_grouped(int row) const { return row < rows - 128; }

  void make_operands(std::mt19937& random) {
    const int D = shape.d, F = shape.f, E = experts();
    auto padding_row = [&](int row, int) { return !is_row(row); };
    auto padding_k = [&](int, int k) { return !is_row(k); };
    auto none = [](int, int) { return false; };
    switch (kKind) {
      case kGateUp:
        a = make_operand(kLeft, kMx, false, rows, D, 1, 1, data, random, padding_row, true);
        b = make_operand(kRight, kMx, false, F, D, 2, E, data, random, none);
        break;
      case kDown:
        a = make_operand(kLeft, kMx, false, rows, F, 1, 1, data, random, padding_row, true);
        b = make_operand(kRight, kMx, false, D, F, 1, E, data, random, none);
        break;
      case kDgradDown:
        a = make_operand(kLeft, kMx, false, rows, D, 1, 1, data, random, padding_row, true);
        b = make_operand(kRight, kMx, true, F, D, 1, E, data, random, none);
        break;
      case kDgradGateUp:
        a = make_operand(kLeft, kMx, false, rows, F, 2, 1, data, random, padding_row, true);
        b = make_operand(kRight, kMx, true, D, F, 2, E, data, random, none);
        break;
      case kWgradDown:
        a = make_operand(kLeft, kMx, true, D, rows, 1, 1, data, random, padding_k);
        b = make_operand(kRight, kMx, true, F, rows, 1, 1, data, random, padding_k);
        break;
      default:
        a = make_operand(kLeft, kMx, true, F, rows, 2, 1, data, random, padding_k);
        b = make_operand(kRight, kMx, true, D, rows, 1, 1, data, random, padding_k);
    }
  }

  void make_buffers(std::mt19937& random) {
    const size_t M = static_cast<size_t>(rows), F = static_cast<size_t>(shape.f), D = static_cast<size_t>(shape.d);
    auto bf16s = [&](size_t n) { return Buffer<uint16_t>(n, 0xFFFF); };
    switch (kKind) {
      case kGateUp:
        before.gate_up = bf16s(2 * M * F);
        if (kMx) before.by_row = Target(1, rows, shape.f, false);
        else before.rows = bf16s(M * F);
        break;
      case kDown:
      case kDgradGateUp:
        before.rows = bf16s(M * D);
        break;
      case kDgradDown:
        before.weight_partial.assign((F + 127) / 128 * M, -7.0f);
        if (kMx) {
          before.by_row = Target(2, rows, shape.f, false);
          before.by_column = Target(2, rows, shape.f, true);
          before.scaled_by_column = Target(1, rows, shape.f, true);
        } else {
          before.rows = bf16s(2 * M * F);
          before.scaled_h = bf16s(M * F);
        }
        for (size_t i = 0; i < 2 * M * F; ++i) {
          gate_up.push_back(bf16(data != Data::kRandom ? static_cast<float>(static_cast<int>(random() % 9) - 4) / 2 : std::normal_distribution<float>()(random)));
        }
        break;
      default:
        before.dw.assign(static_cast<size_t>(experts()) * (kKind == kWgradGateUp ? 2 : 1) * D * F, NAN);
        if (accumulate) {
          for (float& v : before.dw) v = static_cast<float>(static_cast<int>(random() % 100)) / 4;
        }
    }
    for (int r = 0; r < rows; ++r) {
      slot.push_back(is_row(r) ? rows - 1 - r : -1);
      weight.push_back(static_cast<float>(random() % 8 + 1) / 8);
    }
  }

  Tiling tiling() const {
    const int m_extent = kKind == kWgradGateUp ? shape.f : shape.d;
    return {kKind, Config::kClusterM, step_n<Config>(kKind), m_extent, n_extent(), false, Pairs::kNone};
  }
  void make_tasks() {
    tasks = list_tasks(tiling(), shape.count, start);
    for (size_t i = 0; i < tasks.size(); i += 3) tasks[i].signal = static_cast<int>(i);
  }
  // Every tile once: the results would not show one that is computed twice.
  std::string check_tasks() const {
    std::set<std::tuple<int, int, int, int, int>> tiles;
    for (const Task& t : tasks) {
      if (!tiles.insert(std::tuple{t.expert, int{t.half}, t.row0, t.m0, t.n0}).second) return "a tile is in the task list twice";
    }
    const int64_t most = max_tasks(tiling(), rows - 128, experts());
    return static_cast<int64_t>(tasks.size()) <= most ? "" : "the task list is longer than max_tasks says";
  }

  int n_extent() const {
    return kKind == kDown || kKind == kDgradGateUp || kKind == kWgradGateUp ? shape.d : shape.f;
  }

  double sum(int row, int n, int matrix_a, int matrix_b, int k0, int k1) const {
    double total = 0;
    for (int k = k0; k < k1; ++k) total += a.at(matrix_a, row, k) * b.at(matrix_b, n, k);
    return total;
  }

  void compute() {
    expected = before;
    const int D = shape.d, F = shape.f;
    const Activation plain;
    auto grouped = [&](int row) { return is_grouped(row); };
    Buffer<uint16_t> h(static_cast<size_t>(rows) * F, 0), d_gate = h, d_up = h, scaled = h;
    for (int e = 0; e < experts(); ++e) {
      const int end = start[e] + (shape.count[e] + 127) / 128 * 128;
      for (int r = start[e]; r < end && !is_wgrad(kKind); ++r) {
        const bool live = r < start[e] + shape.count[e];
        if (kKind == kGateUp) {
          for (int f = 0; f < F; ++f) {
            const size_t at = static_cast<size_t>(r) * F + f;
            const uint16_t g = live ? bf16(static_cast<float>(sum(r, f, 0, 2 * e, 0, D))) : 0;
            const uint16_t u = live ? bf16(static_cast<float>(sum(r, f, 0, 2 * e + 1, 0, D))) : 0;
            expected.gate_up[at] = g;
            expected.gate_up[static_cast<size_t>(rows) * F + at] = u;
            h[at] = live ? bf16(activation_forward<true, Host>(widen(g), widen(u), plain)) : 0;
          }
        } else if (kKind == kDown) {
          for (int d = 0; d < D; ++d) {
            expected.rows[static_cast<size_t>(r) * D + d] = live ? bf16(static_cast<float>(sum(r, d, 0, e, 0, F))) : 0;
          }
        } else if (kKind == kDgradGateUp) {
          for (int d = 0; d < D; ++d) {
            const double total = sum(r, d, 0, 2 * e, 0, F) + sum(r, d, 1, 2 * e + 1, 0, F);
            expected.rows[static_cast<size_t>(r) * D + d] = live ? bf16(static_cast<float>(total)) : 0;
          }
        } else if (live) {
          const float w = weight[slot[r]];
          float dot = 0.0f;
          for (int f = 0; f < F; ++f) {
            const size_t at = static_cast<size_t>(r) * F + f;
            const float dh0 = static_cast<float>(sum(r, f, 0, e, 0, D));
            const ActivationGrad grad = activation_backward<true, Host>(widen(gate_up[at]), widen(gate_up[static_cast<size_t>(rows) * F + at]), plain);
            const float hv = widen(bf16(grad.h));
            dot = std::fma(hv, dh0, dot);
            d_gate[at] = bf16(w * dh0 * grad.d_gate);
            d_up[at] = bf16(w * dh0 * grad.d_up);
            scaled[at] = bf16(w * hv);
            if (f % 128 == 127 || f == F - 1) {
              expected.weight_partial[static_cast<size_t>(f / 128) * rows + r] = dot;
              dot = 0.0f;
            }
          }
        }
      }
      if (is_wgrad(kKind)) {
        const int halves = kKind == kWgradGateUp ? 2 : 1, m_extent = kKind == kWgradGateUp ? F : D;
        for (int half = 0; half < halves; ++half) {
          for (int m = 0; m < m_extent; ++m) {
            for (int n = 0; n < n_extent(); ++n) {
              float& out = expected.dw[(static_cast<size_t>(e * halves + half) * m_extent + m) * n_extent() + n];
              const float total = static_cast<float>(sum(m, n, half, 0, start[e], start[e] + shape.count[e]));
              out = accumulate ? out + total : total;
            }
          }
        }
      }
    }
    const size_t grouped_values = static_cast<size_t>(rows - 128) * F;
    if (kKind == kGateUp && kMx) oracle_quantize(h, expected.by_row, 0, false, grouped);
    if (kKind == kGateUp && !kMx) std::copy(h.begin(), h.begin() + static_cast<long>(grouped_values), expected.rows.begin());
    if (kKind == kDgradDown && kMx) {
      oracle_quantize(d_gate, expected.by_row, 0, false, grouped);
      oracle_quantize(d_up, expected.by_row, 1, false, grouped);
      oracle_quantize(d_gate, expected.by_column, 0, true, grouped);
      oracle_quantize(d_up, expected.by_column, 1, true, grouped);
      oracle_quantize(scaled, expected.scaled_by_column, 0, true, grouped);
    }
    if (kKind == kDgradDown && !kMx) {
      std::copy(d_gate.begin(), d_gate.begin() + static_cast<long>(grouped_values), expected.rows.begin());
      std::copy(d_up.begin(), d_up.begin() + static_cast<long>(grouped_values), expected.rows.begin() + static_cast<long>(rows) * F);
      std::copy(scaled.begin(), scaled.begin() + static_cast<long>(grouped_values), expected.scaled_h.begin());
    }
  }

  // Runs the program once. Returns "" or what is wrong.
  template <class Isa>
  std::string run(uint32_t seed, Results* out = nullptr) {
    Results results = before;
    Sm100Batch<Map> batch = {};
    Sm100Arguments<Map>& args = batch.args;
    args.a = operand_map(a, 64);
    args.b = operand_map(b, b.mn_major ? 64 : Config::kBoxRowsB);
    args.scale_a = scale_map(a);
    args.scale_b = scale_map(b);
    const int F = shape.f, D = shape.d;
    if (is_wgrad(kKind)) {
      const int halves = kKind == kWgradGateUp ? 2 : 1;
      args.m_extent = kKind == kWgradGateUp ? F : D;
      args.out = map_of(results.dw.data(), 4, n_extent(), args.m_extent, halves, experts(), 32);
      args.dw = results.dw.data();
    } else {
      args.out = map_of(results.rows.data(), 2, n_extent(), rows, kKind == kDgradDown ? 2 : 1, 1, 32);
      args.gate_up = map_of(results.gate_up.data(), 2, F, rows, 2, 1, 32);
      args.scaled_h = map_of(results.scaled_h.data(), 2, F, rows, 1, 1, 32);
    }
    args.gate_up_2xMxF = gate_up.data();
    args.by_row = results.by_row.target();
    args.by_column = results.by_column.target();
    args.scaled_h_by_column = results.scaled_by_column.target();
    signals.assign(tasks.size(), 0);
    targets.assign(tasks.size(), 4 * Config::kBlocks);
    for (size_t i = 1; i < tasks.size() && dependent; ++i) {
      if (i % 3 != 0) tasks[i].wait = static_cast<int>((i - 1) / 3 * 3);
    }
    args.counters = signals.data();
    args.targets = targets.data();
    args.signals = signals.data();
    args.weight_TxK = weight.data();
    args.slot_M = slot.data();
    args.weight_partial = results.weight_partial.data();
    args.num_rows = rows;
    args.n_extent = n_extent();
    args.k_extent = kKind == kDown || kKind == kDgradGateUp ? F : D;
    args.save_gate_up = 1;
    args.accumulate = accumulate;
    const int count = static_cast<int>(tasks.size());
    batch.tasks = tasks.data();
    batch.num_tasks = &count;
    machine::Launch launch;
    launch.blocks = Config::kBlocks;
    launch.clusters = Config::kStealing ? count + 2 : dependent ? 1 : 2;  // with stealing a cluster per task, and some that have none
    launch.stealing = Config::kStealing;
    launch.threads = Config::kThreads;
    launch.shared_bytes = Config::kSharedBytes;
    launch.seed = seed;
    const std::string stopped = machine::run(launch, [&] { sm100_run_block<kKind, true, Isa, Config>(batch); });
    if (!stopped.empty()) return "machine: " + stopped;
    for (size_t i = 0; i < tasks.size(); ++i) {
      const int wanted = tasks[i].signal >= 0 ? 4 * Config::kBlocks : 0;
      if (signals[i] != wanted) return "task " + std::to_string(i) + " signalled " + std::to_string(signals[i]) + " times, not " + std::to_string(wanted);
    }
    if (out != nullptr) *out = results;
    return compare(results);
  }

  static std::string bytes_differ(const char* what, const void* ours, const void* theirs, size_t bytes) {
    const auto* x = static_cast<const uint8_t*>(ours);
    const auto* y = static_cast<const uint8_t*>(theirs);
    size_t different = 0, first = 0;
    for (size_t i = 0; i < bytes; ++i) {
      if (x[i] != y[i] && different++ == 0) first = i;
    }
    if (different == 0) return "";
    return std::string(what) + ": " + std::to_string(different) + " of " + std::to_string(bytes) + " bytes differ, the first at " + std::to_string(first);
  }
  template <class T>
  static std::string same(const char* what, const Buffer<T>& ours, const Buffer<T>& theirs) {
    return bytes_differ(what, ours.data(), theirs.data(), ours.size() * sizeof(T));
  }
  static Buffer<float> one_nan(Buffer<float> values) {  // a NaN is a NaN, whatever its bits
    for (float& v : values) v = std::isnan(v) ? mx::float_of(0x7FC00000u) : v;
    return values;
  }
  // FP32 within 1e-6 of the norm; BF16 within one rounding of that.
  template <class T, class Value>
  static std::string close(const char* what, const Buffer<T>& ours, const Buffer<T>& theirs, double tolerance, Value value) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      if (std::memcmp(&ours[i], &theirs[i], sizeof(T)) == 0) continue;  // NaN where nothing is written, too
      const double d = value(ours[i]) - value(theirs[i]);
      difference += d * d;
    }
    for (const T& t : theirs) norm += std::isfinite(value(t)) ? value(t) * value(t) : 0.0;
    const double error = std::sqrt(difference / (norm > 0 ? norm : 1));
    if (error <= tolerance) return "";
    return std::string(what) + ": relative error " + std::to_string(error);
  }

  std::string compare(const Results& r) const {
    std::vector<std::string> found;
    const Results& e = expected;
    if (data != Data::kRandom) {
      found = {same("rows", r.rows, e.rows), same("gate and up", r.gate_up, e.gate_up), same("scaled h", r.scaled_h, e.scaled_h),
               same("dw", one_nan(r.dw), one_nan(e.dw)), same("d(weight)", r.weight_partial, e.weight_partial),
               same("elements by row", r.by_row.elements, e.by_row.elements), same("codes by row", r.by_row.codes, e.by_row.codes),
               same("elements by column", r.by_column.elements, e.by_column.elements), same("codes by column", r.by_column.codes, e.by_column.codes),
               same("scaled h elements", r.scaled_by_column.elements, e.scaled_by_column.elements),
               same("scaled h codes", r.scaled_by_column.codes, e.scaled_by_column.codes)};
    } else {  // a BF16 rounding that falls the other way is 2^-9 of one element in thousands
      auto wide = [](uint16_t x) { return double{widen(x)}; };
      auto fp32 = [](float x) { return double{x}; };
      found = {close("rows", r.rows, e.rows, 2e-4, wide), close("gate and up", r.gate_up, e.gate_up, 2e-4, wide),
               close("scaled h", r.scaled_h, e.scaled_h, 2e-4, wide), close("dw", r.dw, e.dw, 1e-6, fp32),
               close("d(weight)", r.weight_partial, e.weight_partial, 3e-6, fp32)};
    }
    for (const std::string& f : found) {
      if (!f.empty()) return f;
    }
    return "";
  }
};

}  // namespace sm100_test
