"""The configs for one H200 and the parts of benchmarks/gpu_step.py that need no GPU."""

import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import gpu_step
from moejax.config_load import load
from moejax.training.state import abstract_state

ROOT = pathlib.Path(__file__).resolve().parents[1]


def parameters(path, *overrides):
    state = abstract_state(load(str(path), ["moe.backend=xla", *overrides]))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))


def test_configs_have_the_sizes_they_say():
    layer = 2048 * 128 * (2 * 32 + 2 * 4) + 2 * 128 + 2 * 2048 + 128 * 2048 + 128 * 3 * 2048 * 768
    assert parameters(gpu_step.BASE) == 4 * layer + 2 * 151936 * 2048 + 2048 == 3_114_814_464
    assert round(parameters(ROOT / "configs" / "h200-code.yaml", "model.vocab_size=258") / 1e9, 2) == 0.83


def test_a_machine_without_gpu_is_told_in_one_line():
    done = subprocess.run(
        [sys.executable, gpu_step.__file__],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert (
        done.stderr == "gpu_step.py needs a GPU, and JAX finds none here (python -m moejax.info says what it finds)\n"
    )


def test_batches_are_packed_documents_whose_targets_stay_inside():
    config = load(str(gpu_step.BASE), ["training.sequence_length=64", "model.vocab_size=50"])
    batch = gpu_step._random_batch(config, 0)
    for row in range(config.training.global_batch):
        segment, position, target = (batch[name][row] for name in ("segment", "position", "target"))
        assert (np.diff(segment) >= 0).all() and segment[0] == 1
        starts = np.flatnonzero(np.diff(segment, prepend=0))
        assert (position[starts] == 0).all() and (np.diff(position)[np.diff(segment) == 0] == 1).all()
        inside = np.append(np.diff(segment) == 0, False)
        np.testing.assert_array_equal(target, np.where(inside, np.roll(batch["token"][row], -1), -1))


def test_useful_flops_count_no_recomputation():
    config = load(str(gpu_step.BASE), [])
    tokens, layers = 4 * 4096, 4
    products = layers * (2048 * 128 * 72 + 3 * 8 * 2048 * 768 + 128 * 2048) + 151936 * 2048
    causal = layers * 2 * 32 * 128 * 4096  # scores and their product with the values, half of each
    assert gpu_step._flops(config) == tokens * (6.0 * products + 3.0 * causal)


@pytest.mark.parametrize(
    ("about", "part"),
    [
        ("void moe::(anonymous namespace)::grouped_gemm<moe::KindSet<(moe::Kind)5>", "experts"),
        ("fusion_3 jit(step)/jvp()/while/body/moe_experts/gemm.fprop.down/dot_general", "experts"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop [dot_product_attention_bwd.7]", "attention"),
        ("nvjet_sm90 jit(step)/jvp(head_and_loss)/while/body/dot_general", "head and loss"),
        ("loop_select_fusion_3 jit(step)/optimizer/select_n", "optimizer"),
        ("sort_11 jit(step)/jvp()/while/body/router/route/top_k", "router and schedule"),
        ("wrapped_convert jit(step)/expert_copies/convert_element_type", "expert copies"),
        ("loop_broadcast_fusion jit(step)/broadcast_in_dim", None),
    ],
)
def test_kernels_are_told_apart_by_scope(about, part):
    assert next((name for name, pattern in gpu_step.PARTS.items() if re.search(pattern, about)), None) == part
