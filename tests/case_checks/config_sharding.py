"""Checks for `tests/cases/config_sharding.yaml`."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.decoder import Decoder
from moejax.config_load import config_from_dict
from moejax.flops import model_flops_per_token, moe_layer_flops_per_token, training_flops_per_token
from moejax.ops.gemms import count_gemms, match_names


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
        "moe": {"num_experts": 3, "expert_width": 96, "router": {"top_k": 2}, "backend": "xla"},
    }
    base["model"]["num_layers"] = given["moe_layers"]

    def gradient_program(variant, **training):
        config = config_from_dict(base | {"moe": base["moe"] | variant, "training": training})
        graphdef, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

        def loss(state, token_BxL):
            hidden_BxLxD, _ = nnx.merge(graphdef, state)(token_BxL)
            return hidden_BxLxD.astype(jnp.float32).sum()

        return jax.make_jaxpr(jax.grad(loss))(state, jnp.zeros((2, 7), jnp.int32))

    *variants, missing = given["variants"]
    for variant, expected in zip(variants, case["expect"]["quantised_gemms"], strict=True):
        rest = 6 * given["moe_layers"] - expected
        counted = {"mxfp8": expected} | ({"bf16": rest} if rest else {})
        assert count_gemms(gradient_program(variant)) == counted, variant
    for training in (
        {"scan_layers": False},
        {"remat": "layer"},
    ):  # unrolled and recomputed layers run the same products
        assert count_gemms(gradient_program({}, **training)) == {"mxfp8": case["expect"]["quantised_gemms"][0]}
    with pytest.raises(ValueError, match=r"layer 7 does not exist.*2 MoE layers"):
        gradient_program(missing)

    pattern = given["pattern_test"]
    assert match_names(pattern["pattern"], pattern["names"]) == case["expect"]["pattern_matches"]


CHECKS = {
    "config-quantised-gemms-are-listed": quantised_gemms_are_listed,
    "config-flops-by-hand": flops_by_hand,
}
