"""The end of a run: `summary.json` and `report.html`, one page with no outside parts.

Everything is drawn as inline SVG from `metrics.jsonl`; heat maps are small PNG images inside it, one pixel per expert and
time, so that a page about hundreds of experts stays small.
"""

import base64
import html
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

_WIDTH, _HEIGHT = 860, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 14, 12, 34
_MAX_POINTS = 800
_MAX_COLUMNS = 400


def summary(records: Sequence[dict], held_out: Any, parameters: int, active_parameters: int) -> dict[str, Any]:
    """The numbers a script wants from a run; `seconds` is the time of all training steps, over all restarts.

    `steps_without_record` is more than 0 if somebody removed records from metrics.jsonl: tokens and seconds are then those of
    the other steps.
    """
    tokens = sum(record["tokens"] for record in records)
    seconds = sum(record["seconds"] for record in records)
    return {
        "heldout_nats_per_byte": held_out.nats_per_byte,
        "heldout_bits_per_byte": held_out.bits_per_byte,
        "heldout_bytes": held_out.bytes,
        "heldout_tokens": held_out.tokens,
        "steps": records[-1]["step"] if records else 0,
        "steps_without_record": records[-1]["step"] - len(records) if records else 0,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1) if seconds else 0.0,
        "seconds": round(seconds, 3),
        "parameters": parameters,
        "active_parameters": active_parameters,
    }


def summary_text(values: dict[str, Any]) -> str:
    """The summary as a person reads it."""
    lost = values.get("steps_without_record", 0)
    note = f"\ntokens and seconds leave out {lost:,} steps whose records are no longer in metrics.jsonl" if lost else ""
    return (
        f"held-out loss {values['heldout_nats_per_byte']:.4f} nats per byte "
        f"({values['heldout_bits_per_byte']:.4f} bits per byte, over {values['heldout_bytes']:,} bytes)\n"
        f"{values['steps']:,} steps, {values['tokens']:,} tokens in {values['seconds']:.0f} s "
        f"({values['tokens_per_second']:,.0f} tokens/s); "
        f"{values['parameters']:,} parameters, {values['active_parameters']:,} active per token{note}"
    )


def report_html(records: Sequence[dict], values: dict[str, Any], sample: str, config_text: str, title: str) -> str:
    """The page: loss, learning rate, gradient norm, throughput and expert load over the steps.

    Args:
      records: those of metrics.jsonl, in order.
      values: `summary`.
      sample: generated text, or "".
      config_text: the run's config as YAML.
    """
    step = [record["step"] for record in records]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(values),
        "<h2>Training loss</h2>",
        _lines(step, {"loss": [r["loss"] for r in records]}, "nats per token", smooth=True),
        "<h2>Throughput</h2>",
        _lines(step, {"tokens/s": [r["tokens_per_second"] for r in records]}, "tokens per second", from_zero=True),
        "<h2>Gradient norm</h2>",
        _lines(step, {"norm": [r["grad_norm"] for r in records]}, "before clipping", from_zero=True),
        "<h2>Learning rate</h2>",
        _lines(step, {"rate": [r["learning_rate"] for r in records]}, "per step", from_zero=True),
    ]
    if records and "expert_load_max" in records[-1]:
        layers = range(len(records[-1]["expert_load_max"]))
        busiest = {f"layer {n}": [r["expert_load_max"][n] for r in records] for n in layers}
        entropy = {f"layer {n}": [r["router_entropy"][n] for r in records] for n in layers}
        dropped = {f"layer {n}": [r["dropped_fraction"][n] for r in records] for n in layers}
        parts += [
            "<h2>Busiest expert</h2>",
            _lines(step, busiest, "load / mean load", from_zero=True),
            "<h2>Router entropy</h2>",
            _lines(step, entropy, "nats", from_zero=True),
        ]
        if any(max(values) > 0 for values in dropped.values()):
            parts += ["<h2>Dropped slots</h2>", _lines(step, dropped, "share of slots", from_zero=True)]
        parts += ["<h2>Expert load over time</h2>", _heat_maps([r for r in records if "expert_load" in r])]
    if sample:
        parts += ["<h2>Generated sample</h2>", f"<pre>{html.escape(sample)}</pre>"]
    parts += [f"<details><summary>Config</summary><pre>{html.escape(config_text)}</pre></details>"]
    return _PAGE.format(title=html.escape(title), body="\n".join(parts))


def _table(values: dict[str, Any]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.0f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    rows = (
        f"<tr><th>{html.escape(name.replace('_', ' '))}</th><td>{show(value)}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"


def _lines(step: list[int], series: dict[str, list[float]], unit: str, *, smooth=False, from_zero=False) -> str:
    """One chart; with `smooth` the values are drawn pale under their running mean."""
    if not step:
        return "<p>No steps were recorded.</p>"
    finite = [y for values in series.values() for y in values if math.isfinite(y)]
    low, high = (0.0 if from_zero else min(finite)), max(finite)
    high = high if high > low else low + 1.0
    ticks = _ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = step[0], max(step[-1], step[0] + 1)
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x_at(value: float) -> float:
        return _LEFT + (value - first) / (last - first) * inner_w

    def y_at(value: float) -> float:
        return _TOP + (high - value) / (high - low) * inner_h

    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y_at(t):.1f}" y2="{y_at(t):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y_at(t) + 4:.1f}" text-anchor="end">{_short(t)}</text>'
        for t in ticks
    )
    grid += "".join(
        f'<text x="{x_at(t):.1f}" y="{_HEIGHT - 18}" text-anchor="middle">{_short(t)}</text>'
        for t in _ticks(first, last)
        if first <= t <= last
    )

    def path(values: Sequence[float], style: str) -> str:
        stride = max(1, len(values) // _MAX_POINTS)
        kept = [i for i in range(len(values)) if i % stride == 0 or i == len(values) - 1]
        points = " ".join(f"{x_at(step[i]):.1f},{y_at(values[i]):.1f}" for i in kept if math.isfinite(values[i]))
        return f'<polyline points="{points}" {style}/>'

    drawn, legend = [], []
    for index, (name, values) in enumerate(series.items()):
        colour = _colour(index, len(series))
        if smooth:
            drawn.append(path(values, f'stroke="{colour}" stroke-opacity="0.3"'))
            drawn.append(path(_running_mean(values, max(1, len(values) // 40)), f'stroke="{colour}" stroke-width="2"'))
        else:
            drawn.append(path(values, f'stroke="{colour}"'))
        legend.append(f'<span style="color:{colour}">&#9644;</span> {html.escape(name)}')
    key = f'<p class="key">{" &#160; ".join(legend)}</p>' if len(series) > 1 else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{grid}{"".join(drawn)}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">step &#8594; &#160; {html.escape(unit)}</text></svg>{key}'
    )


def _heat_maps(records: list[dict]) -> str:
    """One map per layer: steps to the right, experts down; white is the mean load, red above it, blue below."""
    if not records:
        return "<p>No expert loads were recorded.</p>"
    load_SxNxE = np.asarray([record["expert_load"] for record in records], np.float64)
    if len(load_SxNxE) > _MAX_COLUMNS:  # mean of neighbouring records
        load_SxNxE = np.stack([part.mean(0) for part in np.array_split(load_SxNxE, _MAX_COLUMNS)])
    columns, layers, experts = load_SxNxE.shape
    height = int(min(max(experts * 8, 60), 256))
    maps = []
    for layer in range(layers):
        picture = _png(_load_colours(load_SxNxE[:, layer, :].T))
        top = load_SxNxE[:, layer, :].max()
        maps.append(
            f'<svg viewBox="0 0 {_WIDTH} {height + 24}" role="img">'
            f'<image x="{_LEFT}" y="0" width="{_WIDTH - _LEFT - _RIGHT}" height="{height}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" href="data:image/png;base64,{picture}"/>'
            f'<text x="{_LEFT - 8}" y="12" text-anchor="end">expert 0</text>'
            f'<text x="{_LEFT - 8}" y="{height}" text-anchor="end">{experts - 1}</text>'
            f'<text x="{_LEFT}" y="{height + 16}">layer {layer}: steps {records[0]["step"]} to {records[-1]["step"]}, '
            f"highest load {top:.2f} x mean</text></svg>"
        )
    return (
        '<p class="key">white: mean load; <span style="color:#b2182b">red: above, full at 2x</span>; '
        '<span style="color:#2166ac">blue: below, full at 0</span></p>' + "\n".join(maps)
    )


def _load_colours(load: np.ndarray) -> np.ndarray:
    """uint8 RGB of loads relative to their mean: blue at 0, white at 1, red at 2 and above."""
    away = np.clip(load - 1.0, -1.0, 1.0)[..., None]
    red, blue, white = np.array([178, 24, 43]), np.array([33, 102, 172]), np.array([255, 255, 255])
    return np.rint(white + np.abs(away) * (np.where(away > 0, red, blue) - white)).astype(np.uint8)


def _png(rgb: np.ndarray) -> str:
    """An (H, W, 3) uint8 image as base64 PNG (W3C PNG specification: signature, IHDR, IDAT, IEND)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = rgb.shape
    rows = b"".join(b"\x00" + row.tobytes() for row in rgb)  # filter type 0 before each row
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return base64.b64encode(data).decode()


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the `width` before it."""
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(np.asarray(values, np.float64)))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width - 1, 0)
    return list((sums[ends] - sums[starts]) / (ends - starts))


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that cover low..high, 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    return [index * size for index in range(math.floor(low / size), math.ceil(high / size) + 1)]


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}"


def _colour(index: int, count: int) -> str:
    return f"hsl({210 + 300 * index / max(count, 1):.0f},65%,42%)"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em; color: #222; background: #fff }}
h2 {{ font-size: 1.1em; margin: 1.6em 0 .3em }}
table {{ border-collapse: collapse }} th {{ text-align: left; font-weight: 500; padding-right: 2em }}
td {{ text-align: right; font-variant-numeric: tabular-nums }}
svg {{ width: 100%; height: auto }} svg text {{ font-size: 12px; fill: #555 }}
polyline {{ fill: none; stroke-width: 1.2 }} .grid {{ stroke: #e4e4e4 }}
pre {{ background: #f6f6f6; padding: 1em; overflow-x: auto }} .key {{ font-size: .85em; margin: .2em 0 }}
</style></head><body>
{body}
</body></html>
"""
