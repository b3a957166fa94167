"""Drives the plain C library of the Hopper kernels through ctypes on torch tensors, for tests and benchmarks.

Letters: T tokens, K experts per token, E experts, D model width, F expert width, M rows after dispatch (padded).
"""

import ctypes
import dataclasses
import math
import os
import pathlib

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "the C library's tests and benchmarks need torch, which moejax does not, in an environment of its own: "
        "python3 -m venv .venv-torch && .venv-torch/bin/pip install torch==2.11.0 numpy",
        name="torch",
    ) from None

LIBRARY = pathlib.Path(
    os.environ.get("MOEJAX_CUDA_LIBRARY")
    or pathlib.Path(__file__).resolve().parent.parent / "build" / "cuda" / "libmoe_cuda_c.so"
)

ACTIVATIONS = {
    "swiglu": (1.0, 0.0, 0.0, math.inf),
    "swiglu_clamped": (1.0, 0.0, 0.0, 7.0),
    "swiglu_oai": (1.702, 1.0, 0.0, 7.0),
    "geglu": (2 * math.sqrt(2 / math.pi), 0.0, 0.044715, math.inf),
}


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "top_k", "experts", "rows", "d_model", "width")),
        ("way", ctypes.c_uint8 * 8),
    ]


class _Activation(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("alpha", "beta", "gamma", "limit")]


class _Matrices(ctypes.Structure):
    """Weights, or their gradients: gate_up, down and the two biases."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("gate_up", "down", "b_gate_up", "b_down")]


def _matrices(gate_up, down, biases) -> _Matrices:
    b_gate_up, b_down = biases or (None, None)
    return _Matrices(*(None if t is None else t.data_ptr() for t in (gate_up, down, b_gate_up, b_down)))


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("count_E", "start_E", "row_TxK", "slot_M", "routed_E")]


KINDS = ("gate_up", "down", "dgrad_down", "dgrad_gate_up", "wgrad_down", "wgrad_gate_up")
WAYS = (
    "auto",
    "dispatched",
    "gathered",
    "tokens_n",
    "gathered_n",
    "resident_512",
    "resident_rows",
    "resident_fp8",
    "beside",
)  # kernels_cuda/moe.h: Way


@dataclasses.dataclass
class Plan:
    """int32 tensors on the device, as docs/design.md defines them."""

    count_E: torch.Tensor
    start_E: torch.Tensor
    row_TxK: torch.Tensor
    slot_M: torch.Tensor
    routed_E: torch.Tensor

    def as_c(self) -> _Plan:
        return _Plan(*(getattr(self, f.name).data_ptr() for f in dataclasses.fields(self)))


def _dirty(shape, dtype) -> torch.Tensor:
    """Memory full of NaN (or -1): nothing may depend on what was there."""
    out = torch.empty(shape, dtype=dtype, device="cuda")
    if dtype.is_floating_point:
        return out.fill_(math.nan)
    return out.fill_(255 if dtype == torch.uint8 else -1)


def load(library=LIBRARY) -> ctypes.CDLL:
    """The C library. FileNotFoundError, with the command that builds it, where it is not."""
    if not pathlib.Path(library).exists():
        raise FileNotFoundError(
            f"{library} is not built, and `make cuda` builds the JAX module alone: run `make cuda-library` (CMake's target "
            "moe_cuda_c in kernels_cuda)"
        )
    return ctypes.CDLL(str(library))


class Layer:
    """One expert layer of fixed shape; owns its workspaces."""

    def __init__(
        self, tokens, top_k, experts, d_model, width, activation="swiglu", recompute=False, library=LIBRARY, ways=None
    ):
        self.lib = load(library)
        for name in ("moe_schedule", "moe_forward", "moe_backward"):
            getattr(self.lib, name).restype = ctypes.c_char_p
        for name in (
            "moe_rows_bound",
            "moe_schedule_workspace_bytes",
            "moe_forward_workspace_bytes",
            "moe_backward_workspace_bytes",
        ):
            getattr(self.lib, name).restype = ctypes.c_int64
        rows = self.lib.moe_rows_bound(ctypes.c_int64(tokens), ctypes.c_int64(top_k), ctypes.c_int64(experts))
        self.shape = _Shape(tokens, top_k, experts, rows, d_model, width)
        for kind, way in (ways or {}).items():
            self.shape.way[KINDS.index(kind)] = WAYS.index(way)
        self.act = _Activation(*ACTIVATIONS[activation])
        self.recompute = recompute
        by = ctypes.byref
        self.schedule_bytes = self.lib.moe_schedule_workspace_bytes(by(self.shape))
        self.forward_bytes = self.lib.moe_forward_workspace_bytes(by(self.shape))
        self.backward_bytes = self.lib.moe_backward_workspace_bytes(by(self.shape), int(recompute))
        self.workspace = _dirty((max(self.schedule_bytes, self.forward_bytes, self.backward_bytes),), torch.uint8)

    def ways(self, kind: str) -> list[str]:
        """The ways that a product of this shape can run."""
        product = KINDS.index(kind)
        return [w for i, w in enumerate(WAYS) if i and self.lib.moe_has_way(ctypes.byref(self.shape), product, i)]

    @property
    def rows(self) -> int:
        return self.shape.rows

    def soil(self) -> None:
        self.workspace.fill_(255)

    def _call(self, name, *args) -> None:
        converted = []
        for a in args:
            if isinstance(a, torch.Tensor):
                converted.append(ctypes.c_void_p(a.data_ptr()))
            elif a is None:
                converted.append(ctypes.c_void_p(None))
            elif isinstance(a, int):
                converted.append(ctypes.c_int32(a))
            else:
                converted.append(ctypes.byref(a))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        message = getattr(self.lib, name)(
            ctypes.byref(self.shape), *converted, ctypes.c_void_p(self.workspace.data_ptr()), stream
        )
        if message:
            raise RuntimeError(f"{name}: {message.decode()}")

    def new_plan(self) -> Plan:
        s = self.shape
        return Plan(
            *(
                _dirty(n, torch.int32)
                for n in ((s.experts,), (s.experts,), (s.tokens, s.top_k), (s.rows,), (s.experts,))
            )
        )

    def schedule(self, expert_TxK, plan, first_expert=0, capacity=2**31 - 1) -> Plan:
        self._call("moe_schedule", expert_TxK, first_expert, capacity, plan.as_c())
        return plan

    def forward(self, x_TxD, weight_TxK, plan, w_gate_up, w_down, y_TxD, gate_up, biases=None) -> None:
        """`biases`: FP32 (b_gate_up, b_down), or None."""
        weights = _matrices(w_gate_up, w_down, biases)
        self._call("moe_forward", self.act, x_TxD, weight_TxK, plan.as_c(), weights, y_TxD, gate_up)

    def backward(
        self,
        x_TxD,
        weight_TxK,
        dy_TxD,
        plan,
        w_gate_up,
        w_down,
        gate_up,
        dx_TxD,
        d_weight_TxK,
        dw_gate_up,
        dw_down,
        accumulate=False,
        biases=None,
        bias_gradients=None,
    ) -> None:
        """`biases`, `bias_gradients`: FP32 pairs as in `forward`, or None."""
        weights = _matrices(w_gate_up, w_down, biases)
        gradients = _matrices(dw_gate_up, dw_down, bias_gradients)
        self._call(
            "moe_backward", self.act, x_TxD, weight_TxK, dy_TxD, plan.as_c(), weights, gate_up, dx_TxD, d_weight_TxK, gradients,
            int(accumulate),
        )  # fmt: skip
