// Every gated activation of the library as one formula of gate g and up u, so that no variant needs a branch:
//   h = g' sigmoid(alpha g' (1 + gamma g'^2)) (u' + beta),  g' = min(g, limit),  u' = clamp(u, -limit, limit)
// swiglu: 1, 0, 0, inf. swiglu_clamped: 1, 0, 0, limit. swiglu_oai: alpha, 1, 0, limit.
// geglu (tanh form): 2 sqrt(2/pi), 0, 0.044715, inf, because (1 + tanh z) / 2 = sigmoid(2 z).
// Plain swiglu has its own shorter form (kPlain): the general one costs 38 instructions per element backward, this one 20, and an
// epilogue is bound by them. On swiglu's parameters both forms give equal bits.
#pragma once

#include "isa/portable.h"

namespace moe {

struct Activation {
  float alpha = 1.0f;
  float beta = 0.0f;
  float gamma = 0.0f;
  float limit = __builtin_huge_valf();
};

inline bool is_plain_swiglu(const Activation& act) {
  return act.alpha == 1.0f && act.beta == 0.0f && act.gamma == 0.0f && act.limit == __builtin_huge_valf();
}

// sigmoid(alpha g (1 + gamma g^2)), FP32.
template <bool kPlain, class Isa>
MOE_FN float activation_gate(float g, const Activation& act) {
  constexpr float kMinusLog2e = -1.4426950408889634f;
  float z = kPlain ? g : Isa::mul(Isa::mul(act.alpha, g), Isa::fma(act.gamma, Isa::mul(g, g), 1.0f));
  return Isa::reciprocal(Isa::add(1.0f, Isa::exp2(Isa::mul(z, kMinusLog2e))));
}

// Comparisons are written so that NaN passes through unclamped.
MOE_FN float clamp_gate(float g, const Activation& act) { return g > act.limit ? act.limit : g; }
MOE_FN float clamp_up(float u, const Activation& act) {
  float v = u > act.limit ? act.limit : u;
  return v < -act.limit ? -act.limit : v;
}

template <bool kPlain, class Isa>
MOE_FN float activation_forward(float gate, float up, const Activation& act) {
  float g = kPlain ? gate : clamp_gate(gate, act);
  float u = kPlain ? up : Isa::add(clamp_up(up, act), act.beta);
  return Isa::mul(Isa::mul(g, activation_gate<kPlain, Isa>(g, act)), u);
}

struct ActivationGrad {
  float h;       // the activation itself, FP32
  float d_gate;  // dh/dgate
  float d_up;    // dh/dup
};

template <bool kPlain, class Isa>
MOE_FN ActivationGrad activation_backward(float gate, float up, const Activation& act) {
  float g = kPlain ? gate : clamp_gate(gate, act);
  float u = kPlain ? up : Isa::add(clamp_up(up, act), act.beta);
  float s = activation_gate<kPlain, Isa>(g, act);
  float gs = Isa::mul(g, s);
  float slope = Isa::fma(-gs, s, gs);  // g s (1 - s), times d(argument)/dg
  if (!kPlain) slope = Isa::mul(slope, Isa::mul(act.alpha, Isa::fma(Isa::mul(3.0f, act.gamma), Isa::mul(g, g), 1.0f)));
  ActivationGrad grad;
  grad.h = Isa::mul(gs, u);
  grad.d_gate = Isa::mul(u, Isa::add(slope, s));
  grad.d_up = gs;
  if (!kPlain) {
    if (gate > act.limit) grad.d_gate = 0.0f;
    if (up > act.limit || up < -act.limit) grad.d_up = 0.0f;
  }
  return grad;
}

}  // namespace moe
