"""The performance model (benchmarks/gpu_model.py): its error on H200 is what docs/blackwell.md says, and its bounds behave."""

import dataclasses

import pytest

from benchmarks import gpu_model as model

PAIR = model.Tile(128, 256, 2)


def test_measured_kernels_are_predicted_within_the_stated_error():
    for kind, measured in model.MEASURED.items():
        assert abs(model.bounds(model.H200, PAIR, model.QWEN3, kind, False)["time"] / measured - 1) < 0.15, kind


def test_measured_layers_are_predicted_within_the_stated_error():
    measured = model.measured_layers()
    for shape in model.SHAPES:
        for backward in (False, True):
            predicted = model.layer(model.H200, PAIR, shape, False, backward)
            real = measured[shape.name, "backward" if backward else "forward"]
            assert 0.8 < predicted / real < 1.3, (shape.name, backward)


@pytest.mark.parametrize("kind", model.KINDS)
@pytest.mark.parametrize("mx", [False, True])
def test_prediction_is_the_largest_bound_and_no_faster_than_the_tensor_core(kind, mx):
    found = model.bounds(model.B200, PAIR, model.KIMI, kind, mx)
    assert found["time"] >= max(value for name, value in found.items() if name != "time") > 0
    peak = model.B200.sms * model.B200.clock_ghz * (model.B200.mx_flops if mx else model.B200.bf16_flops) / 1e3
    assert model.flop(model.KIMI, kind) / found["time"] / 1e6 < peak
    faster = dataclasses.replace(model.B200, clock_ghz=2 * model.B200.clock_ghz, l2_tb_s=99, hbm_tb_s=99)
    assert model.bounds(faster, PAIR, model.KIMI, kind, mx)["time"] < found["time"]
