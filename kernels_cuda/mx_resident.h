// FP8 weight gradients with one operand at rest in shared memory, for experts with up to 640 rows, whose products are short beside what they
// write. A block keeps 128 columns of operand B with their scales, for all rows of an expert, and walks down a strip of tiles of 128 rows, for
// which only columns of operand A arrive, shared with the other block of the cluster. An expert with more rows than fit streams both operands
// through the same rings.
//
// A consumer warpgroup has 64 rows: sums, and two sets of temporaries, so that one K block is multiplied while the one before is added. Results leave
// behind its back: each warp writes its 16 rows into staging and goes on; the store warp of the consumer sends them to memory, a row at a time. The
// sums are those of mx_roles.h, bit for bit.
#pragma once

#include "gemm_resident.h"
#include "mx_roles.h"

namespace moe {

struct MxResidentConfig {
  static constexpr int kTileM = 128;
  static constexpr int kTileN = 128;
  static constexpr int kStripTiles = 16;
  static constexpr int kBlockK = 128;
  static constexpr int kBoxRows = kPanelRows;
  static constexpr bool kOnlyKMajor = true;
  static constexpr int kConsumers = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlocks = 5;    // of K, that fit
  static constexpr int kMaxUnits = 4;  // a consumer hands over a tile warp by warp
  static constexpr int kProducerRegisters = 56;  // a store warp has the addresses of 16 rows
  static constexpr int kConsumerRegisters = 224;

  // Shared memory: operand A, the lookahead; operand B; staging; codes of A by stage, scales of B by K block; then the barriers: full and empty of
  // A, of B, those of mma_sm90.h and left[consumer][warp].
  static constexpr int kStageBytes = kTileM * kPanelRowBytes;
  static constexpr int kStages = 5;
  static constexpr int kColumnsOffset = kStages * kStageBytes;
  static constexpr int kColumnBytes = kTileN * kPanelRowBytes;
  // Rows of 512 bytes, as bulk copies want them, in four regions: row r is in region r % 4, and the regions begin eight banks apart, so that the
  // four rows that half a warp writes at once never meet in a bank.
  static constexpr int kStagingOffset = kColumnsOffset + kBlocks * kColumnBytes;
  static constexpr int kStagedRowBytes = 4 * kTileN, kRegionBytes = 16 * kStagedRowBytes + 32, kStagingBytes = 4 * kRegionBytes;
  static constexpr int kCodesOffset = kStagingOffset + kConsumers * kStagingBytes;
  static constexpr int kCodeBytes = kTileM;
  static constexpr int kScalesOffset = kCodesOffset + kStages * kCodeBytes;
  static constexpr int kQuarterBytes = kTileN / 2, kQuarterPitch = kQuarterBytes + 16;  // scales of a lane's columns; four lanes read at once
  static constexpr int kScaleBytes = 4 * kQuarterPitch;
  static constexpr int kBarrierOffset = kScalesOffset + kBlocks * kScaleBytes;
  static constexpr int kWrittenOffset = kBarrierOffset + 2 * (kStages + kBlocks) * 8;
  static constexpr int kCreditOffset = kWrittenOffset + kConsumers * kMaxUnits * 8;
  static constexpr int kLeadOffset = kCreditOffset + kConsumers * 8;
  static constexpr int kLeftOffset = kLeadOffset + 16;
  static constexpr int kSharedBytes = kLeftOffset + kConsumers * kMaxUnits * 8;

  // Operand B, in a ring of its own: a stage per K block, given back by this block's eight warps alone.
  struct Columns {
    static constexpr int kStages = kBlocks;
    static constexpr int kStageBytes = kColumnBytes;
    static constexpr int kBarrierOffset = MxResidentConfig::kBarrierOffset + 2 * MxResidentConfig::kStages * 8 - kColumnsOffset;
  };

  static MOE_FN uint32_t staged_row(uint32_t base, uint32_t consumer, uint32_t row) {
    return base + kStagingOffset + consumer * kStagingBytes + row % 4 * kRegionBytes + row / 4 * kStagedRowBytes;
  }
  // left: the store warp arrives once per tile, when a warp's rows have left staging; that warp waits before it writes the next tile's. written
  // (mma_sm90.h): four lanes of the warp arrive once per tile, when its rows are there; the store warp waits.
  static MOE_FN uint32_t left_barrier(uint32_t base, uint32_t consumer, uint32_t warp) {
    return base + kLeftOffset + 8 * (kMaxUnits * consumer + warp);
  }

  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= kThreads * 168, "a block starts with 168 registers a thread");
};

// Tiles [first, end) of a strip, as every role sees them.
template <Kind kKind, class Config>
struct MxStrip : Strip<Config> {
  using Strip<Config>::task, Strip<Config>::tiles;
  bool live;  // its columns lie inside

  template <class Arguments>
  MOE_FN MxStrip(const Task& of, int first, int end, uint32_t rank, const Arguments& args) : Strip<Config>(of, kKind, rank, args) {
    tiles = (tiles < end ? tiles : end) - first;
    task.m0 += Config::kTileM * first;
    live = task.n0 < args.n_extent;
  }
};

// Producer, one strip.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void load_mx_strip(const MxStrip<kKind, Config>& strip, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring,
                          Ring<Isa, typename Config::Columns>& columns) {
  const int64_t a_pitch = div_up(args.m_extent, 128) * 128, b_pitch = div_up(args.n_extent, 128) * 128;
  const int n0 = strip.live ? strip.task.n0 : 0;
  const int64_t first_block = strip.task.row0 / 128;
  wait_ready<Isa>(strip.task, args);
  MOE_NO_UNROLL
  for (int t = 0; t < strip.tiles; ++t) {
    const Task tile = strip.tile(t);
    const uint8_t* codes = args.a_codes + (tile.half * (args.num_rows / 128) + first_block) * a_pitch + tile.m0;
    const uint16_t* scales = args.b_scales + first_block * b_pitch + n0;
    MOE_NO_UNROLL
    for (int kb = 0; kb < strip.k_blocks; ++kb) {
      const KBlock block = {0, tile.row0 + Config::kBlockK * kb};
      if (t == 0 || !strip.resident) {
        Isa::barrier_wait(columns.empty(), columns.phase ^ 1);
        Isa::barrier_expect_bytes(columns.full(), Config::kColumnBytes + 4 * Config::kQuarterBytes);
        MOE_UNROLL
        for (int p = 0; p < 2; ++p) {
          const Box box = box_b<kKind, Config>(tile, block, kPanelRows * p, 0);
          Isa::load_panel(&args.b, columns.full(), columns.data() + p * kPanelBytes, box.inner, box.outer, 0, 0);
        }
        const uint32_t to = ring.base + Config::kScalesOffset + columns.stage * Config::kScaleBytes;
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) Isa::load_bytes(scales + 32 * i, columns.full(), to + i * Config::kQuarterPitch, Config::kQuarterBytes);
        columns.advance();
      }
      Isa::barrier_wait(ring.empty(), ring.phase ^ 1);
      Isa::barrier_expect_bytes(ring.full(), Config::kStageBytes + Config::kCodeBytes);
      const Box box = box_a<kKind, Config>(tile, block, kPanelRows * static_cast<int>(rank), 0);  // the other block brings the other half
      Isa::template load_panel_both<true>(&args.a, ring.full(), ring.data() + rank * kPanelBytes, box.inner, box.outer, tile.half, 0);
      Isa::load_bytes(codes, ring.full(), ring.base + Config::kCodesOffset + ring.stage * Config::kCodeBytes, Config::kCodeBytes);
      ring.advance();
      codes += a_pitch;
      scales += b_pitch;
    }
  }
}

// A consumer warpgroup.
template <Kind kKind, class Isa, class Config>
struct MxResidentConsumer {
  using Rows = Ring<Isa, Config>;
  using Columns = Ring<Isa, typename Config::Columns>;
  static constexpr int kSums = Config::kTileN / 2;
  uint32_t base;
  uint32_t consumer;
  uint32_t warp, lane;
  uint32_t tiles = 0;  // handed over
  float sum[kSums];

  // Where the operands of a K block lie, for what comes after its products.
  struct Place {
    uint32_t codes, scales, empty, columns_empty;
  };
  // Of a K block: of this lane's 32 columns in BF16, and of its two rows.
  struct Scales {
    typename Isa::Vector columns[4];
    uint32_t rows[2];
  };

  // `base` and `lane` are kept in registers: what they are made of takes longer.
  MOE_FN MxResidentConsumer(uint32_t shared_base, uint32_t consumer_)
      : base(Isa::not_before(shared_base)), consumer(consumer_), warp(Isa::warp_index() % 4), lane(Isa::not_before(Isa::lane_index())) {}

  // A stage of A goes back to both blocks, of B, if this tile is its last one, to this one.
  MOE_FN void release(const Place& place, bool last) const {
    Isa::warp_sync();  // all lanes have read their scales, or seen the stage full
    Rows::release(place.empty);
    if (last && lane == 0) Isa::barrier_arrive(place.columns_empty);
  }

  // Starts the products of a K block, whose stage has been seen full. first: operand B has yet to be.
  MOE_FN Place start(float (&part)[kSums], bool first, Rows& ring, Columns& at) const {
    if (first) Isa::barrier_wait(at.full(), at.phase);
    const uint64_t a = panel_descriptor(ring.data() + consumer * kPanelBytes, false), b = panel_descriptor(at.data(), false);
    constexpr uint64_t kStep = panel_k16_step(false);  // 32 bytes: 32 of K
    Isa::mma_fence();
    Isa::template mma_e4m3<true>(part, a, b);
    MOE_UNROLL
    for (int k = 1; k < 4; ++k) Isa::template mma_e4m3<false>(part, a + k * kStep, b + k * kStep);
    Isa::mma_commit();
    const Place place = {base + Config::kCodesOffset + ring.stage * Config::kCodeBytes + 64 * consumer + 16 * warp + lane / 4,
                         base + Config::kScalesOffset + at.stage * Config::kScaleBytes + lane % 4 * Config::kQuarterPitch, ring.empty(), at.empty()};
    ring.advance();
    at.advance();
    return place;
  }

  MOE_FN Scales load_scales(const Place& place) const {
    Scales scales;
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) scales.columns[i] = Isa::load_vector(place.scales + 16 * i);
    MOE_UNROLL
    for (int row = 0; row < 2; ++row) scales.rows[row] = Isa::load_shared_byte(place.codes + 8 * row);
    return scales;
  }

  // Of a K block whose products are done: f(k, x, y, row_scale) for values k and k + 1, neighbours in a row, under their columns' scales.
  template <class F>
  MOE_FN void each_pair(const float (&part)[kSums], const Scales& scales, F f) const {
    const float row_scale[2] = {mx::finite_scale_value(scales.rows[0]), mx::finite_scale_value(scales.rows[1])};
    MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t pairs[4] = {scales.columns[i].x, scales.columns[i].y, scales.columns[i].z, scales.columns[i].w};
      MOE_UNROLL
      for (int j = 0; j < 4; ++j) {  // blocks of eight output columns, two of each are this lane's
        const float lo = Isa::bf16_lo(pairs[j]), hi = Isa::bf16_hi(pairs[j]);
        MOE_UNROLL
        for (int row = 0; row < 2; ++row) {
          const int k = 16 * i + 4 * j + 2 * row;
          f(k, Isa::mul(part[k], lo), Isa::mul(part[k + 1], hi), row_scale[row]);
        }
      }
    }
  }
  MOE_FN void add(const float (&part)[kSums], const Scales& scales) {
    each_pair(part, scales, [&](int k, float x, float y, float row_scale) {
      sum[k] = Isa::fma(x, row_scale, sum[k]);
      sum[k + 1] = Isa::fma(y, row_scale, sum[k + 1]);
    });
  }
  // The same of a tile's last K block, whose sums are the tile's: they go to the store warp from where the products were, pair by pair, while the next ones
  // are added, so that handing over costs the stores alone.
  MOE_FN void add_last(const float (&part)[kSums], const Scales& scales) {
    begin_write();
    each_pair(part, scales, [&](int k, float x, float y, float row_scale) {
      write_pair(k, Isa::fma(x, row_scale, sum[k]), Isa::fma(y, row_scale, sum[k + 1]));
    });
    end_write();
  }

  // All K blocks of a strip, tile after tile: one is multiplied while the one before it is added, and the first one of a tile while the tile before
  // is handed over.
  MOE_FN void multiply(const MxStrip<kKind, Config>& strip, Rows& ring, const Columns& columns) {
    float even[kSums], odd[kSums];
    Columns at = columns;
    int kb_started = 0, kb_added = 0;                           // of the tile
    int left = strip.tiles * strip.k_blocks - 1;                // K blocks to be started
    int first = strip.resident ? strip.k_blocks : left + 1;     // of them, those whose columns have yet to be seen full
    int held = strip.resident ? left + 1 - strip.k_blocks : 0;  // K blocks to be added whose columns stay
    auto start_next = [&](float (&part)[kSums]) {
      const Place place = start(part, first > 0, ring, at);
      --first;
      if (++kb_started == strip.k_blocks) {
        kb_started = 0;
        if (strip.resident) at = columns;
      }
      return place;
    };
    auto add_next = [&](const float (&part)[kSums], const Scales& scales, const Place& place) {
      release(place, held <= 0);
      --held;
      if (++kb_added < strip.k_blocks) return add(part, scales);
      kb_added = 0;
      add_last(part, scales);
    };
    // The next stage, whose products are to follow the additions at once: it is asked for while products run, and waited for after the additions alone.
    auto see_next = [&] { Isa::barrier_wait(ring.full(), ring.phase); };
    auto has_next = [&] { return Isa::barrier_passed(ring.full(), ring.phase); };
    see_next();
    Place one = start_next(even);
    if (left > 0) see_next();
    MOE_NO_UNROLL
    for (; left > 1; left -= 2) {
      const Scales a = load_scales(one);  // before the next products, so that they come for nothing
      const Place two = start_next(odd);
      bool seen = has_next();
      Isa::template mma_wait<1>();
      add_next(even, a, one);
      if (!seen) see_next();
      const Scales b = load_scales(two);
      one = start_next(even);
      seen = left <= 2 || has_next();
      Isa::template mma_wait<1>();
      add_next(odd, b, two);
      if (!seen) see_next();
    }
    const Scales a = load_scales(one);
    if (left == 1) {
      const Place two = start_next(odd);
      Isa::template mma_wait<1>();
      add_next(even, a, one);
      const Scales b = load_scales(two);
      Isa::template mma_wait<0>();
      add_next(odd, b, two);
    } else {
      Isa::template mma_wait<0>();
      add_next(even, a, one);
    }
  }

  // The stages of a tile whose columns lie past the end. No lane may give a stage back while another has yet to see it full.
  MOE_FN void follow(const MxStrip<kKind, Config>& strip, bool first, bool last, Rows& ring, Columns& at) {
    MOE_NO_UNROLL
    for (int kb = 0; kb < strip.k_blocks; ++kb) {
      if (first) Isa::barrier_wait(at.full(), at.phase);
      Isa::barrier_wait(ring.full(), ring.phase);
      release({0, 0, ring.empty(), at.empty()}, last);
      ring.advance();
      at.advance();
    }
  }

  MOE_FN void clear() {
    MOE_UNROLL
    for (float& s : sum) s = 0.0f;
  }

  // Hands the warp's 16 rows to the store warp, and begins anew.
  MOE_FN void begin_write() {
    Isa::barrier_wait(Config::left_barrier(base, consumer, warp), (tiles & 1) ^ 1);
    ++tiles;
  }
  MOE_FN void write_pair(int k, float x, float y) const {
    const uint32_t at = Config::staged_row(base, consumer, 16 * warp + 8 * (k / 2 % 2) + lane / 4) + lane % 4 * 8;
    Isa::store_float2(at + 32 * (k / 4), x, y);
  }
  MOE_FN void end_write() {
    Isa::fence_async_shared();
    Isa::warp_sync();
    if (lane < 4) Isa::barrier_arrive(written_barrier<Config>(base, consumer, static_cast<int>(warp)));
    clear();
  }
  MOE_FN void write() {
    begin_write();
    MOE_UNROLL
    for (int k = 0; k < kSums; k += 2) write_pair(k, sum[k], sum[k + 1]);
    end_write();
  }

  MOE_FN void run(const MxStrip<kKind, Config>& strip, Rows& ring, Columns& columns) {
    if (strip.tiles <= 0) return;
    clear();
    if (strip.live && strip.k_blocks > 0) {
      multiply(strip, ring, columns);
    } else {
      Columns at = columns;
      MOE_NO_UNROLL
      for (int t = 0; t < strip.tiles; ++t) {
        if (strip.resident) at = columns;
        follow(strip, t == 0 || !strip.resident, t == strip.tiles - 1 || !strip.resident, ring, at);
        if (strip.live) write();
      }
    }
    columns.skip((strip.resident ? 1 : strip.tiles) * strip.k_blocks);
  }
};

// Store warp of one consumer, one strip. A warp's rows at a time, and no more before those have been read: the copy engine works in order, and loads
// of operands must not wait long.
template <Kind kKind, class Isa, class Config, class Arguments>
MOE_FN void store_mx_strip(const MxStrip<kKind, Config>& strip, const Arguments& args, uint32_t base, uint32_t consumer, uint32_t& tiles) {
  if (!strip.live) return;
  const bool one = Isa::lane_index() == 0;
  MOE_NO_UNROLL
  for (int t = 0; t < strip.tiles; ++t) {
    const Task tile = strip.tile(t);
    const int columns = args.n_extent - tile.n0 < Config::kTileN ? args.n_extent - tile.n0 : Config::kTileN;
    const int matrix = kKind == kWgradGateUp ? 2 * tile.expert + tile.half : tile.expert;
    int row = tile.m0 + static_cast<int>(64 * consumer);
    float* to = args.dw + (static_cast<int64_t>(matrix) * args.m_extent + row) * args.n_extent + tile.n0;
    MOE_NO_UNROLL
    for (int unit = 0; unit < Config::kMaxUnits; ++unit) {
      Isa::barrier_wait(written_barrier<Config>(base, consumer, unit), tiles & 1);
      if (one) {
        if (row < args.m_extent) {  // a multiple of 32
          MOE_UNROLL
          for (int r = 0; r < 16; ++r) {
            Isa::store_bytes_once(to + static_cast<int64_t>(r) * args.n_extent, Config::staged_row(base, consumer, 16 * unit + r), 4 * columns);
          }
        }
        Isa::store_commit();
        Isa::template store_wait_read<0>();
      }
      Isa::warp_sync();
      if (one) Isa::barrier_arrive(Config::left_barrier(base, consumer, unit));
      row += 16;
      to += static_cast<int64_t>(16) * args.n_extent;
    }
    ++tiles;
  }
}

// The roles of a block that runs strips, for run_roles.
template <Kind kKind, class Isa, class Config_ = MxResidentConfig>
struct MxResident : ColumnsAtRest<Isa, Config_> {
  using Config = Config_;
  using typename ColumnsAtRest<Isa, Config>::Columns;
  using ColumnsAtRest<Isa, Config>::columns;
  static_assert(Config::kStages >= 3 && Config::Columns::kStages >= 3, "a consumer waits for a K block while it holds two");

  static MOE_FN void init(uint32_t base) {
    ColumnsAtRest<Isa, Config>::init(base);
    for (uint32_t i = 0; i < Config::kConsumers * Config::kMaxUnits; ++i) Isa::barrier_init(Config::left_barrier(base, 0, i), 1);
  }

  // f(strip, arguments) for this block's cluster: every n-th strip of the list, and of those left after whole rounds an equal share of the tiles, unless
  // somebody waits for them. The next task is not read ahead: consumers have no registers for it, and the loader runs ahead of them.
  template <class Batch, class F>
  static MOE_FN void each_strip(const Batch& batch, F f) {
    const auto& args = batch.kinds[0];
    const int all = (kKind == kWgradGateUp ? 2 : 1) * div_up(args.m_extent, Config::kTileM), tiles = all < Config::kStripTiles ? all : Config::kStripTiles;
    const int count = *batch.num_tasks, clusters = Isa::num_clusters(), index = Isa::cluster_index();
    const int left = count % clusters > 0 && batch.tasks[count - 1].signal < 0 ? count % clusters : 0;
    const int share_end = (index + 1) * left * tiles / clusters;
    int next = index, shared = index * left * tiles / clusters;
    MOE_NO_UNROLL
    while (next < count - left || shared < share_end) {
      int at = next, first = 0, end = tiles;
      if (next < count - left) {
        next += clusters;
      } else {
        at = count - left + shared / tiles;
        first = shared % tiles;
        if (share_end - shared < tiles - first) end = first + share_end - shared;
        shared += end - first;
      }
      f(MxStrip<kKind, Config>(batch.tasks[at], first, end, Isa::cluster_rank(), args), args);
    }
  }
  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    each_strip(batch, [&](const auto& strip, const auto& args) { load_mx_strip<kKind, Isa, Config>(strip, args, Isa::cluster_rank(), ring, b); });
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    uint32_t tiles = 0;
    each_strip(batch, [&](const auto& strip, const auto& args) {
      store_mx_strip<kKind, Isa, Config>(strip, args, base, consumer, tiles);
      signal_done<Isa>(strip.task, args, Isa::lane_index() == 0);
    });
    if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Columns b = columns(base);
    MxResidentConsumer<kKind, Isa, Config> state(base, consumer);
    each_strip(batch, [&](const auto& strip, const auto&) { state.run(strip, ring, b); });
  }
};

}  // namespace moe
