"""A decoder-only transformer with mixture-of-experts layers, written over `moejax.nn`. Copy and edit it.

Leading dense layers (optional), then MoE layers; the parameters of each kind are one stack with the layer axis first, scanned
(`training.scan_layers`) or unrolled over the same tree. A recipe never changes the tree: layers that differ from their
neighbours (`moe.bf16_layers`, hash layers) are scanned in segments of the stack.

Expert weights can be read in two ways. Without `experts`, a layer gets its slice of the stack, as every other parameter does,
and gradients come out of `jax.grad`: simple, and what generation and evaluation do. The training step hands over whole stacks
and buffers (`expert_stacks`): a layer then reads and accumulates its part where it lies, and nothing of that size is ever copied.

Letters: B batch, L sequence, S cached positions, D model width, V vocabulary, C key/value heads, H head width,
K experts per token, N layers of a stack.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import Config, MoEConfig
from moejax.nn import MLP, Attention, Embedding, ExpertParam, HashTable, Linear, MoE, RMSNorm
from moejax.nn.layers import compute_dtype
from moejax.nn.moe import current_mesh
from moejax.nn.param import declare
from moejax.nn.remat import remat
from moejax.nn.stack import make_stack, split_stack
from moejax.ops.experts import ExpertWeights
from moejax.ops.mxfp8_rates import new_probe
from moejax.ops.rope import rope_turns
from moejax.ops.spec import MoESpec, moe_spec


class Tokens(NamedTuple):
    """What every layer reads beside the hidden states."""

    token_BxL: jax.Array
    segment_BxL: jax.Array
    turns: tuple[jax.Array, jax.Array]  # of `rope_turns`


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, of all layers, dense ones first."""

    k_NxBxSxCxH: jax.Array
    v_NxBxSxCxH: jax.Array


class Segment(NamedTuple):
    """Neighbouring MoE layers that run alike."""

    spec: MoESpec
    layers: int
    hashed: bool


@dataclasses.dataclass(frozen=True)
class Layers:
    """A segment with its variables: `layers` is stacked (state of a Block, copies of its experts or None, hash table or None)."""

    graphdef: nnx.GraphDef
    spec: MoESpec
    layers: tuple[Any, Any, Any]

    def block(self, state: Any = None) -> "Block":
        """The Block with this state; None: with that of all layers, stacked."""
        return nnx.merge(self.graphdef, self.layers[0] if state is None else state)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), where mlp is dense or a mixture of experts."""

    def __init__(self, config: Config, spec: MoESpec | None, *, rngs: nnx.Rngs):
        model, dtype = config.model, compute_dtype(config.recipe)
        self.attention_norm = RMSNorm(model.d_model, eps=model.norm_eps)
        self.attention = Attention(model, rngs=rngs)
        self.mlp_norm = RMSNorm(model.d_model, eps=model.norm_eps)
        if spec is None:
            assert model.dense_width is not None  # refused by the decoder
            self.mlp = MLP(model.d_model, model.dense_width, rngs=rngs, dtype=dtype)
        else:
            self.moe = MoE(model.d_model, config.moe, spec=spec, rngs=rngs)

    def __call__(self, x_BxLxD, tokens: Tokens, spec=None, hash_table_VxK=None, **experts):
        """`experts`: arguments of `MoE` that say where the expert weights are."""
        x_BxLxD += self.attention(self.attention_norm(x_BxLxD), tokens.turns, tokens.segment_BxL)
        return self.feed(x_BxLxD, tokens, spec, hash_table_VxK, **experts)

    def decode(self, x_BxLxD, tokens: Tokens, position, cache, spec=None, copies=None, hash_table_VxK=None):
        mixed_BxLxD, cache = self.attention.decode(self.attention_norm(x_BxLxD), tokens.turns, position, cache)
        x_BxLxD, _ = self.feed(x_BxLxD + mixed_BxLxD, tokens, spec, hash_table_VxK, copies=copies)
        return x_BxLxD, cache

    def feed(self, x_BxLxD, tokens: Tokens, spec, hash_table_VxK, **experts):
        normed_BxLxD = self.mlp_norm(x_BxLxD)
        if spec is None:
            return x_BxLxD + self.mlp(normed_BxLxD), None
        y_BxLxD, stats, *buffers = self.moe(
            normed_BxLxD,
            mask_BxL=tokens.segment_BxL > 0,
            token_BxL=tokens.token_BxL,
            hash_table_VxK=hash_table_VxK,
            spec=spec,
            **experts,
        )
        return x_BxLxD + y_BxLxD, stats, *buffers


class Decoder(nnx.Module):
    """Embedding, dense layers, MoE layers, final norm, head.

    Attributes:
      embedding: `Embedding` (V, D).
      dense_layers, moe_layers: `Block`s whose variables are stacked over layers (leading axis), or None if there are none.
      hash_table: `HashTable` (hash layers, V, K), or None.
      norm: final `RMSNorm`.
      head: `Linear` (V, D), or None if the embedding is the head.
      vocab_size: V.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        model, moe = config.model, config.moe
        self.config = config
        self.vocab_size = _vocab_size(config)
        dtype = compute_dtype(config.recipe)
        self.embedding = Embedding(self.vocab_size, model.d_model, rngs=rngs, std=model.init_std, dtype=dtype)
        self.segments = _segments(config)
        if model.dense_layers and model.dense_width is None:
            raise ValueError(
                f"model.dense_layers is {model.dense_layers}: set model.dense_width, the width of their MLP"
            )
        self.dense_layers = make_stack(lambda rngs: Block(config, None, rngs=rngs), model.dense_layers, rngs)
        spec = moe_spec(config, current_mesh())
        self.moe_layers = make_stack(
            lambda rngs: Block(config, spec, rngs=rngs), model.num_layers - model.dense_layers, rngs
        )
        self.hash_table: Any = _hash_table(rngs, moe, self.vocab_size) if moe.router.hash_layers else None
        self.norm = RMSNorm(model.d_model, eps=model.norm_eps)
        self.head = (
            None
            if model.tie_embeddings
            else Linear(model.d_model, self.vocab_size, rngs=rngs, axes=("vocab", "embed"), std=model.init_std)
        )

    def __call__(
        self,
        token_BxL: jax.Array,
        segment_BxL: jax.Array | None = None,
        position_BxL: jax.Array | None = None,
        copies: Any = None,
        experts: tuple[ExpertWeights, ...] | None = None,
        accumulator: tuple[ExpertWeights, ...] | None = None,
        probe: jax.Array | None = None,
    ):
        """Hidden states after the final norm; `ops.loss.cross_entropy` and `head_weight` make them a loss.

        Args:
          token_BxL: int32 token ids.
          segment_BxL: int32 document of each token, 0 for padding. None: each row is one document.
          position_BxL: int32 position inside the document. None: 0 .. L-1.
          copies: of `expert_copies`; None: made where they are used, on every call.
          experts: of `expert_stacks`: expert weights to read where they lie, instead of slices of the model's own, which
            then get no gradient.
          accumulator: FP32 buffers for their gradient, from `moe.new_accumulator`, one per stack; used as there.
          probe: with `experts`, of `mx_probe`: its cotangent counts what recipe mxfp8 loses.
        Returns:
          hidden_BxLxD in the compute dtype, and `RouterStats` stacked over MoE layers (None without MoE layers); with
          `accumulator` it comes back as third.
        """
        if segment_BxL is None:
            segment_BxL = jnp.ones_like(token_BxL)
        if position_BxL is None:
            position_BxL = jnp.broadcast_to(jnp.arange(token_BxL.shape[1], dtype=jnp.int32), token_BxL.shape)
        tokens = Tokens(token_BxL, segment_BxL, self._turns(position_BxL))
        x_BxLxD = self.embedding(token_BxL)
        if self.dense_layers is not None:
            graphdef, state = nnx.split(self.dense_layers)
            x_BxLxD, _ = self._run(lambda x, xs: nnx.merge(graphdef, xs)(x, tokens), x_BxLxD, state)
        stats, buffers, first = [], [], 0
        for i, segment in enumerate(self._moe_segments(copies)):
            if experts is None:
                x_BxLxD, segment_stats = self._run(_sliced(segment, tokens), x_BxLxD, segment.layers)
            else:
                buffer = None if accumulator is None else accumulator[i]
                part = None if probe is None else probe[first : first + self.segments[i].layers]
                body, layers = _in_place(segment, tokens, experts[i], part)
                first += self.segments[i].layers
                (x_BxLxD, buffer), segment_stats = self._run(body, (x_BxLxD, buffer), layers)
                buffers.append(buffer)
            stats.append(segment_stats)
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *stats) if stats else None
        hidden_BxLxD = self.norm(x_BxLxD)
        return (hidden_BxLxD, joined) if accumulator is None else (hidden_BxLxD, joined, tuple(buffers))

    @staticmethod
    def splits_by_hand(config: Config) -> tuple[str, ...]:
        """Mesh axes that a training step may split inside its `shard_map`: this model's modules know of `ops/hand_split.py`.

        A norm over all heads together needs the sums of all of them, which nobody has there.
        """
        return ("context",) if config.model.qk_norm == "full" else ("context", "tensor")

    def head_weight(self) -> jax.Array:
        """FP32 w_VxD of the output head."""
        return self.embedding.table[...] if self.head is None else self.head.w_OxI[...]

    def expert_copies(self) -> Any:
        """Compute copies of all expert weights, one entry per segment, stacked; None if the recipe needs none.

        Call it once per optimizer step, outside `jax.grad` and the micro-batch loop.
        """
        copies = tuple(stack.copies for stack in self.expert_stacks())
        return copies if jax.tree.leaves(copies) else None

    def expert_stacks(self) -> tuple[ExpertWeights, ...]:
        """Masters and compute copies of all expert weights, one stack of layers per segment.

        Call it once per optimizer step, outside the micro-batch loop. Differentiable in the masters; inside `shard_map` it
        also works on `fsdp` shards of them.
        """
        return tuple(segment.block().moe.prepared(segment.spec) for segment in self._moe_segments(None))

    def mx_probe(self) -> jax.Array | None:
        """Zeros, one entry per MoE layer, if a layer's recipe is mxfp8 (`mxfp8_rates.new_probe`)."""
        if all(segment.spec.recipe != "mxfp8" for segment in self.segments):
            return None
        return new_probe(sum(segment.layers for segment in self.segments))

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` positions of `batch` rows, in the compute dtype."""
        model = self.config.model
        shape = (model.num_layers, batch, length, model.num_kv_heads, model.head_dim)
        dtype = compute_dtype(self.config.recipe)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def decode(
        self, token_BxL: jax.Array, position: jax.Array, cache: Cache, copies: Any = None
    ) -> tuple[jax.Array, Cache]:
        """Hidden states of the next L tokens of each row, given the cache of the earlier ones.

        Args:
          token_BxL: int32; a prompt (L > 1) or one token per row.
          position: int32 scalar, position of the first of them; position + L must not exceed the cache's length (a write beyond it
            would be moved back over earlier keys: the caller checks).
          cache: of `init_cache`, or of an earlier call.
        Returns:
          hidden_BxLxD, and the cache with these tokens added.
        """
        position_BxL = jnp.broadcast_to(position + jnp.arange(token_BxL.shape[1], dtype=jnp.int32), token_BxL.shape)
        tokens = Tokens(token_BxL, jnp.ones_like(token_BxL), self._turns(position_BxL))
        x_BxLxD = self.embedding(token_BxL)
        dense = self.config.model.dense_layers
        sizes = [dense] * bool(dense) + [segment.layers for segment in self.segments]
        caches = split_stack(tuple(cache), sizes)
        done = []
        if self.dense_layers is not None:
            graphdef, state = nnx.split(self.dense_layers)

            def dense_block(x, xs):
                state, cache = xs
                return nnx.merge(graphdef, state).decode(x, tokens, position, cache)

            x_BxLxD, new = jax.lax.scan(dense_block, x_BxLxD, (state, caches.pop(0)))
            done.append(new)
        for segment, part in zip(self._moe_segments(copies), caches, strict=True):

            def block(x, xs, segment=segment):
                (state, copies, table), cache = xs
                return segment.block(state).decode(x, tokens, position, cache, segment.spec, copies, table)

            x_BxLxD, new = jax.lax.scan(block, x_BxLxD, (segment.layers, part))
            done.append(new)
        cache = Cache(*jax.tree.map(lambda *parts: jnp.concatenate(parts), *done))
        return self.norm(x_BxLxD), cache

    def _turns(self, position_BxL):
        model = self.config.model
        return rope_turns(position_BxL, model.head_dim, model.rope_theta, model.rope_fraction)

    def _run(self, block, carry, layers):
        """Applies `block` to each layer of a stack, under the remat policy; stacks what it returns beside the carry."""
        training = self.config.training
        body = remat(block, training.remat, scanned=training.scan_layers)
        if training.scan_layers:
            return jax.lax.scan(body, carry, layers)
        outs = []
        for layer in split_stack(layers):
            carry, out = body(carry, layer)
            outs.append(out)
        return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *outs)

    def _moe_segments(self, copies):
        """The segments with their layers: stacked (state, copies, hash tables)."""
        if not self.segments:
            return
        graphdef, state = nnx.split(self.moe_layers)
        parts = split_stack(state, [segment.layers for segment in self.segments])
        copies = [None] * len(parts) if copies is None else copies
        first = 0
        for segment, part, copy in zip(self.segments, parts, copies, strict=True):
            table = self.hash_table[...][first : first + segment.layers] if segment.hashed else None
            yield Layers(graphdef, segment.spec, (part, copy, table))
            first += segment.layers


def _sliced(segment: Layers, tokens: Tokens):
    """Body of a loop over layers that are given one by one, expert weights too."""

    def body(x, layer):
        state, copies, table = layer
        return segment.block(state)(x, tokens, segment.spec, table, copies=copies)

    return body


def _in_place(segment: Layers, tokens: Tokens, stack: ExpertWeights, probe: jax.Array | None):
    """Body of a loop over layers that read the experts of a whole stack by index, and what it runs over.

    The carry holds the accumulator, so that the backward pass, which runs the other way, adds to one buffer in turn.
    """
    state, _, table = segment.layers
    masters, rest = nnx.split_state(state, ExpertParam, ...)
    index = jnp.arange(stack.w_down_ExDxF.shape[0], dtype=jnp.int32)

    def body(carry, layer):
        x, buffer = carry
        index, rest, table, probe = layer
        # The masters only complete the module; they are neither read nor cut.
        block = segment.block(nnx.merge_state(masters, rest))
        experts = stack.of_layer(index)
        x, stats, *buffers = block(x, tokens, segment.spec, table, experts=experts, accumulator=buffer, probe=probe)
        return (x, buffers[0] if buffers else None), stats

    return body, (index, rest, table, probe)


def _vocab_size(config: Config) -> int:
    if config.model.vocab_size is None:
        raise ValueError("model.vocab_size is not set: give the size of the tokenizer's vocabulary")
    return config.model.vocab_size


def _segments(config: Config) -> tuple[Segment, ...]:
    layers = config.model.num_layers - config.model.dense_layers
    if layers < 0:
        raise ValueError(
            f"model.dense_layers is {config.model.dense_layers} but num_layers is {config.model.num_layers}"
        )
    mesh = current_mesh()
    segments: list[Segment] = []
    for layer in range(layers):
        alike = moe_spec(config, mesh, layer), layer < config.moe.router.hash_layers
        if segments and (segments[-1].spec, segments[-1].hashed) == alike:
            segments[-1] = segments[-1]._replace(layers=segments[-1].layers + 1)
        else:
            segments.append(Segment(alike[0], 1, alike[1]))
    return tuple(segments)


def _hash_table(rngs: nnx.Rngs, moe: MoEConfig, vocab_size: int) -> HashTable:
    """int32 (hash layers, V, K): K distinct experts per token, drawn uniformly."""
    noise = jax.random.uniform(rngs.params(), (moe.router.hash_layers, vocab_size, moe.num_experts))
    table = jax.lax.top_k(noise, moe.router.top_k)[1].astype(jnp.int32)
    return declare(table, ("layer", None, None), HashTable)
