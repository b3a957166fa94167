// Tensor memory and the tensor unit of the machine: allocation, loads, scale copies, products, commits, decoded from descriptor bits.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../quantize_math.h"
#include "../sm100_layout.h"
#include "sm100_state.h"

namespace moe::machine {
namespace {

using sm100::InstructionFields;
using sm100::MatrixFields;

Cell& cell_at(int b, uint32_t lane, uint32_t column) {
  if (lane >= 128 || column >= 512) {
    fail("tensor-memory lane " + std::to_string(lane) + ", column " + std::to_string(column) + " is out of bounds");
  }
  if (state->tmem[b].owner[column] == 0) fail("tensor-memory column " + std::to_string(column) + " is not allocated");
  return state->tmem[b].cells[lane * 512 + column];
}

void check_after_sync(const char* what) {
  if (state->me().needs_after) {
    fail(std::string(what) + " after a wait without tcgen05.fence::after_thread_sync");
  }
}

double power_of_two(uint32_t codes) {  // 2^(codes - 254): both scales at once
  static const std::vector<double> table = [] {
    std::vector<double> t(512);
    for (int i = 0; i < 512; ++i) t[i] = std::ldexp(1.0, i - 254);
    return t;
  }();
  return table[codes];
}

// The block that issues for the pair.
void check_issuer(const char* what) {
  check_after_sync(what);
  if (block() != 0) fail(std::string(what) + " issued by a block that does not lead its pair");
}

bool plain_matrix(const MatrixFields& m) { return m.version == 1 && m.base_offset == 0 && m.leading_absolute == 0; }

// One operand of a product as the tensor core sees it: M/N rows (of one block) by 32 bytes of K.
struct Operand {
  int rows = 0, k = 0, bytes = 0;
  bool mn_major = false;
  MatrixFields fields = {};

  uint32_t address(int mn, int byte_k) const {  // of the element's first byte; byte_k = k * bytes when K-major, k when MN-major
    const uint32_t per_row = 128 / bytes;
    uint32_t a;
    if (mn_major) {
      a = fields.address + mn / per_row * fields.leading_bytes + byte_k / 8 * fields.stride_bytes + byte_k % 8 * 128 +
          mn % per_row * bytes;
    } else {
      a = fields.address + mn / 8 * fields.stride_bytes + mn % 8 * 128 + byte_k;
    }
    return a ^ ((a >> 7 & 7) << 4);
  }
  // Calls f with every 16-byte piece of shared memory once.
  template <class F>
  void for_pieces(F f) const {
    if (mn_major) {
      for (int i = 0; i < k; ++i) {
        for (int mn = 0; mn < rows; mn += 16 / bytes) f(address(mn, i) & ~15u);
      }
    } else {
      for (int mn = 0; mn < rows; ++mn) {
        for (int b = 0; b < 32; b += 16) f(address(mn, b) & ~15u);
      }
    }
  }
  // values[k][row], FP32.
  void read(int b, std::vector<float>& values, int stride, int first) const {
    for (int mn = 0; mn < rows; ++mn) {
      for (int i = 0; i < k; ++i) {
        const uint8_t* at = bytes_at(b, address(mn, mn_major ? i : i * bytes));
        float v;
        if (bytes == 1) {
          v = mx::from_e4m3(*at);
        } else {
          uint16_t bits;
          std::memcpy(&bits, at, 2);
          v = mx::float_of(static_cast<uint32_t>(bits) << 16);
        }
        values[static_cast<size_t>(i) * stride + first + mn] = v;
      }
    }
  }
};

Operand decode_operand(const char* name, uint64_t descriptor, bool mn_major, int rows, int bytes) {
  Operand o;
  o.rows = rows;
  o.bytes = bytes;
  o.k = 32 / bytes;
  o.mn_major = mn_major;
  o.fields = sm100::decode_matrix(descriptor);
  const MatrixFields& f = o.fields;
  if (!plain_matrix(f)) fail(std::string("the descriptor of ") + name + " does not say version 1, base offset 0");
  if (f.swizzle != sm100::kSwizzle128) fail(std::string("the descriptor of ") + name + " does not say 128-byte swizzle");
  if (f.stride_bytes % 1024 != 0 || f.stride_bytes == 0) fail(std::string("groups of 8 rows of ") + name + " are not 1024 bytes apart");
  if (mn_major && rows > 128 / bytes && (f.leading_bytes % 1024 != 0 || f.leading_bytes == 0)) {
    fail(std::string("the leading offset of ") + name + " is not a multiple of 1024 bytes");
  }
  return o;
}

}  // namespace

void fence_before_sync() {
  Worker& me = state->me();
  if (!me.loads.empty()) fail("tcgen05.fence::before_thread_sync while tensor-memory loads are under way");
  me.needs_before = false;
}
void fence_after_sync() { state->me().needs_after = false; }

void tmem_alloc(uint32_t result_address, uint32_t columns) {
  Tmem& tmem = state->tmem[block()];
  if (columns < 32 || columns > 512 || (columns & (columns - 1)) != 0) {
    fail(std::to_string(columns) + " columns of tensor memory: must be a power of two from 32 to 512");
  }
  if (tmem.relinquished) fail("tensor memory is allocated after the permit was given up");
  for (uint32_t at = 0; at + columns <= 512; at += columns) {
    if (std::all_of(tmem.owner + at, tmem.owner + at + columns, [](int o) { return o == 0; })) {
      const int id = ++tmem.allocations;
      std::fill(tmem.owner + at, tmem.owner + at + columns, id);
      for (uint32_t lane = 0; lane < 128; ++lane) {
        std::fill(tmem.cells.begin() + lane * 512 + at, tmem.cells.begin() + lane * 512 + at + columns, Cell{});
      }
      tmem.allocated = true;
      chunk_at(block(), result_address, 4).state = kInFlight;  // visible after the next barrier of this warp
      std::memcpy(bytes_at(block(), result_address), &at, 4);
      const int first = state->fibers.self() / 32 * 32;
      for (int i = first; i < first + 32; ++i) {
        state->workers[i].alloc_chunk = static_cast<int>((result_address - kSharedBase) / 16);
        state->workers[i].needs_before = true;
      }
      return;
    }
  }
  fail("no " + std::to_string(columns) + " free columns of tensor memory: the allocation would wait for ever");
}

void tmem_dealloc(uint32_t address, uint32_t columns) {
  check_after_sync("tcgen05.dealloc");
  Tmem& tmem = state->tmem[block()];
  if (blocks() == 2 && !state->tmem[1 - block()].synchronised) {
    fail("tensor memory of a pair is deallocated before a cluster barrier has followed the peer's allocation (cutlass #3435)");
  }
  if (address % 0x10000 + columns > 512 || columns == 0) fail("deallocation of columns that do not exist");
  const int id = tmem.owner[address % 512];
  if (id == 0) fail("tensor memory is deallocated twice, or never was allocated");
  const long held = std::count(tmem.owner, tmem.owner + 512, id);
  if (held != static_cast<long>(columns) || (address > 0 && tmem.owner[address - 1] == id)) {
    fail("deallocation of " + std::to_string(columns) + " columns, " + std::to_string(held) + " were allocated");
  }
  for (uint32_t lane = 0; lane < 128; ++lane) {
    for (uint32_t c = address; c < address + columns; ++c) {
      const Cell& cell = tmem.cells[lane * 512 + c];
      if (cell.writers > 0 || cell.readers > 0) fail("tensor memory is deallocated while it is in use");
    }
  }
  std::fill(tmem.owner + address, tmem.owner + address + columns, 0);
}

void tmem_relinquish() { state->tmem[block()].relinquished = true; }

void tmem_load(uint32_t address, uint32_t* to, int columns) {
  check_after_sync("tcgen05.ld");
  Worker& me = state->me();
  const uint32_t lane = address >> 16, column = address & 0xFFFFu;
  const uint32_t own = static_cast<uint32_t>(thread() / 32 % 4) * 32;
  if (lane != own) {
    fail("a warp may read lanes " + std::to_string(own) + ".." + std::to_string(own + 31) + " of tensor memory, not " + std::to_string(lane));
  }
  const uint32_t mine = lane + static_cast<uint32_t>(thread() % 32);
  for (int i = 0; i < columns; ++i) {
    Cell& cell = cell_at(block(), mine, column + i);
    if (cell.writers > 0) fail("tensor memory is read while a product is still writing it");
    if (!cell.written) fail("tensor memory is read at column " + std::to_string(column + i) + " and was never written");
    ++cell.readers;
    to[i] = 0x7FC0DEADu;  // until the wait
  }
  me.loads.push_back({address, to, columns});
  me.needs_before = true;
}

void tmem_wait_load() {
  Worker& me = state->me();
  for (const Load& load : me.loads) {
    const uint32_t lane = (load.address >> 16) + static_cast<uint32_t>(thread() % 32);
    for (int i = 0; i < load.columns; ++i) {
      Cell& cell = cell_at(block(), lane, (load.address & 0xFFFFu) + i);
      load.to[i] = cell.value;
      --cell.readers;
    }
  }
  me.loads.clear();
}

void copy_scales(uint32_t tmem, uint64_t descriptor) {
  check_issuer("tcgen05.cp");
  const MatrixFields f = sm100::decode_matrix(descriptor);
  if (!plain_matrix(f) || f.swizzle != sm100::kSwizzleNone) fail("the descriptor of a scale copy must say version 1 and no swizzle");
  if (tmem >> 16 != 0) fail("a scale copy must start at lane 0");
  const int count = blocks();
  for (int b = 0; b < count; ++b) {
    for (uint32_t row = 0; row < 32; ++row) begin_async_read(b, f.address + row / 8 * f.stride_bytes + row % 8 * 16);
    for (uint32_t c = 0; c < 4; ++c) {
      if (cell_at(b, 0, tmem + c).readers > 0) fail("scales are copied over tensor memory that is being read");
    }
  }
  state->tensor[0].push_back([=] {
    for (int b = 0; b < count; ++b) {
      for (uint32_t row = 0; row < 32; ++row) {
        const uint32_t address = f.address + row / 8 * f.stride_bytes + row % 8 * 16;
        for (uint32_t quarter = 0; quarter < 4; ++quarter) {
          for (uint32_t c = 0; c < 4; ++c) {
            Cell& cell = cell_at(b, quarter * 32 + row, tmem + c);
            std::memcpy(&cell.value, bytes_at(b, address + 4 * c), 4);
            cell.written = true;
          }
        }
        end_async_read(b, address);
      }
    }
  });
}

void product(bool block_scaled, uint32_t d, uint64_t a, uint64_t b, uint32_t instruction, uint32_t scale_a, uint32_t scale_b,
             bool accumulate) {
  check_issuer("tcgen05.mma");
  const InstructionFields f = sm100::decode_instruction(instruction);
  const int count = blocks();
  const bool supported = block_scaled ? sm100::mx_shape_supported(count, f.m, f.n) : sm100::bf16_shape_supported(count, f.m, f.n);
  if (!supported) fail("a product of M " + std::to_string(f.m) + ", N " + std::to_string(f.n) + " does not exist for " + std::to_string(count) + " block(s)");
  if (f.sparse || f.negate_a || f.negate_b) fail("the instruction descriptor asks for sparsity or negation");
  if (block_scaled && (f.a_format != 0 || f.b_format != 0)) fail("the instruction descriptor says E5M2 operands (TE #3342); all are E4M3");
  if (block_scaled && !f.ue8m0) fail("the instruction descriptor does not say UE8M0 scales");
  if (!block_scaled && (f.a_format != 1 || f.b_format != 1 || f.accumulator != 1)) fail("the instruction descriptor does not say BF16 operands, FP32 accumulators");
  if (d >> 16 != 0) fail("accumulators must start at lane 0");
  const int bytes = block_scaled ? 1 : 2;
  const Operand left = decode_operand("A", a, f.mn_major_a, f.m / count, bytes);
  const Operand right = decode_operand("B", b, f.mn_major_b, f.n / count, bytes);
  for (int block = 0; block < count; ++block) {
    left.for_pieces([&](uint32_t at) { begin_async_read(block, at); });
    right.for_pieces([&](uint32_t at) { begin_async_read(block, at); });
    for (uint32_t lane = 0; lane < 128; ++lane) {
      for (int n = 0; n < f.n; ++n) {
        Cell& cell = cell_at(block, lane, d + n);
        if (cell.readers > 0) fail("accumulators are overwritten while a warp still loads them");
        ++cell.writers;
      }
    }
  }
  state->tensor[0].push_back([=] {
    std::vector<float> rhs(static_cast<size_t>(left.k) * f.n), lhs(static_cast<size_t>(left.k) * 128), row(f.n);
    for (int block = 0; block < count; ++block) right.read(block, rhs, f.n, block * right.rows);
    for (int block = 0; block < count; ++block) {
      left.read(block, lhs, 128, 0);
      auto scale = [&](uint32_t base, int index, int id) {  // code of operand row `index`
        // All four quarters must hold it: the hardware reads its own.
        uint32_t code = 0;
        for (uint32_t quarter = 0; quarter < 4; ++quarter) {
          const Cell& cell = cell_at(block, quarter * 32 + index % 32, base + index / 32);
          if (!cell.written) fail("scales at tensor-memory column " + std::to_string(base + index / 32) + " were never copied");
          code = cell.value >> (8 * id) & 0xFF;
        }
        return code;
      };
      std::vector<uint32_t> codes_b(f.n, 127);
      if (block_scaled) {
        for (int n = 0; n < f.n; ++n) codes_b[n] = scale(scale_b, n, f.b_scale_id);
      }
      for (int m = 0; m < 128; ++m) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (int k = 0; k < left.k; ++k) {
          const float x = lhs[static_cast<size_t>(k) * 128 + m];
          const float* y = &rhs[static_cast<size_t>(k) * f.n];
          for (int n = 0; n < f.n; ++n) row[n] += x * y[n];
        }
        const uint32_t code_a = block_scaled ? scale(scale_a, m, f.a_scale_id) : 127;
        Cell* cells = &state->tmem[block].cells[static_cast<size_t>(m) * 512 + d];
        for (int n = 0; n < f.n; ++n) {
          float sum = row[n];
          if (block_scaled) {
            const bool poisoned = code_a == mx::kPoison || codes_b[n] == mx::kPoison;
            sum = poisoned ? NAN : static_cast<float>(double{sum} * power_of_two(code_a + codes_b[n]));
          }
          if (accumulate) {
            if (!cells[n].written) fail("a product accumulates on tensor memory that was never written");
            sum += mx::float_of(cells[n].value);
          }
          cells[n].value = mx::bits_of(sum);
          cells[n].written = true;
          --cells[n].writers;
        }
      }
      left.for_pieces([&](uint32_t at) { end_async_read(block, at); });
      right.for_pieces([&](uint32_t at) { end_async_read(block, at); });
    }
  });
  yield();
}

void commit(uint32_t bar, uint32_t block_mask) {
  check_issuer("tcgen05.commit");
  const int count = blocks();
  if (block_mask >> count != 0) fail("a commit signals a block that the cluster does not have");
  state->tensor[0].push_back([=] {
    for (int b = 0; b < count; ++b) {
      if (block_mask >> b & 1) arrive_by_unit(b, bar);
    }
  });
  yield();
}

}  // namespace moe::machine
