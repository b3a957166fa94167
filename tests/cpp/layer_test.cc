// The expert layer against a triple loop in double precision: unaligned and empty groups, NaN in rows that belong to nobody, dirty
// outputs, 1, 2 and 8 threads and several windows bit for bit, accumulation.
#include <limits>

#include "check.h"
#include "cpu/gemm.h"
#include "cpu/moe.h"
#include "cpu/schedule.h"

namespace moejax::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Gaussian(int64_t n, uint32_t seed, float scale) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

struct Problem {
  int64_t T, K, E, D, F, M;
  std::vector<int32_t> count, start, row, slot;
  std::vector<float> x, dy, weight, w_gate_up, w_down, b_gate_up, b_down;
};

// Tokens with K = 1 whose experts give the groups these sizes, in an order that is not sorted; every ninth token is masked.
Problem Make(const std::vector<int>& sizes, int64_t D, int64_t F) {
  Problem p;
  std::vector<int32_t> ids;
  for (size_t e = 0; e < sizes.size(); ++e) ids.insert(ids.end(), sizes[e], int32_t(e));
  for (size_t i = 0; i < ids.size() / 9; ++i) ids.push_back(-1);
  std::mt19937 random(5);
  std::shuffle(ids.begin(), ids.end(), random);
  p.T = int64_t(ids.size()), p.K = 1, p.E = int64_t(sizes.size()), p.D = D, p.F = F;
  p.M = 128;  // slack at the end
  for (int size : sizes) p.M += CeilDiv(size, kTile) * kTile;
  p.count.resize(p.E), p.start.resize(p.E), p.row.resize(p.T), p.slot.resize(p.M);
  std::vector<int32_t> routed(p.E);
  const std::string problem =
      Schedule({ids.data(), p.count.data(), p.start.data(), p.row.data(), p.slot.data(), routed.data()}, p.T, p.E, 0, p.E, p.M, -1);
  CHECK(problem.empty(), "%s", problem.c_str());
  p.x = Gaussian(p.T * D, 1, 1.0f), p.dy = Gaussian(p.T * D, 2, 1.0f), p.weight = Gaussian(p.T, 3, 1.0f);
  p.w_gate_up = Gaussian(p.E * 2 * F * D, 4, 0.3f), p.w_down = Gaussian(p.E * D * F, 5, 0.3f);
  p.b_gate_up = Gaussian(p.E * 2 * F, 6, 0.3f), p.b_down = Gaussian(p.E * D, 7, 0.3f);
  return p;
}

struct Outputs {
  std::vector<float> y, dx, d_weight, dw_gate_up, dw_down, db_gate_up, db_down;
  bool operator==(const Outputs& o) const {
    return SameBits(y, o.y) && SameBits(dx, o.dx) && SameBits(d_weight, o.d_weight) && SameBits(dw_gate_up, o.dw_gate_up) &&
           SameBits(dw_down, o.dw_down) && SameBits(db_gate_up, o.db_gate_up) && SameBits(db_down, o.db_down);
  }
};

Layer LayerOf(const Problem& p) {
  Layer layer;
  layer.shape = {p.T, p.K, p.D, p.F};
  layer.groups = {p.E, p.M, p.count.data(), p.start.data()};
  layer.slot_M = p.slot.data();
  layer.row_TxK = p.row.data();
  layer.gate_up = {p.w_gate_up.data(), nullptr, Format::kFp32, 2 * p.F, p.D, false};
  layer.down = {p.w_down.data(), nullptr, Format::kFp32, p.D, p.F, false};
  layer.b_gate_up = p.b_gate_up.data();
  layer.b_down = p.b_down.data();
  return layer;
}

// Everything starts as NaN, so what is read before it is written, or not written at all, shows.
Outputs Run(const Problem& p, int threads, int64_t window_tiles, bool save, float accumulate_from = kNan) {
  TestPool pool(threads);
  const bool accumulate = accumulate_from == accumulate_from;
  const auto nan = [](int64_t n, float value = kNan) { return std::vector<float>(n, value); };
  Outputs out{nan(p.T * p.D), nan(p.T * p.D), nan(p.T), nan(p.E * 2 * p.F * p.D, accumulate_from), nan(p.E * p.D * p.F, accumulate_from),
              nan(p.E * 2 * p.F, accumulate_from), nan(p.E * p.D, accumulate_from)};
  std::vector<float> y_rows = nan(p.T * p.K * p.D), dx_rows = y_rows, saved = nan(p.T * p.K * 2 * p.F);
  std::vector<float> window = nan(window_tiles * FloatsPerTile(p.D, p.F));
  ForwardBuffers forward;
  forward.x = {p.x.data(), Format::kFp32};
  forward.weight = p.weight.data();
  forward.y = {out.y.data(), Format::kFp32};
  forward.y_rows = {y_rows.data(), Format::kFp32};
  if (save) forward.saved = {saved.data(), Format::kFp32};
  const Layer layer = LayerOf(p);
  MoeForward(pool, layer, forward);
  BackwardBuffers backward;
  backward.x = forward.x;
  backward.dy = {p.dy.data(), Format::kFp32};
  backward.weight = p.weight.data();
  if (save) backward.saved = {saved.data(), Format::kFp32};
  backward.gate_up_down = layer.gate_up;
  backward.down_down = layer.down;
  backward.dx = {out.dx.data(), Format::kFp32};
  backward.dx_rows = {dx_rows.data(), Format::kFp32};
  backward.d_weight = out.d_weight.data();
  backward.dw_gate_up = out.dw_gate_up.data();
  backward.dw_down = out.dw_down.data();
  backward.db_gate_up = out.db_gate_up.data();
  backward.db_down = out.db_down.data();
  backward.accumulate = accumulate;
  backward.window = window.data();
  backward.window_tiles = window_tiles;
  MoeBackward(pool, layer, backward);
  return out;
}

double Silu(double g) { return g / (1 + std::exp(-g)); }

// Token by token, in double.
Outputs Oracle(const Problem& p) {
  const int64_t D = p.D, F = p.F;
  std::vector<double> y(p.T * D), dx(p.T * D), d_weight(p.T), dwg(p.E * 2 * F * D), dwd(p.E * D * F), dbg(p.E * 2 * F), dbd(p.E * D);
  for (int64_t t = 0; t < p.T; ++t) {
    if (p.row[t] < 0) continue;
    int64_t e = 0;
    while (p.row[t] < p.start[e] || p.row[t] >= p.start[e] + p.count[e]) ++e;
    std::vector<double> a(2 * F), h(F), dh(F), da(2 * F);
    for (int64_t f = 0; f < 2 * F; ++f) {
      a[f] = p.b_gate_up[e * 2 * F + f];
      for (int64_t d = 0; d < D; ++d) a[f] += double(p.x[t * D + d]) * p.w_gate_up[(e * 2 * F + f) * D + d];
    }
    for (int64_t f = 0; f < F; ++f) h[f] = Silu(a[f]) * a[F + f];
    for (int64_t d = 0; d < D; ++d) {
      double row = p.b_down[e * D + d];
      for (int64_t f = 0; f < F; ++f) row += h[f] * p.w_down[(e * D + d) * F + f];
      y[t * D + d] = p.weight[t] * row;
      d_weight[t] += row * p.dy[t * D + d];
      dbd[e * D + d] += double(p.weight[t]) * p.dy[t * D + d];
      for (int64_t f = 0; f < F; ++f) {
        const double dy = double(p.weight[t]) * p.dy[t * D + d];
        dh[f] += dy * p.w_down[(e * D + d) * F + f];
        dwd[(e * D + d) * F + f] += dy * h[f];
      }
    }
    for (int64_t f = 0; f < F; ++f) {
      const double s = 1 / (1 + std::exp(-a[f]));
      da[f] = dh[f] * a[F + f] * (s + a[f] * s * (1 - s));
      da[F + f] = dh[f] * Silu(a[f]);
    }
    for (int64_t f = 0; f < 2 * F; ++f) {
      dbg[e * 2 * F + f] += da[f];
      for (int64_t d = 0; d < D; ++d) {
        dx[t * D + d] += da[f] * p.w_gate_up[(e * 2 * F + f) * D + d];
        dwg[(e * 2 * F + f) * D + d] += da[f] * p.x[t * D + d];
      }
    }
  }
  const auto narrow = [](const std::vector<double>& v) { return std::vector<float>(v.begin(), v.end()); };
  return {narrow(y), narrow(dx), narrow(d_weight), narrow(dwg), narrow(dwd), narrow(dbg), narrow(dbd)};
}

// Relative norm of each of `parts` equal pieces; a piece that is exactly zero must be so on both sides.
void CheckClose(const char* name, const std::vector<float>& got, const std::vector<float>& expected, int64_t parts) {
  const size_t size = got.size() / parts;
  for (int64_t part = 0; part < parts; ++part) {
    double error = 0, norm = 0;
    for (size_t i = part * size; i < (part + 1) * size; ++i) {
      error += std::pow(double(got[i]) - expected[i], 2);
      norm += std::pow(double(expected[i]), 2);
    }
    CHECK(norm == 0 ? error == 0 : std::sqrt(error / norm) < 2e-6, "%s of part %d is off by %g", name, int(part), std::sqrt(error / norm));
  }
}

void MatchesTheOracle(const std::vector<int>& sizes, int64_t D, int64_t F) {
  const Problem p = Make(sizes, D, F);
  const Outputs one = Run(p, 1, 1, true), expected = Oracle(p);
  CheckClose("y", one.y, expected.y, 1);
  CheckClose("dx", one.dx, expected.dx, 1);
  CheckClose("d_weight", one.d_weight, expected.d_weight, 1);
  CheckClose("dw_gate_up", one.dw_gate_up, expected.dw_gate_up, p.E);
  CheckClose("dw_down", one.dw_down, expected.dw_down, p.E);
  CheckClose("db_gate_up", one.db_gate_up, expected.db_gate_up, p.E);
  CheckClose("db_down", one.db_down, expected.db_down, p.E);
  for (int threads : {1, 2, 8}) {
    for (int64_t tiles : {1, 3, 64}) {
      CHECK(Run(p, threads, tiles, true) == one, "%d threads, window of %d tiles: other bits", threads, int(tiles));
    }
  }
  CHECK(Run(p, 2, 3, false) == one, "recomputing gives other bits than saving");
}

void AccumulationContinuesFromTheBuffer() {
  const Problem p = Make({1, 31, 0, 140}, 24, 40);
  const Outputs fresh = Run(p, 2, 2, true), from = Run(p, 2, 2, true, 2.5f), from_zero = Run(p, 1, 1, true, 0.0f);
  CHECK(from_zero == fresh, "starting from zeros differs from not accumulating");
  for (size_t i = 0; i < fresh.dw_down.size(); ++i) {
    CHECK(std::fabs(from.dw_down[i] - (fresh.dw_down[i] + 2.5f)) < 1e-3, "element %zu", i);
  }
  const size_t expert = size_t(p.D * p.F);  // expert 2 has no rows
  for (size_t i = 2 * expert; i < 3 * expert; ++i) CHECK(from.dw_down[i] == 2.5f && fresh.dw_down[i] == 0.0f, "an expert without rows");
}

}  // namespace
}  // namespace moejax::cpu

int main() {
  using namespace moejax::cpu;
  InitGemm();
  MatchesTheOracle({1, 31, 32, 33, 0}, 33, 17);
  MatchesTheOracle({200}, 20, 72);
  MatchesTheOracle({0, 129, 0, 128, 257, 5}, 40, 24);
  MatchesTheOracle({0, 0, 0}, 8, 8);
  AccumulationContinuesFromTheBuffer();
  std::puts("layer: ok");
}
