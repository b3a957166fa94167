"""Turns a source into tokens on disk.

    python -m moejax.data.prepare SOURCE --out FOLDER [--tokenizer byte|bpe|tokenizer.json] [--vocab-size N] [--text-key K]

The folder can then be named as `data.source`, and moved. A run does the same into its cache when its source is text.
"""

import argparse
import pathlib
import sys

from moejax.config import MAX_BPE_VOCABULARY
from moejax.data.build import write
from moejax.data.sources import DataError, open_source
from moejax.data.store import read_store
from moejax.data.tokenizer import ByteTokenizer, load_tokenizer


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.data.prepare",
        description="Turn text into memory-mapped tokens that data.source can name.",
    )
    parser.add_argument("source", help="'stdlib', or a folder or file of text or .jsonl")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write; must not exist")
    parser.add_argument(
        "--tokenizer", default="byte", help="'byte' (default), 'bpe' (trained on the source), or a tokenizer.json"
    )
    parser.add_argument(
        "--vocab-size", type=int, default=4096, help="of a BPE trained here (default 4096, at least 259)"
    )
    parser.add_argument(
        "--text-key", default="text", help="field of JSONL records that holds the text (default 'text')"
    )
    options = parser.parse_args(arguments)
    try:
        if options.out.exists():
            raise DataError(f"--out: {options.out} exists already; name a new folder")
        if options.vocab_size < 259:
            raise DataError(
                f"--vocab-size is {options.vocab_size}; the 256 bytes, BOS and EOS need at least 259 with one merge"
            )
        if options.vocab_size > MAX_BPE_VOCABULARY:
            raise DataError(f"--vocab-size is {options.vocab_size}; at most {MAX_BPE_VOCABULARY} can be trained")
        named = {"byte": ByteTokenizer(), "bpe": None}
        tokenizer = named[options.tokenizer] if options.tokenizer in named else load_tokenizer(options.tokenizer)
        source = open_source(options.source, options.text_key)
        write(source, tokenizer, options.vocab_size, options.out, progress=sys.stderr.isatty())
        _, _, meta = read_store(options.out)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: vocabulary {meta['vocab_size']}")
    for split, sizes in meta["splits"].items():
        print(f"  {split}: {sizes['documents']:,} documents, {sizes['tokens']:,} tokens, {sizes['bytes']:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
