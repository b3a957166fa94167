"""Checks for `tests/cases/config_sharding.yaml`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder
from moejax import native
from moejax.config import MeshConfig
from moejax.config_load import config_from_dict
from moejax.flops import model_flops_per_token, moe_layer_flops_per_token, training_flops_per_token
from moejax.mesh import logical_to_spec, make_mesh, named_sharding
from moejax.ops.balance import balance_loss
from moejax.ops.gemms import count_gemms, match_names
from moejax.ops.moe import moe_layer, prepare_experts
from moejax.ops.routing import route, router_logits
from moejax.ops.spec import moe_spec


def flops_by_hand(case):
    for name, (top_k, d_model, width, shared) in case["given"]["shapes_K_D_F_shared"].items():
        assert moe_layer_flops_per_token(top_k, d_model, width, shared * width) == case["expect"][name], name
    top_k, d_model, width, _ = case["given"]["shapes_K_D_F_shared"]["DeepSeek-V3"]
    assert moe_layer_flops_per_token(top_k, d_model, width) == case["wrong"]["DeepSeek-V3_without_shared"]
    # The whole model's count uses the same formula: a shared expert adds its own width in each of the three layers.
    model = {"num_layers": 3, "d_model": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    moe = {"num_experts": 8, "expert_width": 48, "router": {"top_k": 2}}
    count = {
        shared: model_flops_per_token(config_from_dict({"model": model, "moe": moe | {"shared_experts": shared}}), 258)
        for shared in (0, 1)
    }
    assert count[1] - count[0] == 3 * 6 * 64 * 48
    assert training_flops_per_token(config_from_dict({"model": model, "moe": moe}), 258) == 3 * count[0]


def quantised_gemms_are_listed(case):
    """Counts the products of a traced gradient whose two operands come from E4M3 data, and compares with the config."""
    given = case["given"]
    base = {
        "recipe": given["recipe"],
        "model": {"vocab_size": 31, "d_model": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32},
        "moe": {"num_experts": 3, "expert_width": 96, "router": {"top_k": 2}},
    }
    base["model"]["num_layers"] = given["moe_layers"]

    def gradient_program(variant, backend="xla", **training):
        config = config_from_dict(base | {"moe": base["moe"] | variant | {"backend": backend}, "training": training})
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

        def loss(state, token_BxL):
            hidden_BxLxD, _ = nnx.merge(graphdef, state)(token_BxL)
            return hidden_BxLxD.astype(jnp.float32).sum()

        return jax.make_jaxpr(jax.grad(loss))(state, jnp.zeros((2, 7), jnp.int32))

    *variants, missing = given["variants"]
    for variant, expected in zip(variants, case["expect"]["quantised_gemms"], strict=True):
        rest = 6 * given["moe_layers"] - expected
        counted = {"mxfp8": expected} | ({"bf16": rest} if rest else {})
        for backend in ["xla"] if native.missing("_cpu") else ["xla", "native"]:
            assert count_gemms(gradient_program(variant, backend)) == counted, (backend, variant)
    for training in (
        {"scan_layers": False},
        {"remat": "layer"},
    ):  # unrolled and recomputed layers run the same products
        assert count_gemms(gradient_program({}, **training)) == {"mxfp8": case["expect"]["quantised_gemms"][0]}
    with pytest.raises(ValueError, match=r"layer 7 does not exist.*2 MoE layers"):
        gradient_program(missing)

    pattern = given["pattern_test"]
    assert match_names(pattern["pattern"], pattern["names"]) == case["expect"]["pattern_matches"]


def axis_used_twice(case):
    given = case["given"]
    mesh = make_mesh(MeshConfig(**given["mesh"]))
    ((tensor, names),) = given["tensor"].items()
    collision = rf"{tensor}: mesh axis 'expert' is on two of its axes, 'experts' and 'expert_mlp'"
    with pytest.raises(ValueError, match=collision):
        logical_to_spec(names, tensor, (8, 16, 24), mesh, rules=given["rules"])
    with pytest.raises(ValueError, match=collision):  # whatever the size of the axis: the table is wrong, not the mesh
        logical_to_spec(names, tensor, (8, 16, 24), make_mesh(MeshConfig()), rules=given["rules"])
    assert logical_to_spec(names[:2], tensor, (8, 16), mesh, rules=given["rules"]) == jax.P("expert", "fsdp")


def expert_axis_resolves(case):
    given, expect = case["given"], case["expect"]
    configs = [MeshConfig(**sizes) for sizes in given["meshes"]]
    for i, message in zip(expect["refused"], ("8 devices do not divide by 3", "8 devices are not 16"), strict=True):
        with pytest.raises(ValueError, match=rf"{message}: mesh is data=.* expert=.*would fit 8 devices"):
            make_mesh(configs[i], given["experts"])
    with pytest.raises(
        ValueError, match=r"expert axis has 4 of 8 devices but num_experts is 6: .*data=4 expert=2 would fit"
    ):
        make_mesh(configs[2], 6)
    meshes = [make_mesh(config, given["experts"]) for config in configs[:5]]
    assert [mesh.size for mesh in meshes] == [given["devices"]] * 5
    assert [mesh.shape["expert"] for mesh in meshes] == expect["expert_axis"]
    losses = np.array([_expert_layer_losses(mesh, given["experts"]) for mesh in [None, *meshes]])
    assert losses[0, 0] > losses[0, -1] > 0  # it trains
    np.testing.assert_allclose(losses, np.broadcast_to(losses[0], losses.shape), rtol=2e-6)


def _expert_layer_losses(mesh, experts):
    """Losses of three SGD steps of a router and its experts, 8 sequences over the mesh; parameters placed by the rules."""
    rng = np.random.default_rng(0)
    axes = {
        "router": ("expert", "embed"),
        "gate_up": ("expert", None, "mlp", "embed"),
        "down": ("expert", "embed", "mlp"),
    }
    shapes = {"router": (experts, 16), "gate_up": (experts, 2, 24, 16), "down": (experts, 16, 24)}
    params = {name: rng.standard_normal(shape).astype(np.float32) / 4 for name, shape in shapes.items()}
    x, target = rng.standard_normal((2, 8, 4, 16)).astype(np.float32)
    config = config_from_dict(
        {
            "model": {"d_model": 16},
            "moe": {
                "num_experts": experts,
                "expert_width": 24,
                "backend": "xla",
                "balance": {"aux_coef": 0.1, "z_coef": 0.01},
            },
        }
    )
    spec = moe_spec(config, mesh)

    def loss(params, x, target):
        weight, expert, stats = route(router_logits(x, params["router"]), None, spec)
        y, _ = moe_layer(x, weight, expert, prepare_experts(params["gate_up"], params["down"], spec), spec)
        return jnp.mean(jnp.square(y - target)) + balance_loss(stats, spec, tokens=32)

    @jax.jit
    def step(params, x, target):
        value, grads = jax.value_and_grad(loss)(params, x, target)
        return jax.tree.map(lambda p, g: p - 3.0 * g, params, grads), value

    values = []
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        if mesh is not None:
            params = {k: jax.device_put(v, named_sharding(mesh, axes[k], k, v.shape)) for k, v in params.items()}
            tokens = named_sharding(mesh, ("batch", "sequence", None), "x", x.shape)
            x, target = jax.device_put(x, tokens), jax.device_put(target, tokens)
        for _ in range(3):
            params, value = step(params, x, target)
            values.append(float(value))
    return values


CHECKS = {
    "sharding-axis-used-twice": axis_used_twice,
    "sharding-expert-axis-resolves": expert_axis_resolves,
    "config-quantised-gemms-are-listed": quantised_gemms_are_listed,
    "config-flops-by-hand": flops_by_hand,
}
