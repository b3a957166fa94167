"""What the GPUs can do, by their data sheets. Per GPU; rates are dense (no structured sparsity), links count one direction.

Sources: NVIDIA's data sheets and architecture briefs of the H200, HGX B200, GB200 NVL72 and GB300 NVL72, divided by the number
of GPUs where a sheet gives a rack or a board; docs/estimate.md lists them. A real kernel reaches less: on an H200 we
measured 760-790 TFLOP/s of dense BF16 (of 989) and 4.24-4.28 TB/s of copying (of 4.8).
"""

import dataclasses
import types
from collections.abc import Mapping

TERA, GIGA = 1e12, 1e9


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU and what it hangs on.

    Attributes:
      fp32, bf16, fp8: FLOP/s of dense products; fp32 is that of the CUDA cores, because our FP32 products are not TF32.
      memory_bytes, memory_rate: HBM, bytes and bytes/s.
      nvlink_rate: bytes/s to the GPUs of its NVLink domain, one direction.
      domain: GPUs of that domain.
      network_rate: bytes/s to all others, one direction: one network card per GPU.
      native_mx: tensor cores apply MX scales; without it, MXFP8 products run as BF16 (`moe.mx_mode: exact`).
    """

    name: str
    fp32: float
    bf16: float
    fp8: float
    memory_bytes: float
    memory_rate: float
    nvlink_rate: float
    domain: int
    network_rate: float
    native_mx: bool


GPUS: Mapping[str, Gpu] = types.MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("H200", 67 * TERA, 989 * TERA, 1979 * TERA, 141 * GIGA, 4.8 * TERA, 450 * GIGA, 8, 50 * GIGA, False),
            Gpu("B200", 75 * TERA, 2250 * TERA, 4500 * TERA, 180 * GIGA, 8.0 * TERA, 900 * GIGA, 8, 50 * GIGA, True),
            Gpu("GB200", 80 * TERA, 2500 * TERA, 5000 * TERA, 186 * GIGA, 8.0 * TERA, 900 * GIGA, 72, 50 * GIGA, True),
            Gpu("GB300", 80 * TERA, 2500 * TERA, 5000 * TERA, 279 * GIGA, 8.0 * TERA, 900 * GIGA, 72, 100 * GIGA, True),
        )
    }
)
