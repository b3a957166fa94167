"""The MXFP8 expert layer on a GPU of compute capability 9.0: against the operands of ops/mxfp8.py multiplied in FP64
(mx_oracle.py), against FP32, and against itself.
"""

import os
import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU kernel tests drive the C library through torch")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import c_api  # noqa: E402
import mx_c_api  # noqa: E402
import mx_oracle  # noqa: E402
import oracle  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a GPU of sm_90"
    ),
    pytest.mark.skipif(not c_api.LIBRARY.exists(), reason=f"needs {c_api.LIBRARY.name}: build kernels_cuda first"),
]

# Against the same operands in FP64. Both sides round to BF16 at the same places: 1.7e-3 in y and dx from the last of
# them alone. A value that falls across a tie on one side is also quantised to another element, which matters more:
# aligned adds the tensor core's short sums, 1e-3, and so more of those.
TOLERANCE = {
    "exact": {"y": 3e-3, "dx": 3e-3, "d_weight": 2e-4, "dw_gate_up": 4e-4, "dw_down": 4e-4},
    "aligned": {"y": 1e-2, "dx": 1.2e-2, "d_weight": 3e-3, "dw_gate_up": 2e-2, "dw_down": 2e-2},
}

CASES = {
    # name: (group sizes or None, K, E, T, D, F, activation, data)
    "issue_sizes": ([162, 0, 257, 446, 0, 83], 1, 6, None, 352, 224, "swiglu", "gaussian"),
    "tiny_groups": ([1, 31, 32, 33, 0, 127, 129], 1, 7, None, 288, 160, "swiglu_oai", "gaussian"),
    "long_experts": ([700, 129, 300], 1, 3, None, 160, 288, "swiglu", "gaussian"),
    "one_expert": ([385], 1, 1, None, 96, 544, "geglu", "gaussian"),
    "top_k": (None, 4, 9, 500, 512, 384, "swiglu", "gaussian"),
    "outliers": (None, 2, 4, 300, 640, 256, "swiglu", "outliers"),
    "heavy_tails": (None, 2, 4, 300, 384, 256, "swiglu_clamped", "heavy"),
}


def routing(rng, sizes, top_k, experts, tokens):
    if sizes is not None:
        return rng.permutation(np.append(np.repeat(np.arange(len(sizes)), sizes), -1)).astype(np.int32)[:, None]
    ids = np.argsort(rng.random((tokens, experts)) + np.linspace(0, 0.7, experts), axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(tokens) < 0.05] = -1
    return ids


ROWS_ON_M = dict.fromkeys(
    ("gate_up", "down", "dgrad_gate_up"), "dispatched"
)  # not what problems with few rows take by themselves


class Problem:
    def __init__(self, name):
        sizes, top_k, experts, tokens, self.d, self.f, self.activation, data = CASES[name]
        rng = np.random.default_rng(17)
        ids = routing(rng, sizes, top_k, experts, tokens)
        self.expert = torch.from_numpy(ids).cuda()
        self.tokens, self.top_k = ids.shape
        self.experts = experts

        def draw(*shape):
            x = rng.standard_t(3, shape) if data == "heavy" else rng.standard_normal(shape)
            if data == "outliers":  # channels up to 12 binades above the others
                x = x * np.where(rng.random(shape[-1]) < 0.03, 2.0 ** rng.integers(4, 13, shape[-1]), 1.0)
            return torch.from_numpy(x).float().cuda()

        self.x, self.dy = draw(self.tokens, self.d).bfloat16(), draw(self.tokens, self.d).bfloat16()
        if data == "outliers":
            self.x = (self.x.float() / 8).bfloat16()
        normal = lambda *shape, fan: torch.from_numpy(rng.standard_normal(shape) * fan**-0.5).float().cuda()  # noqa: E731
        self.w_gate_up = normal(experts, 2, self.f, self.d, fan=self.d)
        self.w_down = normal(experts, self.d, self.f, fan=self.f)
        self.weight = torch.from_numpy(rng.random(ids.shape) + 0.1).float().cuda()

    def run(self, mode="aligned", wgrad_bf16=False, save="gate_up", accumulate_into=None, dirt=0, ways=None):
        shape = (self.tokens, self.top_k, self.experts, self.d, self.f)
        layer = mx_c_api.MxLayer(*shape, mode, wgrad_bf16, self.activation, ways=ways)
        gate_up, down = layer.prepare(self.w_gate_up), layer.prepare(self.w_down)
        plan = layer.schedule(self.expert, layer.new_plan())
        layer.soil()
        if dirt:
            layer.workspace.fill_(dirt)
        saved = layer.new_saved(save)
        y, dx = (torch.full_like(self.x, float("nan")) for _ in range(2))
        d_weight = torch.full_like(self.weight, float("nan"))
        dw = accumulate_into or [torch.full_like(w, float("nan")) for w in (self.w_gate_up, self.w_down)]
        layer.forward(self.x, self.weight, plan, gate_up, down, y, saved)
        self.saved, self.row_TxK = saved, plan.row_TxK
        layer.workspace.fill_(dirt or 255)
        layer.backward(
            self.x,
            self.weight,
            self.dy,
            plan,
            gate_up,
            down,
            saved,
            dx,
            d_weight,
            *dw,
            accumulate=accumulate_into is not None,
        )
        torch.cuda.synchronize()
        return dict(zip(("y", "dx", "d_weight", "dw_gate_up", "dw_down"), (y, dx, d_weight, *dw), strict=True))


NAMES = ("y", "dx", "d_weight", "dw_gate_up", "dw_down")


def errors(got, ref):
    """Relative norm per tensor, and per expert for the gradients of weights."""
    out = {}
    for name in NAMES:
        pairs = [(got[name], ref[name])]
        if name.startswith("dw_"):
            pairs = [(got[name][e], ref[name][e]) for e in range(got[name].shape[0])]
        out[name] = max(oracle.relative(a, b) for a, b in pairs)
    return out


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["aligned", "exact"])
@pytest.mark.parametrize("wgrad_bf16", [False, True], ids=["mx_wgrad", "bf16_wgrad"])
def test_layer_matches_the_same_operands_in_double_precision(name, mode, wgrad_bf16):
    p = Problem(name)
    got = p.run(mode, wgrad_bf16)
    ref = mx_oracle.layer(p.activation, p.x, p.weight, p.expert, p.w_gate_up, p.w_down, p.dy, mode, wgrad_bf16)
    found = errors(got, dict(zip(NAMES, ref, strict=True)))
    print(name, mode, wgrad_bf16, {k: f"{v:.1e}" for k, v in found.items()})
    assert all(found[k] < TOLERANCE[mode][k] for k in NAMES), found
    for e in range(p.experts):
        if not (p.expert == e).any():
            assert not got["dw_gate_up"][e].any() and not got["dw_down"][e].any()


@pytest.mark.parametrize("name", ["issue_sizes", "tiny_groups", "long_experts", "top_k"])
@pytest.mark.parametrize("mode", ["aligned", "exact"])
def test_every_way_of_a_bf16_weight_gradient_has_equal_bits(name, mode):
    p = Problem(name)
    tiles, *strips = (
        p.run(mode, wgrad_bf16=True, ways={"wgrad_down": way, "wgrad_gate_up": way})
        for way in ("dispatched", "resident_512", "resident_rows")
    )
    for other in strips:
        for k in NAMES:
            assert torch.equal(tiles[k], other[k]), k


@pytest.mark.parametrize("name", CASES)
def test_fp8_weight_gradients_in_strips_have_equal_bits(name):
    p = Problem(name)
    tiles, strips = (
        p.run("aligned", dirt=dirt, ways={"wgrad_down": way, "wgrad_gate_up": way})
        for way, dirt in (("dispatched", 0), ("resident_fp8", 0x7F))
    )
    for k in NAMES:
        assert torch.equal(tiles[k], strips[k]), k


@pytest.mark.parametrize("name", ["tiny_groups", "long_experts", "top_k", "outliers", "heavy_tails"])
@pytest.mark.parametrize("save", ["gate_up", "gate_up_mx", "recompute"])
@pytest.mark.parametrize("wgrad_bf16", [False, True], ids=["mx_wgrad", "bf16_wgrad"])
def test_tokens_on_the_n_side_have_equal_bits(name, save, wgrad_bf16):
    p = Problem(name)
    rows = p.run("aligned", wgrad_bf16, save, ways=ROWS_ON_M)
    for products in (["gate_up"], ["down"], ["dgrad_gate_up"], ["gate_up", "down", "dgrad_gate_up"]):
        if p.top_k == 1 and products != ["gate_up"]:
            continue
        other = p.run("aligned", wgrad_bf16, save, dirt=0x7F, ways=ROWS_ON_M | dict.fromkeys(products, "tokens_n"))
        for k in NAMES:
            assert torch.equal(rows[k], other[k]), (products, k)


# With tokens on the N side dgrad_gate_up does not dispatch x for the weight gradients in BF16.
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("save", ["gate_up", "recompute"])
@pytest.mark.parametrize("wgrad_bf16", [False, True], ids=["mx_wgrad", "bf16_wgrad"])
def test_gathered_dy_has_equal_bits(name, save, wgrad_bf16):
    p = Problem(name)
    apart = {"dgrad_down": "dispatched"} | ({"dgrad_gate_up": "tokens_n"} if p.top_k > 1 else {})
    rows = p.run("aligned", wgrad_bf16, save, ways=apart)
    other = p.run("aligned", wgrad_bf16, save, dirt=0x7F, ways={"dgrad_down": "gathered"})
    for k in NAMES:
        assert torch.equal(rows[k], other[k]), k


@pytest.mark.parametrize(
    ("mode", "ways"),
    [
        ("aligned", {"gate_up": "gathered"}),
        ("exact", {"dgrad_down": "gathered"}),
        ("aligned", {"wgrad_down": "resident_512"}),
        ("aligned", {"dgrad_down": "tokens_n"}),
        ("exact", {"down": "tokens_n"}),
    ],
    ids=str,
)
def test_a_way_that_a_product_does_not_have_is_refused(mode, ways):
    with pytest.raises(RuntimeError, match=r"way [235] is not one that the \w+ product of this shape has in MXFP8"):
        Problem("top_k").run(mode, ways=ways)


@pytest.mark.parametrize("mode", ["aligned", "exact"])
def test_two_runs_on_different_dirt_have_equal_bits(mode):
    p = Problem("issue_sizes")
    first, second = p.run(mode), p.run(mode, dirt=0x7F)
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("name", ["top_k", "tiny_groups"])
@pytest.mark.parametrize("mode, wgrad_bf16", [("aligned", False), ("aligned", True), ("exact", False)])
def test_calls_replay_from_a_graph(name, mode, wgrad_bf16):
    """The steps of the backward, which overlap on streams, are the edges of a graph."""
    p = Problem(name)
    expected = p.run(mode, wgrad_bf16)
    layer = mx_c_api.MxLayer(p.tokens, p.top_k, p.experts, p.d, p.f, mode, wgrad_bf16, p.activation)
    weights = layer.prepare(p.w_gate_up), layer.prepare(p.w_down)
    plan, saved = layer.schedule(p.expert, layer.new_plan()), layer.new_saved("gate_up")
    found = {"y": p.x, "dx": p.x, "d_weight": p.weight, "dw_gate_up": p.w_gate_up, "dw_down": p.w_down}
    found = {name: torch.empty_like(like) for name, like in found.items()}
    y, *gradients = found.values()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.forward(p.x, p.weight, plan, *weights, y, saved)
        layer.backward(p.x, p.weight, p.dy, plan, *weights, saved, *gradients)
    for _ in range(3):
        for out in found.values():
            out.fill_(float("nan"))
        layer.workspace.fill_(255)
        graph.replay()
        torch.cuda.synchronize()
        for key, out in found.items():
            assert torch.equal(out, expected[key]), key


@pytest.mark.parametrize("mode", ["aligned", "exact"])
def test_recomputed_is_saved(mode):
    p = Problem("top_k")
    saved, recomputed = p.run(mode), p.run(mode, save="recompute")
    for name in NAMES:
        assert torch.equal(saved[name], recomputed[name]), name


def test_gate_up_in_mxfp8_stays_close():
    p = Problem("top_k")
    exact, packed = p.run("aligned"), p.run("aligned", save="gate_up_mx")
    assert torch.equal(exact["y"], packed["y"])
    found = errors(packed, exact)
    assert all(found[k] < 8e-2 for k in NAMES), found
    assert found["dx"] > 1e-3  # it was quantised


@pytest.mark.parametrize("wgrad_bf16", [False, True], ids=["mx_wgrad", "bf16_wgrad"])
def test_gradients_continue_from_the_buffer(wgrad_bf16):
    p = Problem("issue_sizes")
    start = [torch.randn_like(w) for w in (p.w_gate_up, p.w_down)]
    once = p.run("aligned", wgrad_bf16)
    continued = p.run("aligned", wgrad_bf16, accumulate_into=[s.clone() for s in start])
    for s, name in zip(start, ("dw_gate_up", "dw_down"), strict=True):
        for e in range(p.experts):
            if (p.expert == e).any():
                assert oracle.relative(continued[name][e], once[name][e].double() + s[e]) < 1e-6
            else:
                assert torch.equal(continued[name][e], s[e])


def test_against_fp32_the_error_is_that_of_the_format():
    p = Problem("top_k")
    got = p.run("aligned")
    ref = oracle.layer(p.activation, p.x, p.weight, p.expert, p.w_gate_up, p.w_down, p.dy)
    found = errors(got, dict(zip(NAMES, ref[:5], strict=True)))
    # below the range something ran unquantised, above it something is broken (numerics of the format: 6.6e-2 y, 7e-2 dx
    # and dW)
    assert 4e-2 < found["y"] < 8.5e-2 and 4e-2 < found["dx"] < 9e-2, found
    assert 4e-2 < found["dw_gate_up"] < 1e-1 and 4e-2 < found["dw_down"] < 1e-1, found


def test_poison_reaches_what_reads_it_and_nothing_else():
    p = Problem("top_k")
    clean = p.run("aligned")
    token = int((p.expert[:, 0] >= 0).nonzero()[10])
    p.x[token, 5] = float("nan")
    got = p.run("aligned")
    assert got["y"][token].isnan().all()
    others = torch.arange(p.tokens, device="cuda") != token
    assert torch.equal(got["y"][others], clean["y"][others])
    assert torch.equal(got["dx"][others], clean["dx"][others])


@pytest.mark.parametrize("mode", ["aligned", "exact"])
def test_small_integers_are_exact(mode):
    """Every sum fits the tensor core's short accumulators and BF16: gate and up are the integers they should be."""
    p = Problem("top_k")
    generator = torch.Generator("cuda").manual_seed(2)
    p.x = torch.randint(-2, 3, p.x.shape, device="cuda", generator=generator).bfloat16()
    p.w_gate_up = torch.randint(-1, 2, p.w_gate_up.shape, device="cuda", generator=generator).float()
    p.run(mode)
    for t, s in (p.expert >= 0).nonzero().tolist()[::7]:
        expected = p.w_gate_up[p.expert[t, s]].double() @ p.x[t].double()
        assert torch.equal(p.saved[0][:, p.row_TxK[t, s]].double(), expected), (t, s)


@pytest.mark.parametrize("name", ["top_k", "outliers"])
def test_error_of_the_products_alone(name):
    """From the kernels' own gate and up, d(weight) shows the error of one FP8 product, before any rounding to BF16,
    and its bias.
    """
    p = Problem(name)
    found = {}
    for mode in ("aligned", "exact"):
        got = p.run(mode)
        ref = mx_oracle.layer(
            p.activation, p.x, p.weight, p.expert, p.w_gate_up, p.w_down, p.dy, mode, saved=(p.saved[0], p.row_TxK)
        )
        d_weight = ref[2]
        error = got["d_weight"].double() - d_weight
        bias = ((error * d_weight.sign()).sum() / d_weight.abs().sum()).item()
        found[mode] = {"d_weight": oracle.relative(got["d_weight"], d_weight), "bias": bias}
        found[mode] |= {k: errors(got, dict(zip(NAMES, ref, strict=True)))[k] for k in ("dw_gate_up", "dw_down")}
    print(name, found)
    assert found["exact"]["d_weight"] < 2e-5
    assert found["aligned"]["d_weight"] < 5e-4 and abs(found["aligned"]["bias"]) < 2e-4
