"""What a run says about its expert layers before it starts: with what they run, and why with nothing faster."""

from moejax.config import Config
from moejax.ops import experts_native
from moejax.ops.backends import choose_backend, not_chosen
from moejax.ops.spec import EXPERT_AXIS, Mesh, MoESpec, moe_spec


def experts_line(config: Config, mesh: Mesh | None = None) -> str:
    """Backend, recipe and mode of the MoE layers in one line; layers that differ from most (`moe.bf16_layers`) by number.

    Args:
      config: of the run.
      mesh: that it runs on; None: one device.
    """
    layers: dict[MoESpec, list[str]] = {}
    for layer in range(config.model.num_layers - config.model.dense_layers):
        layers.setdefault(moe_spec(config, mesh, layer), []).append(str(layer))
    most = max(layers, key=lambda spec: len(layers[spec]), default=None)
    if most is None:
        return "experts: none, every layer is dense"
    others = [
        f"; MoE layer{'s' if numbers[1:] else ''} {', '.join(numbers)}: {_about(spec, config)}"
        for spec, numbers in layers.items()
        if spec is not most
    ]
    return f"experts: {_about(most, config)}{''.join(others)}"


def _about(spec: MoESpec, config: Config) -> str:
    words = [f"backend {spec.backend}", f"recipe {spec.recipe}"]
    if spec.recipe == "mxfp8":
        words.append(f"mode {spec.mx_mode}")
        if spec.mx_mode == "exact" and spec.backend == "native" and experts_native.aligned_is_faster():
            words[-1] += " (moe.mx_mode=aligned would use the FP8 tensor cores)"
        if spec.wgrad == "bf16":
            words.append("weight gradients in bf16")
    if spec.ranks > 1:
        words.append(f"{spec.transport} over mesh.{EXPERT_AXIS}={spec.ranks}")
    if config.moe.backend is not None:
        why = "as asked"
    else:
        why = not_chosen(choose_backend(spec.replace(backend=None))[1])
    return ", ".join(words) + (f" ({why})" if why else "")
