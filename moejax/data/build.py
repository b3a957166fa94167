"""Writes the tokens of a source, once: into the cache of a run (`prepared`) or where a person wants them (`write`)."""

import hashlib
import logging
import pathlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from moejax.data.sources import DataError, Document, Source, open_source
from moejax.data.store import FORMAT, SPLITS, StoreWriter, writing
from moejax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22  # text tokenised at a time


def prepared(
    source: str, cache: pathlib.Path, tokenizer: str, vocab_size: int, text_key: str, progress: bool
) -> pathlib.Path:
    """The folder in `cache` with the tokens of a source, written now unless it is there already.

    Its name is a hash of everything the tokens depend on: the content of the source, the tokenizer, the format.

    Args:
      source, tokenizer, vocab_size, text_key: as in `DataConfig`.
      cache: folder of prepared data.
      progress: show a progress bar on stderr.
    Raises:
      DataError: the source or the tokenizer cannot be used, or the cache cannot be written.
    """
    opened = open_source(source, text_key)
    # A tokenizer in a file counts with its content, so that editing the file makes new tokens.
    made_by = f"bpe {vocab_size}" if tokenizer == "bpe" else "byte"
    loaded: Tokenizer | None = ByteTokenizer() if tokenizer == "byte" else None
    if tokenizer not in ("byte", "bpe"):
        loaded = load_tokenizer(tokenizer)
        made_by = hashlib.sha256(loaded.to_json().encode()).hexdigest()
    key = hashlib.sha256(f"{FORMAT}\0{opened.fingerprint()}\0{made_by}".encode()).hexdigest()[:32]
    if not (cache / key).is_dir():
        write(opened, loaded, vocab_size, cache / key, progress)
    return cache / key


def write(source: Source, tokenizer: Tokenizer | None, vocab_size: int, target: pathlib.Path, progress: bool) -> None:
    """Writes the tokens of `source` to `target`, unless another process has by the time it is our turn.

    Args:
      source: the documents.
      tokenizer: None: BPE trained on the documents that are not held out.
      vocab_size: of that BPE.
      target: the folder to make.
      progress: show a progress bar on stderr.
    Raises:
      DataError: as `prepared`.
    """
    with writing(target) as folder, _bar(progress) as bar:
        if folder is None:
            return
        tails = not _both_splits(source)
        if tokenizer is None:
            training = _watched(source, tails, bar, "training BPE")
            tokenizer = train_bpe((document.text for document in training if not document.held_out), vocab_size)
        _warn_if_lossy(source, tokenizer)
        writer = StoreWriter(folder, tokenizer)
        try:
            for split, texts in _chunks(_watched(source, tails, bar, "tokenising")):
                writer.add(split, texts)
            writer.finish({"source": source.name, "held_out": "end of each document" if tails else "by name"})
        finally:
            writer.close()


def _warn_if_lossy(source: Source, tokenizer: Tokenizer) -> None:
    """Losses per byte count the bytes of the text; a tokenizer that forgets some of it makes them look better."""
    document, _ = next(source.documents())
    text = document.text.decode()
    if tokenizer.decode(tokenizer.encode(text)) != text:
        logger.warning(
            "the tokenizer does not give %s back exactly as it was: losses per byte will be too low to compare",
            document.name,
        )


def _both_splits(source: Source) -> bool:
    """Whether choosing documents by name leaves text on both sides."""
    seen = set()
    for document, _ in source.documents():
        seen.add(document.held_out)
        if len(seen) == 2:
            return True
    if not seen:
        raise DataError(f"data.source: {source.name} holds no text")
    return False


def _chunks(documents: Iterator[Document]) -> Iterator[tuple[str, list[bytes]]]:
    """Documents grouped for the tokenizer, in their order within each split."""
    waiting: dict[str, list[bytes]] = {split: [] for split in SPLITS}
    sizes = dict.fromkeys(SPLITS, 0)
    for document in documents:
        split = "heldout" if document.held_out else "train"
        waiting[split].append(document.text)
        sizes[split] += len(document.text)
        if sizes[split] >= _CHUNK_BYTES:
            yield split, waiting[split]
            waiting[split], sizes[split] = [], 0
    yield from waiting.items()


def _bar(progress: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not progress)


def _watched(source: Source, tails: bool, bar: Progress, what: str) -> Iterator[Document]:
    task = bar.add_task(f"{what} {source.name}", total=source.num_bytes)
    for document, size in source.documents(tails):
        yield document
        bar.advance(task, size)
