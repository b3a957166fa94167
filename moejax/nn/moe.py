"""`MoE`: router, experts and shared experts as one Flax module, for our decoder or for yours.

It holds parameters and calls `moejax.ops`: `routing.py` chooses, `schedule.py` orders, `moe.py` computes.
Letters: B batch, L sequence, D model width, F expert width, E experts, K experts per token, V vocabulary.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import Config, ModelConfig, MoEConfig
from moejax.nn import param
from moejax.nn.layers import MLP, compute_dtype
from moejax.ops import mxfp8_rates
from moejax.ops.experts import ExpertWeights, prepare_experts
from moejax.ops.linear import linear
from moejax.ops.moe import moe_layer
from moejax.ops.routing import route, router_logits
from moejax.ops.spec import MoESpec, Recipe, moe_spec


class RouterBias(nnx.Variable):
    """State of a router that follows token counts or is frozen, never a gradient: it stays out of the optimizer."""


class HashTable(RouterBias):
    """Frozen int32 table of hash layers, token -> K experts. State, because restoring without it would reroute every token."""


class ExpertParam(nnx.Param):
    """A master of routed experts: sharded over the `expert` axis, where its gradient stays, and accumulated in place."""


class Experts(nnx.Module):
    """The routed experts: FP32 masters `w_gate_up` (E, 2, F, D) and `w_down` (E, D, F), biases or None."""

    def __init__(self, spec: MoESpec, *, rngs: nnx.Rngs):
        experts, width, d_model = spec.num_experts, spec.expert_width, spec.d_model
        self.w_gate_up = param.matrix(rngs, (experts, 2, width, d_model), ("expert", None, "mlp", "embed"), ExpertParam)
        self.w_down = param.matrix(rngs, (experts, d_model, width), ("expert", "embed", "mlp"), ExpertParam)
        biases = spec.expert_bias
        self.b_gate_up = param.zeros((experts, 2, width), ("expert", None, "mlp"), ExpertParam) if biases else None
        self.b_down = param.zeros((experts, d_model), ("expert", "embed"), ExpertParam) if biases else None

    def masters(self) -> ExpertWeights:
        b_gate_up, b_down = (None if leaf is None else leaf[...] for leaf in (self.b_gate_up, self.b_down))
        return ExpertWeights(self.w_gate_up[...], self.w_down[...], b_gate_up, b_down)


class MoE(nnx.Module):
    """A mixture-of-experts layer in place of an MLP.

    1. Router logits in FP32; `route` picks K experts per token and their weights.
    2. Each token visits its experts; the outputs are summed with those weights.
    3. Shared experts see every token; their output is added, behind a sigmoid gate if `shared_gate`.

    Usable alone: in any Flax model, without a mesh, under a mesh of explicit or automatic axes.

    Attributes:
      w_router: (E, D); b_router: (E,) or None; select_bias: `RouterBias` (E,) or None.
      experts: `Experts`. shared: `MLP` or None; w_shared_gate: (1, D) or None.
      spec: the static description of the layer.

    Example:
      >>> from flax import nnx
      >>> from moejax.config import MoEConfig
      >>> from moejax.nn import MoE
      >>> moe = MoE(64, MoEConfig(num_experts=8, expert_width=96), rngs=nnx.Rngs(0))
      >>> y, stats = moe(jax.numpy.ones((2, 5, 64)))
      >>> y.shape, int(stats.count_E.sum())
      ((2, 5, 64), 20)
    """

    def __init__(
        self,
        d_model: int,
        config: MoEConfig | None = None,
        *,
        rngs: nnx.Rngs,
        recipe: Recipe = "fp32",
        mesh: jax.sharding.Mesh | None = None,
        spec: MoESpec | None = None,
    ):
        """
        Args:
          d_model: D.
          config: experts, router, balance; defaults as in `MoEConfig`.
          rngs: reads `params`.
          recipe: "fp32", "bf16" or "mxfp8".
          mesh: mesh whose `expert` axis the experts are sharded over; None: the one set by `jax.set_mesh`, if any.
          spec: a resolved spec, instead of one made from the arguments above.
        Raises:
          ValueError: a field cannot work; the message says what would.
        """
        config = config or MoEConfig()
        if spec is None:
            if config.bf16_layers:
                raise ValueError(
                    f"bf16_layers is {config.bf16_layers}, but a MoE of its own is not told which layer of a model it is: leave "
                    "it out, and give the layers meant recipe='bf16'"
                )
            whole = Config(recipe=recipe, model=ModelConfig(d_model=d_model), moe=config)
            spec = moe_spec(whole, mesh if mesh is not None else current_mesh())
        self.spec = spec
        self.w_router = param.matrix(rngs, (spec.num_experts, d_model), ("expert", "embed"))
        self.b_router = param.zeros((spec.num_experts,), ("expert",)) if spec.router.router_bias else None
        self.select_bias = (
            param.declare(jnp.zeros(spec.num_experts, jnp.float32), ("expert",), RouterBias)
            if spec.router.select_bias
            else None
        )
        self.experts = Experts(spec, rngs=rngs)
        width = config.shared_experts * (config.shared_width or config.expert_width)
        dtype = compute_dtype(spec.recipe)
        self.shared = MLP(d_model, width, rngs=rngs, act=config.act, dtype=dtype) if width else None
        if config.shared_gate and not width:
            raise ValueError("moe.shared_gate is set but moe.shared_experts is 0: there is nothing to gate")
        self.w_shared_gate = param.matrix(rngs, (1, d_model), (None, "embed")) if config.shared_gate else None

    def __call__(
        self,
        x_BxLxD: jax.Array,
        *,
        mask_BxL: jax.Array | None = None,
        token_BxL: jax.Array | None = None,
        hash_table_VxK: jax.Array | None = None,
        copies: Any = None,
        spec: MoESpec | None = None,
        experts: ExpertWeights | None = None,
        accumulator: ExpertWeights | None = None,
        probe: jax.Array | None = None,
    ):
        """
        Args:
          x_BxLxD: FP32 or BF16 activations.
          mask_BxL: true for real tokens; the others visit no routed expert and are not counted. None: all are real.
          token_BxL, hash_table_VxK: token ids and table of a hash layer.
          copies: of `expert_copies`, made once per optimizer step; None: made here, on every call.
          spec: replaces the module's own for this call (another recipe or backend).
          experts: read instead of the module's own masters, which then get no gradient: of `prepared`, or one layer of a
            stack of them.
          accumulator: FP32 buffers shaped like `experts`, which their gradient is added to (`moe_layer`).
          probe: one layer's of `mxfp8_rates.new_probe`, whose cotangent counts what mxfp8 loses; recipe mxfp8 only.
        Returns:
          y_BxLxD in the dtype of x, and the sums the balance losses and metrics are made of; with `accumulator` it
          comes back as third.
        """
        spec = spec or self.spec
        bias_E = None if self.select_bias is None else self.select_bias[...]
        router_bias_E = None if self.b_router is None else self.b_router[...]
        with jax.named_scope("router"):
            # Under checkpoint the residual is x in its own dtype, not an FP32 copy of it.
            logits_BxLxE = jax.checkpoint(router_logits)(x_BxLxD, self.w_router[...], router_bias_E)
            weight_BxLxK, expert_BxLxK, stats = route(logits_BxLxE, bias_E, spec, mask_BxL, token_BxL, hash_table_VxK)
        experts = self.prepared(spec, copies) if experts is None else experts
        y_BxLxD, dispatched, *buffers = moe_layer(x_BxLxD, weight_BxLxK, expert_BxLxK, experts, spec, accumulator)
        stats = dataclasses.replace(stats, dropped=dispatched.dropped, moved_bytes=dispatched.moved_bytes)
        if probe is not None and spec.recipe == "mxfp8":
            y_BxLxD = _observe(x_BxLxD, y_BxLxD, probe, expert_BxLxK)
        if self.shared is not None:
            y_BxLxD += self._gate(x_BxLxD) * self.shared(x_BxLxD)
        return y_BxLxD, stats, *buffers

    def expert_copies(self, spec: MoESpec | None = None) -> Any:
        """What the products of the recipe read, made from the masters: once per optimizer step, without a gradient.

        Works on stacked layers too. None where the products read the masters themselves.
        """
        return self.prepared(spec).copies

    def prepared(self, spec: MoESpec | None = None, copies: Any = None) -> ExpertWeights:
        """The masters with their copies, which are made here if None. Works on stacked layers, and on `fsdp` shards of them."""
        w = self.experts.masters()
        if copies is None:
            # A shard over fsdp is narrower in D, and so are its copies.
            spec = (spec or self.spec).replace(d_model=w.w_down_ExDxF.shape[-2])
            return prepare_experts(w.w_gate_up_Ex2xFxD, w.w_down_ExDxF, spec, w.b_gate_up_Ex2xF, w.b_down_ExD)
        return ExpertWeights(w.w_gate_up_Ex2xFxD, w.w_down_ExDxF, w.b_gate_up_Ex2xF, w.b_down_ExD, copies)

    def _gate(self, x_BxLxD):
        if self.w_shared_gate is None:
            return jnp.ones((), x_BxLxD.dtype)
        # One logit per token, FP32 like the router: a rounded gate would scale the whole shared output by the error.
        gate_BxLx1 = jax.nn.sigmoid(linear(x_BxLxD.astype(jnp.float32), self.w_shared_gate[...]))
        return gate_BxLx1.astype(x_BxLxD.dtype)


def _observe(x_BxLxD, y_BxLxD, probe, expert_BxLxK):
    width = x_BxLxD.shape[-1]
    x_TxD, y_TxD = jax.lax.stop_gradient(x_BxLxD).reshape(-1, width), y_BxLxD.reshape(-1, width)
    real_T = expert_BxLxK[..., 0].reshape(-1)  # -1 for masked tokens
    return mxfp8_rates.observe(x_TxD, y_TxD, probe, real_T).reshape(y_BxLxD.shape)


def current_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh
