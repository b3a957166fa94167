"""From a data config to batches: opens (or prepares) the tokens, and serves them through Grain."""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from moejax.config import Config, DataConfig
from moejax.data.build import prepared
from moejax.data.packing import ShuffledWindows, Windows
from moejax.data.sources import DataError
from moejax.data.store import TokenStore, is_store, read_store
from moejax.data.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """An opened corpus.

    Attributes:
      train, heldout: tokens to train on and tokens to score; `heldout.num_bytes` turns a loss into one per byte.
      tokenizer: what made them.
      vocab_size: ids are below it.
      folder: where they lie.
    """

    train: TokenStore
    heldout: TokenStore
    tokenizer: Tokenizer
    vocab_size: int
    folder: pathlib.Path


def open_dataset(config: DataConfig, progress: bool | None = None) -> Dataset:
    """The tokens of `config.source`, from the cache or prepared now. Prepared folders are used as they are.

    Args:
      config: where the text is and how it becomes tokens.
      progress: show a bar while preparing; None: if stderr is a terminal.
    Raises:
      DataError: the source or the tokenizer cannot be used, or the cache cannot be written.
    """
    folder = pathlib.Path(config.source).expanduser()
    if config.source == "stdlib" or not is_store(folder):
        folder = prepared(
            source=config.source,
            cache=pathlib.Path(config.cache_dir).expanduser(),
            tokenizer=config.tokenizer,
            vocab_size=config.vocab_size,
            text_key=config.text_key,
            progress=sys.stderr.isatty() if progress is None else progress,
        )
    stores, tokenizer, meta = read_store(folder)
    return Dataset(stores["train"], stores["heldout"], tokenizer, meta["vocab_size"], folder)


def train_iterator(
    dataset: Dataset, config: Config, rows: Sequence[int] | np.ndarray | None = None, start: int = 0
) -> grain.DatasetIterator[Batch]:
    """Training batches without end, from batch number `start`.

    Args:
      dataset: from `open_dataset`.
      config: reads training.global_batch, training.sequence_length and data.seed.
      rows: numbers of the rows of every global batch that this process loads (`placement.local_rows`); None: all B.
      start: number of the first batch, counted from the beginning of the run.
    Returns:
      A Grain iterator of dicts of int32 arrays (rows, L), as `docs/design.md` §3. `get_state()` is
      `{"next_index": n}`, the number of batches taken since the beginning, the same in every process; `set_state` goes there.
    Raises:
      DataError: sequences longer than the corpus.
    """
    rows = range(config.training.global_batch) if rows is None else rows
    samples = ShuffledWindows(dataset.train, config.training.sequence_length, dataset.tokenizer.eos, config.data.seed)

    def batch(step: int) -> Batch:
        first = step * config.training.global_batch
        return _stack(samples.samples([first + int(row) for row in rows]))

    # Longer than any run; an epoch is the samples' affair, not Grain's.
    steps = grain.MapDataset.range(1 << 62).map(batch)
    iterator = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))
    iterator.set_state({"next_index": start})
    return iterator


def heldout_batches(
    dataset: Dataset, config: Config, rows: Sequence[int] | np.ndarray | None = None
) -> Iterator[Batch]:
    """Batches that score every byte of the held-out documents exactly once, in order; all of one shape.

    The end of a document is not scored: it is no byte. What is missing in the last batch is padding.

    Args:
      dataset, config, rows: as `train_iterator`.
    Raises:
      DataError: nothing is held out.
    """
    rows = range(config.training.global_batch) if rows is None else rows
    if not dataset.heldout.num_bytes:
        raise DataError(f"{dataset.folder}: has no held-out text")
    windows = Windows(dataset.heldout, config.training.sequence_length, eos=-1)
    count = len(windows)
    for first in range(0, count, config.training.global_batch):
        # a window past the end is all padding
        yield _stack([windows.sample(min(first + int(row), count)) for row in rows])


def _stack(samples: list[Batch]) -> Batch:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
