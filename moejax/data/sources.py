"""Where text comes from: documents of a source, one after the other, and which of them are held out of training.

A document is a text file or a JSONL record. It is held out if sha256(its name) mod 20 is 0, where its name is its path relative
to the source (with the line number for a record), so that the choice depends on nothing else. Where that leaves one side
without text, as in a single file, the last twentieth of every document is held out instead.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import sysconfig
from collections.abc import Iterator

_ONE_IN = 20  # documents held out, or the share of each

# Parts of the standard library that are tests, data in Python syntax, or not the standard library. Some systems install the
# tests and some do not; without them everybody trains on the same text.
_STDLIB_WITHOUT = frozenset(
    "site-packages dist-packages test tests idlelib lib2to3 pydoc_data encodings __pycache__".split()
)


class DataError(ValueError):
    """The data cannot be used. The message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class Document:
    """A text: its name in the source, its UTF-8 bytes, and whether it is kept out of training."""

    name: str
    text: bytes
    held_out: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of a source, sorted by name.

    Attributes:
      name: what the user called it.
      files: (name relative to the source, path).
      text_key: the field of JSONL records that holds the text.
    """

    name: str
    files: tuple[tuple[str, pathlib.Path], ...]
    text_key: str

    @property
    def num_bytes(self) -> int:
        """Bytes on disk, for progress bars."""
        return sum(path.stat().st_size for _, path in self.files)

    def fingerprint(self) -> str:
        """Hash of every name and content (hexadecimal): equal sources have equal fingerprints, wherever they lie."""
        total = hashlib.sha256(f"{self.text_key}\0".encode())
        for name, path in self.files:
            with _reading(path), open(path, "rb") as file:
                total.update(name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def documents(self, tails: bool = False) -> Iterator[tuple[Document, int]]:
        """Every document that is not empty, in order, with the bytes on disk behind it.

        Args:
          tails: hold out the end of each document instead of whole ones; then a document may come as two.
        Raises:
          DataError: a file is not UTF-8 text, or a JSONL line is not a record with a text; names file and line.
        """
        for name, path in self.files:
            texts = _records(name, path, self.text_key) if path.suffix == ".jsonl" else _whole_file(name, path)
            for document, text, size in texts:
                parts = _split_tail(text) if tails else [(text, _is_held_out(document))]
                for number, (part, held_out) in enumerate(parts):
                    if part:
                        yield Document(document, part, held_out), size if number == 0 else 0


def open_source(name: str, text_key: str) -> Source:
    """The source a user named: 'stdlib', a folder of text and .jsonl files, or one such file.

    Raises:
      DataError: it does not exist, or there is nothing in it.
    """
    if name == "stdlib":
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not _STDLIB_WITHOUT & set(path.relative_to(root).parts)]
        if not paths:
            raise DataError(
                f"data.source is stdlib, but this Python has no sources under {root}: name a folder of text instead"
            )
        return _sorted_source(name, root, paths, text_key)
    path = pathlib.Path(name).expanduser()
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"data.source: {path} is empty")
        return _sorted_source(name, path.parent, [path], text_key)
    if not path.is_dir():
        raise DataError(f"data.source: there is no file or folder {path}")
    # hidden files and folders (.git, .DS_Store) are nobody's text
    paths = [
        file
        for file in path.rglob("*")
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(path).parts)
    ]
    if not any(file.stat().st_size for file in paths):
        raise DataError(f"data.source: the folder {path} holds no text")
    return _sorted_source(name, path, paths, text_key)


def _sorted_source(name: str, root: pathlib.Path, paths: list[pathlib.Path], text_key: str) -> Source:
    return Source(name, tuple(sorted((path.relative_to(root).as_posix(), path) for path in paths)), text_key)


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % _ONE_IN == 0


def _split_tail(text: bytes) -> list[tuple[bytes, bool]]:
    """The text in two, the last twentieth held out: cut after a line if there is one, never inside a character."""
    cut = len(text) - max(len(text) // _ONE_IN, 1)
    newline = text.find(b"\n", cut - 1, len(text) - 1)
    if newline >= 0:
        cut = newline + 1
    while cut > 0 and text[cut] & 0xC0 == 0x80:  # continuation bytes of UTF-8
        cut -= 1
    return [(text[:cut], False), (text[cut:], True)]


def _whole_file(name: str, path: pathlib.Path) -> Iterator[tuple[str, bytes, int]]:
    with _reading(path):
        text = path.read_bytes()
    _check_text(text, str(path))
    yield name, text, len(text)


def _records(name: str, path: pathlib.Path, text_key: str) -> Iterator[tuple[str, bytes, int]]:
    with _reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:  # the second: brackets thousands deep
                raise DataError(f"{where}: not a JSON record ({error})") from None
            if not isinstance(record, dict) or not isinstance(record.get(text_key), str):
                found = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
                raise DataError(
                    f"{where}: expected a record with text in {text_key!r}, found {found}; data.text_key names the field"
                )
            try:
                text = record[text_key].encode()
            except UnicodeEncodeError:
                raise DataError(f"{where}: {text_key!r} holds half of a surrogate pair, which is no text") from None
            yield f"{name}:{number}", text, len(line)


def _check_text(text: bytes, where: str) -> None:
    position = text.find(b"\0")
    if position >= 0:
        raise DataError(f"{where}: is a binary file (a zero byte at offset {position}), expected UTF-8 text")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: is not UTF-8 text (byte 0x{text[error.start]:02x} at offset {error.start}): convert or remove it"
        ) from None


class _reading:
    """Turns what the system says about a file into a DataError."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, OSError):
            raise DataError(f"{os.fspath(self.path)}: cannot be read ({error.strerror or error})") from None
