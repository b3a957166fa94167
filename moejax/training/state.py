"""The training state, and how a Flax model becomes one.

A model is split once, here, into its static graph and plain dicts of arrays; the step is a pure function of those
(`step.py`), and checkpoints hold them under their names.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moejax.checkpoint import named_leaves
from moejax.config import Config
from moejax.mesh import RULES, logical_to_spec, named_sharding
from moejax.nn.moe import ExpertParam, RouterBias
from moejax.ops.spec import Mesh
from moejax.training.optimizer import make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that determines the future of a run, except the position in the data.

    Attributes:
      step: int32 scalar, finished optimizer steps.
      params: FP32 masters, nested dict by name.
      opt_state: optax state, moments in FP32.
      router_bias: FP32 selection biases, nested dict by name; they follow counts, not gradients.
      rng: uint32 key data (`jax.random.wrap_key_data`).
    """

    step: jax.Array
    params: Any
    opt_state: Any
    router_bias: Any
    rng: jax.Array


@dataclasses.dataclass(frozen=True)
class Skeleton:
    """A model without its arrays: `merge` puts them back, inside or outside `jax.jit`."""

    graphdef: nnx.GraphDef
    params: nnx.State
    router_bias: nnx.State

    def merge(self, params: Any, router_bias: Any) -> Any:
        """The model with these arrays (nested dicts, as in `TrainState`)."""
        return nnx.merge(self.graphdef, _fill(self.params, params), _fill(self.router_bias, router_bias))

    def partition(self, params: Any) -> tuple[Any, Any]:
        """(masters of routed experts, everything else): trees like `params`, with None where a leaf is in the other one."""
        is_expert = _by_name(self.params, lambda variable: isinstance(variable, ExpertParam))
        experts = jax.tree.map(lambda chosen, leaf: leaf if chosen else None, is_expert, params)
        return experts, jax.tree.map(lambda chosen, leaf: None if chosen else leaf, is_expert, params)

    def join(self, experts: Any, rest: Any) -> Any:
        """The inverse of `partition`."""
        return jax.tree.map(lambda a, b: b if a is None else a, experts, rest, is_leaf=lambda leaf: leaf is None)

    def specs(self, mesh: Mesh, rules: Mapping[str, Any] = RULES) -> Any:
        """`PartitionSpec` of every parameter on a mesh, from the logical names of its axes; a tree like `params`."""

        def spec(variable):
            axes = _logical_axes(variable)
            return jax.P() if axes is None else logical_to_spec(axes, str(axes), variable.shape, mesh, rules)

        return _by_name(self.params, spec)


def model_class(module: str) -> type:
    """The class that `module:Class` names.

    Raises:
      ValueError: not of that form, no such module, no such class in it, or a class that is no Flax module.
    """
    path, _, name = module.partition(":")
    if not path or not name or not all(part.isidentifier() for part in [*path.split("."), name]):
        raise ValueError(f"model.module is '{module}': write it as module:Class, such as models.decoder:Decoder")
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise  # the module exists, and something it imports doesn't
        raise ValueError(
            f"model.module is '{module}': there is no module '{path}' here or on the Python path"
        ) from error
    if not isinstance(cls := getattr(found, name, None), type):
        raise ValueError(f"model.module is '{module}': {path} has no class '{name}'")
    if not issubclass(cls, nnx.Module):
        raise ValueError(f"model.module is '{module}': {name} is not a Flax module (flax.nnx.Module)")
    return cls


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """The config with `model.vocab_size` filled in from the tokenizer; a larger one that the user chose stays.

    Raises:
      ValueError: the user chose fewer ids than the tokenizer has.
    """
    chosen = config.model.vocab_size
    if chosen is not None and chosen < vocab_size:
        raise ValueError(f"model.vocab_size is {chosen}, but the tokenizer has {vocab_size} ids: leave it out")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=chosen or vocab_size))


def make_skeleton(config: Config) -> Skeleton:
    """The static part of `config.model.module`; no array is created."""
    model = nnx.eval_shape(lambda: _build(config, jax.random.key(config.training.seed)))
    graphdef, params, router_bias = nnx.split(model, nnx.Param, RouterBias)  # type: ignore[misc]
    return Skeleton(graphdef, params, router_bias)


def make_init(config: Config) -> Callable[[], TrainState]:
    """A function without arguments that creates the first state: `jax.eval_shape` it, or `jax.jit` it under a mesh."""

    def init() -> TrainState:
        model_key, run_key = jax.random.split(jax.random.key(config.training.seed))
        _, params, router_bias = nnx.split(_build(config, model_key), nnx.Param, RouterBias)  # type: ignore[misc]
        params = jax.tree.map(lambda x: x.astype(jnp.float32), nnx.to_pure_dict(params))
        return TrainState(
            step=jnp.int32(0),
            params=params,
            opt_state=make_optimizer(config.optimizer).init(params),
            router_bias=nnx.to_pure_dict(router_bias),
            rng=jax.random.key_data(run_key),
        )

    return init


def abstract_state(config: Config, mesh: jax.sharding.Mesh | None = None) -> TrainState:
    """Shapes, dtypes and (with a mesh) shardings of the state, as `jax.ShapeDtypeStruct`s.

    A parameter is sharded by the logical names of its axes (`moejax.mesh`), its moments like it, all else replicated.
    """
    abstract = jax.eval_shape(make_init(config))
    if mesh is None:
        return abstract
    model = nnx.eval_shape(lambda: _build(config, jax.random.key(0)))
    logical = {
        ".".join(map(str, path)): _logical_axes(variable) for path, variable in nnx.to_flat_state(nnx.state(model))
    }

    def placed(name: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # `opt_state.0.mu.head.w_OxI` is sharded like `head.w_OxI`: the longest end of its name that is a variable's
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(1, len(parts)))
        axes = next((logical[end] for end in ends if end in logical), None)
        if axes is None or len(axes) != leaf.ndim:
            sharding = jax.NamedSharding(mesh, jax.P())
        else:
            sharding = named_sharding(mesh, axes, name, leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    leaves = [placed(name, leaf) for name, leaf in named_leaves(abstract).items()]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def create_state(config: Config, mesh: jax.sharding.Mesh | None = None) -> TrainState:
    """The first state, each leaf born in its own sharding; the same values on every mesh.

    The random bits are the same; the normal distribution is made of them by a polynomial, which XLA on the CPU rounds by vector
    or one by one as a shard's size asks. So an entry may differ in its last bit where shards aren't whole vectors (fsdp=4 of 20).
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    return jax.jit(make_init(config), out_shardings=shardings)()


def apply_update(
    state: TrainState,
    grads: Any,
    rate: jax.Array,
    optimizer: optax.GradientTransformationExtraArgs,
    accept: jax.Array | bool = True,
) -> tuple[Any, Any]:
    """Params and optimizer state after one update with these (clipped) FP32 gradients; as they were unless `accept`."""
    direction, opt_state = optimizer.update(grads, state.opt_state, state.params, accept=accept)
    params = jax.tree.map(lambda p, d: jnp.where(accept, p - rate * d, p), state.params, direction)
    return params, opt_state


def parameter_counts(params: Any, config: Config) -> tuple[int, int]:
    """All parameters, and those that act on one token: of the routed experts, K of E.

    Routed expert weights are the leaves of a module named `experts`, which have an expert axis of length E.
    """
    total = active = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        size = leaf.size
        total += size
        active += size * config.moe.router.top_k // config.moe.num_experts if "experts" in names else size
    return total, active


def _build(config: Config, key: jax.Array) -> Any:
    return model_class(config.model.module)(config, rngs=nnx.Rngs(key))


def _logical_axes(variable: nnx.Variable) -> tuple[str | None, ...] | None:
    """None: a variable of a stock module, replicated on every mesh."""
    return getattr(variable, "logical_axes", None)


def _by_name(state: nnx.State, of: Callable[[Any], Any]) -> Any:
    """`of(variable)` for every variable, in a nested dict by name."""
    tree: dict = {}
    for path, variable in nnx.to_flat_state(state):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = of(variable)
    return tree


def _fill(template: nnx.State, values: Any) -> nnx.State:
    filled = jax.tree.map(lambda leaf: leaf, template)  # a copy: replacing works in place
    nnx.replace_by_pure_dict(filled, values)
    return filled
