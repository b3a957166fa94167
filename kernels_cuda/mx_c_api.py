"""Drives the MXFP8 functions of the plain C library through ctypes on torch tensors, for tests and benchmarks. See
c_api.py.

Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch (padded).
"""

import ctypes
import dataclasses

import c_api
import torch
from c_api import ACTIVATIONS, KINDS, LIBRARY, WAYS, Plan, _Activation, _Shape

FORMS = ("none", "mx", "aligned", "aligned_tile", "dequantized")
LAYOUTS = ("plain", "interleaved", "fragment")
MODES = ("aligned", "exact")
_I64 = ctypes.c_int64


class _Output(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("form", "layout", "transposed", "unused")),
        *((name, ctypes.c_void_p) for name in ("elements", "codes")),
    ]


class _Saved(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gate_up", "elements", "codes")]


class _Weights(ctypes.Structure):
    _fields_ = [
        (name + suffix, ctypes.c_void_p)
        for suffix in ("", "_codes")
        for name in ("gate_up_fprop", "gate_up_dgrad", "down_fprop", "down_dgrad")
    ]


def load(library=LIBRARY) -> ctypes.CDLL:
    lib = c_api.load(library)
    for name in ("mx_quantize", "mx_count_losses", "mx_prepare_weight", "mx_forward", "mx_backward"):
        getattr(lib, name).restype = ctypes.c_char_p
    for name in ("mx_code_bytes", "mx_forward_workspace_bytes", "mx_backward_workspace_bytes"):
        getattr(lib, name).restype = ctypes.c_int64
    for name in ("moe_schedule", "moe_forward", "moe_backward"):
        getattr(lib, name).restype = ctypes.c_char_p
    for name in ("moe_rows_bound", "moe_schedule_workspace_bytes"):
        getattr(lib, name).restype = ctypes.c_int64
    return lib


def _pointer(tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def _check(name, message) -> None:
    if message:
        raise RuntimeError(f"{name}: {message.decode()}")


def dirty_bytes(*shape) -> torch.Tensor:
    return torch.full(shape, 255, dtype=torch.uint8, device="cuda")


class Output:
    """One orientation: elements (uint8, or BF16 when dequantized) and codes, in dirty memory."""

    def __init__(self, lib, shape, by_rows: bool, form="mx", layout="plain", transposed=False):
        batch, rows, columns = shape
        self.c = _Output(FORMS.index(form), LAYOUTS.index(layout), int(transposed), 0, None, None)
        if form == "none":
            return
        stored = (batch, columns, rows) if transposed else (batch, rows, columns)
        if form == "dequantized":
            self.elements = torch.full(stored, float("nan"), dtype=torch.bfloat16, device="cuda")
        else:
            self.elements = dirty_bytes(*stored)
        self.c.elements = self.elements.data_ptr()
        size = lib.mx_code_bytes(*(_I64(n) for n in shape), ctypes.byref(self.c), int(by_rows))
        self.codes = dirty_bytes(size)
        self.c.codes = self.codes.data_ptr()


def quantize(
    lib,
    x: torch.Tensor,
    rows: Output,
    columns: Output,
    slot_M=None,
    gather: int = 0,
    num_rows: int | None = None,
    tokens: int = 0,
) -> None:
    """`x` (B, R, C); with `gather` it holds tokens, and R is `num_rows`. `tokens`: their count, where a kernel may keep
    all of them in shared memory.
    """
    batch, count, width = x.shape
    message = lib.mx_quantize(
        _pointer(x),
        int(x.dtype == torch.float32),
        _I64(batch),
        _I64(num_rows or count),
        _I64(width),
        _pointer(slot_M),
        _I64(gather),
        _I64(tokens),
        ctypes.byref(rows.c),
        ctypes.byref(columns.c),
        _stream(),
    )
    _check("mx_quantize", message)


def count_losses(lib, x: torch.Tensor, slot_M=None) -> list[int]:
    """elements, nonzero, underflowed, saturated, blocks, poisoned."""
    counts = torch.zeros(6, dtype=torch.int64, device="cuda")
    batch, rows, columns = x.shape
    message = lib.mx_count_losses(
        _pointer(x),
        int(x.dtype == torch.float32),
        _I64(batch),
        _I64(rows),
        _I64(columns),
        _pointer(slot_M),
        _pointer(counts),
        _stream(),
    )
    _check("mx_count_losses", message)
    return counts.tolist()


@dataclasses.dataclass
class MxWeight:
    """Both orientations of one weight; codes are None in mode exact."""

    fprop: torch.Tensor
    fprop_codes: torch.Tensor | None
    dgrad: torch.Tensor
    dgrad_codes: torch.Tensor | None


class MxLayer:
    """One expert layer of fixed shape in MXFP8; owns its workspace."""

    def __init__(
        self,
        tokens,
        top_k,
        experts,
        d_model,
        width,
        mode="aligned",
        wgrad_bf16=False,
        activation="swiglu",
        library=LIBRARY,
        ways=None,
    ):
        """`ways`: how products run where not as by default, {"wgrad_down": "resident_rows"}."""
        self.lib = load(library)
        rows = self.lib.moe_rows_bound(_I64(tokens), _I64(top_k), _I64(experts))
        self.shape = _Shape(tokens, top_k, experts, rows, d_model, width)
        for kind, way in (ways or {}).items():
            self.shape.way[KINDS.index(kind)] = WAYS.index(way)
        self.act = _Activation(*ACTIVATIONS[activation])
        self.mode, self.options = mode, (ctypes.c_int32(MODES.index(mode)), ctypes.c_int32(int(wgrad_bf16)))
        by = ctypes.byref(self.shape)
        self.forward_bytes = self.lib.mx_forward_workspace_bytes(by, *self.options)
        self.backward_bytes = self.lib.mx_backward_workspace_bytes(by, *self.options)
        size = max(self.forward_bytes, self.backward_bytes, self.lib.moe_schedule_workspace_bytes(by))
        self.workspace = dirty_bytes(size)

    @property
    def rows(self) -> int:
        return self.shape.rows

    def soil(self) -> None:
        self.workspace.fill_(255)

    def new_plan(self) -> Plan:
        s = self.shape
        sizes = ((s.experts,), (s.experts,), (s.tokens, s.top_k), (s.rows,), (s.experts,))
        return Plan(*(torch.full(n, -1, dtype=torch.int32, device="cuda") for n in sizes))

    def schedule(self, expert_TxK, plan) -> Plan:
        c = plan.as_c()
        message = self.lib.moe_schedule(
            ctypes.byref(self.shape),
            _pointer(expert_TxK),
            ctypes.c_int32(0),
            ctypes.c_int32(2**31 - 1),
            ctypes.byref(c),
            _pointer(self.workspace),
            _stream(),
        )
        _check("moe_schedule", message)
        return plan

    def new_weight(self, master: torch.Tensor) -> MxWeight:
        """Memory for both orientations of an FP32 or BF16 master (..., rows, columns)."""
        *lead, rows, columns = master.shape
        if self.mode == "exact":
            values = [torch.full(master.shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
            return MxWeight(values[0], None, values[1], None)
        tiles = (-(-rows // 128), -(-columns // 128))
        return MxWeight(
            dirty_bytes(*lead, rows, columns),
            dirty_bytes(*lead, *tiles),
            dirty_bytes(*lead, columns, rows),
            dirty_bytes(*lead, *tiles[::-1]),
        )

    def prepare(self, master: torch.Tensor, weight: MxWeight | None = None) -> MxWeight:
        weight = weight or self.new_weight(master)
        *lead, rows, columns = master.shape
        matrices = 1
        for n in lead:
            matrices *= n
        message = self.lib.mx_prepare_weight(
            self.options[0],
            _pointer(master),
            int(master.dtype == torch.float32),
            _I64(matrices),
            _I64(rows),
            _I64(columns),
            _pointer(weight.fprop),
            _pointer(weight.fprop_codes),
            _pointer(weight.dgrad),
            _pointer(weight.dgrad_codes),
            _stream(),
        )
        _check("mx_prepare_weight", message)
        return weight

    def _weights(self, gate_up: MxWeight, down: MxWeight) -> _Weights:
        tensors = (
            gate_up.fprop,
            gate_up.dgrad,
            down.fprop,
            down.dgrad,
            gate_up.fprop_codes,
            gate_up.dgrad_codes,
            down.fprop_codes,
            down.dgrad_codes,
        )
        return _Weights(*(None if t is None else t.data_ptr() for t in tensors))

    def new_saved(self, kind="gate_up"):
        """What a forward saves: (gate_up BF16,), (elements, codes) for gate_up_mx, or () for recompute."""
        M, F = self.rows, self.shape.width
        if kind == "gate_up":
            return (torch.full((2, M, F), float("nan"), dtype=torch.bfloat16, device="cuda"),)
        if kind == "gate_up_mx":
            return dirty_bytes(2, M, F), dirty_bytes(2, -(-F // 128), M)
        return ()

    @staticmethod
    def _saved(saved) -> _Saved:
        pointers = [None if t is None else t.data_ptr() for t in saved]
        return _Saved(
            *((pointers + [None, None]) if len(pointers) == 1 else [None, *pointers] if pointers else [None] * 3)
        )

    def forward(self, x_TxD, weight_TxK, plan, gate_up: MxWeight, down: MxWeight, y_TxD, saved=()) -> None:
        plan_c, weights, saved_c = plan.as_c(), self._weights(gate_up, down), self._saved(saved)
        by = ctypes.byref
        message = self.lib.mx_forward(
            by(self.shape),
            by(self.act),
            *self.options,
            _pointer(x_TxD),
            _pointer(weight_TxK),
            by(plan_c),
            by(weights),
            _pointer(y_TxD),
            by(saved_c),
            _pointer(self.workspace),
            _stream(),
        )
        _check("mx_forward", message)

    def backward(
        self,
        x_TxD,
        weight_TxK,
        dy_TxD,
        plan,
        gate_up: MxWeight,
        down: MxWeight,
        saved,
        dx_TxD,
        d_weight_TxK,
        dw_gate_up,
        dw_down,
        accumulate=False,
    ) -> None:
        plan_c, weights, saved_c = plan.as_c(), self._weights(gate_up, down), self._saved(saved)
        by = ctypes.byref
        message = self.lib.mx_backward(
            by(self.shape),
            by(self.act),
            *self.options,
            _pointer(x_TxD),
            _pointer(weight_TxK),
            _pointer(dy_TxD),
            by(plan_c),
            by(weights),
            by(saved_c),
            _pointer(dx_TxD),
            _pointer(d_weight_TxK),
            _pointer(dw_gate_up),
            _pointer(dw_down),
            ctypes.c_int32(int(accumulate)),
            _pointer(self.workspace),
            _stream(),
        )
        _check("mx_backward", message)
