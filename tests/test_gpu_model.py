"""The performance model (benchmarks/gpu_model.py): its error on H200 is what docs/blackwell.md says, and its bounds behave."""

import dataclasses

import pytest

from benchmarks import gpu_model as model

PAIR = model.Tile(128, 256, 2)


def test_measured_kernels_are_predicted_within_the_stated_error():
    for kind, measured in model.MEASURED.items():
        error = 100 * (model.bounds(model.H200, PAIR, model.QWEN3, kind, False)["time"] / measured - 1)
        assert -14.5 < error < 9.5, (kind, error)


# Percent, as docs/blackwell.md states them.
STATED = {"forward": (0, 2), "backward": (3, 7)}
STATED_ALONE = {
    ("qwen3.5-397b-a17b", "forward"): (16, 16),
    ("qwen3.5-397b-a17b", "backward"): (22, 22),
    ("qwen3-30b-a3b", "backward"): (21, 21),
}


def test_measured_layers_are_predicted_within_the_stated_error():
    measured = model.measured_layers()
    for shape in model.SHAPES:
        for name in ("forward", "backward"):
            predicted = model.layer(model.H200, PAIR, shape, False, name == "backward")
            error = 100 * (predicted / measured[shape.name, name] - 1)
            low, high = STATED_ALONE.get((shape.name, name), STATED[name])
            assert low - 0.5 < error < high + 0.5, (shape.name, name, error)


def test_the_epilogue_of_dgrad_down_bounds_qwen3_alone():
    """What docs/blackwell.md says to try first rests on it."""
    bounded = set()
    for shape in model.SHAPES:
        found = model.bounds(model.B200, PAIR, shape, "dgrad_down", True)
        if found["issue"] == max(value for name, value in found.items() if name != "time"):
            bounded.add(shape.name)
    assert bounded == {"qwen3-30b-a3b"}


@pytest.mark.parametrize("arguments", [["--gpu", "H900"], ["--tokens", "0"], ["B200"]])
def test_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        model.main(arguments)
    assert stopped.value.code == 2
    assert "unrecognized arguments: " + " ".join(arguments) in capsys.readouterr().err


def test_help_prints_no_table(capsys):
    with pytest.raises(SystemExit) as stopped:
        model.main(["--help"])
    assert stopped.value.code == 0 and "|" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", model.KINDS)
@pytest.mark.parametrize("mx", [False, True])
def test_prediction_is_the_largest_bound_and_no_faster_than_the_tensor_core(kind, mx):
    found = model.bounds(model.B200, PAIR, model.KIMI, kind, mx)
    assert found["time"] >= max(value for name, value in found.items() if name != "time") > 0
    peak = model.B200.sms * model.B200.clock_ghz * (model.B200.mx_flops if mx else model.B200.bf16_flops) / 1e3
    assert model.flop(model.KIMI, kind) / found["time"] / 1e6 < peak
    faster = dataclasses.replace(model.B200, clock_ghz=2 * model.B200.clock_ghz, l2_tb_s=99, hbm_tb_s=99)
    assert model.bounds(faster, PAIR, model.KIMI, kind, mx)["time"] < found["time"]
