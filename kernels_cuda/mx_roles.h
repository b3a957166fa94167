// The FP8 products of `aligned` MXFP8 on Hopper: consumers of a GEMM block whose operands are E4M3 with one scale code per
// 128 of the contraction. Ring, tasks, loader, epilogues and store warps are those of the BF16 blocks (mma_sm90.h), but for h and the
// results of kDgradDown, which leave in MXFP8 (mx_epilogue.h). Kernels: mx_gemm_kernels.cu.
//
// A panel (64 rows of 128 bytes) holds 128 of K, so a stage carries as many bytes as in BF16 and twice the work. FP8 operands must be
// K-major, so the weight gradients read transposed copies. The tensor core keeps about 14 bits of a sum: a K block is summed in 64
// temporaries per thread, half of the tile's columns at a time, and added to the FP32 sums times both scales, powers of two: one
// rounding.
#pragma once

#include "mx_epilogue.h"

namespace moe {

// The shape of the BF16 block. Registers: a K loop over 64 temporaries beside 128 sums wants as many as there are, but a store warp that scatters
// rows to tokens (kDown, kDgradGateUp) needs some.
template <Kind kKind>
struct MxConfig : GemmConfig<256> {
  static constexpr int kBlockK = 128;
  static constexpr int kElementBytes = 1;
  static constexpr bool kOnlyKMajor = true;
  static constexpr bool kScatters = kKind == kDown || kKind == kDgradGateUp;
  static constexpr int kProducerRegisters = kScatters ? 72 : 40;
  static constexpr int kConsumerRegisters = kScatters ? 216 : 232;
  // For each stage the codes of its 128 rows of A and, of weight gradients, BF16 scales of 256 columns of B. Weight gradients also have a barrier per
  // consumer (Turns), kDgradDown those of its epilogue.
  static constexpr int kTurnOffset = GemmConfig<256>::kSharedBytes;
  static constexpr int kScaleOffset = (kTurnOffset + 8 * kConsumers + 127) / 128 * 128;
  static constexpr int kScaleBytesA = kTileM, kScaleBytesB = is_wgrad(kKind) ? 2 * kTileN : 0;
  static constexpr int kGroupOffset = kScaleOffset + kStages * kScaleBytesA;
  static constexpr int kOffsetTable = kGroupOffset + 128;  // where rows are gathered from (gemm_gather.h)
  static constexpr int kWeightsOffset = kOffsetTable + 640;  // combine weights of 128 rows
  static constexpr int kSharedBytes = kScaleOffset + kStages * (kTileM + 2 * kTileN);

  static_assert(kWeightsOffset + 4 * kTileM <= kSharedBytes, "kDgradDown has no scales of columns in the ring");
  static_assert(kSharedBytes <= 232448, "a block has 227 KiB of shared memory");
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= kThreads * 168, "a block starts with 168 registers a thread");
};

template <class TensorMap>
struct MxArguments : GemmArguments<TensorMap> {
  // Row kinds: (halves, K/128, M). Weight gradients: (halves, M/128, m_extent rounded up to 128).
  const uint8_t* a_codes;
  const uint16_t* a_scales;  // tokens on the N side: the same, (halves, K/128, M), as lane_scales makes them of the codes
  const uint8_t* b_codes;   // row kinds: (E, halves, N/128, K/128), one per 128 x 128
  // Weight gradients: not codes but the scales themselves in BF16 (one operation each in the K loop instead of five): (M/128, n_extent rounded
  // up to 128), each 128 in the order of mx::fragment_position. They arrive through the ring with their K block.
  const uint16_t* b_scales;
  // What `out` takes as E4M3: (F/128, M) of h for kGateUp, (2, F/128, M) of d(gate) and d(up) for kDgradDown.
  uint8_t* row_codes;
  uint8_t* h_MxF;  // kGateUp with tokens on the N side: h, in place of `out`
  // kDgradDown, for FP8 weight gradients: d(gate), d(up) and weight * h along columns, transposed ((2, F, M) and `scaled_h` (F, M)), their codes
  // (2, M/128, F rounded up to 128) and scales (as b_scales). Without column_codes d_gate_up and scaled_h are BF16 rows.
  TensorMap d_gate_up;
  uint8_t* column_codes;
  uint16_t* scaled_h_scales;
};

template <class TensorMap>
using MxBatch = Batch<MxArguments<TensorMap>, 1>;

// Where the scales of the ring's stage lie.
template <class Isa, class Config>
MOE_FN uint32_t scale_bytes(const Ring<Isa, Config>& ring) {
  return ring.base + Config::kScaleOffset + ring.stage * (Config::kScaleBytesA + Config::kScaleBytesB);
}
// What comes with a K block (gemm_load.h). Row kinds: the codes of the tile's rows. A lane wants two of them, but every block has new lines of them,
// and those fetched one block ahead by the lanes themselves take longer to come than the block's products.
template <Kind kKind, class Isa, class Config>
struct RowCodes {
  const uint8_t* codes;
  int64_t step;

  template <class Arguments>
  MOE_FN RowCodes(const Task& tile, const Arguments& args) : codes(args.a_codes + tile.row0), step(args.num_rows) {}
  MOE_FN uint32_t bytes() const { return Config::kScaleBytesA; }
  MOE_FN void load(KBlock, const Ring<Isa, Config>& ring) {
    Isa::load_bytes(codes, ring.full(), scale_bytes(ring), Config::kScaleBytesA);
    codes += step;
  }
};
// Weight gradients: scales, one per row and column of the tile.
template <Kind kKind, class Isa, class Config>
struct LineScales {
  const uint8_t* a;
  const uint16_t* b;
  int64_t a_pitch, b_pitch;
  uint32_t b_bytes;

  template <class Arguments>
  MOE_FN LineScales(const Task& tile, const Arguments& args) : a_pitch(div_up(args.m_extent, 128) * 128), b_pitch(div_up(args.n_extent, 128) * 128) {
    const int64_t first = tile.row0 / 128;
    const int n0 = tile.n0 < b_pitch ? tile.n0 : 0;  // a tile outside is not multiplied
    a = args.a_codes + (tile.half * (args.num_rows / 128) + first) * a_pitch + tile.m0;
    b = args.b_scales + first * b_pitch + n0;
    b_bytes = n0 + 128 < b_pitch ? 512 : 256;
  }
  MOE_FN uint32_t bytes() const { return Config::kScaleBytesA + b_bytes; }
  MOE_FN void load(KBlock, const Ring<Isa, Config>& ring) {
    Isa::load_bytes(a, ring.full(), scale_bytes(ring), Config::kScaleBytesA);
    Isa::load_bytes(b, ring.full(), scale_bytes(ring) + Config::kScaleBytesA, b_bytes);
    a += a_pitch;
    b += b_pitch;
  }
};

// Weight gradients: the consumers take turns at the tensor core, half a K block at a time, because adding a half to the sums takes about as long
// as its products, and in step they would leave the tensor core idle for it. A consumer passes the turn on when half of its products are done, so
// that the other one's are there when it ends. For the row kinds it costs more than it gives: the products of one warpgroup alone, each waiting
// for the sums of the one before, reach half of the tensor core's rate (NOTES-mx.md).
template <class Isa, class Config>
struct Turns {
  uint32_t base, consumer;
  uint32_t taken = 0;  // the same for both consumers

  MOE_FN Turns(uint32_t shared_base, uint32_t consumer_) : base(shared_base + Config::kTurnOffset), consumer(consumer_) {}
  MOE_FN void wait() const { Isa::barrier_wait(base + 8 * (1 - consumer), (taken & 1) ^ (1 - consumer)); }
  MOE_FN void pass() {
    if (Isa::lane_index() == 0) Isa::barrier_arrive(base + 8 * consumer);
    ++taken;
  }
};

// Starts the products of a K block with half of the tile's columns. `after_second` is called when two of the four are on their way.
template <class Isa, class Config, class F>
MOE_FN void start_half(float (&block)[Config::kAcc / 2], uint32_t stage, uint32_t consumer, int half, F after_second) {
  const uint64_t a = panel_descriptor(stage + consumer * kPanelBytes, false);
  const uint64_t b = panel_descriptor(stage + (Config::kPanelsA + Config::kPanelsB / 2 * half) * kPanelBytes, false);
  constexpr uint64_t kStep = panel_k16_step(false);  // 32 bytes: 32 of K
  Isa::mma_fence();
  Isa::template mma_e4m3<true>(block, a, b);
  MOE_UNROLL
  for (int k = 1; k < 4; ++k) {
    if (k == 2) after_second();
    Isa::template mma_e4m3<false>(block, a + k * kStep, b + k * kStep);
  }
  Isa::mma_commit();
}

// Scale codes of the weights of a row kind's tile: of gate and of up for kGateUp, else of kBlocks neighbouring blocks of 128 columns.
template <Kind kKind, int kBlocks>
struct WeightCodes {
  static constexpr int kCount = kKind == kGateUp ? 2 : kBlocks;
  const uint8_t* codes[kCount];
  int k_blocks, jump;

  template <class Arguments>
  MOE_FN WeightCodes(const Arguments& args, const Task& tile) {
    const int n_blocks = (args.n_extent + 127) / 128;
    k_blocks = div_up(args.k_extent, 128);
    jump = kKind == kDgradGateUp ? (n_blocks - 1) * k_blocks : 0;  // from the end of a gate row of blocks to that of up
    MOE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      int block = tile.n0 / 128 + (kKind == kGateUp ? 0 : i);
      if (block >= n_blocks) block = n_blocks - 1;  // columns outside: zeros
      const int matrix = kKind == kGateUp ? 2 * tile.expert + i : kKind == kDgradGateUp ? 2 * tile.expert : tile.expert;
      codes[i] = args.b_codes + (static_cast<int64_t>(matrix) * n_blocks + block) * k_blocks;
    }
  }
  MOE_FN int at(int kb) const { return kb + (kKind == kDgradGateUp && kb >= k_blocks ? jump : 0); }
};

// Consumer, the K loop of a row kind.
template <Kind kKind, class Isa, class Config, class Arguments, class EpilogueType>
MOE_FN void multiply_rows(float (&sum)[Config::kAcc], const Task& tile, const Arguments& args, int blocks, Ring<Isa, Config>& ring,
                          const EpilogueType& epilogue) {
  constexpr int kHalf = Config::kAcc / 2;
  const uint32_t consumer = epilogue.consumer;
  const WeightCodes<kKind, 2> weights(args, tile);
  uint32_t weight[2] = {Isa::load_code(weights.codes[0]), Isa::load_code(weights.codes[1])};  // of either half of the columns
  auto wait_full = [&] {
    Isa::barrier_wait(ring.full(), ring.phase);
    if (can_gather_fp8(kKind) && args.gather != nullptr) Isa::fence_async_shared();  // A was written by lanes, and is read by the tensor cores
  };
  float block[kHalf];
  wait_full();
  MOE_NO_UNROLL
  for (int kb = 0; kb < blocks; ++kb) {
    float factor[2][2];  // half, row
    const uint32_t stage = ring.data(), empty = ring.empty();
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      start_half<Isa, Config>(block, stage, consumer, half, [] {});
      if (half == 0) {  // while the products run
        Isa::warp_sync();  // or the compiler reads the codes, and waits for them, before the second product
        const uint32_t rows = scale_bytes(ring) + 64 * consumer + epilogue.row_in_group();
        const uint32_t row[2] = {Isa::load_shared_byte(rows), Isa::load_shared_byte(rows + 8)};
        MOE_UNROLL
        for (int i = 0; i < 4; ++i) factor[i / 2][i % 2] = mx::product_scale(row[i % 2], weight[i / 2]);
      } else {  // all that the next block's products wait for
        ring.advance();
        if (kb + 1 < blocks) {
          const int at = weights.at(kb + 1);
          weight[0] = Isa::load_code(weights.codes[0] + at);
          weight[1] = Isa::load_code(weights.codes[1] + at);
          wait_full();
        }
      }
      Isa::template mma_wait<0>();
      if (half == 1) {
        Isa::warp_sync();  // all lanes have read their codes
        Ring<Isa, Config>::release(empty);
      }
      MOE_UNROLL
      for (int i = 0; i < kHalf; ++i) sum[kHalf * half + i] = Isa::fma(block[i], factor[half][i / 2 % 2], sum[kHalf * half + i]);
    }
  }
}

// Consumer, the K loop of a weight gradient: a scale per row and per column.
template <Kind kKind, class Isa, class Config, class Arguments, class EpilogueType>
MOE_FN void multiply_columns(float (&sum)[Config::kAcc], const Task& tile, const Arguments& args, int blocks, Ring<Isa, Config>& ring,
                             const EpilogueType& epilogue, Turns<Isa, Config>& turns) {
  constexpr int kHalf = Config::kAcc / 2;
  const uint32_t consumer = epilogue.consumer;
  const uint32_t quarter = epilogue.lane % 4;
  float block[kHalf];
  MOE_NO_UNROLL
  for (int kb = 0; kb < blocks; ++kb) {
    Isa::barrier_wait(ring.full(), ring.phase);
    MOE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const uint32_t a_scales = scale_bytes(ring) + 64 * consumer + epilogue.row_in_group();
      const uint32_t b_scales = scale_bytes(ring) + Config::kScaleBytesA + 256 * half + 64 * quarter;  // 32 columns of this lane, BF16
      const float row_scale[2] = {mx::finite_scale_value(Isa::load_shared_byte(a_scales)),
                                  mx::finite_scale_value(Isa::load_shared_byte(a_scales + 8))};
      auto next = Isa::load_vector(b_scales);
      turns.wait();
      start_half<Isa, Config>(block, ring.data(), consumer, half, [] { Isa::mma_commit(); });
      Isa::template mma_wait<1>();
      turns.pass();
      Isa::template mma_wait<0>();
      MOE_UNROLL
      for (int part = 0; part < 4; ++part) {
        const auto words = next;
        if (part < 3) next = Isa::load_vector(b_scales + 16 * (part + 1));  // one part ahead
        const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
        MOE_UNROLL
        for (int column = 0; column < 8; ++column) {  // blocks of eight output columns, two of each are this lane's
          const float scale = column % 2 ? Isa::bf16_hi(pairs[column / 2]) : Isa::bf16_lo(pairs[column / 2]);
          MOE_UNROLL
          for (int row = 0; row < 2; ++row) {
            const int at = 16 * part + 4 * (column / 2) + 2 * row + column % 2;
            sum[kHalf * half + at] = Isa::fma(Isa::mul(block[at], scale), row_scale[row], sum[kHalf * half + at]);
          }
        }
      }
      if (half == 1) {
        Isa::warp_sync();  // all lanes have read their scales
        Ring<Isa, Config>::release(ring.empty());
      }
    }
    ring.advance();
  }
}

// Consumer warpgroup, one task: rows 64 * consumer .. + 63 of the tile.
template <Kind kKind, bool kPlain, class Isa, class Config, class Arguments>
MOE_FN void compute_mx_task(const Task& task, const Arguments& args, uint32_t rank, Ring<Isa, Config>& ring,
                            Epilogue<Isa, Config>& epilogue, Turns<Isa, Config>& turns) {
  const Task tile = block_tile<Config>(task, kKind, rank);
  const int blocks = task_k_blocks<kKind, Config>(task, args);
  const int rows = tile.rows - 64 * static_cast<int>(epilogue.consumer);  // real rows of this warpgroup; <= 0: all padding
  const bool live = (is_wgrad(kKind) || rows > 0) && tile.n0 < args.n_extent && blocks > 0;

  float sum[Config::kAcc];
  MOE_UNROLL
  for (int i = 0; i < Config::kAcc; ++i) sum[i] = 0.0f;
  if (is_wgrad(kKind) && args.accumulate) {
    MOE_UNROLL
    for (int chunk = 0; chunk < Config::kColumns64; ++chunk) {
      Isa::barrier_wait(ring.full(), ring.phase);
      epilogue.read_fp32_chunk(sum, chunk, ring.data());
      Isa::warp_sync();
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  }
  if (!live) {
    MOE_NO_UNROLL
    for (int kb = 0; kb < blocks; ++kb) {  // keep step with the ring: a stage may only be given back once all lanes saw it full
      Isa::barrier_wait(ring.full(), ring.phase);
      if (can_gather_fp8(kKind) && args.gather != nullptr) Isa::fence_async_shared();  // the copy engine writes there next
      Isa::warp_sync();
      Ring<Isa, Config>::release(ring.empty());
      ring.advance();
    }
  } else if constexpr (is_wgrad(kKind)) {
    multiply_columns<kKind, Isa, Config>(sum, tile, args, blocks, ring, epilogue, turns);
  } else {
    multiply_rows<kKind, Isa, Config>(sum, tile, args, blocks, ring, epilogue);
  }

  if constexpr (is_wgrad(kKind)) {
    epilogue.write_wgrad(sum, tile, kKind, args);
  } else if constexpr (kKind == kGateUp) {
    MxGateUpTile<Isa, Config> results = {{sum, tile, rows, epilogue, ring}, {}};
    write_gate_up<kPlain, Isa>(results, args);
  } else if constexpr (kKind == kDgradDown) {
    // The K loop has no registers for addresses of the epilogue.
    epilogue.lane = Isa::not_before(epilogue.lane);
    epilogue.warp = Isa::not_before(epilogue.warp);
    MxDgradDownTile<Isa, Config, kPlain> results = {{sum, tile, rows, epilogue, ring, {}}, sum};
    write_dgrad_down<kPlain, Isa>(results, args);
  } else {
    RegisterTile<kKind, Isa, Config> results = {sum, tile, rows, epilogue, ring, {}};
    if (results.wanted(args)) {
      write_tile<kKind, kPlain, Isa>(results, args);
    } else {
      results.skip(args);
    }
  }
}

// The roles of a block with FP8 operands, for run_roles.
template <Kind kKind, bool kPlain, class Isa>
struct MxRoles {
  using Config = MxConfig<kKind>;
  static constexpr bool kFourthWarp = can_gather_fp8(kKind) || can_carry(kKind);
  template <class Batch>
  static MOE_FN uint32_t full_arrivals(const Batch& batch) {
    return 1 + (can_gather_fp8(kKind) && gathers(batch) ? kGatherLanes : 0);
  }
  static MOE_FN void init(uint32_t base) {
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) Isa::barrier_init(base + Config::kTurnOffset + 8 * consumer, 4);
    if constexpr (kKind == kDgradDown) GroupBarriers<Config>::template init<Isa>(base);
  }

  template <class Batch>
  static MOE_FN void load(const Batch& batch, uint32_t base) {
    Ring<Isa, Config> ring(base);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      load_task<kKind, Isa>(task, args, Isa::cluster_rank(), ring, [&](const Task& tile) {
        if constexpr (is_wgrad(kKind)) {
          return LineScales<kKind, Isa, Config>(tile, args);
        } else {
          return RowCodes<kKind, Isa, Config>(tile, args);
        }
      });
    });
  }
  // As in BF16 (TokensM).
  template <class Batch>
  static MOE_FN void gather(const Batch& batch, uint32_t base) {
    if constexpr (can_carry(kKind)) {
      carry_rows<Isa>(batch.kinds[0].carry);
    } else if (gathers(batch)) {
      Ring<Isa, Config> ring(base);
      const int count = *batch.num_tasks, step = static_cast<int>(Isa::num_clusters());
      MOE_NO_UNROLL
      for (int i = static_cast<int>(Isa::cluster_index()); i < count; i += step) {  // no TaskStream: registers are few, and there is time to read a task
        const Task task = batch.tasks[i];
        gather_task<kKind, Isa>(task, batch.kinds[0], Isa::cluster_rank(), ring);
      }
    }
  }
  template <class Batch>
  static MOE_FN void store(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    uint32_t tiles = 0;
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      if constexpr (kKind == kGateUp) {
        store_gate_up_mx(task, args, base, consumer, tiles, ring);
      } else if constexpr (kKind == kDgradDown) {
        store_dgrad_down_mx(task, args, base, consumer, tiles, ring);
      } else {
        store_task<kKind>(task, args, base, consumer, tiles, ring);
      }
    });
    if (Isa::lane_index() == 0) Isa::store_wait_done();  // shared memory must outlive the stores that read it
  }
  template <class Batch>
  static MOE_FN void compute(const Batch& batch, uint32_t base, uint32_t consumer) {
    Ring<Isa, Config> ring(base);
    Epilogue<Isa, Config> epilogue(base, consumer);
    Turns<Isa, Config> turns(base, consumer);
    for_each_task<Isa>(batch, [&](const Task& task, const auto& args) {
      compute_mx_task<kKind, kPlain>(task, args, Isa::cluster_rank(), ring, epilogue, turns);
    });
  }
};

}  // namespace moe
