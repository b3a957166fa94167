// The single-GPU expert layer for Hopper (sm_90a), BF16: plain C++ over raw device pointers and a stream. No XLA headers, no host
// synchronisation, no allocation of memory: every call can be captured into a graph. Callers own all memory; each operation
// states the workspace it needs. Where launches overlap they also use a second stream, which a call has to itself while it
// launches and which is kept for the next one on the same stream (overlap.h). docs/design.md section 2 is the contract (Plan, row order, rounding points).
//
// Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch (padded).
// Layouts are row-major in the order of the suffix; BF16 data is passed as uint16_t*.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "activation.h"

typedef struct CUstream_st* cudaStream_t;  // as in CUDA's headers, which host tests of layers do without

namespace moe {

// Empty when all is well; else one line that names the argument, what it is and what it must be.
struct Status {
  std::string message;
  bool ok() const { return message.empty(); }
};

// How a grouped product is run. Changes speed, never bits; what suits a shape is measured (moejax/tune.py), and kWayAuto takes the
// default. A product that can't run as asked refuses.
enum Way : uint8_t {
  kWayAuto,        // what layer.cc thinks suits the shape
  kWayDispatched,  // rows of tokens are first copied into expert order, and read by the copy engine
  kWayGathered,    // rows of tokens are read where they are
  kWayTokensN,     // tokens on the N side of the product, for experts with few rows; rows are dispatched
  kWayGatheredN,   // tokens on the N side, read where they are
  // Weight gradients with one operand at rest. Those that continue a buffer run dispatched.
  kWayResident512,   // so many columns of B in the shared memory of a cluster (gemm_resident.h), for experts with up to 192 rows
  kWayResidentRows,  // rows of A in registers (gemm_resident_rows.h), for experts with about 512 rows or fewer
  kWayResidentFp8,   // columns of B in shared memory, of FP8 operands (mx_resident.h), for experts with up to 640 rows
  kWayBeside,        // rows are dispatched in two parts, the second beside the product of the tasks that need the first alone (row_copy.h)
  kNumWays,
};
constexpr int kNumProducts = 6;
inline const char* product_name(int product) {  // Kind in task.h
  static const char* const kNames[kNumProducts] = {"gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up"};
  return kNames[product];
}

struct LayerShape {
  int64_t tokens = 0;   // T
  int64_t top_k = 0;    // K
  int64_t experts = 0;  // E, experts whose weights are here
  int64_t rows = 0;     // M: a multiple of 128, at least what rows_bound says for dropless
  int64_t d_model = 0;  // D: a multiple of 8
  int64_t width = 0;    // F: a multiple of 8
  Way way[8] = {};      // by product; the last two are unused
};

struct Weights {
  const uint16_t* gate_up_Ex2xFxD = nullptr;  // BF16
  const uint16_t* down_ExDxF = nullptr;       // BF16
  const float* b_gate_up_Ex2xF = nullptr;     // FP32, added before the rounding of gate and up
  const float* b_down_ExD = nullptr;          // FP32, added before the rounding of a slot row; both biases, or neither
};

struct WeightGradients {  // FP32
  float* gate_up_Ex2xFxD = nullptr;
  float* down_ExDxF = nullptr;
  float* b_gate_up_Ex2xF = nullptr;  // with biases only
  float* b_down_ExD = nullptr;
};

constexpr int kGroupRows = 128;  // groups start at multiples of this many rows

// Experts that can have rows. One layer of a stack is called with the experts of all layers, of which only its own have any; how many those
// are shows in the padding that M has room for (rows_bound).
int64_t routed_experts(const LayerShape& shape);

// Whether a product of this shape can run that way; kWayAuto always. `rows` is not looked at.
bool has_way(const LayerShape& shape, int product, Way way);

// M for dropless dispatch: T min(K, E) rows and up to 127 of padding per expert, rounded up to 128.
int64_t rows_bound(int64_t tokens, int64_t top_k, int64_t experts);

struct Plan {
  int32_t* count_E = nullptr;   // rows of each expert, after capacity
  int32_t* start_E = nullptr;   // its first row, a multiple of 128
  int32_t* row_TxK = nullptr;   // row of each (token, slot), -1: masked, dropped or another rank's
  int32_t* slot_M = nullptr;    // flat slot t K + s of each row, -1: padding
  int32_t* routed_E = nullptr;  // rows asked for, before capacity
};

// Stable counting sort of the slots by expert. Experts [first_expert, first_expert + E) are local; other ids, and negative ones,
// get no row. `capacity` cuts each expert's rows (the last in token order are dropped); INT32_MAX: dropless. Rows that would
// pass M are dropped as well, and count_E says so: nothing is written out of bounds. E <= 4096.
size_t schedule_workspace_bytes(const LayerShape& shape);
Status schedule(const LayerShape& shape, const int32_t* expert_TxK, int32_t first_expert, int32_t capacity, const Plan& plan,
                void* workspace, cudaStream_t stream);

// y_TxD = combine(expert(dispatch(x))). gate_up_2xMxF: if not null, gate and up are saved there (BF16, 4 F bytes per row; the
// only residual besides the inputs). All of it: x and y BF16; weight_TxK FP32.
size_t forward_workspace_bytes(const LayerShape& shape);
Status forward(const LayerShape& shape, const Activation& act, const uint16_t* x_TxD, const float* weight_TxK, const Plan& plan,
               const Weights& weights, uint16_t* y_TxD, uint16_t* gate_up_2xMxF, void* workspace, cudaStream_t stream);

// Gradients of forward. gate_up_2xMxF: as saved, or null to recompute. Weight gradients are overwritten, or continued from what is
// there when `accumulate` (row order; experts without rows leave their buffer as it is). Overwriting gives exact zeros for them.
size_t backward_workspace_bytes(const LayerShape& shape, bool recompute);
Status backward(const LayerShape& shape, const Activation& act, const uint16_t* x_TxD, const float* weight_TxK,
                const uint16_t* dy_TxD, const Plan& plan, const Weights& weights, const uint16_t* gate_up_2xMxF, uint16_t* dx_TxD,
                float* d_weight_TxK, const WeightGradients& gradients, bool accumulate, void* workspace, cudaStream_t stream);

}  // namespace moe
