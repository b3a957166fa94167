"""From the number of a sample to its tokens, by arithmetic alone.

An epoch lays all documents end to end, in an order of its own, and cuts the line into windows of L tokens; the last one
is padded. Sample i is window σ_e(i mod W) of epoch e = i div W, where σ_e is a permutation of the W windows: windows of
one document would otherwise fill a batch. Nothing but i has to be remembered to go on from anywhere, and every token is
seen exactly once per epoch.

Both orders are computed, not drawn from a library's generator, so that no version of NumPy can change them.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.data.sources import DataError
from moejax.data.store import TokenStore

_DOCUMENTS, _WINDOWS = 1, 2  # which of an epoch's two permutations


class Windows:
    """Documents of a store, end to end in a given order, cut into windows of `length` tokens.

    Args:
      store: the documents.
      length: L.
      eos: target of the last token of a document, or -1 to leave it unscored.
      order: int64 permutation of the documents; None: as they are.
    """

    def __init__(self, store: TokenStore, length: int, eos: int, order: np.ndarray | None = None):
        self._store, self._length, self._eos = store, length, eos
        self._order = np.arange(store.num_documents) if order is None else order
        lengths = np.diff(store.starts)[self._order]
        self._bounds = np.concatenate([[0], np.cumsum(lengths)])  # where each document starts on the line

    def __len__(self) -> int:
        return (int(self._bounds[-1]) + self._length - 1) // self._length

    def sample(self, window: int) -> dict[str, np.ndarray]:
        """int32 arrays (L,): `token`, `target` (-1: not scored), `segment` (1, 2, ... per document, 0: padding) and
        `position` (from 0 in each segment)."""
        length = self._length
        sample = {
            "token": np.zeros(length, np.int32),
            "target": np.full(length, -1, np.int32),
            "segment": np.zeros(length, np.int32),
            "position": np.zeros(length, np.int32),
        }
        begin = window * length
        end = min(begin + length, int(self._bounds[-1]))
        first = int(np.searchsorted(self._bounds, begin, "right")) - 1
        at, segment = begin, 0
        while at < end:
            place = first + segment
            segment += 1
            document = self._order[place]
            stop = min(end, int(self._bounds[place + 1]))
            source = int(self._store.starts[document]) + at - int(self._bounds[place])
            here, count = slice(at - begin, stop - begin), stop - at
            sample["token"][here] = self._store.tokens[source : source + count]
            last = int(self._store.starts[document + 1]) - 1  # the document's last token has EOS as its target
            known = min(count, last - source)
            sample["target"][at - begin : at - begin + known] = self._store.tokens[source + 1 : source + 1 + known]
            if known < count:
                sample["target"][stop - begin - 1] = self._eos
            sample["segment"][here] = segment
            sample["position"][here] = np.arange(count)
            at = stop
        return sample


class ShuffledWindows:
    """The endless sequence of training samples.

    Args:
      store: the training documents.
      length: L.
      eos: target of the last token of each document.
      seed: of the permutations.
    Raises:
      DataError: the store has fewer than L tokens.
    """

    def __init__(self, store: TokenStore, length: int, eos: int, seed: int):
        if length > len(store.tokens):
            raise DataError(
                f"training.sequence_length is {length}, but the corpus has only {len(store.tokens)} tokens to train on: "
                "use shorter sequences or more text"
            )
        self._store, self._length, self._eos, self._seed = store, length, eos, seed
        self.per_epoch = -(-len(store.tokens) // length)
        # Threads ahead of an epoch's end and behind it need two epochs at once.
        self._epoch = functools.lru_cache(maxsize=2)(self._arrange)

    def samples(self, indices: Sequence[int] | np.ndarray) -> list[dict[str, np.ndarray]]:
        """Samples `indices` (from 0 on, ascending), each as `Windows.sample`."""
        numbers = np.asarray(indices, np.int64)
        samples = []
        for epoch in np.unique(numbers // self.per_epoch).tolist():
            here = numbers[numbers // self.per_epoch == epoch] - epoch * self.per_epoch
            windows = self._epoch(epoch)
            order = permutation(here, self.per_epoch, self._seed, epoch, _WINDOWS)
            samples += [windows.sample(int(window)) for window in order]
        return samples

    def _arrange(self, epoch: int) -> Windows:
        documents = self._store.num_documents
        order = permutation(np.arange(documents), documents, self._seed, epoch, _DOCUMENTS)
        return Windows(self._store, self._length, self._eos, order)


def permutation(numbers: np.ndarray, size: int, *key: int) -> np.ndarray:
    """Where the permutation of 0..size-1 named by `key` sends each of `numbers` (int64).

    A Feistel network permutes the smallest 2^(2b) >= size; a result outside 0..size-1 is sent on until it falls inside,
    which keeps it a permutation (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). No table is needed.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    rounds = _round_keys(key)
    result = numbers.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for round_key in rounds:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _round_keys(key: tuple[int, ...]) -> list[np.uint64]:
    state: Any = np.uint64(0)
    for part in key:
        state = _mix(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return [_mix(state ^ np.uint64(i)) for i in range(1, 9)]


def _mix(x: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014): a bijection of 64-bit words, of one or an array."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
