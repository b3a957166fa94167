// Runs every kind of grouped GEMM of kernels_cuda/ on the host emulator, on a small layer with unequal, unaligned sizes, and compares
// with plain loops: relative norm per expert, zero padding, nothing written elsewhere, equal bits for every interleaving seed.
// Usage: host_kernels KIND SEED... [--without=FAULT] (host_faults.h); prints one line per kind and exits with 1 on a mismatch. KIND_tokens_n: begins
// with tokens on the N side.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "gemm_resident.h"
#include "gemm_resident_rows.h"
#include "gemm_tokens_n.h"
#include "host_faults.h"
#include "host_tasks.h"
#include "isa/host/host_mx.h"
#include "mma_sm90.h"
#include "row_copy.h"

namespace {

using namespace moe;
struct Isa : Faulty<Host> {
  static inline uint32_t cluster = 0, clusters = 1;  // which one runs; they run one after the other
  static uint32_t cluster_index() { return cluster; }
  static uint32_t num_clusters() { return clusters; }
  static inline int gathered = 0;  // copies of 16 bytes
  static void gather_vector(uint32_t dst, const uint8_t* src, uint32_t bytes) {
    ++gathered;
    Faulty<Host>::gather_vector(dst, src, bytes);
  }
};
using CopyIsa = Faulty<HostMx>;
using Config = GemmConfig<256>;
using Arguments = GemmArguments<host::Map>;

constexpr int kExperts = 5, kD = 72, kF = 136;
// Two row tiles that pair, an empty expert, an odd tile; with tokens on the N side a tile that overflows by one token, and several widths of a product.
constexpr int kCount[kExperts] = {193, 0, 70, 140, 170};
constexpr int kStart[kExperts] = {0, 256, 256, 384, 640};
constexpr int kRows = 896;
constexpr int kTopK = 2;

std::mt19937 generator(7);

std::vector<uint16_t> random_bf16(size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<uint16_t> v(n);
  for (auto& x : v) x = Host::bf16(normal(generator));
  return v;
}

float value(uint16_t bits) { return Host::from_bits(static_cast<uint32_t>(bits) << 16); }
float rounded(double x) { return value(Host::bf16(static_cast<float>(x))); }

bool is_row(int row, int* expert = nullptr) {
  for (int e = 0; e < kExperts; ++e) {
    if (row >= kStart[e] && row < kStart[e] + kCount[e]) {
      if (expert != nullptr) *expert = e;
      return true;
    }
  }
  return false;
}

std::vector<uint16_t> random_rows(int width) {  // rows of experts, zeros in between
  auto v = random_bf16(static_cast<size_t>(kRows) * width);
  for (int r = 0; r < kRows; ++r) {
    if (!is_row(r)) std::memset(&v[static_cast<size_t>(r) * width], 0, 2 * width);
  }
  return v;
}

// Dispatched rows as products see them that multiply no padded row past the next multiple of `zero_to` with others: those are NaN.
std::vector<uint16_t> poisoned(std::vector<uint16_t> rows, int width, int zero_to) {
  for (int e = 0; e < kExperts; ++e) {
    const int first = kStart[e] + (kCount[e] + zero_to - 1) / zero_to * zero_to, end = e + 1 < kExperts ? kStart[e + 1] : kRows;
    std::fill(rows.begin() + first * width, rows.begin() + end * width, uint16_t{0xFFFF});
  }
  return rows;
}

host::Map map_of(const void* data, int element_bytes, int64_t inner, int64_t outer, int64_t halves = 1, int64_t experts = 1) {
  host::Map map;
  map.data = static_cast<uint8_t*>(const_cast<void*>(data));
  map.element_bytes = element_bytes;
  const int64_t dims[4] = {inner, outer, halves, experts};
  std::memcpy(map.dims, dims, sizeof(dims));
  return map;
}

Tiling tiling_of(Kind kind, const Arguments& args, int tile_m, Pairs pairs) {
  const int step = kind == kGateUp ? Config::kTileN / 2 : Config::kTileN;
  return {kind, tile_m, step, args.m_extent, args.n_extent, false, pairs};
}

// How operand A is brought, which side the tokens are on, whether results go straight to tokens, or what stays in shared memory.
enum class Variant { kDispatched, kGathered, kTokensN, kGatheredN, kScattered, kResident512, kResidentRows, kFewResidentRows };

bool gathers(Variant variant) { return variant == Variant::kGathered || variant == Variant::kGatheredN; }
bool on_n(Variant variant) { return variant == Variant::kTokensN || variant == Variant::kGatheredN; }

// Runs the list of this tiling with the given roles.
template <class Roles>
void run_list(const Tiling& tiling, const Arguments& args, uint32_t seed, uint32_t clusters = 1) {
  const auto tasks = list_tasks(tiling, kCount, kStart);
  const int count = static_cast<int>(tasks.size());
  GemmBatch<host::Map, 1> batch = {{args}, tasks.data(), &count};
  Isa::clusters = clusters;
  for (Isa::cluster = 0; Isa::cluster < clusters; ++Isa::cluster) {
    host::run_cluster(Roles::Config::kThreads, Roles::Config::kSharedBytes, seed, [&] { run_roles<Roles, Isa>(batch); });
  }
}

constexpr int kZeroTo = 32;  // results with tokens on the N side are written so far

template <Kind kKind>
void run_tokens_n(Arguments args, uint32_t seed) {
  for (host::Map* map : {&args.a, &args.out, &args.gate_up, &args.scaled_h}) map->box_rows = TokensNConfig::kBoxRows;
  args.zero_to = kZeroTo;
  run_list<TokensN<kKind, true, Isa>>(tiling_of(kKind, args, TokensNConfig::kTokens, Pairs::kColumns), args, seed);
}

template <Kind kKind>
void run(const Arguments& args, uint32_t seed) {
  run_list<TokensM<KindSet<kKind>, true, Isa, Config>>(tiling_of(kKind, args, 2 * Config::kTileM, Pairs::kRows), args, seed);
}

// Weight gradients by strips, which here are one each. The expert of 193 rows streams, the one of 70 stays.
template <Kind kKind>
void run_resident(const Arguments& args, uint32_t seed) {
  using Shape = ResidentConfig;
  Tiling tiling = tiling_of(kKind, args, Shape::kStripTiles * Shape::kTileM, Pairs::kStrips);
  tiling.m_extent = div_up(tiling.m_extent, Shape::kTileM) * Shape::kTileM;
  tiling.step_n = Shape::kTileN;
  run_list<Resident<kKind, Isa, Shape>>(tiling, args, seed);
}

// The same with rows at rest: all of them, by one cluster, whose ring comes round; or the first 64 of an expert's, by four clusters, which share the
// tiles of strips that are left over: one of five, or two of ten.
struct FewResidentRows : ResidentRowsConfig {
  static constexpr int kResidentBlocks = 1;
};
template <Kind kKind, class Shape>
void run_resident_rows(const Arguments& args, uint32_t seed, uint32_t clusters) {
  Tiling tiling = tiling_of(kKind, args, Shape::kStripTiles * Shape::kTileN, Pairs::kColumns);
  std::swap(tiling.m_extent, tiling.n_extent);
  tiling.step_n = Shape::kTileM;
  run_list<ResidentRows<kKind, Isa, Shape>>(tiling, args, seed, clusters);
}

template <Kind kKind>
void run_wgrad(Variant variant, const Arguments& args, uint32_t seed) {
  switch (variant) {
    case Variant::kResident512: return run_resident<kKind>(args, seed);
    case Variant::kResidentRows: return run_resident_rows<kKind, ResidentRowsConfig>(args, seed, 1);
    case Variant::kFewResidentRows: return run_resident_rows<kKind, FewResidentRows>(args, seed, 4);
    default: return run<kKind>(args, seed);
  }
}

int failures = 0;

// Relative norm over the elements of one expert.
void compare(const char* what, int expert, const std::vector<double>& out, const std::vector<double>& ref, double tolerance) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    difference += (out[i] - ref[i]) * (out[i] - ref[i]);
    norm += ref[i] * ref[i];
  }
  const double error = norm > 0 ? std::sqrt(difference / norm) : (difference == 0 ? 0.0 : INFINITY);
  if (!(error <= tolerance)) {
    std::printf("%s, expert %d: relative norm %g is above %g\n", what, expert, error, tolerance);
    ++failures;
  }
}

// Rows of `out` (width columns) against reference(row, expert, column). Padding must be zero as far as others multiply it; with tokens on the N side
// nothing may be written past that.
template <class Reference>
void compare_rows(const char* what, const std::vector<uint16_t>& out, int width, double tolerance, Variant variant, Reference reference) {
  const int zero_to = on_n(variant) ? kZeroTo : 64;
  for (int e = 0; e < kExperts; ++e) {
    std::vector<double> got, want;
    for (int r = kStart[e]; r < kStart[e] + kCount[e]; ++r) {
      for (int c = 0; c < width; ++c) {
        got.push_back(value(out[static_cast<size_t>(r) * width + c]));
        want.push_back(reference(r, e, c));
      }
    }
    compare(what, e, got, want, tolerance);
    const int zero = kStart[e] + (kCount[e] + zero_to - 1) / zero_to * zero_to;
    const int end = !on_n(variant) ? zero : e + 1 < kExperts ? kStart[e + 1] : kRows;
    for (int r = kStart[e] + kCount[e]; r < end; ++r) {
      const uint16_t wanted = r < zero ? 0 : 0xFFFF;
      for (int c = 0; c < width; ++c) {
        const uint16_t found = out[static_cast<size_t>(r) * width + c];
        if (found != wanted) {
          std::printf("%s: padded row %d is %04x, should be %04x\n", what, r, found, wanted);
          ++failures;
          return;
        }
      }
    }
  }
}

struct Layer {
  std::vector<uint16_t> x = random_rows(kD), dy = random_rows(kD), h = random_rows(kF), scaled_h = random_rows(kF);
  std::vector<uint16_t> gate_up, d_gate_up;
  std::vector<uint16_t> w_gate_up = random_bf16(size_t{kExperts} * 2 * kF * kD, 0.2f);
  std::vector<uint16_t> w_down = random_bf16(size_t{kExperts} * kD * kF, 0.1f);
  std::vector<float> weight, b_gate_up, b_down;
  std::vector<int> slot;

  Layer() {
    for (int half = 0; half < 2; ++half) {
      auto a = random_rows(kF), b = random_rows(kF);
      gate_up.insert(gate_up.end(), a.begin(), a.end());
      d_gate_up.insert(d_gate_up.end(), b.begin(), b.end());
    }
    for (int r = 0; r < kRows; ++r) {
      slot.push_back(is_row(r) ? kTopK * (kRows - 1 - r) + r % kTopK : -1);
      for (int s = 0; s < kTopK; ++s) weight.push_back(std::uniform_real_distribution<float>(0.0f, 1.0f)(generator));
    }
    for (int i = 0; i < kExperts * 2 * kF; ++i) b_gate_up.push_back(std::normal_distribution<float>()(generator));
    for (int i = 0; i < kExperts * kD; ++i) b_down.push_back(std::normal_distribution<float>()(generator));
  }
  // The tokens that `rows` were dispatched from; the others must not be read.
  std::vector<uint16_t> tokens(const std::vector<uint16_t>& rows) const {
    std::vector<uint16_t> out(static_cast<size_t>(kRows) * kD, 0xFFFF);
    for (int r = 0; r < kRows; ++r) {
      if (slot[r] >= 0) std::memcpy(&out[static_cast<size_t>(slot[r] / kTopK) * kD], &rows[static_cast<size_t>(r) * kD], 2 * kD);
    }
    return out;
  }
  double gate(int half, int r, int e, int f) const {
    double sum = b_gate_up[(e * 2 + half) * kF + f];
    for (int k = 0; k < kD; ++k) sum += double{value(x[r * kD + k])} * value(w_gate_up[((e * 2 + half) * kF + f) * kD + k]);
    return sum;
  }
};

double sigmoid(double z) { return 1.0 / (1.0 + std::exp(-z)); }

Arguments arguments(int k_extent, int m_extent, int n_extent) {
  Arguments args = {};
  args.num_rows = kRows;
  args.k_extent = k_extent;
  args.m_extent = m_extent;
  args.n_extent = n_extent;
  return args;
}

// Operand A: the dispatched rows, or the tokens that they come from.
void set_rows(Arguments& args, const Layer& l, const std::vector<uint16_t>& rows, const std::vector<uint16_t>& tokens, Variant variant) {
  args.slot_M = l.slot.data();
  if (!gathers(variant)) {
    args.a = map_of(rows.data(), 2, kD, kRows);
    return;
  }
  args.gather = reinterpret_cast<const uint8_t*>(tokens.data());
  args.top_k = kTopK;
  args.gather_vectors = kD / 8;
}

// With tokens on the N side no box of rows is gathered that holds none: both blocks of the one pair of column tiles bring what their tiles need.
void compare_gathered() {
  int boxes = 0;
  for (int count : kCount) {
    for (int left = count; left > 0; left -= TokensNConfig::kTokens) boxes += div_up(std::min(left, TokensNConfig::kTokens), TokensNConfig::kBoxRows);
  }
  const int wanted = 2 * boxes * TokensNConfig::kBoxRows * div_up(kD, TokensNConfig::kBlockK) * kPanelRowBytes / 16;
  if (Isa::gathered == wanted) return;
  std::printf("%d pieces of rows were gathered, should be %d\n", Isa::gathered, wanted);
  ++failures;
}

const std::vector<uint16_t> kPoison16(size_t{2} * kRows * kF, 0xFFFF);

uint64_t digest(const void* data, size_t bytes, uint64_t hash = 1469598103934665603ull) {
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211ull;
  return hash;
}

// Of real rows and of the padding up to a multiple of kZeroTo, which every variant writes.
uint64_t digest_rows(const std::vector<uint16_t>& out, int width, int halves = 1) {
  uint64_t hash = 1469598103934665603ull;
  for (int half = 0; half < halves; ++half) {
    for (int e = 0; e < kExperts; ++e) {
      const size_t first = (size_t{1} * half * kRows + kStart[e]) * width, rows = (kCount[e] + kZeroTo - 1) / kZeroTo * kZeroTo;
      hash = digest(&out[first], 2 * rows * width, hash);
    }
  }
  return hash;
}

uint64_t gate_up(const Layer& l, uint32_t seed, Variant variant) {
  std::vector<uint16_t> h(kPoison16.begin(), kPoison16.begin() + kRows * kF), saved = kPoison16;
  Arguments args = arguments(kD, kF, kF);
  const auto tokens = l.tokens(l.x), rows = poisoned(l.x, kD, 16);
  set_rows(args, l, rows, tokens, variant);
  args.bias = l.b_gate_up.data();
  args.b = map_of(l.w_gate_up.data(), 2, kD, kF, 2, kExperts);
  args.out = map_of(h.data(), 2, kF, kRows);
  args.gate_up = map_of(saved.data(), 2, kF, kRows, 2);
  args.save_gate_up = args.write_out = 1;
  Isa::gathered = 0;
  on_n(variant) ? run_tokens_n<kGateUp>(args, seed) : run<kGateUp>(args, seed);
  if (variant == Variant::kGatheredN) compare_gathered();
  std::vector<uint16_t> half(saved.begin(), saved.begin() + kRows * kF), other(saved.begin() + kRows * kF, saved.end());
  compare_rows("gate", half, kF, 3e-3, variant, [&](int r, int e, int f) { return l.gate(0, r, e, f); });
  compare_rows("up", other, kF, 3e-3, variant, [&](int r, int e, int f) { return l.gate(1, r, e, f); });
  compare_rows("h", h, kF, 3e-3, variant, [&](int r, int, int f) {
    const double g = value(half[r * kF + f]), u = value(other[r * kF + f]);
    return g * sigmoid(g) * u;
  });
  return digest_rows(h, kF) ^ digest_rows(saved, kF, 2);
}

// Rows that went to their slots, back in order, with the zeros that others write into padding; nothing else may have been written.
void collect(const Layer& l, std::vector<uint16_t>& scattered, std::vector<uint16_t>& rows) {
  if (rows != std::vector<uint16_t>(kPoison16.begin(), kPoison16.begin() + static_cast<long>(rows.size()))) {
    std::printf("scattered rows were written as rows too\n");
    ++failures;
  }
  for (int e = 0; e < kExperts; ++e) {
    for (int r = kStart[e]; r < kStart[e] + (kCount[e] + 63) / 64 * 64; ++r) {
      const auto to = rows.begin() + r * kD;
      if (l.slot[r] < 0) {
        std::fill_n(to, kD, uint16_t{0});
        continue;
      }
      const auto from = scattered.begin() + l.slot[r] * kD;
      std::copy_n(from, kD, to);
      std::fill_n(from, kD, uint16_t{0xFFFF});
    }
  }
  if (std::count(scattered.begin(), scattered.end(), 0xFFFF) != static_cast<long>(scattered.size())) {
    std::printf("rows were scattered to slots that nobody has\n");
    ++failures;
  }
}

uint64_t down(const Layer& l, uint32_t seed, Variant variant) {
  std::vector<uint16_t> y(kPoison16.begin(), kPoison16.begin() + kRows * kD);
  Arguments args = arguments(kF, kD, kD);
  args.a = map_of(l.h.data(), 2, kF, kRows);
  args.b = map_of(l.w_down.data(), 2, kF, kD, 1, kExperts);
  args.out = map_of(y.data(), 2, kD, kRows);
  args.bias = l.b_down.data();
  std::vector<uint16_t> scattered(size_t{kRows} * kTopK * kD, 0xFFFF);  // one row per slot: as with one expert per token
  args.slot_M = l.slot.data();
  if (variant == Variant::kScattered) args.scatter = reinterpret_cast<uint8_t*>(scattered.data());
  on_n(variant) ? run_tokens_n<kDown>(args, seed) : run<kDown>(args, seed);
  if (variant == Variant::kScattered) collect(l, scattered, y);
  compare_rows("y", y, kD, 3e-3, variant, [&](int r, int e, int d) {
    double sum = l.b_down[e * kD + d];
    for (int f = 0; f < kF; ++f) sum += double{value(l.h[r * kF + f])} * value(l.w_down[(e * kD + d) * kF + f]);
    return sum;
  });
  return digest_rows(y, kD);
}

uint64_t dgrad_down(const Layer& l, uint32_t seed, Variant variant) {
  std::vector<uint16_t> d_gate_up = kPoison16, scaled(kPoison16.begin(), kPoison16.begin() + kRows * kF);
  std::vector<float> partial(size_t{2} * kRows, NAN);
  Arguments args = arguments(kD, kF, kF);
  const auto dy = poisoned(l.dy, kD, 16);
  args.a = map_of(dy.data(), 2, kD, kRows);
  args.slot_M = l.slot.data();
  args.b = map_of(l.w_down.data(), 2, kF, kD, 1, kExperts);
  args.gate_up = map_of(l.gate_up.data(), 2, kF, kRows, 2);
  args.out = map_of(d_gate_up.data(), 2, kF, kRows, 2);
  args.scaled_h = map_of(scaled.data(), 2, kF, kRows);
  args.weight_TxK = l.weight.data();
  args.weight_partial = partial.data();
  on_n(variant) ? run_tokens_n<kDgradDown>(args, seed) : run<kDgradDown>(args, seed);
  auto dh0 = [&](int r, int e, int f) {
    double sum = 0;
    for (int d = 0; d < kD; ++d) sum += double{value(l.dy[r * kD + d])} * value(l.w_down[(e * kD + d) * kF + f]);
    return sum;
  };
  auto g = [&](int r, int f) { return double{value(l.gate_up[r * kF + f])}; };
  auto u = [&](int r, int f) { return double{value(l.gate_up[kRows * kF + r * kF + f])}; };
  std::vector<uint16_t> half(d_gate_up.begin(), d_gate_up.begin() + kRows * kF), other(d_gate_up.begin() + kRows * kF, d_gate_up.end());
  compare_rows("d_gate", half, kF, 3e-3, variant, [&](int r, int e, int f) {
    const double s = sigmoid(g(r, f));
    return l.weight[l.slot[r]] * dh0(r, e, f) * u(r, f) * s * (1 + g(r, f) * (1 - s));
  });
  compare_rows("d_up", other, kF, 3e-3, variant,
               [&](int r, int e, int f) { return l.weight[l.slot[r]] * dh0(r, e, f) * g(r, f) * sigmoid(g(r, f)); });
  compare_rows("weight * h", scaled, kF, 4e-3, variant,
               [&](int r, int, int f) { return l.weight[l.slot[r]] * g(r, f) * sigmoid(g(r, f)) * u(r, f); });
  for (int e = 0; e < kExperts; ++e) {
    std::vector<double> got, want;
    for (int r = kStart[e]; r < kStart[e] + kCount[e]; ++r) {
      double sum = 0;
      for (int f = 0; f < kF; ++f) sum += rounded(g(r, f) * sigmoid(g(r, f)) * u(r, f)) * dh0(r, e, f);
      got.push_back(double{partial[r]} + partial[kRows + r]);
      want.push_back(sum);
    }
    compare("d_weight", e, got, want, 1e-3);
  }
  return digest_rows(d_gate_up, kF, 2) ^ digest_rows(scaled, kF) ^ digest(partial.data(), 4 * partial.size());
}

// Rows of `width` columns that a product dispatches on the way, as the schedule of `l` has them. They come from tokens whose values are
// those places; a token that has no row must not be read.
struct Carried {
  static constexpr int kZeroTo = 16;
  int width;
  std::vector<uint16_t> tokens, rows;
  std::vector<int> row_TxK;

  Carried(const Layer& l, int width_)
      : width(width_), tokens(size_t{kRows} * width, 0xFFFF), rows(size_t{kRows} * width, 0xFFFF), row_TxK(size_t{kRows} * kTopK, -1) {
    for (int r = 0; r < kRows; ++r) {
      if (l.slot[r] < 0) continue;
      row_TxK[l.slot[r]] = r;
      for (int d = 0; d < width; ++d) tokens[static_cast<size_t>(l.slot[r] / kTopK) * width + d] = of(l.slot[r] / kTopK, d);
    }
  }
  static uint16_t of(int token, int column) { return static_cast<uint16_t>(1 + (token * 131 + column) % 65000); }
  Carry carry() {
    return {reinterpret_cast<const uint8_t*>(tokens.data()), reinterpret_cast<uint8_t*>(rows.data()), row_TxK.data(), kCount, kStart,
            kRows, kTopK, kExperts, width / 8, kZeroTo};
  }
  // Padding up to a multiple of kZeroTo is zero, nothing else is touched.
  void check(const Layer& l) const {
    for (int e = 0; e < kExperts; ++e) {
      const int end = e + 1 < kExperts ? kStart[e + 1] : kRows;
      for (int r = kStart[e]; r < end; ++r) {
        const bool padding = r < kStart[e] + (kCount[e] + kZeroTo - 1) / kZeroTo * kZeroTo;
        for (int d = 0; d < width; ++d) {
          const uint16_t want = l.slot[r] >= 0 ? of(l.slot[r] / kTopK, d) : padding ? 0 : 0xFFFF;
          if (rows[static_cast<size_t>(r) * width + d] == want) continue;
          std::printf("carried row %d of %d columns, column %d: %04x\n", r, width, d, rows[static_cast<size_t>(r) * width + d]);
          ++failures;
          return;
        }
      }
    }
  }
};

// Rows wider than what a lane has in flight at once, with a part left at the end.
uint64_t carry_wide(const Layer& l, uint32_t seed) {
  Carried carried(l, 8 * 300);
  const Carry carry = carried.carry();
  host::run_cluster(32, 1024, seed, [&] { carry_rows<Host>(carry, static_cast<int>(Host::cluster_rank()), host::kBlocks); });
  carried.check(l);
  return digest(carried.rows.data(), 2 * carried.rows.size());
}

// The rows from a cut on, by two blocks of more warps than one has groups of rows; and none where no task stands in front of a cut.
uint64_t copy_back(const Layer& l, uint32_t seed) {
  constexpr int kWidth = 8 * 50, kWarps = 3, kTileM = 64;
  uint64_t bits = 0;
  for (const int num_front : {0, 2, 11}) {
    Carried carried(l, kWidth);
    std::vector<Task> front(11);
    for (int i = 0; i < 11; ++i) front[i].row0 = kTileM / 2 * (i < 2 ? i : i - 1);  // after a group of 8, rows of the next
    const int cut = num_front == 0 ? kRows : front[num_front - 1].row0 + kTileM;
    const RowCopy copy = {reinterpret_cast<const uint8_t*>(carried.tokens.data()), reinterpret_cast<uint8_t*>(carried.rows.data()), l.slot.data(),
                          front.data(), &num_front, kRows, 2 * kWidth, kTopK, kTileM};
    host::run_cluster(32 * kWarps, RowCopyConfig::kSharedBytes, seed, [&] {
      const int warp = static_cast<int>(CopyIsa::cluster_rank()) * kWarps + static_cast<int>(CopyIsa::warp_index());
      copy_rows<CopyIsa, RowCopyConfig>(copy, warp, host::kBlocks * kWarps);
    });
    for (int r = 0; r < kRows; ++r) {
      for (int d = 0; d < kWidth; ++d) {
        const uint16_t want = r >= cut && l.slot[r] >= 0 ? Carried::of(l.slot[r] / kTopK, d) : 0xFFFF;
        if (carried.rows[static_cast<size_t>(r) * kWidth + d] == want) continue;
        std::printf("row %d, column %d of those from %d on: %04x\n", r, d, cut, carried.rows[static_cast<size_t>(r) * kWidth + d]);
        ++failures;
        return 0;
      }
    }
    bits ^= digest(carried.rows.data(), 2 * carried.rows.size());
  }
  return bits;
}

uint64_t dgrad_gate_up(const Layer& l, uint32_t seed, Variant variant) {
  std::vector<uint16_t> dx(kPoison16.begin(), kPoison16.begin() + kRows * kD);
  Arguments args = arguments(kF, kF, kD);
  Carried carried(l, kD);
  if (!on_n(variant)) args.carry = carried.carry();
  args.a = map_of(l.d_gate_up.data(), 2, kF, kRows, 2);
  args.b = map_of(l.w_gate_up.data(), 2, kD, kF, 2, kExperts);
  args.out = map_of(dx.data(), 2, kD, kRows);
  on_n(variant) ? run_tokens_n<kDgradGateUp>(args, seed) : run<kDgradGateUp>(args, seed);
  if (!on_n(variant)) carried.check(l);
  compare_rows("dx", dx, kD, 3e-3, variant, [&](int r, int e, int d) {
    double sum = 0;
    for (int half = 0; half < 2; ++half) {
      for (int f = 0; f < kF; ++f) {
        sum += double{value(l.d_gate_up[(half * kRows + r) * kF + f])} * value(l.w_gate_up[((e * 2 + half) * kF + f) * kD + d]);
      }
    }
    return sum;
  });
  return digest_rows(dx, kD);
}

// dW[e][half][m][n] = sum over rows of a[half][row][m] b[row][n], overwritten or continued.
template <Kind kKind>
uint64_t wgrad(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b, int m_extent, int n_extent, int halves,
               bool accumulate, uint32_t seed, Variant variant) {
  const size_t size = size_t{kExperts} * halves * m_extent * n_extent;
  std::vector<float> dw(size, NAN), before(size, 0.0f);
  if (accumulate) {
    for (auto& v : before) v = std::normal_distribution<float>()(generator);
    dw = before;
  }
  Arguments args = arguments(kRows, m_extent, n_extent);
  // What the layer dispatches for a product, dy or x, is zero only as far as the product multiplies; the other operand comes from dgrad.
  const int zero_to = variant == Variant::kResident512 ? 16 : 64;
  const auto rows_a = kKind == kWgradDown ? poisoned(a, m_extent, zero_to) : a;
  const auto rows_b = kKind == kWgradGateUp ? poisoned(b, n_extent, zero_to) : b;
  args.a = map_of(rows_a.data(), 2, m_extent, kRows, halves);
  args.b = map_of(rows_b.data(), 2, n_extent, kRows);
  if (variant == Variant::kResident512) args.a.box_rows = args.b.box_rows = ResidentConfig::kBoxRows;
  if (variant == Variant::kResidentRows || variant == Variant::kFewResidentRows) args.a.box_rows = args.b.box_rows = ResidentRowsConfig::kBoxRows;
  args.out = map_of(dw.data(), 4, n_extent, m_extent, halves, kExperts);
  args.dw = dw.data();
  args.accumulate = accumulate;
  run_wgrad<kKind>(variant, args, seed);
  for (int e = 0; e < kExperts; ++e) {
    std::vector<double> got, want;
    for (int half = 0; half < halves; ++half) {
      for (int m = 0; m < m_extent; ++m) {
        for (int n = 0; n < n_extent; ++n) {
          const size_t at = (static_cast<size_t>(e * halves + half) * m_extent + m) * n_extent + n;
          double sum = before[at];
          for (int r = kStart[e]; r < kStart[e] + kCount[e]; ++r) {
            sum += double{value(a[(static_cast<size_t>(half) * kRows + r) * m_extent + m])} * value(b[static_cast<size_t>(r) * n_extent + n]);
          }
          got.push_back(dw[at]);
          want.push_back(sum);
        }
      }
    }
    compare(kKind == kWgradDown ? "dw_down" : "dw_gate_up", e, got, want, 1e-5);
  }
  return digest(dw.data(), 4 * dw.size());
}

std::vector<uint32_t> barriers_of(const std::string& name) {
  const uint32_t base = Isa::shared_base();
  std::vector<uint32_t> full;
  for (int s = 0; s < Config::kStages; ++s) full.push_back(base + Config::kBarrierOffset + 8 * s);
  if (name == "full") return full;
  if (name == "credit") return {credit_barrier<Config>(base, 0), credit_barrier<Config>(base, 1)};
  if (name == "written_n") {  // of a consumer with tokens on the N side
    std::vector<uint32_t> written;
    for (int unit = 0; unit < TokensNConfig::kMaxUnits; ++unit) written.push_back(written_barrier<TokensNConfig>(base, 1, unit));
    return written;
  }
  if (name == "landed") {  // of all rings of copied rows
    std::vector<uint32_t> landed;
    for (int i = 0; i < RowCopyConfig::kMostWarps * RowCopyConfig::kStages; ++i) landed.push_back(base + RowCopyConfig::kBarrierOffset + 8 * i);
    return landed;
  }
  std::fprintf(stderr, "unknown barrier %s\n", name.c_str());
  std::exit(2);
}

}  // namespace

int main(int argc, char** argv) {
  take_fault(argc, argv, barriers_of);
  if (argc < 3) {
    std::fprintf(stderr, "usage: host_kernels KIND SEED... [--without=FAULT]\n");
    return 2;
  }
  std::string kind = argv[1];
  const std::string suffix = "_tokens_n";
  const bool only_n = kind.size() > suffix.size() && kind.substr(kind.size() - suffix.size()) == suffix;
  if (only_n) kind.resize(kind.size() - suffix.size());
  uint64_t first = 0;
  for (int i = 2; i < argc; ++i) {
    generator.seed(7);
    const Layer l;
    const uint32_t seed = static_cast<uint32_t>(std::atoi(argv[i]));
    const auto run_kind = [&](Variant variant) -> uint64_t {
      if (kind == "gate_up") return gate_up(l, seed, variant);
      if (kind == "down") return down(l, seed, variant);
      if (kind == "dgrad_down") return dgrad_down(l, seed, variant);
      if (kind == "carry") return carry_wide(l, seed);
      if (kind == "copy_back") return copy_back(l, seed);
      if (kind == "dgrad_gate_up") return dgrad_gate_up(l, seed, variant);
      if (kind == "wgrad_down") return wgrad<kWgradDown>(l.dy, l.scaled_h, kD, kF, 1, false, seed, variant);
      if (kind == "wgrad_gate_up") return wgrad<kWgradGateUp>(l.d_gate_up, l.x, kF, kD, 2, false, seed, variant);
      if (kind == "wgrad_down_accumulate") {
        generator.seed(11);
        return wgrad<kWgradDown>(l.dy, l.scaled_h, kD, kF, 1, true, seed, variant);
      }
      std::fprintf(stderr, "unknown kind %s\n", kind.c_str());
      std::exit(2);
    };
    const uint64_t bits = run_kind(only_n ? Variant::kTokensN : Variant::kDispatched);
    std::vector<Variant> others;
    if (kind == "gate_up") others = {Variant::kGathered, Variant::kTokensN, Variant::kGatheredN};
    if (kind == "down") others = {Variant::kTokensN, Variant::kScattered};
    if (kind == "dgrad_down" || kind == "dgrad_gate_up") others = {Variant::kTokensN};
    if (kind == "wgrad_down" || kind == "wgrad_gate_up") others = {Variant::kResident512, Variant::kResidentRows, Variant::kFewResidentRows};
    for (Variant other : others) {
      if (run_kind(other) == bits) continue;
      std::printf("%s: variant %d gives other bits than dispatched rows on the M side\n", kind.c_str(), static_cast<int>(other));
      ++failures;
    }
    if (i == 2) first = bits;
    if (bits != first) {
      std::printf("%s: seeds %s and %s give different bits\n", kind.c_str(), argv[2], argv[i]);
      ++failures;
    }
  }
  std::printf("%s: %s\n", kind.c_str(), failures == 0 ? "ok" : "failed");
  return failures == 0 ? 0 : 1;
}
