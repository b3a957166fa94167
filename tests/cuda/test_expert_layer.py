"""The Hopper expert layer against FP32 and integer oracles, on a GPU of compute capability 9.0. See oracle.py."""

import concurrent.futures
import dataclasses
import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU kernel tests drive the C library through torch")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import c_api  # noqa: E402
import oracle  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a GPU of sm_90"
    ),
    pytest.mark.skipif(not c_api.LIBRARY.exists(), reason=f"needs {c_api.LIBRARY.name}: build kernels_cuda first"),
]

BF16_TOLERANCE = 8e-3  # four BF16 roundings of 1.1e-3 rms each on the longest path, and no more


def routing(rng, sizes, top_k, experts, tokens):
    """Expert ids: exact group sizes with K = 1 (and one masked token), or random distinct experts with masked tokens."""
    if sizes is not None:
        ids = np.repeat(np.arange(len(sizes)), sizes)
        ids = np.append(ids, -1)
        return rng.permutation(ids).astype(np.int32)[:, None]
    ids = np.argsort(rng.random((tokens, experts)) + np.linspace(0, 0.7, experts), axis=1)[:, :top_k].astype(np.int32)
    ids[rng.random(tokens) < 0.05] = -1
    return ids


CASES = {
    # name: (group sizes or None, K, E, T, D, F, activation)
    "issue_sizes": ([162, 0, 257, 446, 0, 83], 1, 6, None, 328, 200, "swiglu"),
    "tiny_groups": ([1, 31, 32, 33, 0, 127, 129], 1, 7, None, 264, 136, "swiglu_oai"),
    "empty_first_and_last": ([0, 300, 0], 1, 3, None, 512, 384, "swiglu_clamped"),
    "one_expert": ([385], 1, 1, None, 72, 520, "geglu"),
    "all_empty": ([0, 0], 1, 2, None, 128, 256, "swiglu"),
    "top_k": (None, 4, 16, 777, 448, 320, "swiglu"),
    "many_experts": (None, 8, 64, 512, 256, 192, "swiglu"),
    "deep": (None, 2, 8, 2048, 1032, 776, "swiglu"),
    "single_token": ([1], 1, 1, None, 8, 8, "swiglu"),
}


@pytest.fixture(params=CASES)
def case(request):
    return build(request.param)


def build(name):
    sizes, top_k, experts, tokens, d, f, act = CASES[name]
    rng = np.random.default_rng(sorted(CASES).index(name))
    ids = routing(rng, sizes, top_k, experts, tokens)
    tokens = len(ids)
    g = torch.Generator(device="cuda").manual_seed(len(name))
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=g)  # noqa: E731
    return {
        "name": name, "act": act, "ids": ids, "tokens": tokens, "top_k": top_k, "experts": experts, "d": d, "f": f,
        "expert": torch.tensor(ids, device="cuda"),
        "x": randn(tokens, d).bfloat16(),
        "weight": torch.rand(tokens, top_k, device="cuda", generator=g),
        "w_gate_up": (2 * randn(experts, 2, f, d) / d**0.5).bfloat16(),
        "w_down": (randn(experts, d, f) / f**0.5).bfloat16(),
        "dy": randn(tokens, d).bfloat16(),
        "biases": (0.3 * randn(experts, 2, f), 0.3 * randn(experts, d)),
    }  # fmt: skip


def run(case, recompute=False, accumulate_into=None, ways=None, biased=False):
    """Schedule, forward and backward on dirty memory. Returns a dict of tensors."""
    layer = c_api.Layer(
        case["tokens"], case["top_k"], case["experts"], case["d"], case["f"], case["act"], recompute, ways=ways
    )
    biases = case["biases"] if biased else None
    plan = layer.schedule(case["expert"], layer.new_plan())
    y, dx = (c_api._dirty(case["x"].shape, torch.bfloat16) for _ in range(2))
    gate_up = c_api._dirty((2, layer.rows, case["f"]), torch.bfloat16)
    layer.soil()
    layer.forward(case["x"], case["weight"], plan, case["w_gate_up"], case["w_down"], y, gate_up, biases)
    d_weight = c_api._dirty(case["weight"].shape, torch.float32)
    if accumulate_into is None:
        shapes = [case[n].shape for n in ("w_gate_up", "w_down")] + [b.shape for b in case["biases"]]
        dws = [c_api._dirty(shape, torch.float32) for shape in shapes]
    else:
        dws = [t.clone() for t in accumulate_into]
    layer.soil()
    saved = None if recompute else gate_up
    layer.backward(
        case["x"], case["weight"], case["dy"], plan, case["w_gate_up"], case["w_down"], saved, dx, d_weight, *dws[:2],
        accumulate=accumulate_into is not None, biases=biases, bias_gradients=dws[2:] if biased else None,
    )  # fmt: skip
    torch.cuda.synchronize()
    return {
        "plan": plan,
        "y": y,
        "gate_up": gate_up,
        "dx": dx,
        "d_weight": d_weight,
        "dw_gate_up": dws[0],
        "dw_down": dws[1],
        **({"db_gate_up": dws[2], "db_down": dws[3]} if biased else {}),
    }


def errors(case, out) -> dict:
    """Relative norms per tensor, and the worst over experts for weight gradients."""
    biases = case["biases"] if "db_down" in out else None
    y, dx, d_weight, *gradients = oracle.layer(
        case["act"], case["x"], case["weight"], case["expert"], case["w_gate_up"], case["w_down"], case["dy"], biases
    )
    found = {name: oracle.relative(out[name], ref) for name, ref in (("y", y), ("dx", dx), ("d_weight", d_weight))}
    for name, ref in zip(("dw_gate_up", "dw_down", "db_gate_up", "db_down"), gradients, strict=True):
        if name not in out:
            continue
        per_expert = [oracle.relative(out[name][e], ref[e]) for e in range(case["experts"])]
        found[name] = max(per_expert, key=lambda v: float("inf") if v != v else v)
    return found


@pytest.mark.parametrize("first_expert,capacity", [(0, 2**31 - 1), (0, 40), (1, 2**31 - 1)])
def test_schedule_equals_a_stable_sort(case, first_expert, capacity):
    layer = c_api.Layer(case["tokens"], case["top_k"], case["experts"], case["d"], case["f"])
    plan = layer.schedule(case["expert"], layer.new_plan(), first_expert, capacity)
    expected = oracle.plan(case["ids"], case["experts"], layer.rows, first_expert, capacity)
    for name, want in expected.items():
        np.testing.assert_array_equal(getattr(plan, name).cpu().numpy(), want, err_msg=name)


def test_layer_matches_the_fp32_oracle_per_tensor_and_expert(case):
    found = errors(case, run(case))
    assert all(v <= BF16_TOLERANCE for v in found.values()), found


def test_two_runs_on_dirty_memory_and_recompute_give_equal_bits(case):
    first, second, third = run(case), run(case), run(case, recompute=True)
    for name in ("y", "dx", "d_weight", "dw_gate_up", "dw_down"):
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], third[name]), f"{name} with recompute"


@pytest.mark.parametrize("name", ["issue_sizes", "one_expert", "all_empty", "top_k"])
def test_biases_match_the_fp32_oracle_and_continue(name):
    case = build(name)
    out, again = run(case, biased=True), run(case, biased=True, recompute=True)
    found = errors(case, out)
    assert {"db_gate_up", "db_down"} <= set(found)
    assert all(v <= BF16_TOLERANCE for v in found.values()), found
    names = ("dw_gate_up", "dw_down", "db_gate_up", "db_down")
    for tensor in ("y", "dx", "d_weight", *names):
        assert torch.equal(out[tensor], again[tensor]), tensor
    start = [torch.randn_like(out[n]) for n in names]
    sums = run(case, accumulate_into=start, biased=True)
    for tensor, before in zip(names, start, strict=True):
        assert oracle.relative(sums[tensor], before + out[tensor]) < 1e-5, tensor


@pytest.mark.parametrize("kind", c_api.KINDS)
def test_every_way_of_a_product_gives_equal_bits(case, kind):
    layer = c_api.Layer(case["tokens"], case["top_k"], case["experts"], case["d"], case["f"])
    scatters = case["top_k"] == 1 and kind in ("down", "dgrad_gate_up")
    assert len(layer.ways(kind)) == (5 if kind == "gate_up" else 3 if "wgrad" in kind else 1 if scatters else 2)
    start = [torch.randn(case[n].shape, device="cuda") for n in ("w_gate_up", "w_down")]
    start += [torch.zeros_like(b) for b in case["biases"]]
    runs = []
    for way in layer.ways(kind):
        runs.append([run(case, ways={kind: way}), run(case, ways={kind: way}, accumulate_into=start, biased=True)])
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            for name in ("y", "gate_up", "dx", "d_weight", "dw_gate_up", "dw_down"):
                rows = written_rows(a["plan"])
                x, y = (a[name][:, rows], b[name][:, rows]) if name == "gate_up" else (a[name], b[name])
                assert torch.equal(x, y), name


@pytest.mark.parametrize("capturing", [False, True], ids=["streams", "graph"])
def test_rows_dispatched_in_two_parts_give_equal_bits(monkeypatch, capturing):
    """So many rows that tasks stand on both sides of the cut; the steps overlap on streams, or are the edges of a graph."""
    monkeypatch.setitem(CASES, "two_parts", ([9000, 0, 22001, 12300], 1, 4, None, 264, 256, "swiglu"))
    case = build("two_parts")
    wanted = run(case, ways={"gate_up": "dispatched"})
    assert torch.equal(run(case)["y"], wanted["y"])
    layer = c_api.Layer(*(case[n] for n in ("tokens", "top_k", "experts", "d", "f", "act")), ways={"gate_up": "beside"})
    plan = layer.schedule(case["expert"], layer.new_plan())
    y, gate_up = torch.empty_like(wanted["y"]), torch.empty_like(wanted["gate_up"])

    def forward():
        layer.forward(case["x"], case["weight"], plan, case["w_gate_up"], case["w_down"], y, gate_up)

    call = forward
    if capturing:
        forward()  # what is asked once per device
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        call = graph.replay
    rows = written_rows(plan)
    for _ in range(3):
        for out in (y, gate_up):
            out.fill_(float("nan"))
        layer.soil()
        call()
        torch.cuda.synchronize()
        assert torch.equal(y, wanted["y"]) and torch.equal(gate_up[:, rows], wanted["gate_up"][:, rows])


def written_rows(plan):
    """Rows of experts, with their padding up to a multiple of 64: nobody reads what follows."""
    spans = [(s, s + (c + 63) // 64 * 64) for s, c in zip(plan.start_E.tolist(), plan.count_E.tolist(), strict=True)]
    return torch.cat([torch.arange(a, b, device="cuda") for a, b in spans])


@pytest.mark.parametrize("ways", [{"gate_up": w} for w in c_api.WAYS if "resident" not in w], ids=str)
def test_padded_rows_of_gate_and_up_are_zero(case, ways):
    out = run(case, ways=ways)
    rows = written_rows(out["plan"])
    padding = rows[out["plan"].slot_M[rows] < 0]
    assert (out["gate_up"][:, padding] == 0).all()


def test_accumulation_continues_from_the_buffer_and_leaves_empty_experts_alone(case):
    plain = run(case)
    start = [torch.randn_like(plain["dw_gate_up"]), torch.randn_like(plain["dw_down"])]
    out = run(case, accumulate_into=start)
    for name, before in zip(("dw_gate_up", "dw_down"), start, strict=True):
        for e in range(case["experts"]):
            assert oracle.relative(out[name][e], before[e] + plain[name][e]) < 1e-5, (name, e)
            if (case["ids"] == e).sum() == 0:
                assert torch.equal(out[name][e], before[e])


@pytest.mark.parametrize(
    "layers", [75, 97]
)  # task lists of more than 6,000 experts (kMostOrdered) have a builder of their own
def test_a_layer_of_a_stack_gives_the_bits_of_the_layer_alone(layers):
    """Layers of 64 experts as one array: the layer is called with all of them, and only its own have rows."""
    case, at = build("many_experts"), 71
    start = [torch.randn(case[n].shape, device="cuda") for n in ("w_gate_up", "w_down")]
    alone = run(case, accumulate_into=start)
    own = slice(at * case["experts"], (at + 1) * case["experts"])

    def stacked(tensor, fill):
        out = torch.full((layers * case["experts"], *tensor.shape[1:]), fill, dtype=tensor.dtype, device="cuda")
        out[own] = tensor
        return out

    layer = c_api.Layer(case["tokens"], case["top_k"], layers * case["experts"], case["d"], case["f"], case["act"])
    layer.shape.rows = len(alone["plan"].slot_M)
    plan = dataclasses.replace(
        alone["plan"], **{n: stacked(getattr(alone["plan"], n), 0) for n in ("count_E", "start_E", "routed_E")}
    )
    weights = [stacked(case[n], float("nan")) for n in ("w_gate_up", "w_down")]
    gradients = [stacked(t, 1.0) for t in start]
    y, dx = (c_api._dirty(case["x"].shape, torch.bfloat16) for _ in range(2))
    gate_up = c_api._dirty((2, layer.rows, case["f"]), torch.bfloat16)
    d_weight = c_api._dirty(case["weight"].shape, torch.float32)
    layer.forward(case["x"], case["weight"], plan, *weights, y, gate_up)
    layer.backward(
        case["x"], case["weight"], case["dy"], plan, *weights, gate_up, dx, d_weight, *gradients, accumulate=True
    )
    for name, found in {"y": y, "dx": dx, "d_weight": d_weight}.items():
        assert torch.equal(found, alone[name]), name
    for name, found in zip(("dw_gate_up", "dw_down"), gradients, strict=True):
        assert torch.equal(found[own], alone[name]), name
        found[own] = 1.0
        assert (found == 1.0).all(), name


@pytest.mark.parametrize("name", ["top_k", "tiny_groups"])
def test_calls_replay_from_a_graph(name):
    """Command buffers: nothing on the host may depend on the data, and nothing may be allocated."""
    case = build(name)
    expected = run(case)
    layer = c_api.Layer(case["tokens"], case["top_k"], case["experts"], case["d"], case["f"], case["act"])
    plan = layer.new_plan()
    y, dx = (c_api._dirty(case["x"].shape, torch.bfloat16) for _ in range(2))
    gate_up = c_api._dirty((2, layer.rows, case["f"]), torch.bfloat16)
    d_weight = c_api._dirty(case["weight"].shape, torch.float32)
    dws = [c_api._dirty(case[n].shape, torch.float32) for n in ("w_gate_up", "w_down")]
    expert = torch.zeros_like(case["expert"])  # another routing at capture time
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.schedule(expert, plan)
        layer.forward(case["x"], case["weight"], plan, case["w_gate_up"], case["w_down"], y, gate_up)
        layer.backward(
            case["x"], case["weight"], case["dy"], plan, case["w_gate_up"], case["w_down"], gate_up, dx, d_weight, *dws
        )
    expert.copy_(case["expert"])
    found = {"y": y, "dx": dx, "d_weight": d_weight, "dw_gate_up": dws[0], "dw_down": dws[1]}
    for _ in range(3):
        for out in found.values():
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for key, out in found.items():
            assert torch.equal(out, expected[key]), key


def test_layers_on_streams_of_several_threads():
    """The steps of a backward overlap on a second stream (overlap.h): each call has its own for as long as it launches."""
    case = build("top_k")
    expected = run(case)  # and everything that was made for it is there

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            return [run(case) for _ in range(6)]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = [out for outs in threads.map(work, range(4)) for out in outs]
    for out in found:
        for name in ("y", "dx", "d_weight", "dw_gate_up", "dw_down"):
            assert torch.equal(out[name], expected[name]), name


def test_bad_shapes_are_refused_by_name():
    case = build("tiny_groups")
    layer = c_api.Layer(case["tokens"], 1, case["experts"], case["d"], case["f"])
    plan = layer.schedule(case["expert"], layer.new_plan())
    layer.shape.width = 132
    args = (case["x"], case["weight"], plan, case["w_gate_up"], case["w_down"], case["x"].clone(), None)
    with pytest.raises(RuntimeError, match="width is 132, must be a positive multiple of 8"):
        layer.forward(*args)
    layer.shape.width = case["f"]
    layer.shape.way[c_api.KINDS.index("down")] = c_api.WAYS.index("gathered")
    with pytest.raises(RuntimeError, match="way 2 is not one that the down product of this shape has"):
        layer.forward(*args)
    layer.shape.way[c_api.KINDS.index("down")] = 0
    layer.shape.rows += 1
    with pytest.raises(RuntimeError, match="rows is .* must be a multiple of 128"):
        layer.forward(*args)
