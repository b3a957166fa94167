"""Text from a trained model: the prompt in one pass, then one token at a time with cached keys and values.

    python -m moejax.generate runs/quickstart --prompt "def main("

The loop over tokens is one compiled program.

Letters: B batch, P prompt length, S prompt and new tokens, N new tokens, D model width, V vocabulary.
"""

import argparse
import contextlib
import fcntl
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.checkpoint import Checkpoints
from moejax.config import MAX_SEED
from moejax.config_load import config_from_dict
from moejax.data.tokenizer import Tokenizer, load_tokenizer
from moejax.training.errors import one_line_errors
from moejax.training.run import read_stored
from moejax.training.state import abstract_state, make_skeleton, with_vocabulary


def generate(
    model: Any,
    prompt_BxP: np.ndarray | jax.Array,
    new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    allowed_V: np.ndarray | None = None,
) -> np.ndarray:
    """Continues prompts of equal length.

    Args:
      model: as in `docs/design.md` §3. A model without `init_cache` and `decode` is run on the whole text for every token.
      prompt_BxP: int32 token ids, at least one per row.
      new_tokens: tokens to add.
      temperature: logits are divided by it before sampling; 0 takes the most likely token.
      top_k: sample among the k most likely tokens; None: among all.
      seed: of the sampling; the same seed, prompt and model give the same text.
      stop: token that ends a row; what follows it is filled with it.
      allowed_V: booleans, tokens that may be chosen. None: all.
    Returns:
      int32 (B, new_tokens).
    Raises:
      ValueError: an argument is out of range.
    """
    prompt_BxP = jnp.asarray(prompt_BxP, jnp.int32)
    if prompt_BxP.ndim != 2 or prompt_BxP.shape[1] == 0:
        raise ValueError(f"the prompt has shape {prompt_BxP.shape}: expected (rows, at least 1 token)")
    if not 1 <= new_tokens < 2**31 - prompt_BxP.shape[1]:  # positions are int32
        raise ValueError(f"{new_tokens} new tokens asked for: expected at least 1, and fewer than 2^31 with the prompt")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed is {seed}: expected 0..{MAX_SEED}")
    if temperature != 0 and not 1e-6 <= temperature <= 1e6:  # beyond, logits / temperature is no FP32 number
        raise ValueError(f"temperature is {temperature}: expected 0 (the most likely token) or 1e-6..1e6")
    if top_k is not None and not 1 <= top_k <= model.vocab_size:
        raise ValueError(f"top_k is {top_k}: expected 1..{model.vocab_size}, the vocabulary")
    allowed_V = np.ones(model.vocab_size, bool) if allowed_V is None else np.asarray(allowed_V, bool)
    if allowed_V.shape != (model.vocab_size,) or not allowed_V.any():
        raise ValueError(
            f"allowed has shape {allowed_V.shape} and {allowed_V.sum()} true: expected ({model.vocab_size},), 1 or more"
        )
    graphdef, state = nnx.split(model)
    how = (new_tokens, temperature > 0, top_k)
    values = (
        jnp.float32(temperature),
        jax.random.key(seed),
        jnp.int32(-1 if stop is None else stop),
        jnp.asarray(allowed_V),
    )
    tokens = _generate(graphdef, how, state, prompt_BxP, *values)
    return np.asarray(tokens)


def generate_text(
    model: Any,
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    *,
    temperature: float = 0.7,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """`prompt` and its continuation, as the beginning of a document; ends early where the model ends the document."""
    try:
        prompt.encode()
    except UnicodeEncodeError:  # bytes of a command line that are no UTF-8 arrive as lone surrogates
        raise ValueError(f"the prompt {prompt[:40]!a} is not UTF-8 text") from None
    ids = [tokenizer.bos, *tokenizer.encode(prompt)]
    allowed_V = np.arange(model.vocab_size) < tokenizer.vocab_size  # a model may have more ids than its tokenizer
    allowed_V[tokenizer.bos] = tokenizer.bos == tokenizer.eos
    (new,) = generate(
        model, np.array([ids]), new_tokens,
        temperature=temperature, top_k=top_k, seed=seed, stop=tokenizer.eos, allowed_V=allowed_V,
    ).tolist()  # fmt: skip
    ended = new.index(tokenizer.eos) if tokenizer.eos in new else len(new)
    return tokenizer.decode(ids[1:] + new[:ended])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _generate(graphdef, how, state, prompt_BxP, temperature, key, stop, allowed_V):
    model = nnx.merge(graphdef, state)
    copies = model.expert_copies()
    batch, prompt_length = prompt_BxP.shape
    new_tokens = how[0]

    def choose(hidden_BxD, index):
        logits_BxV = jnp.einsum(
            "bd,vd->bv", hidden_BxD, model.head_weight().astype(hidden_BxD.dtype),
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        return _sample(jnp.where(allowed_V, logits_BxV, -jnp.inf), how, temperature, jax.random.fold_in(key, index))

    def step(carry):
        index, token_B, memory, tokens_BxN, ended_B = carry
        hidden_BxD, memory = advance(token_B, prompt_length + index - 1, memory)
        token_B = jnp.where(ended_B, stop, choose(hidden_BxD, index))
        tokens_BxN = jax.lax.dynamic_update_slice_in_dim(tokens_BxN, token_B[:, None], index, axis=1)
        return index + 1, token_B, memory, tokens_BxN, ended_B | (token_B == stop)

    first, advance = _cached(model, copies) if hasattr(model, "decode") else _whole(model, copies)
    hidden_BxD, memory = first(prompt_BxP, prompt_length + new_tokens)
    token_B = choose(hidden_BxD, 0)
    tokens_BxN = jnp.full((batch, new_tokens), stop, jnp.int32).at[:, 0].set(token_B)
    carry = (jnp.int32(1), token_B, memory, tokens_BxN, token_B == stop)
    return jax.lax.while_loop(lambda c: (c[0] < new_tokens) & ~jnp.all(c[4]), step, carry)[3]


def _cached(model, copies):
    """The hidden state after the prompt, and after one more token, with a cache of keys and values."""

    def first(prompt_BxP, length):
        hidden_BxPxD, cache = model.decode(
            prompt_BxP, jnp.int32(0), model.init_cache(prompt_BxP.shape[0], length), copies
        )
        return hidden_BxPxD[:, -1], cache

    def advance(token_B, position, cache):
        hidden_Bx1xD, cache = model.decode(token_B[:, None], position, cache, copies)
        return hidden_Bx1xD[:, 0], cache

    return first, advance


def _whole(model, copies):
    """The same for a model without a cache: the text so far is read again for every token; what follows it is padding."""

    def last(text_BxS, position):
        at_S = jnp.arange(text_BxS.shape[1], dtype=jnp.int32)
        segment_BxS = jnp.broadcast_to((at_S <= position).astype(jnp.int32), text_BxS.shape)
        hidden_BxSxD, _ = model(text_BxS, segment_BxS, jnp.broadcast_to(at_S, text_BxS.shape), copies=copies)
        return jax.lax.dynamic_index_in_dim(hidden_BxSxD, position, axis=1, keepdims=False), text_BxS

    def first(prompt_BxP, length):
        text_BxS = jnp.pad(prompt_BxP, ((0, 0), (0, length - prompt_BxP.shape[1])))
        return last(text_BxS, jnp.int32(prompt_BxP.shape[1] - 1))

    def advance(token_B, position, text_BxS):
        return last(jax.lax.dynamic_update_slice_in_dim(text_BxS, token_B[:, None], position, axis=1), position)

    return first, advance


def _sample(logits_BxV, how, temperature, key):
    _, random, top_k = how
    if not random:
        return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
    if top_k is not None:
        best_BxK, token_BxK = jax.lax.top_k(logits_BxV, top_k)
        place_B = jax.random.categorical(key, best_BxK / temperature)
        return jnp.take_along_axis(token_BxK, place_B[:, None], axis=1)[:, 0].astype(jnp.int32)
    return jax.random.categorical(key, logits_BxV / temperature).astype(jnp.int32)


def load_run(folder: str | pathlib.Path, step: int | None = None) -> tuple[Any, Tokenizer]:
    """The model of a run folder, with the weights of checkpoint `step` (None: the newest), and its tokenizer.

    Raises:
      ValueError: not a run folder, or the run is being trained right now.
      CheckpointError: no such checkpoint, or it does not fit.
    """
    folder = pathlib.Path(folder)
    stored = folder / "config.yaml"
    if not stored.is_file() or not (folder / "checkpoints").is_dir():
        raise ValueError(
            f"{folder} is no run folder: expected one that train.py made, with config.yaml and checkpoints/"
        )
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    config = with_vocabulary(config_from_dict(read_stored(stored) or {}), tokenizer.vocab_size)
    with _unused(folder):
        checkpoints = Checkpoints(folder / "checkpoints", keep=config.checkpoint.keep)
        state, _ = checkpoints.restore(abstract_state(config), step)
        checkpoints.close()
    return make_skeleton(config).merge(state.params, state.router_bias), tokenizer


@contextlib.contextmanager
def _unused(folder: pathlib.Path) -> Iterator[None]:
    """Keeps training away while a checkpoint is read: it would delete old ones, and we its unfinished ones."""
    with open(folder / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being trained: wait for it, or copy the folder") from None
        yield


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.generate", description="Continues a prompt with a trained model."
    )
    parser.add_argument("run", help="run folder, such as runs/quickstart")
    parser.add_argument("--prompt", default="", help="text to continue (default: none, the beginning of a document)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0: the most likely token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, help="sample among the k most likely tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    options = parser.parse_args(arguments)
    with one_line_errors() as outcome:
        model, tokenizer = load_run(options.run, options.step)
        print(
            generate_text(
                model, tokenizer, options.prompt, options.tokens,
                temperature=options.temperature, top_k=options.top_k, seed=options.seed,
            )
        )  # fmt: skip
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
