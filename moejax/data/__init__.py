"""From text to batches: sources -> documents -> tokens on disk -> packed windows -> a Grain iterator.

`sources.py` finds documents and decides which are held out, `tokenizer.py` turns them into ids, `store.py` keeps the ids
memory-mapped, `packing.py` is the index arithmetic from a sample's number to its tokens, `pipeline.py` makes batches.
"""

from moejax.data.pipeline import Dataset, heldout_batches, open_dataset, train_iterator
from moejax.data.sources import DataError
from moejax.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "DataError",
    "Dataset",
    "Tokenizer",
    "heldout_batches",
    "load_tokenizer",
    "open_dataset",
    "train_iterator",
]
