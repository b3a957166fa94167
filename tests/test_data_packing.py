"""Packing: which tokens a sample holds, and in which order samples come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.config_load import config_from_dict
from moejax.data import DataError, Dataset, heldout_batches, train_iterator
from moejax.data.packing import ShuffledWindows, Windows, permutation
from moejax.data.store import TokenStore
from moejax.data.tokenizer import ByteTokenizer

BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos
# Without a deadline: the machine that runs the tests may be busy.
relaxed = settings(max_examples=60, deadline=None)
document_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def make_store(lengths):
    """Documents of BOS and `length` - 0 bytes each; byte values depend on document and place, so that mix-ups show."""
    documents = [[BOS, *((17 * d + 5 * k) % 251 for k in range(length))] for d, length in enumerate(lengths)]
    starts = np.cumsum([0] + [len(document) for document in documents])
    store = TokenStore(np.concatenate(documents).astype(np.uint16), starts.astype(np.int64), sum(lengths))
    return store, documents


def segments(sample):
    """The pieces of documents in a sample, as (tokens, targets, positions)."""
    for segment in range(1, sample["segment"].max(initial=0) + 1):
        inside = sample["segment"] == segment
        assert inside.any() and np.all(np.diff(np.flatnonzero(inside)) == 1), "a segment is one stretch"
        yield tuple(sample[name][inside].tolist() for name in ("token", "target", "position"))


@relaxed
@given(document_lengths, st.integers(1, 50))
def test_windows_lay_the_documents_end_to_end_and_targets_stay_inside_them(lengths, length):
    store, documents = make_store(lengths)
    windows = Windows(store, length, EOS)
    samples = [windows.sample(w) for w in range(len(windows))]
    tokens = np.concatenate([sample["token"] for sample in samples])
    targets = np.concatenate([sample["target"] for sample in samples])
    segment = np.concatenate([sample["segment"] for sample in samples])
    total = sum(len(document) for document in documents)
    assert len(samples) == -(-total // length)
    assert tokens[:total].tolist() == [token for document in documents for token in document]
    assert targets[:total].tolist() == [token for document in documents for token in [*document[1:], EOS]]
    assert (segment[:total] > 0).all()
    assert (segment[total:] == 0).all() and (targets[total:] == -1).all()
    for sample in samples:
        for token, target, position in segments(sample):
            assert position == list(range(len(token)))
            assert BOS not in token[1:], "a document starts a segment of its own"
            assert token[1:] == target[:-1], "inside a segment the target is the next token"


@relaxed
@given(document_lengths, st.integers(1, 30), st.integers(0, 2**31), st.integers(0, 3))
def test_an_epoch_scores_every_byte_of_every_document_exactly_once(lengths, length, seed, epoch):
    store, documents = make_store(lengths)
    if length > len(store.tokens):
        length = len(store.tokens)
    shuffled = ShuffledWindows(store, length, EOS, seed)
    samples = shuffled.samples(range(epoch * shuffled.per_epoch, (epoch + 1) * shuffled.per_epoch))
    assert len(samples) == shuffled.per_epoch
    pieces = sorted((tuple(token), tuple(target)) for sample in samples for token, target, _ in segments(sample))
    scored = sorted(target for _, piece in pieces for target in piece)
    assert scored == sorted(token for document in documents for token in [*document[1:], EOS])
    # ... and no piece holds tokens of two documents
    texts = ["".join(map(chr, [*document, EOS])) for document in documents]
    for token, target in pieces:
        assert any("".join(map(chr, [*token, target[-1]])) in text for text in texts)


@relaxed
@given(document_lengths, st.integers(1, 30), st.integers(0, 50), st.integers(1, 40))
def test_samples_do_not_depend_on_how_they_are_asked_for(lengths, length, first, count):
    store, _ = make_store(lengths)
    length = min(length, len(store.tokens))
    together = ShuffledWindows(store, length, EOS, seed=3).samples(range(first, first + count))
    alone = ShuffledWindows(store, length, EOS, seed=3)
    for index in reversed(range(count)):  # backwards, so that no state can help
        (sample,) = alone.samples(range(first + index, first + index + 1))
        assert all(np.array_equal(sample[name], together[index][name]) for name in sample)


@relaxed
@given(st.integers(1, 3000), st.integers(0, 2**64), st.integers(0, 5))
def test_every_key_names_a_permutation(size, seed, epoch):
    order = permutation(np.arange(size), size, seed, epoch, 1)
    assert np.array_equal(np.sort(order), np.arange(size))
    some = np.arange(size)[::7]
    assert np.array_equal(permutation(some, size, seed, epoch, 1), order[::7])


def test_permutations_differ_by_seed_epoch_and_purpose_and_spread_evenly():
    size = 1000
    orders = [permutation(np.arange(size), size, *key) for key in ((0, 0, 1), (0, 0, 2), (0, 1, 1), (1, 0, 1))]
    for i, one in enumerate(orders):
        # a random permutation has 1 fixed point and a rank correlation of 0 +- 1/sqrt(size), on average
        assert (one == np.arange(size)).sum() < 10
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 5 / size**0.5
        for other in orders[i + 1 :]:
            assert (one == other).sum() < 10
    # where 0 goes, over many keys: each tenth of the range equally often (chi-square, 9 degrees: < 33.7 but for one in 10^4)
    places = np.asarray([permutation(np.asarray([0]), size, seed, 0, 1)[0] for seed in range(2000)])
    counts = np.bincount(places * 10 // size, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 33.7


def test_the_order_never_changes_between_versions():
    """A run resumed with a newer version must go on with the same samples: these numbers are the format."""
    assert permutation(np.arange(12), 12, 0, 0, 2).tolist() == [6, 10, 8, 7, 3, 11, 0, 4, 5, 1, 9, 2]
    big = permutation(np.asarray([0, 1, 2, 10**12]), 10**12 + 1, 7, 3, 1)
    assert big.tolist() == [292937195203, 393136190533, 258961539966, 484860596340]
    shuffled = ShuffledWindows(make_store([7, 3, 12, 9, 4, 1])[0], 5, EOS, seed=2)
    assert [int(sample["token"][-1]) for sample in shuffled.samples(range(18))] == [
        0,
        20,
        44,
        256,
        83,
        69,
        256,
        81,
        56,
        73,
        20,
        0,
        256,
        49,
        71,
        85,
        74,
        256,
    ]


def make_dataset(lengths):
    store, _ = make_store(lengths)
    return Dataset(store, store, ByteTokenizer(), ByteTokenizer.vocab_size, folder=None)


def make_config(batch, length, seed=0):
    return config_from_dict({"training": {"global_batch": batch, "sequence_length": length}, "data": {"seed": seed}})


@settings(max_examples=10, deadline=None)
@given(document_lengths, st.integers(1, 20), st.sampled_from([(1, 1), (1, 2), (4, 2), (2, 4)]), st.integers(0, 7))
def test_resumed_readers_of_any_number_continue_the_same_batches(lengths, length, readers, stop):
    dataset, config = make_dataset(lengths), make_config(4, min(length, sum(lengths) + len(lengths)))
    before, after = readers
    straight = train_iterator(dataset, config)
    expected = [next(straight) for _ in range(stop + 2)]
    first = [train_iterator(dataset, config, rows) for rows in np.split(np.arange(4), before)]
    batches = [[next(reader) for reader in first] for _ in range(stop)]
    state = first[-1].get_state()
    assert state == {"next_index": stop}
    second = [train_iterator(dataset, config, rows, start=stop) for rows in np.split(np.arange(4), after)]
    batches += [[next(reader) for reader in second] for _ in range(2)]
    for whole, parts in zip(expected, batches, strict=True):
        for name in whole:
            assert np.array_equal(whole[name], np.concatenate([part[name] for part in parts]))


def test_another_seed_is_another_order():
    dataset = make_dataset([30] * 20)
    one, other = (next(train_iterator(dataset, make_config(8, 16, seed)))["token"] for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_batches_have_the_shapes_and_types_of_the_contract():
    batch = next(train_iterator(make_dataset([9, 5, 33]), make_config(6, 8), rows=[2, 5]))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((2, 8), np.dtype(np.int32)) for name in ("token", "target", "segment", "position")
    }


@relaxed
@given(document_lengths, st.integers(1, 30), st.integers(1, 5), st.sampled_from([1, 2]))
def test_held_out_batches_score_every_byte_once_and_nothing_else(lengths, length, batch, processes):
    dataset, config = make_dataset(lengths), make_config(batch * processes, length)
    _, documents = make_store(lengths)
    shares = np.split(np.arange(batch * processes), processes)
    readers = [list(heldout_batches(dataset, config, rows)) for rows in shares]
    assert len({len(reader) for reader in readers}) == 1
    rows = [row for parts in zip(*readers) for part in parts for row in part["target"]]
    scored = np.concatenate(rows)
    assert scored[scored >= 0].tolist() == [byte for document in documents for byte in document[1:]]
    assert (scored >= 0).sum() == dataset.heldout.num_bytes
    assert {part["token"].shape for reader in readers for part in reader} == {(batch, length)}


def test_a_sequence_longer_than_the_corpus_is_refused():
    with pytest.raises(DataError, match="training.sequence_length is 25, but the corpus has only 24 tokens"):
        train_iterator(make_dataset([10, 12]), make_config(2, 25))
    next(train_iterator(make_dataset([10, 12]), make_config(2, 24)))
