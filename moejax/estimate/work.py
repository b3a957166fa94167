"""FLOPs of a step, bytes it moves, and how long they take at least on one GPU of a mesh: the roofline.

Formulas, per device and step, with t its tokens, m micro-batches, P its dense weights (whole over fsdp), S their bytes in the
compute dtype, W its expert weights, d, f, R, c, n the sizes of data, fsdp, expert, context and tensor:

  FLOPs           3 x the forward's (`moejax/flops.py`), and one more forward of a layer's products under remat; / (c n)
  NVLink, network (ring algorithms: a device sends (g-1)/g of what a group of g gathers or scatters, twice that to all-reduce)
    fsdp          gather P in FP32 once, copies (or FP32 masters) of W once; scatter 4 P + 4 W of gradients
    data, expert  all-reduce of gradients: what is left after fsdp, over the axes they are replicated over
    expert        rows of width D per token and layer (`transport.rows_per_token`, there and back): once forward, once and
                  a half backward (x and dY go out, dx comes back), once more under remat
    tensor        4 all-reduces of t D activations per layer; context: keys and values gathered twice, their gradients scattered
  HBM             weights read 3 times a micro-batch; FP32 gradients read and written once a micro-batch; optimizer state read and
                  written; activations written and read; 12 passes over t D per layer between the products

An axis of stride s and size g is inside one NVLink domain if s g divides its size, or the whole mesh fits it; otherwise its
bytes go over the network.
"""

import dataclasses
import math

import jax

from moejax import flops
from moejax.config import Config
from moejax.estimate.hardware import Gpu
from moejax.estimate.memory import StateBytes, StepBytes
from moejax.mesh import AXES
from moejax.mesh_plan import RACK
from moejax.ops.spec import MoESpec, moe_spec
from moejax.ops.transport import rows_per_token

_ACTIVATION_PASSES = (
    12  # norms, residuals, rotations, gate and up, the rows of experts: reads and writes of t x D per layer
)


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device in one step.

    Attributes:
      expert_flops, dense_flops: of products, recomputation included; model_flops: without it.
      traffic: bytes sent per mesh axis.
      memory: bytes read from and written to HBM.
    """

    expert_flops: float
    dense_flops: float
    model_flops: float
    traffic: dict[str, float]
    memory: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Least seconds of a step on one kind of GPU: if all terms overlap perfectly it takes the largest."""

    terms: dict[str, float]

    @property
    def limit(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def seconds(self) -> float:
        return self.terms[self.limit]

    @property
    def without_overlap(self) -> float:
        return sum(self.terms.values())


def work(
    config: Config, mesh: jax.sharding.AbstractMesh, weights: dict[str, int], state: StateBytes, step: StepBytes
) -> Work:
    """Args: `weights` of `memory.skeleton_weights`; `state`, `step` of `memory`."""
    training, model, moe = config.training, config.model, config.moe
    d, f, ranks, c, n = (mesh.shape[axis] for axis in AXES)
    tokens = training.global_batch * training.sequence_length / (d * f * ranks * c)
    moe_layers = model.num_layers - model.dense_layers
    item = 4 if config.recipe == "fp32" else 2

    experts = moe_layers * flops.moe_layer_flops_per_token(moe.router.top_k, model.d_model, moe.expert_width) * tokens
    assert model.vocab_size is not None
    whole = flops.model_flops_per_token(config, model.vocab_size) * tokens / n
    head = 2 * model.d_model * model.vocab_size * tokens / n
    dense = whole - experts / n
    spec = spec_on(config, mesh)
    again = 0.0 if training.remat == "none" else 1.0  # every layer runs forward twice
    # save=recompute: gate and up, 2 of the 3 matrices, run once more in the experts' own backward
    expert_total = experts * (3 + again + (2 / 3 if spec.save == "recompute" else 0.0))
    dense_total = dense * 3 + again * (dense - head)
    dense_bytes, expert_bytes = weights["other"], weights["expert"]

    traffic = dict.fromkeys(AXES, 0.0)
    if f > 1:
        gathered = dense_bytes + (expert_bytes if config.recipe == "fp32" else step.copies)
        traffic["fsdp"] = (f - 1) / f * (gathered + dense_bytes + expert_bytes)
    shard_dense, shard_expert = dense_bytes / f, expert_bytes / f
    traffic["data"] = 2 * (d - 1) / d * (shard_dense + shard_expert)
    traffic["expert"] = 2 * (ranks - 1) / ranks * shard_dense
    if ranks > 1:
        traffic["expert"] += (
            rows_per_token(spec.transport, spec) * model.d_model * item * tokens * moe_layers * (2.5 + again)
        )
    if n > 1:
        traffic["tensor"] = 4 * 2 * (n - 1) / n * tokens * model.d_model * item * model.num_layers
    if c > 1:
        keys = 2 * model.num_kv_heads * model.head_dim * item * tokens * c
        traffic["context"] = 3 * (c - 1) / c * keys * model.num_layers

    read = (step.copies or expert_bytes) + dense_bytes * item / 4
    passes = _ACTIVATION_PASSES * (3 + again) * tokens * model.d_model * item * model.num_layers
    passes += 6 * tokens * moe.router.top_k * (model.d_model + 2 * moe.expert_width) * item * moe_layers
    memory = training.micro_batches * (3 * read + 2 * (dense_bytes + expert_bytes) + 2 * step.activations)
    memory += 2 * state.total + passes
    return Work(expert_total / n, dense_total, 3 * whole, {k: v for k, v in traffic.items() if v}, memory)


def spec_on(config: Config, mesh: jax.sharding.AbstractMesh) -> MoESpec:
    """The spec of the expert layers on a mesh without devices."""
    with jax.sharding.use_abstract_mesh(mesh):
        return moe_spec(config, mesh)


def links(mesh: jax.sharding.AbstractMesh, gpu: Gpu, spares: int = 0) -> dict[str, str]:
    """What carries each axis longer than 1: "nvlink" if all devices of its groups fit one domain, else "network".

    Neighbours along an axis lie as many devices apart as the axes after it have. Of a rack the mesh has all GPUs but
    the last `spares`.
    """
    found, stride = {}, 1
    domain = gpu.domain - spares if gpu.domain == RACK else gpu.domain
    for axis in reversed(AXES):
        size = mesh.shape[axis]
        span = stride * size
        if size > 1:
            found[axis] = "nvlink" if mesh.size <= domain or domain % span == 0 else "network"
        stride = span
    return found


def roofline(config: Config, mesh: jax.sharding.AbstractMesh, work: Work, gpu: Gpu) -> Roofline:
    """The terms of a step on `gpu`, seconds: products, HBM, NVLink, network."""
    dense_rate = gpu.fp32 if config.recipe == "fp32" else gpu.bf16
    expert_rate = dense_rate
    if config.recipe == "mxfp8" and (gpu.native_mx or config.moe.mx_mode == "aligned"):
        expert_rate = gpu.fp8
    by_link = {"nvlink": 0.0, "network": 0.0}
    for axis, link in links(mesh, gpu, config.mesh.spares).items():
        by_link[link] += work.traffic.get(axis, 0.0)
    terms = {
        "products": work.expert_flops / expert_rate + work.dense_flops / dense_rate,
        "HBM": work.memory / gpu.memory_rate,
        "NVLink": by_link["nvlink"] / gpu.nvlink_rate,
        "network": by_link["network"] / gpu.network_rate,
    }
    return Roofline({name: seconds for name, seconds in terms.items() if seconds})


def parameters(state) -> int:
    """Number of parameters of the whole model."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
