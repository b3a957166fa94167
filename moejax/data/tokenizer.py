"""Tokenizers: bytes, or byte-level BPE through the `tokenizers` library.

Every tokenizer has a token that begins a document (BOS) and one that ends it (EOS). A document is stored as BOS and its
tokens, so that each of its bytes is some token's target; EOS is the target of its last token, and is never an input.
"""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import tokenizers

from moejax.data.sources import DataError

# What public tokenizers call the two, in the order we look for them. Some have one token for both.
_BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]", "<|endoftext|>")
_EOS_NAMES = ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[EOS]")


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
      vocab_size: ids are below it, BOS and EOS included.
      bos, eos: ids of the tokens around a document.
    """

    vocab_size: int
    bos: int
    eos: int

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS and EOS."""
        ...

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids of many UTF-8 texts, without BOS and EOS."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. BOS and EOS are left out; bytes that are not UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """What `load_tokenizer` reads."""
        ...


class ByteTokenizer:
    """The 256 bytes are ids 0..255, BOS is 256 and EOS 257."""

    vocab_size = 258
    bos = 256
    eos = 257

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def to_json(self) -> str:
        return json.dumps({"moejax_tokenizer": "byte"})


class BpeTokenizer:
    """A tokenizer of the `tokenizers` library. If it has no BOS or EOS of its own, they get the first ids above its own."""

    def __init__(self, inner: tokenizers.Tokenizer):
        self._inner = inner
        size = inner.get_vocab_size(with_added_tokens=True)
        # Ids may have holes: a released vocabulary can be smaller than its highest id.
        size = max(size, 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=0))
        self.bos, size = _find(inner, _BOS_NAMES, size)
        self.eos, size = _find(inner, _EOS_NAMES, size)
        self.vocab_size = size

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        return self._inner.decode([i for i in ids if i not in (self.bos, self.eos)], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._inner.to_str()


def _find(inner: tokenizers.Tokenizer, names: Sequence[str], size: int) -> tuple[int, int]:
    """The id of the first of `names` that is a token, else the next free one; and the vocabulary size after that."""
    for name in names:
        if (token := inner.token_to_id(name)) is not None:
            return token, size
    return size, size + 1


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
    """Byte-level BPE with `vocab_size` ids (fewer if the text has too few pairs), BOS and EOS among them.

    Every byte is a token, so any text can be encoded, and decoding gives it back exactly.
    """
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((text.decode() for text in texts), trainer)
    # Text that spells out "<bos>" is text.
    inner.encode_special_tokens = True
    return BpeTokenizer(inner)


def load_tokenizer(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer in a file: a `tokenizer.json` of the tokenizers library, or what `to_json` of one of ours wrote.

    Raises:
      DataError: no such file, or it holds no tokenizer.
    """
    try:
        text = pathlib.Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(
            f"data.tokenizer: there is no file {path}; expected byte, bpe or the path of a tokenizer.json"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tokenizer: {path} cannot be read ({error})") from None
    return tokenizer_from_json(text, str(path))


def tokenizer_from_json(text: str, where: str) -> Tokenizer:
    """The tokenizer that `to_json` wrote. `where` names it in errors."""
    try:
        values = json.loads(text)
        if isinstance(values, dict) and values.get("moejax_tokenizer") == "byte":
            return ByteTokenizer()
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for a file that is no tokenizer
        raise DataError(
            f"data.tokenizer: {where} is no tokenizer.json ({' '.join(str(error).split())[:200]})"
        ) from None
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return BpeTokenizer(inner)
