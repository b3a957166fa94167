"""FFI calls of the CUDA kernels for Blackwell (compute capability 10.x): the single-GPU expert layer in BF16 and exact
MXFP8, tokens in, tokens out. Rules of a call: `calls.py`; the contract: `kernels_cuda/sm100_moe.h`.

None of it has run on such a GPU (docs/blackwell.md); `moejax/selftest.py` compares every tile configuration with the `xla` backend
before a layer may use it.

Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch.
"""

import contextlib
import importlib.metadata
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax import native
from moejax.config import ActivationConfig
from moejax.native.calls import Rows, absent, ffi_call
from moejax.native.cuda_calls import _activation, _indices
from moejax.native.cuda_mx_calls import E4M3, MXWeight

BLOCKS = (1, 2)  # that compute a tile together; 0 leaves the choice to the kernels
_blocks = 0


def library_problem() -> str | None:
    """Why this installation's cuBLAS must not share a Blackwell GPU with these kernels, or None: versions 12.8 to 13.1 free tensor
    memory twice. A cuBLAS that is no Python package is left to JAX's own check.
    """
    for package in ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
        if (12, 8) <= numbers < (13, 2):
            return (
                f"{package} is {version}, and cuBLAS 12.8 to 13.1 frees tensor memory twice on Blackwell: "
                f"pip install 'nvidia-cublas>=13.2'"
            )
    return None


@contextlib.contextmanager
def blocks_per_tile(blocks: int):
    """Calls that are traced inside use tiles of so many blocks: for the self-test. Changes speed, never bits."""
    global _blocks
    before, _blocks = _blocks, blocks
    try:
        yield
    finally:
        _blocks = before


def prepare(master: jax.Array) -> MXWeight:
    """Both orientations in MXFP8, in the layout of the FP32 master, of at least two axes, multiples of 32.

    Codes are uint8 (*leading axes, bytes): a table per matrix in the order that the tensor core reads.
    """
    *lead, R, C = master.shape
    B = int(np.prod(lead))
    code_bytes = native.module("_cuda").sm100_code_bytes
    results: list[tuple[tuple[int, ...], Any]] = [((B, R, C), E4M3), ((B, code_bytes(R, C)), jnp.uint8)]
    results += [((B, R, C), E4M3), ((B, code_bytes(C, R)), jnp.uint8)]
    leaves = ffi_call("_cuda", "moejax_cuda_sm100_prepare", results, [master.reshape(B, R, C)])
    return MXWeight(*(leaf.reshape(*lead, *leaf.shape[1:]) for leaf in leaves))


def bf16_weight(weight: jax.Array) -> MXWeight:
    """A BF16 weight as the calls below take it: one orientation, no codes."""
    return MXWeight(weight, None, None, None)  # type: ignore[arg-type]


def moe_forward(x_TxD, weight_TxK, rows: Rows, gate_up: MXWeight, down: MXWeight, *, act: ActivationConfig, save: bool):
    """y (T, D) in BF16, and gate_up (2, M, F) in BF16 if `save`, else None.

    Args:
      x_TxD: BF16 tokens.
      weight_TxK: FP32 combine weights.
      rows: indices of the plan, with slot and row indices.
      gate_up, down: from `prepare` or `bf16_weight`.
    """
    sizes, mx = _sizes(x_TxD, rows, down), down.fprop_codes is not None
    _, _, _, M, _, F = sizes
    workspace = native.module("_cuda").sm100_forward_workspace_bytes(*sizes, mx, _blocks)
    results = [(x_TxD.shape, jnp.bfloat16), ((2, M, F) if save else (0,), jnp.bfloat16), ((workspace,), jnp.uint8)]
    arguments = [x_TxD, weight_TxK, *_indices(rows), gate_up.fprop, _codes(gate_up.fprop_codes)]
    arguments += [down.fprop, _codes(down.fprop_codes)]
    y, saved, _ = ffi_call("_cuda", "moejax_cuda_sm100_forward", results, arguments, **_attributes(act))
    return y, saved if save else None


def moe_backward(
    x_TxD,
    dy_TxD,
    weight_TxK,
    saved,
    rows: Rows,
    gate_up: MXWeight,
    down: MXWeight,
    accumulators,
    *,
    act: ActivationConfig,
):
    """Gradients of `moe_forward`: dx (BF16), d_weight (FP32), dw_gate_up and dw_down (FP32).

    Args:
      saved: what the forward saved, or None: gate and up are computed again.
      accumulators: (dw_gate_up, dw_down) FP32 to continue from, aliased to the results; or None.
    """
    sizes, mx = _sizes(x_TxD, rows, down), down.fprop_codes is not None
    _, _, E, _, D, F = sizes
    workspace = native.module("_cuda").sm100_backward_workspace_bytes(*sizes, mx, _blocks, saved is None)
    results = [
        (x_TxD.shape, jnp.bfloat16),
        (weight_TxK.shape, jnp.float32),
        ((E, 2, F, D), jnp.float32),
        ((E, D, F), jnp.float32),
        ((workspace,), jnp.uint8),
    ]
    arguments = [x_TxD, dy_TxD, weight_TxK, absent(jnp.bfloat16) if saved is None else saved, *_indices(rows)]
    for weight in (gate_up, down):
        dgrad = absent(jnp.bfloat16) if weight.dgrad is None else weight.dgrad
        arguments += [weight.fprop, _codes(weight.fprop_codes), dgrad, _codes(weight.dgrad_codes)]
    first = len(arguments)
    arguments += list(accumulators) if accumulators else [absent(jnp.float32)] * 2
    aliases = {first: 2, first + 1: 3} if accumulators else {}
    attributes = _attributes(act) | {"accumulate": bool(accumulators)}
    *gradients, _ = ffi_call("_cuda", "moejax_cuda_sm100_backward", results, arguments, aliases, **attributes)
    return tuple(gradients)


def _attributes(act: ActivationConfig) -> dict[str, Any]:
    return _activation(act) | {"blocks": np.int64(_blocks)}


def _codes(codes) -> jax.Array:
    return absent(jnp.uint8) if codes is None else codes


def _sizes(x_TxD: jax.Array, rows: Rows, down: MXWeight) -> tuple[int, ...]:
    """T, K, E, M, D, F."""
    slot_M, row_TxK, _, _ = _indices(rows)
    E, D, F = down.fprop.shape
    return x_TxD.shape[0], row_TxK.shape[1], E, slot_M.shape[0], D, F
