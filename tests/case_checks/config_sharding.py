"""Checks for `tests/cases/config_sharding.yaml`."""

from moejax.config_load import config_from_dict
from moejax.flops import model_flops_per_token, moe_layer_flops_per_token, training_flops_per_token


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


CHECKS = {"config-flops-by-hand": flops_by_hand}
