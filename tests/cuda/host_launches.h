// The launches around the products of a layer as plain loops: what kernels_cuda's rows.h, bias.h, task_list.h and quantize.h declare, for a
// layer that runs on a host emulator. Written from those contracts, not from the kernels. The stream is ignored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "bias.h"
#include "host_tasks.h"
#include "isa/host/host.h"
#include "quantize.h"
#include "rows.h"
#include "task_list.h"
#include "tensor_shape.h"

namespace moe {

// What tensor_map.cc refuses, and what the maps of both host machines have in common.
template <class Map>
Status describe_tensor(Map* map, const char* name, Element element, const void* address, const TensorShape& shape) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return {std::string(name) + " is not aligned to 16 bytes"};
  const int size = element_bytes(element);
  if (shape.inner * size % 16 != 0) return {std::string(name) + " has rows that are no multiple of 16 bytes"};
  map->data = static_cast<uint8_t*>(const_cast<void*>(address));
  map->element_bytes = size;
  const int64_t dims[4] = {shape.inner, shape.outer, shape.halves, shape.experts};
  std::copy(dims, dims + 4, map->dims);
  return {};
}

inline float widen_bf16(uint16_t x) { return mx::float_of(static_cast<uint32_t>(x) << 16); }

Status build_tasks(int64_t experts, const int32_t* count_E, const int32_t* start_E, const TaskList* lists, int num_lists, cudaStream_t) {
  const std::vector<int32_t> counts(count_E, count_E + experts), starts(start_E, start_E + experts);
  for (int l = 0; l < num_lists; ++l) {
    const auto tasks = list_tasks(static_cast<const Tiling&>(lists[l]), counts, starts, 3);  // for how many clusters changes no result
    const int count = static_cast<int>(tasks.size()), front = lists[l].cut.in_front(count);
    for (int i = 0; i < count; ++i) lists[l].tasks[lists[l].cut.place(i, count)] = tasks[i];
    lists[l].num_tasks[kWhole] = count;
    if (lists[l].cut.front > 0) lists[l].num_tasks[kFront] = front, lists[l].num_tasks[kBack] = count - front;
  }
  return {};
}

inline void zero_padding(const LayerShape& s, const Plan& plan, uint16_t* rows_MxD, int zero_to) {
  for (int64_t e = 0; e < s.experts; ++e) {
    const int64_t first = plan.start_E[e] + plan.count_E[e], end = plan.start_E[e] + (plan.count_E[e] + zero_to - 1) / zero_to * zero_to;
    std::fill(rows_MxD + first * s.d_model, rows_MxD + end * s.d_model, uint16_t{0});
  }
}

Status dispatch_rows(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, cudaStream_t, int zero_to) {
  zero_padding(s, plan, rows_MxD, zero_to);
  for (int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
    const int64_t row = plan.row_TxK[slot];
    if (row >= 0) std::copy_n(x_TxD + slot / s.top_k * s.d_model, s.d_model, rows_MxD + row * s.d_model);
  }
  return {};
}

// Rows of the first part: those of tasks in front of the cut, all of them where there is none.
Status dispatch_part(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list, bool front) {
  const int count = list.num_tasks[kFront];
  int64_t cut = count == 0 ? s.rows : 0;
  for (const Task* task = list.tasks + list.cut.at; task < list.tasks + list.cut.at + count; ++task) {
    cut = std::max<int64_t>(cut, task->row0 + std::min(task->rows, task->pair == kPairM ? list.tile_m : list.tile_m / 2));
  }
  for (int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
    const int64_t row = plan.row_TxK[slot];
    if (row >= 0 && (row < cut) == front) std::copy_n(x_TxD + slot / s.top_k * s.d_model, s.d_model, rows_MxD + row * s.d_model);
  }
  return {};
}
Status dispatch_front(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list, cudaStream_t, int zero_to) {
  zero_padding(s, plan, rows_MxD, zero_to);
  return dispatch_part(s, x_TxD, plan, rows_MxD, list, true);
}
Status dispatch_back(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, const TaskList& list, int, cudaStream_t) {
  return dispatch_part(s, x_TxD, plan, rows_MxD, list, false);
}

Status combine_rows(const LayerShape& s, const uint16_t* rows_MxD, const float* weight_TxK, const Plan& plan, uint16_t* y_TxD, cudaStream_t) {
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t d = 0; d < s.d_model; ++d) {
      float sum = 0.0f;
      for (int64_t slot = t * s.top_k; slot < (t + 1) * s.top_k; ++slot) {
        const int64_t row = plan.row_TxK[slot];
        if (row >= 0) sum = std::fma(weight_TxK != nullptr ? weight_TxK[slot] : 1.0f, widen_bf16(rows_MxD[row * s.d_model + d]), sum);
      }
      y_TxD[t * s.d_model + d] = Host::bf16(sum);
    }
  }
  return {};
}

Status sum_weight_partials(const LayerShape& s, const float* partial_CxM, const Plan& plan, float* d_weight_TxK, cudaStream_t, int more) {
  for (int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
    float sum = 0.0f;
    for (int64_t c = 0; c < (s.width + 127) / 128 + more && plan.row_TxK[slot] >= 0; ++c) sum += partial_CxM[c * s.rows + plan.row_TxK[slot]];
    d_weight_TxK[slot] = sum;
  }
  return {};
}

Status zero_unrouted(const LayerShape& s, const Plan& plan, uint16_t* y_TxD, cudaStream_t) {
  for (int64_t t = 0; t < s.tokens; ++t) {
    const int32_t* rows = plan.row_TxK + t * s.top_k;
    if (std::all_of(rows, rows + s.top_k, [](int32_t row) { return row < 0; })) std::fill_n(y_TxD + t * s.d_model, s.d_model, uint16_t{0});
  }
  return {};
}

Status bias_gradients(const LayerShape& s, const Plan& plan, const uint16_t* d_gate_up_2xMxF, const uint16_t* dy_TxD, const float* weight_TxK,
                      float* db_gate_up_Ex2xF, float* db_down_ExD, bool accumulate, cudaStream_t) {
  for (int64_t e = 0; e < s.experts; ++e) {
    if (!accumulate) {
      std::fill_n(db_gate_up_Ex2xF + 2 * e * s.width, 2 * s.width, 0.0f);
      std::fill_n(db_down_ExD + e * s.d_model, s.d_model, 0.0f);
    }
    for (int64_t row = plan.start_E[e]; row < plan.start_E[e] + plan.count_E[e]; ++row) {
      for (int64_t half = 0; half < 2; ++half) {
        const uint16_t* from = d_gate_up_2xMxF + (half * s.rows + row) * s.width;
        for (int64_t f = 0; f < s.width; ++f) db_gate_up_Ex2xF[(2 * e + half) * s.width + f] += widen_bf16(from[f]);
      }
      const int64_t slot = plan.slot_M[row];
      const uint16_t* dy = dy_TxD + slot / s.top_k * s.d_model;
      for (int64_t d = 0; d < s.d_model; ++d) db_down_ExD[e * s.d_model + d] += weight_TxK[slot] * widen_bf16(dy[d]);
    }
  }
  return {};
}

Status bias_weight_partial(const LayerShape& s, const Plan& plan, const uint16_t* dy_TxD, const float* b_down_ExD, float* partial_M,
                           cudaStream_t) {
  for (int64_t e = 0; e < s.experts; ++e) {
    for (int64_t row = plan.start_E[e]; row < plan.start_E[e] + plan.count_E[e]; ++row) {
      const uint16_t* dy = dy_TxD + plan.slot_M[row] / s.top_k * s.d_model;
      partial_M[row] = 0.0f;
      for (int64_t d = 0; d < s.d_model; ++d) partial_M[row] += widen_bf16(dy[d]) * b_down_ExD[e * s.d_model + d];
    }
  }
  return {};
}

// 128 rows of a matrix as one output. Lines are what shares no scale: rows, or columns; blocks lie along the other axis.
class QuantizedTile {
 public:
  QuantizedTile(const QuantizeSource& source, const MxOutput& out, bool columns, int64_t matrix, int64_t row0, const float* values)
      : s_(source), out_(out), columns_(columns), matrix_(matrix), row0_(row0), values_(values) {
    const int64_t wide = (s_.columns + 127) / 128 * 128, tall = (s_.rows + 127) / 128 * 128;
    lines_ = columns ? wide : 128;
    all_lines_ = columns ? wide : tall;
    blocks_ = (columns ? 128 : wide) / 32;
    all_groups_ = (columns ? tall : wide) / 128;
    common_codes_.resize(static_cast<size_t>(lines_ * blocks_ / 4));
    for (int64_t line = 0; line < lines_; ++line) {
      for (int64_t block = 0; block < blocks_; ++block) {
        uint32_t amax = 0;
        for (int64_t i = 32 * block; i < 32 * block + 32; ++i) amax = std::max(amax, mx::bits_of(value(line, i)) & 0x7FFFFFFFu);
        codes_.push_back(mx::scale_code(amax));
        uint32_t& common = common_codes_[group(line, block)];
        if (codes_.back() != mx::kPoison) common = std::max(common, codes_.back());
      }
    }
  }
  void write() const {
    for (int64_t line = 0; line < lines_; ++line) {
      for (int64_t block = 0; block < blocks_; ++block) {
        write_code(line, block);
        for (int64_t i = 32 * block; i < 32 * block + 32; ++i) write_element(line, i);
      }
    }
  }

 private:
  float value(int64_t line, int64_t i) const {
    const int64_t r = columns_ ? i : line, c = columns_ ? line : i;
    return c < s_.columns ? values_[r * s_.columns + c] : 0.0f;
  }
  uint32_t code(int64_t line, int64_t block) const { return codes_[static_cast<size_t>(line * blocks_ + block)]; }
  // Which blocks share a code after re-basing: four of a line, in kAlignedTile of 128 lines.
  size_t group(int64_t line, int64_t block) const {
    return static_cast<size_t>((out_.form == Form::kAlignedTile ? line / 128 : line) * (blocks_ / 4) + block / 4);
  }
  uint32_t common_code(int64_t line, int64_t block) const { return common_codes_[group(line, block)]; }
  void write_code(int64_t line, int64_t block) const {
    if (out_.form == Form::kDequantized) return;
    const int64_t at_line = columns_ ? line : row0_ + line, at_block = columns_ ? row0_ / 32 + block : block;
    if (out_.form == Form::kMx) {
      const int64_t length = columns_ ? s_.rows : s_.columns;
      out_.codes[matrix_ * mx::interleaved_offset(all_lines_, 0, length) + mx::interleaved_offset(at_line, at_block, length)] =
          static_cast<uint8_t>(code(line, block));
      return;
    }
    if (block % 4 != 0) return;
    const uint32_t common = common_code(line, block);
    const int64_t at_group = matrix_ * all_groups_ + at_block / 4;
    if (out_.form == Form::kAlignedTile) {
      out_.codes[(matrix_ * (all_lines_ / 128) + at_line / 128) * all_groups_ + at_block / 4] = static_cast<uint8_t>(common);
    } else if (out_.layout == CodeLayout::kFragment) {
      const int64_t at = at_group * all_lines_ + at_line / 128 * 128 + mx::fragment_position(static_cast<int>(at_line % 128));
      reinterpret_cast<uint16_t*>(out_.codes)[at] = static_cast<uint16_t>(mx::bits_of(mx::finite_scale_value(common)) >> 16);
    } else {
      out_.codes[at_group * all_lines_ + at_line] = static_cast<uint8_t>(common);
    }
  }
  void write_element(int64_t line, int64_t i) const {
    const int64_t r = row0_ + (columns_ ? i : line), c = columns_ ? line : i;
    if (r >= s_.rows || c >= s_.columns) return;
    const int64_t at = out_.transposed ? (matrix_ * s_.columns + c) * s_.rows + r : (matrix_ * s_.rows + r) * s_.columns + c;
    const uint32_t scale = code(line, i / 32), byte = mx::to_e4m3(value(line, i) * mx::reciprocal_scale(scale));
    if (out_.form == Form::kDequantized) {
      static_cast<uint16_t*>(out_.elements)[at] = Host::bf16(mx::from_e4m3(byte) * mx::scale_value(scale));
    } else if (out_.form == Form::kMx) {
      static_cast<uint8_t*>(out_.elements)[at] = static_cast<uint8_t>(byte);
    } else {
      const uint32_t factor = mx::rebase_factor(scale, common_code(line, i / 32));
      static_cast<uint8_t*>(out_.elements)[at] = static_cast<uint8_t>(mx::rebase_e4m3(byte, factor));
    }
  }

  const QuantizeSource& s_;
  const MxOutput& out_;
  const bool columns_;
  const int64_t matrix_, row0_;
  const float* const values_;
  int64_t lines_, all_lines_, blocks_, all_groups_;  // of this tile, and of the matrix; blocks of 32, groups of 128
  std::vector<uint32_t> codes_, common_codes_;
};

// Every form of a source without NaN, but kMx with plain codes. As the kernels, whole tiles of 128 rows at a time.
Status quantize(const QuantizeSource& source, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t) {
  const int64_t R = source.rows, C = source.columns;
  std::vector<float> tile(static_cast<size_t>(128 * C));
  for (int64_t matrix = 0; matrix < source.batch; ++matrix) {
    for (int64_t row0 = 0; row0 < R; row0 += 128) {
      if (source.slot_M != nullptr && source.slot_M[row0] < 0) continue;
      std::fill(tile.begin(), tile.end(), 0.0f);
      for (int64_t r = 0; r < std::min<int64_t>(128, R - row0); ++r) {
        const int32_t slot = source.slot_M == nullptr ? 0 : source.slot_M[row0 + r];
        if (slot < 0) continue;
        const int64_t from = source.gather > 0 ? slot / source.gather : matrix * R + row0 + r;
        for (int64_t c = 0; c < C; ++c) {
          tile[static_cast<size_t>(r * C + c)] = source.fp32 ? static_cast<const float*>(source.data)[from * C + c]
                                                             : widen_bf16(static_cast<const uint16_t*>(source.data)[from * C + c]);
        }
      }
      for (const bool columns : {false, true}) {
        const MxOutput& out = columns ? by_columns : by_rows;
        if (out.form == Form::kNone) continue;
        if (out.form == Form::kMx && out.layout != CodeLayout::kInterleaved) return {"quantize: not a form of this host"};
        QuantizedTile(source, out, columns, matrix, row0, tile.data()).write();
      }
    }
  }
  return {};
}

Status quantize_two(const QuantizeSource (&sources)[2], const MxOutput (&by_columns)[2], cudaStream_t stream) {
  const Status status = quantize(sources[0], {}, by_columns[0], stream);
  return status.ok() ? quantize(sources[1], {}, by_columns[1], stream) : status;
}

Status dispatch_quantized(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, const QuantizedTokens& to, cudaStream_t stream) {
  std::vector<uint8_t> of_rows(to.by_token ? static_cast<size_t>(s.rows * s.d_model) : 0);
  uint8_t* const elements_MxD = to.by_token ? of_rows.data() : to.elements;
  QuantizeSource source;
  source.data = x_TxD;
  source.rows = s.rows;
  source.columns = s.d_model;
  source.slot_M = plan.slot_M;
  source.gather = s.top_k;
  MxOutput out;
  out.form = Form::kAligned;
  out.elements = elements_MxD;
  out.codes = to.codes;
  if (const Status status = quantize(source, out, {}, stream); !status.ok()) return status;
  if (to.by_token) std::fill(to.elements, to.elements + s.tokens * s.d_model, static_cast<uint8_t>(mx::kNanByte));  // those without a row
  for (int64_t row = 0; row < s.rows && to.by_token; ++row) {
    if (plan.slot_M[row] >= 0) std::copy_n(elements_MxD + row * s.d_model, s.d_model, to.elements + plan.slot_M[row] / s.top_k * s.d_model);
  }
  for (int64_t e = 0; e < s.experts; ++e) {  // padding that the kernel does not write: NaN
    const int64_t first = plan.start_E[e] + div_up(plan.count_E[e], to.zero_to) * to.zero_to, end = plan.start_E[e] + div_up(plan.count_E[e], 128) * 128;
    std::fill(elements_MxD + first * s.d_model, elements_MxD + end * s.d_model, static_cast<uint8_t>(mx::kNanByte));
  }
  return to.rows_MxD != nullptr ? dispatch_rows(s, x_TxD, plan, to.rows_MxD, stream, to.zero_rows_to) : Status{};
}

Status lane_scales(const LayerShape& s, const Plan& plan, const uint8_t* codes, int64_t lines, uint16_t* scales, cudaStream_t) {
  for (int64_t line = 0; line < lines; ++line) {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (plan.slot_M[row / 64 * 64] < 0) continue;
      const float scale = mx::finite_scale_value(codes[line * s.rows + row]);
      scales[line * s.rows + row / 64 * 64 + mx::lane_position(row % 64)] = static_cast<uint16_t>(mx::bits_of(scale) >> 16);
    }
  }
  return {};
}

Status dequantize_aligned_rows(const LayerShape& s, const Plan& plan, const uint8_t* elements, const uint8_t* codes, int64_t width,
                               int64_t halves, uint16_t* out, cudaStream_t) {
  const int64_t groups = (width + 127) / 128;
  for (int64_t half = 0; half < halves; ++half) {
    for (int64_t row = 0; row < s.rows; ++row) {
      if (plan.slot_M[row] < 0) continue;
      for (int64_t c = 0; c < width; ++c) {
        const int64_t at = (half * s.rows + row) * width + c;
        out[at] = Host::bf16(mx::from_e4m3(elements[at]) * mx::scale_value(codes[(half * groups + c / 128) * s.rows + row]));
      }
    }
  }
  return {};
}

}  // namespace moe
