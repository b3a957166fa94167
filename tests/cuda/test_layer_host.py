"""The whole Hopper expert layers, forward and backward, on the host machine (layer_host.cc): kernels_cuda/layer.cc and
mx_layer.cc as they are, with the tile programs on the emulator. Against FP64, and every way of a product against the
dispatched one, bit by bit. Memory is full of NaN, tokens without a slot are NaN, and nothing may be written past an end. What the
emulator stops ends this process, with its reason on stderr (pytest -s). Needs a C++ compiler, no GPU."""

import ctypes

import numpy as np
import pytest

from moejax.config import ActivationConfig
from moejax.native.cuda_calls import _activation
from moejax.native.ways import PRODUCTS as KINDS
from moejax.native.ways import WAYS
from tests.cuda.host_build import CXX, KERNELS, ROOT, build, emulator
from tests.cuda.layer_oracle import (
    BIAS_NAMES,
    MX_LIMIT,
    NAMES,
    Problem,
    errors,
    mx_oracle,
    problem,
    relative,
)

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH")

RECIPES = ("bf16", "aligned", "exact")
SAVES = ("nothing", "gate_up", "gate_up_mx")

DISPATCHED = dict.fromkeys(KINDS, "dispatched")
TOKENS_N = dict.fromkeys(("gate_up", "down", "dgrad_gate_up"), "tokens_n")
TOKENS_N_BF16 = TOKENS_N | {"dgrad_down": "tokens_n"}


def resident(what):
    return dict.fromkeys(("wgrad_down", "wgrad_gate_up"), f"resident_{what}")


def ways_of(kind, recipe, top_k, wgrad_bf16=False) -> list[str]:
    """The ways that a product has, besides auto."""
    if kind.startswith("wgrad"):
        return [
            "dispatched",
            *(["resident_512", "resident_rows"] if recipe != "aligned" or wgrad_bf16 else ["resident_fp8"]),
        ]
    on_n = TOKENS_N_BF16 if recipe == "bf16" else TOKENS_N if recipe == "aligned" else {}
    on_n = kind in on_n and (top_k > 1 or kind in ("gate_up", "dgrad_down"))
    gathered = ["gathered", "gathered_n", "beside"] if recipe == "bf16" and kind == "gate_up" else []
    if recipe == "aligned" and kind == "dgrad_down":
        gathered = ["gathered"]
    return ["dispatched", *(["tokens_n"] if on_n else []), *gathered]


# Against FP64 with the roundings of the contract, of which one in thousands goes the other way.
ROUNDED_LIMIT = dict.fromkeys((*NAMES, *BIAS_NAMES), 5e-4)
# Where that happens in MXFP8 the number may become another element: one is seen in the results of an expert with few rows.
MX_TIE_LIMIT = dict.fromkeys(NAMES, 3e-3)


@pytest.fixture(scope="module")
def library():
    tests = ROOT / "tests" / "cuda"
    flags = ["-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{tests / 'host_cuda'}"]
    sources, flags, headers = emulator(tests / "layer_host.cc", flags)
    layers = [KERNELS / "layer.cc", KERNELS / "mx_layer.cc"]
    return ctypes.CDLL(str(build([*sources, *layers], flags, [*headers, tests / "host_cuda"])))


class Refused(AssertionError):
    """The layer stopped with a message."""


def without_idle_tokens(p: Problem) -> Problem:
    """Every ninth token gets no slot; NaN then stands wherever nobody may look."""
    p.expert[::9] = -1
    idle = (p.expert < 0).all(1)
    p.x[idle] = p.dy[idle] = np.nan
    p.weight[p.expert < 0] = np.nan
    return p


def plan(expert_TxK, experts):
    """count_E, start_E, row_TxK, slot_M (docs/design.md, section 2)."""
    flat = expert_TxK.reshape(-1)
    count = np.bincount(flat[flat >= 0], minlength=experts)
    padded = -(-count // 128) * 128
    start = np.cumsum(padded) - padded
    row, slot = np.full(flat.size, -1), np.full(-(-(flat.size + 127 * experts) // 128) * 128, -1)
    for e in range(experts):
        slots = np.flatnonzero(flat == e)
        row[slots] = start[e] + np.arange(len(slots))
        slot[row[slots]] = slots
    return [a.astype(np.int32) for a in (count, start, row, slot)]


def run(
    library,
    p: Problem,
    ways=None,
    recipe="bf16",
    wgrad_bf16=False,
    save="gate_up",
    biases=None,
    start=None,
    seed=0,
    order=0,
    weakened=-1,
):
    """Results by name. `ways`: by product, auto where not named; `start`: gradients to continue from; `order` of the backward's
    steps and the one that is `weakened`: host_overlap.h. Raises Refused."""
    E, D, F = p.w_down.shape
    indices = plan(p.expert, E)
    sizes = np.array([*p.expert.shape, E, indices[3].size, D, F], np.int64)
    way = np.array([WAYS.index((ways or {}).get(kind, "auto")) for kind in KINDS], np.uint8)
    act = np.array(list(_activation(p.spec.act).values()), np.float32)
    options = [RECIPES.index(recipe), wgrad_bf16, SAVES.index(save), start is not None, seed, order, weakened]
    masters = [p.w_gate_up, p.w_down, *(biases or ())]
    gradients = [s.copy() for s in start] if start else [np.full_like(m, np.nan) for m in masters]
    y, dx, d_weight = np.empty_like(p.x), np.empty_like(p.x), np.empty_like(p.weight)
    message = ctypes.create_string_buffer(500)
    absent = [] if biases else [None, None]
    arrays = [sizes, way, act, np.array(options, np.int32), *indices, p.x, p.weight, p.dy]
    arrays += [*masters, *absent, y, dx, d_weight, *gradients, *absent]
    pointers = [None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
    if library.expert_layer(*pointers, message, ctypes.c_int(500)) != 0:
        raise Refused(message.value.decode())
    names = (*NAMES, *BIAS_NAMES)[: 3 + len(gradients)]
    return dict(zip(names, (y, dx, d_weight, *gradients), strict=True))


def assert_equal_bits(got, wanted, what):
    for name in wanted:
        assert got[name].tobytes() == wanted[name].tobytes(), (name, what)


def random_biases(p: Problem):
    random = np.random.default_rng(5)
    E, D, F = p.w_down.shape
    return [0.3 * random.standard_normal(shape).astype(np.float32) for shape in ((E, 2, F), (E, D))]


ORDERS = (0x7FFFFFFF, 0x2AAAAAAA)  # host_overlap.h: between them, each step is overtaken by the next one where that may


# --- BF16 ----------------------------------------


# Dispatched: the product before the last dispatches x for it (gemm_gather.h). With K = 1 products scatter to tokens.
@pytest.mark.parametrize(
    "top_k, act", [(2, ActivationConfig()), (1, ActivationConfig("swiglu_oai", limit=0.7, alpha=1.3))]
)
def test_bf16_matches_fp64_and_every_way_has_equal_bits(library, top_k, act):
    p = without_idle_tokens(problem("bf16", 72, 136, tokens=150, top_k=top_k))
    p.spec = p.spec.replace(act=act)
    biases = random_biases(p)
    wanted = run(library, p, DISPATCHED, biases=biases)
    found = errors(wanted, mx_oracle(p, biases=biases))
    print(found)
    assert all(found[name] < ROUNDED_LIMIT[name] for name in found), found
    on_n = TOKENS_N_BF16 if top_k > 1 else dict.fromkeys(("gate_up", "dgrad_down"), "tokens_n")
    others = [
        ({}, "nothing"),
        ({"gate_up": "gathered", **resident(512)}, "gate_up"),
        (on_n | resident("rows"), "gate_up"),
        (on_n | {"gate_up": "gathered_n"}, "nothing"),
        ({"gate_up": "beside"}, "gate_up"),
    ]
    for seed, (ways, save) in enumerate(others, start=100):
        assert_equal_bits(run(library, p, ways, save=save, biases=biases, seed=seed), wanted, (ways, save))


# Several tasks stand on either side of the cut. The steps run in every order that they may: the second part of the rows lands
# before the product of the first, or after it.
@pytest.mark.parametrize("top_k", [1, 2])
def test_rows_dispatched_beside_the_product_have_equal_bits_in_any_order(library, top_k):
    p = without_idle_tokens(problem("bf16", 24, 264, tokens=1300 // top_k, top_k=top_k))
    wanted = run(library, p, DISPATCHED)
    for order in (0, *ORDERS, *(1 << bit for bit in range(4))):
        got = run(library, p, DISPATCHED | {"gate_up": "beside"}, seed=order, order=order)
        assert_equal_bits(got, wanted, hex(order))


@pytest.mark.parametrize("ways", [DISPATCHED, TOKENS_N_BF16 | resident(512)], ids=["dispatched", "other"])
def test_bf16_gradients_continue(library, ways):
    p = without_idle_tokens(problem("bf16", 40, 72, tokens=60))
    biases = random_biases(p)
    check_continued(
        run(library, p, ways, biases=biases), lambda start: run(library, p, ways, biases=biases, start=start)
    )


def test_strips_of_two_blocks_have_equal_bits(library):
    # More columns than one block keeps, of which the other block's second warpgroup has none; tiles for several ticks; an
    # expert that streams.
    p = without_idle_tokens(problem("bf16", 328, 200, tokens=300))
    wanted = run(library, p, DISPATCHED)
    for seed, what in enumerate((512, "rows"), start=7):
        assert_equal_bits(run(library, p, resident(what), seed=seed), wanted, what)


def check_continued(once, run_from):
    """Experts without rows keep what was there; expert 1 has none."""
    random = np.random.default_rng(0)
    names = [name for name in once if name.startswith(("dw_", "db_"))]
    start = [random.standard_normal(once[name].shape).astype(np.float32) for name in names]
    continued = run_from(start)
    for s, name in zip(start, names, strict=True):
        assert continued[name][1].tobytes() == s[1].tobytes()
        assert relative(continued[name], s + once[name]) < 1e-6, name


# --- MXFP8 ----------------------------------------


@pytest.mark.parametrize(
    "recipe, wgrad_bf16, top_k",
    [("aligned", False, 2), ("aligned", True, 2), ("aligned", True, 1), ("exact", False, 1), ("exact", True, 2)],
)
def test_mxfp8_matches_the_same_operands_in_fp64_and_every_way_has_equal_bits(library, recipe, wgrad_bf16, top_k):
    p = without_idle_tokens(problem("mxfp8", 96, 160, tokens=150, top_k=top_k))
    if top_k == 1:
        p.spec = p.spec.replace(act=ActivationConfig("swiglu_oai", limit=0.7, alpha=1.3))
    wanted = run(library, p, DISPATCHED, recipe, wgrad_bf16)
    found = errors(wanted, mx_oracle(p, recipe == "aligned", wgrad_bf16))
    print(found)
    assert all(found[name] < MX_LIMIT[name] for name in NAMES), found
    on_n = {} if recipe == "exact" else TOKENS_N if top_k > 1 else {"gate_up": "tokens_n"}
    strips = [resident(512), resident("rows")] if recipe == "exact" or wgrad_bf16 else [resident("fp8")] * 2
    gathered = {"dgrad_down": "gathered"} if recipe == "aligned" else {}
    others = [
        ({}, "nothing"),
        (gathered | strips[0], "nothing"),
        (on_n | strips[0], "gate_up"),
        (on_n | strips[1], "nothing"),
    ]
    for seed, (ways, save) in enumerate(others, start=100):
        assert_equal_bits(run(library, p, ways, recipe, wgrad_bf16, save, seed=seed), wanted, (ways, save))


def test_gate_and_up_saved_in_mxfp8_stay_close(library):
    p = without_idle_tokens(problem("mxfp8", 32, 160, tokens=60))
    exact = run(library, p, recipe="aligned")
    packed = run(library, p, recipe="aligned", save="gate_up_mx")
    assert packed["y"].tobytes() == exact["y"].tobytes()
    found = errors(packed, [exact[name] for name in NAMES])
    assert all(found[name] < 8e-2 for name in NAMES) and found["dx"] > 1e-3, found
    for kinds in (("gate_up",), ("down", "dgrad_gate_up")):
        ways = dict.fromkeys(kinds, "tokens_n")
        assert_equal_bits(run(library, p, ways, "aligned", save="gate_up_mx"), packed, ways)


@pytest.mark.parametrize("wgrad_bf16", [False, True], ids=["mx_wgrad", "bf16_wgrad"])
def test_mxfp8_gradients_continue(library, wgrad_bf16):
    p = without_idle_tokens(problem("mxfp8", 32, 64, tokens=60))
    once = run(library, p, TOKENS_N, "aligned", wgrad_bf16)
    check_continued(once, lambda start: run(library, p, TOKENS_N, "aligned", wgrad_bf16, start=start))


# --- both ----------------------------------------


@pytest.mark.parametrize(
    "recipe, ways",
    [("bf16", {}), ("bf16", DISPATCHED), ("bf16", {"gate_up": "beside"}), ("aligned", TOKENS_N), ("exact", {})],
    ids=str,
)
@pytest.mark.parametrize("tokens", [0, 20])
def test_without_rows_everything_is_zero(library, recipe, ways, tokens):
    p = problem("bf16" if recipe == "bf16" else "mxfp8", 32, 64, tokens=20)
    p.expert[:] = -1
    p.x, p.dy, p.weight, p.expert = (a[:tokens] for a in (p.x, p.dy, p.weight, p.expert))
    got = run(library, without_idle_tokens(p), ways, recipe)
    for name in NAMES:
        assert not np.asarray(got[name], np.float32).any(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_without_experts_is_refused(library, recipe):
    p = problem("bf16" if recipe == "bf16" else "mxfp8", 32, 64, tokens=20)
    p.expert[:] = -1
    p.w_gate_up, p.w_down = p.w_gate_up[:0], p.w_down[:0]
    with pytest.raises(Refused, match="experts is 0, must be 1 to"):
        run(library, p, recipe=recipe)


@pytest.mark.parametrize(
    "recipe, ways, message",
    [
        ("bf16", {"down": "gathered"}, "way 2 is not one that the down product of this shape has"),
        ("bf16", {"dgrad_down": "beside"}, "way 8 is not one that the dgrad_down product of this shape has"),
        ("aligned", {"gate_up": "beside"}, "way 8 is not one that the gate_up product of this shape has in MXFP8"),
        ("bf16", {"wgrad_down": "resident_fp8"}, "way 7 is not one that the wgrad_down product of this shape has"),
        (
            "exact",
            {"wgrad_gate_up": "resident_fp8"},
            "way 7 is not one that the wgrad_gate_up product of this shape has in MXFP8",
        ),
        ("aligned", {"down": "resident_fp8"}, "way 7 is not one that the down product of this shape has in MXFP8"),
        ("aligned", {"gate_up": "gathered"}, "way 2 is not one that the gate_up product of this shape has in MXFP8"),
        ("exact", {"dgrad_down": "gathered"}, "way 2 is not one that the dgrad_down product"),
        ("aligned", {"wgrad_down": "resident_512"}, "way 5 is not one that the wgrad_down product"),
        ("aligned", {"dgrad_down": "tokens_n"}, "way 3 is not one that the dgrad_down product"),
        ("exact", {"down": "tokens_n"}, "way 3 is not one that the down product"),
    ],
    ids=str,
)
def test_a_way_that_a_product_does_not_have_is_refused(library, recipe, ways, message):
    with pytest.raises(Refused, match=message):
        run(library, problem("bf16" if recipe == "bf16" else "mxfp8", 32, 64, tokens=20), ways, recipe)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize(
    "recipe, wgrad_bf16, save",
    [
        ("bf16", False, "gate_up"),
        ("bf16", False, "nothing"),
        ("aligned", False, "gate_up"),
        ("aligned", False, "nothing"),
        ("aligned", True, "gate_up"),
        ("aligned", False, "gate_up_mx"),
        ("exact", False, "gate_up"),
        ("exact", True, "gate_up"),
    ],
)
def test_steps_of_the_backward_have_equal_bits_in_any_order(library, recipe, wgrad_bf16, save, top_k):
    p = without_idle_tokens(problem("bf16" if recipe == "bf16" else "mxfp8", 64, 96, tokens=40, top_k=top_k))
    biases = random_biases(p) if recipe == "bf16" else None
    for ways in (
        {},
        TOKENS_N_BF16 if recipe == "bf16" and top_k > 1 else DISPATCHED,
    ):  # with and without rows of x by the way
        wanted = run(library, p, ways, recipe, wgrad_bf16, save, biases)
        for order in ORDERS:
            got = run(library, p, ways, recipe, wgrad_bf16, save, biases, order=order)
            assert_equal_bits(got, wanted, (ways, hex(order)))


# The products, by the number of their step: what the step before each writes is what it reads.
@pytest.mark.parametrize(
    "recipe, wgrad_bf16, save, step",
    [
        ("bf16", False, "gate_up", 3),  # dgrad_gate_up, of what dgrad_down makes
        ("bf16", False, "nothing", 3),  # gate_up, of dispatched rows
        ("bf16", False, "nothing", 4),  # dgrad_down, of a gate and up that are computed again
        ("aligned", True, "gate_up", 3),
        ("aligned", False, "nothing", 4),
        ("exact", False, "gate_up", 5),  # dgrad_gate_up, of quantised rows
    ],
)
def test_a_step_that_does_not_wait_for_the_one_before_it_is_seen(library, recipe, wgrad_bf16, save, step):
    p = without_idle_tokens(problem("bf16" if recipe == "bf16" else "mxfp8", 64, 96, tokens=60))
    wanted = run(library, p, DISPATCHED, recipe, wgrad_bf16, save)
    got = run(library, p, DISPATCHED, recipe, wgrad_bf16, save, order=1 << step - 1, weakened=step)
    assert any(got[name].tobytes() != wanted[name].tobytes() for name in wanted)


# Any shape, recipe and ways that the layer takes.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(40))
def test_random_layers(library, seed):
    random = np.random.default_rng(seed)
    recipe = RECIPES[seed % 3]
    step = 8 if recipe == "bf16" else 32
    d_model, width = (int(step * random.integers(1, 300 // step)) for _ in range(2))
    top_k, wgrad_bf16, tokens = int(random.integers(1, 3)), bool(random.integers(2)), int(random.integers(18, 220))
    p = without_idle_tokens(problem("bf16" if recipe == "bf16" else "mxfp8", d_model, width, tokens, top_k, seed))
    wanted = run(library, p, DISPATCHED, recipe, wgrad_bf16)
    found = errors(wanted, mx_oracle(p, recipe == "aligned", wgrad_bf16))
    limit = ROUNDED_LIMIT if recipe == "bf16" else MX_TIE_LIMIT
    assert all(found[name] < limit[name] for name in NAMES), found
    for save in ("gate_up", "nothing"):
        ways = {kind: str(random.choice(ways_of(kind, recipe, top_k, wgrad_bf16))) for kind in KINDS}
        order = int(random.integers(2**31))
        got = run(library, p, ways, recipe, wgrad_bf16, save, seed=seed, order=order)
        assert_equal_bits(got, wanted, (ways, save, hex(order)))
