"""What bounds each product of the expert layer, and how fast it could be: Hopper against measured kernels and layers,
Blackwell as a prediction.

    python benchmarks/gpu_model.py            # all tables; there is nothing to choose
No measurement: rates from data sheets and public microbenchmarks, tile shapes from kernels_cuda/. A time is the largest
of six bounds of the whole product (tensor core, tensor memory, shared memory, L2, HBM, issue slots of the epilogue) plus,
where the epilogue does not run beside the products, its own time; tiles are dealt to SMs in whole waves.

Letters: D model width, F expert width, E experts; rows: T * K tokens, spread evenly over the experts.
"""

import argparse
import dataclasses
import json
import math
import pathlib

KINDS = ("gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up")


@dataclasses.dataclass(frozen=True)
class Device:
    """Rates per SM and clock, and of the whole chip. `clock_ghz` is what it holds under a full tensor-core load."""

    name: str
    sms: int
    clock_ghz: float
    bf16_flops: int  # dense, per SM and clock
    mx_flops: int
    shared_bytes: int  # per SM and clock
    l2_tb_s: float
    hbm_tb_s: float
    overlapped: bool  # whether a tile's epilogue runs beside the next tile's products
    tmem_bytes: int = 0  # of tensor memory that an epilogue reads, per SM and clock; 0: accumulators are in registers


# H200: 4096 dense BF16 FLOP a clock and SM (989 TFLOP/s at 1.83 GHz); clock under load, HBM and L2 as kernels_cuda/NOTES.md
# found them.
H200 = Device("H200", 132, 1.45, 4096, 8192, 128, 5.5, 4.26, False)
# B200: 2.25 and 4.5 PFLOP/s dense at 1.85 GHz, 148 SMs, 8 TB/s. Guesses: how far the clock falls under load (the share of the
# peak that H200 keeps), the L2's rate (twice H200's), tensor memory (128 lanes of 4 bytes a clock).
B200 = Device("B200", 148, 1.85 * 0.8, 8192, 16384, 128, 11.0, 7.1, True, 512)
# GB200 and GB300: 2.5 and 5 PFLOP/s, so a clock that is higher by 5 / 4.5. GB300 differs in FP4 and in the size of its memory.
GB200 = dataclasses.replace(
    B200, name="GB200 and GB300", clock_ghz=B200.clock_ghz * 5 / 4.5, l2_tb_s=B200.l2_tb_s * 5 / 4.5
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block's tile of rows x columns, and how many blocks share its operands: B by multicast, or a pair's split B."""

    m: int
    n: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    tokens: int
    top_k: int
    experts: int
    d: int
    f: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


QWEN3 = Shape("qwen3-30b-a3b", 8192, 8, 128, 2048, 768)
KIMI = Shape("kimi-k2-share", 65536, 1, 6, 7168, 2048)
SHAPES = (
    QWEN3,
    Shape("mixtral-8x7b", 8192, 2, 8, 4096, 14336),
    Shape("qwen3.5-397b-a17b", 8192, 10, 512, 4096, 1024),
    KIMI,
    Shape("glm-5.2-share", 65536, 1, 4, 6144, 2048),
    Shape("deepseek-v4-pro-share", 65536, 1, 6, 7168, 3072),
)

# Instructions an epilogue thread spends per accumulated value: conversion and store; activation; its gradient
# (kernels_cuda/activation.h counts 20 per element of a pair); FP32 stores.
INSTRUCTIONS = {"gate_up": 14, "down": 4, "dgrad_down": 34, "dgrad_gate_up": 4, "wgrad_down": 6, "wgrad_gate_up": 6}
# More of them where the results become MXFP8 (both orientations for dgrad_down).
QUANTISING = {"gate_up": 5, "dgrad_down": 40}


def bounds(device: Device, tile: Tile, shape: Shape, kind: str, mx: bool) -> dict[str, float]:
    """Microseconds of each bound, and `time`, the prediction."""
    rows_per_expert = shape.rows / shape.experts
    row_tile = tile.m * (tile.blocks if device.overlapped else 1)  # a Blackwell pair multiplies 256 rows
    element = 33 / 32 if mx else 2.0
    d, f, e = shape.d, shape.f, shape.experts
    m, n, k = {
        "gate_up": (rows_per_expert, 2 * f, d),
        "down": (rows_per_expert, d, f),
        "dgrad_down": (rows_per_expert, f, d),
        "dgrad_gate_up": (rows_per_expert, d, 2 * f),
        "wgrad_down": (d, f, rows_per_expert),
        "wgrad_gate_up": (2 * f, d, rows_per_expert),
    }[kind]
    # Rows per expert vary: half a tile of padding on average.
    m_tiles = (m + row_tile / 2) / row_tile if "wgrad" not in kind else math.ceil(m / row_tile)
    tiles = e * m_tiles * math.ceil(n / tile.n) * (row_tile / tile.m)  # tiles of one block
    waves = tiles / device.sms
    rounding = math.ceil(waves) / waves if waves < 8 else 1.0
    hertz = device.clock_ghz * 1e9
    flops = device.mx_flops if mx else device.bf16_flops

    tensor = waves * tile.m * tile.n * k * 2 / flops / hertz
    # The tensor core reads B once per 64 rows on Hopper, and half of it from the other block of a Blackwell pair.
    b_reads = 1 / tile.blocks if device.overlapped else tile.m / 64
    shared = waves * (tile.m + tile.n * b_reads) * k * element / device.shared_bytes / hertz
    l2 = tiles * (tile.m + tile.n / tile.blocks) * k * element / (device.l2_tb_s * 1e12)
    operands = (e * n * k + shape.rows * k) * element if "wgrad" not in kind else shape.rows * (m + n) * element
    narrow = 1.0 if mx else 2.0
    results = {
        "gate_up": shape.rows * f * (4 + narrow),
        "down": shape.rows * d * 2,
        "dgrad_down": shape.rows * f * (4 + (5 * narrow if mx else 6)),
        "dgrad_gate_up": shape.rows * d * 2,
        "wgrad_down": e * d * f * 4,
        "wgrad_gate_up": 2 * e * d * f * 4,
    }[kind]
    hbm = (operands + results) / (device.hbm_tb_s * 1e12)
    instructions = INSTRUCTIONS[kind] + (QUANTISING.get(kind, 0) if mx else 0)
    # Four schedulers issue one warp instruction a clock each.
    epilogue = waves * tile.m * tile.n * instructions / 32 / 4 / hertz
    tmem = 0.0
    if device.tmem_bytes:  # accumulators are read once; MXFP8 writes 512-byte scale atoms to all four lane quarters
        atoms = (1 + tile.n / 128) * k / 128 if mx else 0.0
        tmem = waves * (tile.m * tile.n * 4 + atoms * 2048) / device.tmem_bytes / hertz
    found = {"tensor": tensor, "tmem": tmem, "shared": shared, "l2": l2, "hbm": hbm, "issue": epilogue}
    found["time"] = (
        max(found.values()) * rounding if device.overlapped else max(tensor, shared, l2, hbm) * rounding + epilogue
    )
    return {name: 1e6 * seconds for name, seconds in found.items()}


def flop(shape: Shape, kind: str) -> float:
    return 2.0 * shape.rows * shape.d * shape.f * (2 if "gate_up" in kind else 1)


# Microseconds on one H200, kernels_cuda/NOTES.md, version 1 (the only one measured kernel by kernel).
MEASURED = {
    "gate_up": 681,
    "down": 326,
    "dgrad_down": 444,
    "dgrad_gate_up": 625,
    "wgrad_down": 400,
    "wgrad_gate_up": 795,
}


def table(device: Device, tile: Tile, shape: Shape, mx: bool, measured: dict[str, int] | None = None) -> list[str]:
    """Markdown rows: bounds, prediction and TFLOP/s, and the error against what was measured."""
    names = ("tensor", "tmem", "shared", "l2", "hbm", "issue")
    lines = [
        f"{device.name}, {'MXFP8' if mx else 'BF16'}, {shape.name}, {tile.blocks} x ({tile.m} x {tile.n}), microseconds",
        "",
        "| product | " + " | ".join(names) + " | predicted | TFLOP/s |" + (" measured | error |" if measured else ""),
        "|" + "---|" * (len(names) + 3 + (2 if measured else 0)),
    ]
    for kind in KINDS:
        found = bounds(device, tile, shape, kind, mx)
        largest = max(names, key=lambda name: found[name])
        cells = [f"**{found[name]:.0f}**" if name == largest else f"{found[name]:.0f}" for name in names]
        row = (
            f"| {kind} | "
            + " | ".join(cells)
            + f" | {found['time']:.0f} | {flop(shape, kind) / found['time'] / 1e6:.0f} |"
        )
        if measured:
            row += f" {measured[kind]} | {100 * (found['time'] / measured[kind] - 1):+.0f} % |"
        lines.append(row)
    return lines


def layer(device: Device, tile: Tile, shape: Shape, mx: bool, backward: bool) -> float:
    """TFLOP/s of a whole pass: its products one after another, and around them what moves rows at the speed of memory."""
    kinds = KINDS[2:] if backward else KINDS[:2]
    microseconds = sum(bounds(device, tile, shape, kind, mx)["time"] for kind in kinds)
    tokens, rows = shape.tokens * shape.d, shape.rows * shape.d
    brought = 2 * tokens + rows * (
        1 if mx else 2
    )  # dispatch, or quantising while gathering; in the backward of x and of dy
    moved = (2 if backward else 1) * brought + 2 * (rows + tokens)  # and combine
    microseconds += moved / device.hbm_tb_s / 1e6
    return sum(flop(shape, kind) for kind in kinds) / microseconds / 1e6


def measured_layers() -> dict[tuple[str, str], float]:
    """TFLOP/s of our BF16 layer on an H200 by shape and pass: the newest lines of the result file."""
    path = pathlib.Path(__file__).parent / "results" / "h200" / "moe_layer.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        (line["shape"], line["pass"]): line["tflops"]
        for line in lines
        if line["impl"] == "moejax-native" and line["recipe"] == "bf16" and line["tflops"]
    }


def layer_table(device: Device, mx: bool, measured: dict[tuple[str, str], float] | None = None) -> list[str]:
    """Markdown rows: TFLOP/s of forward and backward, and the errors against what was measured."""
    cells = [" forward | backward |"] + ([" measured | error | measured | error |"] if measured else [])
    lines = [f"{device.name}, {'MXFP8' if mx else 'BF16'}, whole layers, TFLOP/s", "", "| shape |" + "".join(cells)]
    lines.append("|" + "---|" * (3 + (4 if measured else 0)))
    for shape in SHAPES:
        found = [layer(device, Tile(128, 256, 2), shape, mx, backward) for backward in (False, True)]
        row = f"| {shape.name} | {found[0]:.0f} | {found[1]:.0f} |"
        for predicted, name in zip(found, ("forward", "backward"), strict=True) if measured else ():
            real = measured[shape.name, name]
            row += f" {real:.0f} | {100 * (predicted / real - 1):+.0f} % |"
        lines.append(row)
    return lines


def main(argv: list[str] | None = None) -> None:
    """Prints every table; exits with status 2 for any argument but --help."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    pair = Tile(128, 256, 2)
    print("\n".join(table(H200, pair, QWEN3, False, MEASURED)))
    print("\n" + "\n".join(layer_table(H200, False, measured_layers())))
    for shape in (QWEN3, KIMI):
        for tile in (Tile(128, 128, 1), Tile(128, 256, 1), pair):  # compiled are the last two
            print("\n" + "\n".join(table(B200, tile, shape, True)))
    print("\n" + "\n".join(table(B200, pair, QWEN3, False)))
    for device in (B200, GB200):
        for mx in (True, False):
            print("\n" + "\n".join(layer_table(device, mx)))


if __name__ == "__main__":
    main()
