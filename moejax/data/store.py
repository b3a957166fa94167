"""Tokens on disk: one flat memory-mapped array for training and one held out, with the place where each document starts.

    meta.json            format, key, vocabulary, and the sizes of the rest
    tokenizer.json       what `tokenizer.load_tokenizer` reads
    train.tokens         uint16 (uint32 above 65536 ids), little-endian: BOS and tokens of each document, back to back
    train.starts         int64: first token of each document, and the end of the last
    heldout.tokens, heldout.starts

A store is written into a folder beside its place and renamed when it is complete, so it is whole or absent.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from moejax.data.sources import DataError
from moejax.data.tokenizer import Tokenizer, tokenizer_from_json

FORMAT = "moejax tokens 1"
SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class TokenStore:
    """Tokenised documents.

    Attributes:
      tokens: flat array of ids (memory-mapped, read-only): BOS and the tokens of each document, back to back.
      starts: int64, one more than documents: document d is tokens[starts[d]:starts[d + 1]].
      num_bytes: bytes of the text, whatever the tokenizer.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1


def is_store(folder: pathlib.Path) -> bool:
    """Whether `folder` holds prepared tokens."""
    try:
        return json.loads((folder / "meta.json").read_text()).get("format", "").startswith("moejax tokens")
    except (OSError, ValueError, AttributeError):
        return False


def read_store(folder: pathlib.Path) -> tuple[dict[str, TokenStore], Tokenizer, dict[str, Any]]:
    """The stores by split, the tokenizer, and meta.json of a prepared folder.

    Raises:
      DataError: another version wrote it, or a file is missing or has another size than it should.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        if meta["format"] != FORMAT:
            raise DataError(f"{folder}: has the format {meta['format']!r}, expected {FORMAT!r}: prepare it again")
        stores = {}
        for split in SPLITS:
            sizes = meta["splits"][split]
            tokens = _map(folder / f"{split}.tokens", meta["dtype"], sizes["tokens"])
            starts = np.asarray(_map(folder / f"{split}.starts", "<i8", sizes["documents"] + 1))
            stores[split] = TokenStore(tokens, starts, sizes["bytes"])
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be read ({error.strerror}); delete {folder} to prepare it again"
        ) from None
    return stores, tokenizer_from_json(text, str(folder / "tokenizer.json")), meta


def _map(path: pathlib.Path, dtype: str, length: int) -> np.ndarray:
    expected = length * np.dtype(dtype).itemsize
    if (found := path.stat().st_size) != expected:
        raise DataError(
            f"{path}: is damaged, {found} bytes instead of {expected}; delete {path.parent} to prepare it again"
        )
    return np.memmap(path, dtype, "r", shape=(length,)) if length else np.zeros(0, dtype)


class StoreWriter:
    """Writes the files of a store into a folder, document by document; `finish` writes meta.json last."""

    def __init__(self, folder: pathlib.Path, tokenizer: Tokenizer):
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._files: dict[str, BinaryIO] = {split: open(folder / f"{split}.tokens", "wb") for split in SPLITS}
        self._starts: dict[str, list[int]] = {split: [0] for split in SPLITS}
        self._bytes = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, texts: Sequence[bytes]) -> None:
        """Appends documents."""
        for text, ids in zip(texts, self._tokenizer.encode_documents(texts), strict=True):
            array = np.empty(len(ids) + 1, self._dtype)
            array[0] = self._tokenizer.bos
            array[1:] = ids
            self._files[split].write(array)
            self._starts[split].append(self._starts[split][-1] + len(array))
            self._bytes[split] += len(text)

    def documents(self, split: str) -> int:
        return len(self._starts[split]) - 1

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self, about: dict[str, Any]) -> None:
        """Writes the rest, `about` into meta.json, and makes sure it is on disk."""
        for split in SPLITS:
            _sync(self._files[split])
            with open(self._folder / f"{split}.starts", "wb") as file:
                file.write(np.asarray(self._starts[split], "<i8"))
                _sync(file)
        with open(self._folder / "tokenizer.json", "wb") as file:
            file.write(self._tokenizer.to_json().encode())
            _sync(file)
        splits = {
            split: {"documents": self.documents(split), "tokens": self._starts[split][-1], "bytes": self._bytes[split]}
            for split in SPLITS
        }
        meta = {"format": FORMAT, "dtype": self._dtype.str, "vocab_size": self._tokenizer.vocab_size, "splits": splits}
        with open(self._folder / "meta.json", "wb") as file:
            file.write(json.dumps(meta | about, indent=1).encode())
            _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def writing(target: pathlib.Path) -> Iterator[pathlib.Path | None]:
    """Gives an empty folder that becomes `target` when the block ends well, and is removed when it does not.

    Only one process writes a target at a time; the others wait, and get None if it is there by then.

    Raises:
      DataError: the disk is full, or the place cannot be written to.
    """
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target.with_name(f"{target.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system drops it however the process ends
            if target.exists():
                yield None
                return
            shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
            temporary.mkdir()
            try:
                yield temporary
                os.rename(temporary, target)
                # Only now: whoever waits for this lock, or makes a new one, will see the target.
                target.with_name(f"{target.name}.lock").unlink()
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        place = error.filename or target
        raise DataError(
            f"cannot write prepared data to {place} ({error.strerror or error}): free some space there or choose another "
            "folder with data.cache_dir=..."
        ) from None
