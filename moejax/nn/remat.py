"""Which values of a layer are kept for its backward pass, by policy name (`training.remat`).

  none      everything autodiff asks for
  minimal   the layer is computed again, except for what KEPT["minimal"] names
  layer     the layer is computed again, except for the choice of experts and the schedule

The choice is kept by every policy: computed twice, it could differ between forward and backward.
`jax.checkpoint` saves nothing and raises nothing for a misspelt name, so names are constants of the modules that use them.
"""

from collections.abc import Callable

import jax

from moejax.ops.attention import LSE_NAME, OUT_NAME
from moejax.ops.spec import GATE_UP_NAME, SCHEDULE_NAME

KEPT = {
    "minimal": (SCHEDULE_NAME, GATE_UP_NAME, OUT_NAME, LSE_NAME),
    "layer": (SCHEDULE_NAME,),
}


def remat(body: Callable, policy: str, *, scanned: bool) -> Callable:
    """`body` with the named policy.

    Args:
      body: a function of arrays.
      policy: "none", "minimal" or "layer".
      scanned: whether body runs inside `jax.lax.scan`, where the compiler cannot merge the two computations anyway.
    Raises:
      ValueError: unknown policy.
    """
    if policy == "none":
        return body
    if policy not in KEPT:
        raise ValueError(f"training.remat is {policy!r}: expected one of none, {', '.join(KEPT)}")
    keep = jax.checkpoint_policies.save_only_these_names(*KEPT[policy])
    return jax.checkpoint(body, policy=keep, prevent_cse=not scanned)
