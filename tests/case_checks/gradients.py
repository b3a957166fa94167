"""Checks of `tests/cases/gradients.yaml`: gradients over ranks and micro-batches, and what a step does with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax import native
from moejax.config import OptimizerConfig, RouterConfig
from moejax.ops.grouped_matmul import grouped_matmul
from moejax.ops.linear import linear
from moejax.ops.moe import moe_ffn, moe_layer, prepare_experts
from moejax.ops.routing import route, router_logits
from moejax.ops.schedule import schedule
from moejax.ops.spec import MoESpec
from moejax.training.optimizer import make_optimizer
from moejax.training.state import TrainState, apply_update


def global_norm_with_experts(case):
    given, expect = case["given"], case["expect"]
    mesh = jax.make_mesh((given["expert_ranks"],), ("expert",))
    with jax.set_mesh(mesh):
        grads_ExF = jax.device_put(jnp.asarray(given["expert_gradients"]), jax.P("expert"))
        # two more experts whose rank saw no token, and a dense leaf that is zero: neither changes the norm
        grads = {
            "experts": grads_ExF,
            "idle": jax.device_put(jnp.zeros((2, 2)), jax.P("expert")),
            "dense": jnp.zeros(3),
        }

        @jax.jit
        def clip(grads):
            norm = optax.tree.norm(grads)
            clipped, _ = optax.clip_by_global_norm(given["clip_at"]).update(grads, optax.EmptyState())
            return norm, clipped, max_norm(grads)

        norm, clipped, largest = clip(grads)
    close = functools.partial(np.testing.assert_allclose, rtol=case["tolerance"]["rel"])
    close(norm, expect["norm"])
    close(given["clip_at"] / norm, expect["clip_factor"])
    close(clipped["experts"], expect["clipped"])
    close(largest, expect["max_norm"])


def max_norm(grads):
    return optax.tree.max(jax.tree.map(jnp.abs, grads))


def equal_for_every_rank_count(case):
    given, expect = case["given"], case["expect"]
    x, dy = (jnp.asarray([given[name]], jnp.float32) for name in ("x_TxD", "dy_TxD"))
    w_router = jnp.asarray(given["w_router_ExD"], jnp.float32)
    w_gate_up = jnp.stack([jnp.asarray(given[f"w_{half}_ExFxD"], jnp.float32) for half in ("gate", "up")], axis=1)
    w_down = jnp.asarray(given["w_down_ExDxF"], jnp.float32)
    rule = given["router"]
    router = RouterConfig(top_k=rule["k"], score_fn=rule["score"], norm_topk=rule["norm_topk"])
    results = {}
    for ranks in given["ranks"]:
        spec = MoESpec(4, 2, 2, router=router, axis="expert", ranks=ranks)

        @jax.jit
        def run(x, w_router, w_gate_up, w_down, spec=spec):
            def layer(x, weight_shift, w_router, w_gate_up, w_down):
                weight, expert, _ = route(router_logits(x, w_router), None, spec)
                y, _ = moe_layer(x, weight + weight_shift, expert, prepare_experts(w_gate_up, w_down, spec), spec)
                return y, (weight, expert)

            shift = jnp.zeros((*x.shape[:2], rule["k"]))  # its gradient is d(weight)
            y, pullback, (weight, expert) = jax.vjp(layer, x, shift, w_router, w_gate_up, w_down, has_aux=True)
            return expert, weight, y, *pullback(dy)

        with jax.set_mesh(jax.make_mesh((ranks,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))):
            results[ranks] = [np.asarray(leaf) for leaf in run(x, w_router, w_gate_up, w_down)]
    expert, weight, y, dx, d_weight, d_router, d_gate_up, d_down = results[1]
    np.testing.assert_array_equal(expert[0], expect["expert_TxK"])
    named = {
        "weight_TxK": weight[0], "y_TxD": y[0], "dx_TxD": dx[0], "d_weight_TxK": d_weight[0], "d_w_router_ExD": d_router,
        "d_w_gate_ExFxD": d_gate_up[:, 0], "d_w_up_ExFxD": d_gate_up[:, 1], "d_w_down_ExDxF": d_down,
    }  # fmt: skip
    tolerance = {"rtol": case["tolerance"]["rel"], "atol": case["tolerance"]["abs"]}
    for name, value in named.items():
        np.testing.assert_allclose(value, np.asarray(expect[name]), **tolerance, err_msg=name)
    for ranks, leaves in results.items():
        for name, leaf, reference in zip(
            ("expert", "weight", "y", "dx", "d_weight", "d_router", "d_gate_up", "d_down"), leaves, results[1]
        ):
            if name in ("dx", "d_router"):  # these also hold the router's own products, whose partial sums XLA orders
                np.testing.assert_allclose(leaf, reference, rtol=1e-6, atol=1e-8, err_msg=f"{name} {ranks}")
            else:
                np.testing.assert_array_equal(leaf, reference, err_msg=f"{name} with {ranks} ranks")


def every_micro_batch_counts(case):
    given, expect = case["given"], case["expect"]["every_element_of_dw"]
    x = jnp.broadcast_to(jnp.asarray(given["x_per_micro_batch"])[:, None, None], (given["micro_batches"], 1, 32))
    dy = jnp.broadcast_to(jnp.asarray(given["dy_per_micro_batch"])[:, None, None], (given["micro_batches"], 1, 64))
    size, w = jnp.ones(1, jnp.int32), jnp.ones((1, 64, 32))
    for recipe in given["recipe"]:

        def one(x, dy, recipe=recipe):
            return jax.vjp(lambda w: grouped_matmul(x, w, size, recipe), w)[1](dy)[0]

        def scanned(x, dy, one=one):
            return jax.lax.scan(lambda total, part: (total + one(*part), None), jnp.zeros_like(w), (x, dy))[0]

        def full(x, dy, recipe=recipe):
            sizes = jnp.full(1, given["micro_batches"], jnp.int32)
            return jax.vjp(lambda w: grouped_matmul(x[:, 0], w, sizes, recipe), w)[1](dy[:, 0])[0]

        for form in (scanned, full):
            dw = np.asarray(jax.jit(form)(x, dy))
            assert dw.dtype == np.float32
            np.testing.assert_array_equal(dw, expect, err_msg=recipe)
    for backend in ("dense", "xla", *(["native"] if native.missing("_cpu") is None else [])):
        for recipe in given["recipe"]:
            spec = MoESpec(1, 32, 64, router=RouterConfig(top_k=1, norm_topk=False), recipe=recipe, backend=backend)
            check_buffer(spec, given["micro_batches"])


def check_buffer(spec, micro_batches):
    """The same for gradients the layer writes into an existing buffer; a buffer that is dirty stays dirty by as much."""
    dtype = jnp.float32 if spec.recipe == "fp32" else jnp.bfloat16
    experts = prepare_experts(jnp.ones((1, 2, 64, 32)), jnp.ones((1, 32, 64)), spec)
    plan = schedule(jnp.zeros((1, 1), jnp.int32), spec)

    @jax.jit
    def accumulate(x, start):
        def micro_batch(buffer, x):
            layer = lambda buffer: moe_ffn(x, jnp.ones((1, 1)), plan, experts, spec, accumulator=buffer)  # noqa: E731
            (y, _), pullback = jax.vjp(layer, buffer)
            return pullback((jnp.ones_like(y), buffer))[0], None

        return jax.lax.scan(micro_batch, start, x)[0]

    x = jnp.ones((micro_batches, 1, 32), dtype) / 32  # gate = up = 1
    once, all_of_them = accumulate(x[:1], experts.zeros()), accumulate(x, experts.zeros())
    dirty = accumulate(x, jax.tree.map(lambda leaf: leaf + 64, experts.zeros()))
    for one, total, shifted in zip(*map(jax.tree.leaves, (once, all_of_them, dirty))):
        assert np.asarray(one).all()
        np.testing.assert_allclose(total, micro_batches * np.asarray(one), rtol=1e-6)
        np.testing.assert_allclose(shifted, 64 + np.asarray(total), rtol=1e-6)


def fp32_master_weights(case):
    given = case["given"]
    optimizer = make_optimizer(OptimizerConfig(name=given["optimizer"]))
    params = {"w": jnp.full((1, 1), given["weight"], jnp.float32), "norm": jnp.full(1, given["weight"], jnp.float32)}
    x = jnp.full((1, 1), given["gradient"], given["compute_dtype"])

    @jax.jit
    def step(state):
        def loss(params):
            scale = params["norm"] * given["gradient"]  # a leaf that is used in FP32
            return linear(x, params["w"])[0, 0].astype(jnp.float32) + scale[0]

        new = apply_update(state, jax.grad(loss)(state.params), jnp.float32(given["learning_rate"]), optimizer)
        return TrainState(state.step + 1, *new, state.router_bias, state.rng)

    state = TrainState(jnp.int32(0), params, optimizer.init(params), {}, jnp.zeros(2, jnp.uint32))
    for _ in range(given["steps"]):
        state = step(state)
    for name, leaf in state.params.items():
        assert leaf.dtype == jnp.float32, name
        np.testing.assert_allclose(leaf, case["expect"]["weight"], atol=case["tolerance"]["abs"], rtol=0, err_msg=name)


def fixed_order_sums(case):
    """Three experts whose outputs are the given numbers for every token: zero matrices, and the numbers as down biases."""
    given, expect = case["given"], case["expect"]
    outputs = jnp.asarray(given["expert_output_of_each_slot"], jnp.float32)
    spec = MoESpec(3, 4, 4, router=RouterConfig(top_k=given["k"], norm_topk=False), expert_bias=True)
    zeros = (jnp.zeros((3, 2, 4, 4)), jnp.zeros((3, 4, 4)))
    for backend in ("xla", *(["native"] if native.missing("_cpu") is None else [])):
        layer_spec = spec.replace(backend=backend)
        b_down = jnp.broadcast_to(outputs[:, None], (3, 4))
        experts = prepare_experts(*zeros, layer_spec, b_gate_up=jnp.zeros((3, 2, 4)), b_down=b_down)

        @jax.jit
        def run(expert, layer_spec=layer_spec, experts=experts):
            weight = jnp.asarray(given["weight_TxK"], jnp.float32)
            return moe_ffn(jnp.ones((1, 4)), weight, schedule(expert, layer_spec), experts, layer_spec)

        runs = [np.asarray(run(jnp.asarray([[0, 1, 2]], jnp.int32))) for _ in range(given["runs"])]
        np.testing.assert_array_equal(runs[0], expect["y"], err_msg=backend)
        assert runs[0].tobytes() == runs[1].tobytes()
        # Slot order, not expert order: the same numbers in another order of slots give the other sum.
        np.testing.assert_array_equal(run(jnp.asarray([[0, 2, 1]], jnp.int32)), case["wrong"]["another_order"])


CHECKS = {
    "gradients-global-norm-with-experts": global_norm_with_experts,
    "gradients-equal-for-every-rank-count": equal_for_every_rank_count,
    "gradients-every-micro-batch-counts": every_micro_batch_counts,
    "gradients-fp32-master-weights": fp32_master_weights,
    "gradients-fixed-order-sums": fixed_order_sums,
}
