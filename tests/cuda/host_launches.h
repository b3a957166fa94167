// The launches around the products of a layer as plain loops: what kernels_cuda's rows.h, task_list.h and quantize.h declare, for a layer
// that runs on a host emulator. Written from those contracts, not from the kernels. The stream is ignored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa/host/host.h"
#include "quantize.h"
#include "rows.h"
#include "task_list.h"

namespace moe {

inline float widen_bf16(uint16_t x) { return mx::float_of(static_cast<uint32_t>(x) << 16); }

Status build_tasks(int64_t experts, const int32_t* count_E, const int32_t* start_E, const TaskList* lists, int num_lists, cudaStream_t) {
  for (int l = 0; l < num_lists; ++l) {
    int32_t at = 0;
    for (int e = 0; e < experts; ++e) {
      const TaskGrid grid = task_grid(lists[l], count_E[e]);
      for (int i = 0; i < grid.total; ++i) lists[l].tasks[at++] = make_task(lists[l], grid, i, e, start_E[e], count_E[e]);
    }
    *lists[l].num_tasks = at;
  }
  return {};
}

Status dispatch_rows(const LayerShape& s, const uint16_t* x_TxD, const Plan& plan, uint16_t* rows_MxD, cudaStream_t, int zero_to) {
  for (int64_t e = 0; e < s.experts; ++e) {  // padding
    const int64_t first = plan.start_E[e] + plan.count_E[e], end = plan.start_E[e] + (plan.count_E[e] + zero_to - 1) / zero_to * zero_to;
    std::fill(rows_MxD + first * s.d_model, rows_MxD + end * s.d_model, uint16_t{0});
  }
  for (int64_t slot = 0; slot < s.tokens * s.top_k; ++slot) {
    const int64_t row = plan.row_TxK[slot];
    if (row >= 0) std::copy_n(x_TxD + slot / s.top_k * s.d_model, s.d_model, rows_MxD + row * s.d_model);
  }
  return {};
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

// Form::kMx with interleaved codes, elements in the layout of the source. As the kernels, whole tiles of 128 rows at a time.
Status quantize(const QuantizeSource& source, const MxOutput& by_rows, const MxOutput& by_columns, cudaStream_t) {
  const int64_t R = source.rows, C = source.columns;
  std::vector<float> tile(static_cast<size_t>(128 * C));
  for (int64_t matrix = 0; matrix < source.batch; ++matrix) {
    for (int64_t row0 = 0; row0 < R; row0 += 128) {
      if (source.slot_M != nullptr && source.slot_M[row0] < 0) continue;
      const int64_t lines = std::min<int64_t>(128, R - row0);
      std::fill(tile.begin(), tile.end(), 0.0f);
      for (int64_t r = 0; r < lines; ++r) {
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
        if (out.form != Form::kMx || out.layout != CodeLayout::kInterleaved || out.transposed) return {"quantize: not a form of this host"};
        const int64_t across = columns ? C : lines, padded = (across + 127) / 128 * 128, along = columns ? 128 : (C + 127) / 128 * 128;
        const int64_t table = columns ? mx::interleaved_offset((C + 127) / 128 * 128, 0, R) : mx::interleaved_offset((R + 127) / 128 * 128, 0, C);
        auto value = [&](int64_t line, int64_t i) {
          const int64_t r = columns ? i : line, c = columns ? line : i;
          return r < 128 && c < C ? tile[static_cast<size_t>(r * C + c)] : 0.0f;
        };
        for (int64_t line = 0; line < padded; ++line) {
          for (int64_t block = 0; block < along; block += 32) {
            uint32_t amax = 0;
            for (int64_t i = block; i < block + 32; ++i) amax = std::max(amax, mx::bits_of(value(line, i)) & 0x7FFFFFFFu);
            const uint32_t code = mx::scale_code(amax);
            const int64_t at = columns ? mx::interleaved_offset(line, (row0 + block) / 32, R) : mx::interleaved_offset(row0 + line, block / 32, C);
            out.codes[matrix * table + at] = static_cast<uint8_t>(code);
            for (int64_t i = block; i < block + 32; ++i) {
              const int64_t r = columns ? i : line, c = columns ? line : i;
              if (r >= lines || c >= C) continue;
              const uint32_t byte = mx::to_e4m3(value(line, i) * mx::reciprocal_scale(code));
              static_cast<uint8_t*>(out.elements)[(matrix * R + row0 + r) * C + c] = static_cast<uint8_t>(byte);
            }
          }
        }
      }
    }
  }
  return {};
}

}  // namespace moe
