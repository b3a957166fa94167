"""The CUDA quantisers on a GPU of compute capability 9.0 against ops/mxfp8.py run on the same GPU: equal bits,
everywhere.
"""

import os
import pathlib
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU kernel tests drive the C library through torch")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "kernels_cuda"))

import c_api  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import mx_c_api  # noqa: E402
from mx_c_api import Output, quantize  # noqa: E402

from moejax.ops import mxfp8  # noqa: E402
from moejax.ops.mxfp8_layout import interleave_scales  # noqa: E402
from moejax.ops.mxfp8_matmul import align  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)), reason="needs a GPU of sm_90"
    ),
    pytest.mark.skipif(not c_api.LIBRARY.exists(), reason=f"needs {c_api.LIBRARY.name}: build kernels_cuda first"),
]

FRAGMENT = [c % 8 // 2 * 32 + c // 8 * 2 + c % 2 for c in range(128)]


@pytest.fixture(scope="module")
def lib():
    return mx_c_api.load()


def to_jax(x):
    return jax.dlpack.from_dlpack(x.contiguous())


def to_torch(x):
    if x.dtype == jnp.float8_e4m3fn:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return torch.from_dlpack(x)


def same(got, expected, what):
    got, expected = (t.view(torch.int16) if t.dtype == torch.bfloat16 else t for t in (got, expected))
    wrong = (got != expected).nonzero()
    assert wrong.numel() == 0, f"{what}: {len(wrong)} of {got.numel()} differ, first at {wrong[0].tolist()}"


def reference(x, axis, form, transposed):
    """Elements and plain codes (kAligned: one per 128, along the block axis) of x (B, R, C), as torch tensors."""
    mx = mxfp8.quantize(to_jax(x), axis, transposed=transposed)
    if form == "dequantized":
        return to_torch(mxfp8.dequantize(mx, jnp.bfloat16)), None
    if form != "mx":
        mx = align(mx, 128 if form == "aligned_tile" else 1)
    return to_torch(mx.elements), to_torch(mx.scales)


def expected_codes(codes, form, layout, by_rows, transposed):
    """The reference's codes (one per 32, storage order) in the layout asked for."""
    if layout == "interleaved":
        k_last = codes if by_rows or transposed else codes.transpose(-1, -2)
        return to_torch(interleave_scales(to_jax(k_last))).reshape(-1)
    if form == "mx":
        return codes.reshape(-1)
    per_line = codes if by_rows or transposed else codes.transpose(-1, -2)  # (B, lines, blocks)
    groups = per_line[..., ::4].transpose(-1, -2)  # (B, blocks of 128, lines)
    if form == "aligned_tile":
        return groups[..., ::128].transpose(-1, -2).reshape(-1)  # (B, line tiles, blocks of 128)
    padded = torch.nn.functional.pad(groups, (0, -groups.shape[-1] % 128))
    if layout == "fragment":
        shuffled = torch.empty_like(padded).reshape(*padded.shape[:-1], -1, 128)
        shuffled[..., FRAGMENT] = padded.reshape(shuffled.shape)
        scales = torch.exp2(shuffled.double() - 127).bfloat16()  # code 0 is subnormal in BF16
        return scales.reshape(-1).view(torch.uint8)
    return padded.reshape(-1)


def check(lib, x, rows, columns, references=None):
    """`rows`, `columns`: (form, layout, transposed), or None. `references`: those of x already made, by arguments."""
    references = {} if references is None else references
    shape = tuple(x.shape)
    outputs = [Output(lib, shape, by_rows, *(spec or ("none",))) for by_rows, spec in ((True, rows), (False, columns))]
    quantize(lib, x, *outputs)
    torch.cuda.synchronize()
    for by_rows, spec, out in ((True, rows, outputs[0]), (False, columns, outputs[1])):
        if spec is None:
            continue
        form, layout, transposed = spec
        key = (-1 if by_rows else -2, form, transposed)
        if key not in references:
            references[key] = reference(x, *key)
        elements, codes = references[key]
        what = f"{'rows' if by_rows else 'columns'} {spec} of {x.dtype} {shape}"
        if form == "dequantized":
            # NaN payloads are the hardware's; code 0..2 may round, the same way
            assert torch.equal(out.elements.isnan(), elements.isnan()), what
            same(torch.nan_to_num(out.elements, 0.0), torch.nan_to_num(elements, 0.0), what)
            continue
        same(out.elements, elements, what + " elements")
        same(out.codes, expected_codes(codes, form, layout, by_rows, transposed), what + " codes")


FORMS = [
    (("mx", "plain", False), None),
    (("mx", "interleaved", False), None),
    (None, ("mx", "plain", False)),
    (None, ("mx", "plain", True)),
    (None, ("mx", "interleaved", True)),
    (("mx", "plain", False), ("mx", "plain", False)),
    (("mx", "interleaved", False), ("mx", "interleaved", True)),
    (("aligned", "plain", False), None),
    (None, ("aligned", "fragment", True)),
    (("aligned", "plain", False), ("aligned", "plain", True)),
    (("aligned_tile", "plain", False), ("aligned_tile", "plain", True)),
    (("dequantized", "plain", False), None),
    (("dequantized", "plain", False), ("dequantized", "plain", False)),
]


def special_values(x):
    """NaN, Inf, zeros, subnormals and the largest numbers, in places that share blocks with ordinary values."""
    x = x.clone()
    flat = x.view(-1)
    at = torch.randint(0, flat.numel(), (64,), device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 3.0e38, 2.0**-130, 448.0, 2.0**-149]
    flat[at] = torch.tensor(values * 8, device="cuda").to(x.dtype)
    x[..., 1, :] = 0
    x[..., 2, :] *= 2.0**-125
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(2, 256, 384), (3, 144, 96), (1, 16, 32)], ids=str)
@pytest.mark.parametrize("spread", [False, True], ids=["gaussian", "spread"])
def test_every_form_has_the_bits_of_the_reference(lib, dtype, shape, spread):
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(shape, device="cuda", generator=generator)
    if spread:  # neighbouring blocks many binades apart: re-based elements turn subnormal and vanish
        blocks = (shape[0], shape[1], shape[2] // 32)
        exponent = torch.randint(-28, 28, blocks, device="cuda", generator=generator).repeat_interleave(32, -1)
        x = torch.ldexp(x, exponent)
    x = special_values(x).to(dtype)
    references = {}
    for rows, columns in FORMS:
        check(lib, x, rows, columns, references)


def test_every_bf16_maximum(lib):
    """Each of the 2^16 BF16 values as the largest of its block, with smaller ones beside it."""
    bits = torch.arange(2**16, device="cuda", dtype=torch.int32).to(torch.int16)
    largest = bits.view(torch.bfloat16)
    x = torch.zeros(2**16, 32, dtype=torch.bfloat16, device="cuda")
    x[:, 7] = largest
    for i, factor in ((0, 0.5), (1, -0.37), (13, 2.0**-9), (31, -(2.0**-12))):
        x[:, i] = largest * factor
    check(lib, x[None], ("mx", "plain", False), None)
    check(lib, x.T.contiguous()[None], None, ("mx", "plain", True))
    check(lib, x.float()[None], ("mx", "plain", False), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_random_bit_patterns(lib, dtype):
    """2^26 of them per dtype and form; `MOEJAX_MX_VALUES` raises it (10^9 for the record)."""
    total = int(float(os.environ.get("MOEJAX_MX_VALUES", 2**26)))
    generator = torch.Generator("cuda").manual_seed(11)
    part = min(total, 2**26)
    for _ in range(-(-total // part)):
        words = torch.randint(
            -(2**31),
            2**31,
            (part // (2 if dtype == torch.bfloat16 else 1),),
            device="cuda",
            generator=generator,
            dtype=torch.int32,
        )
        x = words.view(dtype).view(1, -1, 2048)
        # exponents near each other in most blocks, or one large element would round the others to zero
        calm = torch.randn(x.shape, device="cuda", generator=generator).to(dtype)
        x = torch.where(torch.arange(x.shape[1], device="cuda")[None, :, None] % 4 == 0, x, calm)
        references = {}
        check(lib, x, ("mx", "plain", False), ("mx", "plain", True), references)
        check(lib, x, ("mx", "plain", False), None, references)
        check(lib, x, ("aligned", "plain", False), ("aligned", "plain", True))


def grouped_plan(sizes, top_k, tokens, rows):
    """slot_M of groups of these sizes, with random slots."""
    rng = np.random.default_rng(5)
    slots = rng.permutation(tokens * top_k)
    slot = np.full(rows, -1, np.int32)
    at = start = 0
    for size in sizes:
        slot[start : start + size] = slots[at : at + size]
        at, start = at + size, start + (size + 127) // 128 * 128
    return torch.from_numpy(slot).cuda()


def test_groups_read_no_padding_and_leave_slack_alone(lib):
    sizes, top_k, tokens, width, rows = [130, 0, 1, 128, 40], 2, 200, 160, 1024
    slot_M = grouped_plan(sizes, top_k, tokens, rows)
    used_rows = sum((s + 127) // 128 * 128 for s in sizes)
    tokens_TxD = torch.randn(tokens, width, device="cuda").bfloat16()
    dense = torch.where((slot_M >= 0)[:, None], tokens_TxD[slot_M.clamp(min=0).long() // top_k], 0.0).bfloat16()
    in_place = torch.where((slot_M >= 0)[:, None], dense, float("nan")).bfloat16()  # padding holds NaN
    for source, gather in ((tokens_TxD, top_k), (in_place, 0)):
        rows_out = Output(lib, (1, rows, width), True, "aligned")
        columns_out = Output(lib, (1, rows, width), False, "aligned", "plain", True)
        quantize(lib, source[None], rows_out, columns_out, slot_M, gather, rows)
        torch.cuda.synchronize()
        elements, codes = reference(dense[None], -1, "aligned", False)
        same(rows_out.elements[0, :used_rows], elements[0, :used_rows], "grouped rows")
        got = rows_out.codes.view(-1, rows)[:, :used_rows]
        same(
            got,
            expected_codes(codes, "aligned", "plain", True, False).view(-1, rows)[:, :used_rows],
            "grouped row codes",
        )
        elements, codes = reference(dense[None], -2, "aligned", True)
        same(columns_out.elements[0, :, :used_rows], elements[0, :, :used_rows], "grouped columns")
        got = columns_out.codes.view(rows // 128, -1)[: used_rows // 128]
        same(
            got,
            expected_codes(codes, "aligned", "plain", False, True).view(rows // 128, -1)[: used_rows // 128],
            "grouped column codes",
        )
        assert (rows_out.elements[0, used_rows:] == 255).all(), "slack rows were written"


@pytest.mark.parametrize("layout", ["plain", "fragment"])
@pytest.mark.parametrize("tokens", [40, 1000, 8192, 14527])  # two slices fit, and overlap; all that fit
@pytest.mark.parametrize("data", ["gaussian", "spread", "bits"])
def test_tokens_kept_in_shared_memory_give_the_bits_of_the_reference(lib, layout, tokens, data):
    """Columns of gathered rows where a block keeps eight columns of all tokens: 2176 columns are more than two slices
    a block.
    """
    top_k, width = 4, 128 if tokens == 40 else 2176
    count = 97 * tokens // 100 * top_k  # some tokens have no row
    sizes = [count // 2 + 1, 0, count // 3, 1, count // 8]
    rows = (sum((s + 127) // 128 for s in sizes) + 2) * 128
    slot_M = grouped_plan(sizes, top_k, tokens, rows)
    generator = torch.Generator("cuda").manual_seed(tokens)
    x_TxD = torch.randn(tokens, width, device="cuda", generator=generator)
    if data == "spread":  # re-based elements turn subnormal and vanish, many of them with both roundings
        exponent = torch.randint(-12, 12, (tokens, 1), device="cuda", generator=generator)
        x_TxD = torch.ldexp(x_TxD, exponent)
    if data == "bits":
        words = torch.randint(-(2**15), 2**15, x_TxD.shape, device="cuda", generator=generator).to(torch.int16)
        x_TxD = torch.where(
            torch.rand(width, device="cuda", generator=generator) < 0.5, words.view(torch.bfloat16), x_TxD
        )
    x_TxD = special_values(x_TxD[None])[0].bfloat16() if tokens > 40 else x_TxD.bfloat16()
    out, by_rows = (
        Output(lib, (1, rows, width), False, "aligned", layout, True),
        Output(lib, (1, rows, width), True, "none"),
    )
    by_tiles = Output(lib, (1, rows, width), False, "aligned", layout, True)
    quantize(lib, x_TxD[None], by_rows, out, slot_M, top_k, rows, tokens)
    quantize(lib, x_TxD[None], by_rows, by_tiles, slot_M, top_k, rows)
    dense = torch.where((slot_M >= 0)[:, None], x_TxD[slot_M.clamp(min=0).long() // top_k], 0.0).bfloat16()
    elements, codes = reference(dense[None], -2, "aligned", True)
    codes = expected_codes(codes, "aligned", layout, False, True).view(rows // 128, -1)
    used = slot_M.view(-1, 128)[:, 0] >= 0
    used_rows = used.repeat_interleave(128)
    for what, got in (("kept", out), ("by tiles", by_tiles)):
        same(got.elements[0][:, used_rows], elements[0][:, used_rows], what)
        same(got.codes.view(rows // 128, -1)[used], codes[used], what + " codes")
        assert (got.elements[0][:, ~used_rows] == 255).all(), f"{what}: slack was written"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_losses_are_counted(lib, dtype):
    x = torch.randn(2, 128, 256, device="cuda")
    x[:, ::3, ::32] *= 2.0**20
    x = special_values(x).to(dtype)
    stats = mxfp8.quantization_stats(to_jax(x), mxfp8.quantize(to_jax(x)))
    expected = [
        int(getattr(stats, f)) for f in ("elements", "nonzero", "underflowed", "saturated", "blocks", "poisoned")
    ]
    assert mx_c_api.count_losses(lib, x) == expected
    assert expected[2] > 0 and expected[5] > 0


def test_bad_shapes_are_refused(lib):
    x = torch.zeros(1, 20, 48, device="cuda")
    with pytest.raises(RuntimeError, match="columns is 48, must be a positive multiple of 32"):
        quantize(lib, x, Output(lib, (1, 20, 64), True), Output(lib, (1, 20, 64), False, "none"))
    x = torch.zeros(1, 20, 64, device="cuda")
    with pytest.raises(RuntimeError, match="rows is 20, must be a multiple of 16"):
        quantize(lib, x, Output(lib, (1, 20, 64), True, "none"), Output(lib, (1, 20, 64), False, "mx", "plain", True))
    slot_M = torch.zeros(129, dtype=torch.int32, device="cuda")[1:]
    with pytest.raises(RuntimeError, match="slot_M must be aligned to 16 bytes"):
        quantize(lib, x, Output(lib, (1, 128, 64), True), Output(lib, (1, 128, 64), False, "none"), slot_M, 2, 128)
