"""Generation: the cache changes nothing, greedy is argmax of the full forward, sampling is seeded and restricted as asked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from moejax.checkpoint import Checkpoints
from moejax.config import Config
from moejax.config_load import config_to_dict
from moejax.data.tokenizer import ByteTokenizer
from moejax.generate import _generate, generate, generate_text, load_run, main
from moejax.training.state import create_state, make_skeleton
from tests.test_decoder import CONFIG, SMALL, parts, relative

PROMPT = np.random.default_rng(5).integers(0, 41, size=(2, 6))


@functools.cache
def model(config=SMALL):
    return nnx.merge(*parts(config))


@jax.jit
def full_logits(token_BxL):
    hidden, _ = model()(token_BxL)
    return hidden @ model().head_weight().T


def test_cached_decoding_equals_the_full_forward():
    token = jnp.asarray(np.random.default_rng(6).integers(0, 41, size=(2, 9)), jnp.int32)
    want, _ = jax.jit(lambda token: model(CONFIG)(token))(token)

    @jax.jit
    def in_pieces(token):
        cache, pieces = model(CONFIG).init_cache(2, 12), []  # longer than the text: unused positions must not be seen
        cache = jax.tree.map(lambda x: x + jnp.nan_to_num(jnp.inf), cache)  # nor read, whatever they hold
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 9)):
            hidden, cache = model(CONFIG).decode(token[:, first:last], jnp.int32(first), cache)
            pieces.append(hidden)
        return jnp.concatenate(pieces, axis=1)

    got = in_pieces(token)
    for position in range(9):
        assert relative(got[:, position], want[:, position]) < 1e-5, position


def test_greedy_text_is_the_argmax_of_the_full_forward_token_by_token():
    got = generate(model(), PROMPT, 5)
    whole = np.concatenate([PROMPT, got], axis=1)
    logits = np.asarray(full_logits(jnp.asarray(whole, jnp.int32)))  # causal: one pass scores every prefix
    np.testing.assert_array_equal(got, logits[:, 5:-1].argmax(-1))


def test_a_model_without_a_cache_gives_the_same_text():
    class WithoutCache(nnx.Module):
        def __init__(self, inner):
            self.inner = inner
            self.vocab_size = inner.vocab_size

        def __call__(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

        def head_weight(self):
            return self.inner.head_weight()

        def expert_copies(self):
            return self.inner.expert_copies()

    np.testing.assert_array_equal(generate(WithoutCache(model()), PROMPT, 5), generate(model(), PROMPT, 5))


def test_sampling_is_seeded_and_compiled_once():
    before = _generate._cache_size()
    first, again, other = (generate(model(), PROMPT, 5, temperature=1.5, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    generate(model(), PROMPT, 5, temperature=0.3, seed=1, stop=7)
    assert _generate._cache_size() <= before + 1


def test_top_k_one_and_tiny_temperatures_are_greedy():
    greedy = generate(model(), PROMPT, 5)
    np.testing.assert_array_equal(generate(model(), PROMPT, 5, temperature=3.0, top_k=1), greedy)
    np.testing.assert_array_equal(generate(model(), PROMPT, 5, temperature=1e-4), greedy)


def test_only_allowed_tokens_appear_and_a_row_ends_at_its_stop():
    allowed = np.zeros(41, bool)
    allowed[[3, 8, 30]] = True
    got = [generate(model(), PROMPT, 5, temperature=50.0, seed=s, stop=8, allowed_V=allowed) for s in range(8)]
    assert set(np.unique(got)) == {3, 8, 30}
    stopped = [row for row in np.concatenate(got).tolist() if 8 in row[:-1]]
    assert stopped
    for row in stopped:
        assert set(row[row.index(8) :]) == {8}


def test_sampled_frequencies_are_the_softmax_of_the_logits():
    row, rows, temperature = PROMPT[:1], 4096, 0.7
    got = generate(model(), np.repeat(row, rows, axis=0), 1, temperature=temperature)[:, 0]
    logits = np.asarray(full_logits(jnp.asarray(row, jnp.int32)))[0, -1].astype(np.float64) / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    error = np.abs(np.bincount(got, minlength=41) / rows - p)
    assert (error < 5 * np.sqrt(p * (1 - p) / rows) + 1e-9).all()  # 5 standard deviations


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 0}, "0 new tokens"),
        ({"new_tokens": 2**31}, "2147483648 new tokens"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**32}, r"seed is 4294967296: expected 0\.\.4294967295"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": 1e300}, r"temperature is 1e\+300"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": np.nan}, "temperature is nan"),
        ({"top_k": 42}, r"top_k is 42: expected 1\.\.41"),
        ({"prompt": np.zeros((1, 0))}, "at least 1 token"),
        ({"allowed_V": np.zeros(41)}, "0 true"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    changes = {"prompt": PROMPT, "new_tokens": 3} | changes
    with pytest.raises(ValueError, match=message):
        generate(model(), changes.pop("prompt"), changes.pop("new_tokens"), **changes)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run folder as train.py leaves it, with an untrained byte model."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    config = Config(model=dataclasses.replace(SMALL.model, vocab_size=258, num_layers=1), moe=SMALL.moe)
    checkpoints = Checkpoints(folder / "checkpoints", asynchronous=False)
    state = create_state(config)
    checkpoints.save(7, state, {"next_index": 0})
    checkpoints.close()
    (folder / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    (folder / "tokenizer.json").write_text(ByteTokenizer().to_json())
    return folder, config, state


def test_the_command_continues_a_prompt_with_the_weights_of_the_run(run_folder, capsys):
    folder, config, state = run_folder
    assert main([str(folder), "--prompt", "import ", "--tokens", "9", "--seed", "4"]) == 0
    want = make_skeleton(config).merge(state.params, state.router_bias)
    printed = capsys.readouterr().out
    assert printed == generate_text(want, ByteTokenizer(), "import ", 9, seed=4) + "\n"
    assert printed.startswith("import ") and len(printed) > len("import ") + 1


def test_the_command_says_in_one_line_what_is_wrong(run_folder, tmp_path, capsys):
    folder, *_ = run_folder
    assert main([str(tmp_path)]) == 1
    assert "is no run folder" in capsys.readouterr().err
    assert main([str(folder), "--step", "8"]) == 1
    assert "no checkpoint 8" in capsys.readouterr().err
    assert main([str(folder), "--prompt", "caf\udce9"]) == 1  # how Python hands on a byte that is no UTF-8
    assert "is not UTF-8 text" in capsys.readouterr().err


def test_a_run_that_is_being_trained_is_left_alone(run_folder):
    import fcntl

    folder, *_ = run_folder
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="is being trained"):
            load_run(folder)
