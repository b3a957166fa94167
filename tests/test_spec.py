"""`moe_spec`: one frozen spec from a config and a mesh, or an error that says what would work."""

import jax
import pytest

from moejax.config import (
    ActivationConfig,
    BalanceConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    TrainingConfig,
)
from moejax.mesh import make_mesh
from moejax.ops.spec import moe_spec


def config_of(recipe="fp32", model=None, training=None, **moe):
    """Built from the dataclasses, as a user's own program may; `config_load` refuses some of the same faults earlier."""
    model = {"d_model": 64, "num_layers": 4, "dense_layers": 1, "dense_width": 64} | (model or {})
    moe = {"num_experts": 8, "expert_width": 96, "backend": "xla"} | moe
    sections = {"router": RouterConfig, "balance": BalanceConfig, "act": ActivationConfig}
    moe |= {name: kind(**moe[name]) for name, kind in sections.items() if name in moe}
    return Config(
        recipe=recipe, model=ModelConfig(**model), moe=MoEConfig(**moe), training=TrainingConfig(**(training or {}))
    )


def test_spec_is_the_config_and_the_mesh():
    config = config_of("mxfp8", router={"top_k": 3}, balance={"aux_coef": 0.5}, capacity_factor="1.25", wgrad="bf16")
    alone = moe_spec(config)
    assert (alone.num_experts, alone.d_model, alone.expert_width, alone.top_k) == (8, 64, 96, 3)
    assert (alone.axis, alone.ranks, alone.local_experts, alone.backend) == (None, 1, 8, "xla")
    assert (alone.balance.aux_coef, alone.capacity_factor, alone.wgrad) == (0.5, "1.25", "bf16")
    assert hash(alone) == hash(moe_spec(config)) and alone == moe_spec(config)
    split = moe_spec(config, make_mesh(MeshConfig(expert=4)))
    assert (split.axis, split.ranks, split.local_experts) == ("expert", 4, 2)
    assert moe_spec(config, make_mesh(MeshConfig())) == alone  # an expert axis of 1 is no expert parallelism
    assert moe_spec(config, jax.make_mesh((8,), ("data",))) == alone  # nor is a mesh without that axis
    assert moe_spec(config_of(backend=None)).backend is not None


@pytest.mark.parametrize(
    ("save", "remat", "ranks", "expected"),
    [
        ("auto", "none", 1, "gate_up"),
        ("auto", "minimal", 1, "recompute"),
        ("auto", "layer", 1, "recompute"),
        ("auto", "none", 2, "recompute"),
        ("gate_up", "minimal", 1, "gate_up"),
        ("gate_up", "none", 2, "gate_up"),
        ("recompute", "none", 1, "recompute"),
    ],
)
def test_what_the_layer_keeps_follows_remat_and_expert_parallelism(save, remat, ranks, expected):
    mesh = make_mesh(MeshConfig(expert=ranks))
    assert moe_spec(config_of(save=save, training={"remat": remat}), mesh).save == expected


def test_layers_kept_in_bf16_count_moe_layers_from_both_ends():
    config = config_of("mxfp8", bf16_layers=(0, -1))
    assert [moe_spec(config, layer=i).recipe for i in range(3)] == ["bf16", "mxfp8", "bf16"]
    assert moe_spec(config, layer=-3).recipe == "bf16" and moe_spec(config).recipe == "mxfp8"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": 6}, r"expert axis has 4 ranks but num_experts is 6: use one of \[1, 2, 3, 6\]"),
        ({"router": {"top_k": 1}}, "norm_topk with k = 1"),
        ({"router": {"hash_layers": 4}}, "hash_layers is 4 but the model has 3 MoE layers"),
        ({"balance": {"bias_rate": 0.001}}, "bias_rate is 0.001 but there is no bias to move: set router.select_bias"),
        (
            {"recipe": "mxfp8", "bf16_layers": (3,)},
            r"bf16_layers: layer 3 does not exist; the model has 3 MoE layers, 0..2 \(or -3..-1",
        ),
        ({"recipe": "mxfp8", "bf16_layers": (-4,)}, "layer -4 does not exist"),
        ({"capacity_factor": "1e1"}, "capacity_factor is '1e1'"),
        ({"recipe": "mxfp8", "expert_width": 40}, "expert_width is 40"),
        ({"recipe": "bf16", "model": {"d_model": 60}}, "d_model is 60"),
        ({"act": {"name": "swiglu_oai"}}, "limit"),
        ({"router": {"score_fn": "sqrt_softplus"}}, "score_fn is 'sqrt_softplus'; expected 'softmax' or 'sigmoid' or"),
        ({"balance": {"aux_scope": "batch"}}, "aux_scope is 'batch'; expected 'sequence' or 'micro_batch' or 'global'"),
        ({"save": "gateup"}, "save is 'gateup'; expected 'auto' or 'recompute' or 'gate_up' or 'gate_up_mx'"),
        (
            {"recipe": "bf16", "bf16_layers": (0,)},
            r"bf16_layers has an effect only with recipe=mxfp8, .* bf16 \(.* is \(0,",
        ),
        ({"recipe": "bf16", "mx_mode": "aligned"}, "mx_mode has an effect only with recipe=mxfp8, but recipe is bf16"),
        ({"wgrad": "bf16"}, "wgrad has an effect only with recipe=mxfp8, but recipe is fp32"),
        (
            {"save": "gate_up", "training": {"remat": "layer"}},
            "save is 'gate_up' but training.remat 'layer' does not keep",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(config, message):
    with pytest.raises(ValueError, match=message):
        moe_spec(config_of(**config), make_mesh(MeshConfig(expert=4)) if config.get("num_experts") else None)


def test_a_layer_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="layer: layer 3 does not exist"):
        moe_spec(config_of(), layer=3)
