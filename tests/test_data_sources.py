"""Sources, tokenizers and the prepared format: what becomes tokens, what is held out, and what is refused."""

import hashlib
import json
import multiprocessing
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
import tokenizers

from moejax.config import DataConfig
from moejax.data import DataError, load_tokenizer, open_dataset
from moejax.data.prepare import main as prepare_command
from moejax.data.tokenizer import ByteTokenizer, train_bpe

TEXTS = {"b.txt": "zwei Äpfel\n", "a.md": "# one\n\ntwo\n", "deep/er/c.py": "x = 'é€😀'\n", "d.txt": "no end of line"}


def config(source, tmp_path, **more):
    return DataConfig(source=str(source), cache_dir=str(tmp_path / "cache"), **more)


def make_folder(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


def texts_of(store, tokenizer):
    """Documents of a store as text, after checking that each begins with BOS and has no other."""
    documents = [store.tokens[a:b].tolist() for a, b in zip(store.starts[:-1], store.starts[1:])]
    assert all(ids[0] == tokenizer.bos and tokenizer.bos not in ids[1:] for ids in documents)
    return [tokenizer.decode(ids[1:]) for ids in documents]


def held_out(name):
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def test_the_standard_library_is_the_files_we_say_and_no_others(tmp_path):
    dataset = open_dataset(config("stdlib", tmp_path))
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not left_out & set(path.relative_to(root).parts) and path.stat().st_size
    )
    for store, wanted in ((dataset.train, False), (dataset.heldout, True)):
        texts = [(root / name).read_bytes() for name in names if held_out(name) == wanted]
        assert store.num_bytes == sum(map(len, texts)) == len(store.tokens) - store.num_documents
        first, last = store.tokens[1 : store.starts[1]], store.tokens[store.starts[-2] + 1 :]
        assert (bytes(first.astype(np.uint8)), bytes(last.astype(np.uint8))) == (texts[0], texts[-1])
    assert dataset.vocab_size == 258


def test_whole_files_are_held_out_by_the_hash_of_their_name(tmp_path):
    names = {f"part{i:02}.txt": f"text number {i}\n" for i in range(60)}
    dataset = open_dataset(config(make_folder(tmp_path / "in", names), tmp_path))
    expected = {True: [], False: []}
    for name in sorted(names):
        expected[held_out(name)].append(names[name])
    assert expected[True] and texts_of(dataset.heldout, dataset.tokenizer) == expected[True]
    assert texts_of(dataset.train, dataset.tokenizer) == expected[False]


def test_where_no_file_is_held_out_the_end_of_each_is(tmp_path):
    lines = [f"line {i:03} ä\n" for i in range(200)]
    dataset = open_dataset(config(make_folder(tmp_path / "in", {"a.txt": "".join(lines)}) / "a.txt", tmp_path))
    (train,), (tail,) = (texts_of(store, dataset.tokenizer) for store in (dataset.train, dataset.heldout))
    assert train + tail == "".join(lines)
    assert tail.startswith("line 19") and len(tail) / len(train + tail) == pytest.approx(1 / 20, abs=0.01)


@pytest.mark.parametrize("text", ["a", "aé", "é", "😀" * 30, "no newline at all, é😀" * 9, "\n\n\n"])
def test_the_cut_never_falls_inside_a_character_and_loses_nothing(text, tmp_path):
    dataset = open_dataset(config(make_folder(tmp_path / "in", {"a.txt": text}), tmp_path))
    parts = texts_of(dataset.train, dataset.tokenizer) + texts_of(dataset.heldout, dataset.tokenizer)
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)
    assert dataset.heldout.num_bytes > 0


def test_folders_mix_text_and_jsonl_in_sorted_order_and_skip_hidden_and_empty_files(tmp_path):
    records = "\n".join(json.dumps({"text": text, "id": i}) for i, text in enumerate(["erste", "", "dritte\n"]))
    texts = TEXTS | {"cc.jsonl": records + "\n\n", ".git/x": b"\0", "empty.txt": "", "z/.hidden": b"\xff"}
    dataset = open_dataset(config(make_folder(tmp_path / "in", texts), tmp_path))
    expected = [TEXTS["a.md"], TEXTS["b.txt"], "erste", "dritte\n", TEXTS["d.txt"], TEXTS["deep/er/c.py"]]
    assert not any(
        held_out(name) for name in (*TEXTS, "cc.jsonl:1", "cc.jsonl:3")
    )  # so each document comes in two parts
    train, tail = (texts_of(store, dataset.tokenizer) for store in (dataset.train, dataset.heldout))
    assert "".join(train) + "".join(tail) != "" and len(tail) == len(expected)
    assert [a + b for a, b in zip(train, tail, strict=True)] == expected


def test_the_text_key_chooses_the_field(tmp_path):
    line = json.dumps({"text": "no", "body": "yes yes yes"}) + "\n"
    path = make_folder(tmp_path / "in", {"r.jsonl": line * 3}) / "r.jsonl"
    dataset = open_dataset(config(path, tmp_path, text_key="body"))
    assert texts_of(dataset.train, dataset.tokenizer)[0].startswith("yes yes")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "empty.txt is empty"),
        ("binary.bin", b"ab\0c", "binary.bin: is a binary file (a zero byte at offset 2)"),
        ("latin.txt", b"caf\xe9 ", "latin.txt: is not UTF-8 text (byte 0xe9 at offset 3)"),
        (
            "r.jsonl",
            b'{"text": "a"}\n\n{"txet": "b"}\n',
            "r.jsonl line 3: expected a record with text in 'text', found the keys txet",
        ),
        ("r.jsonl", b'{"text": 5}\n', "r.jsonl line 1: expected a record with text"),
        ("r.jsonl", b"[1]\n", "r.jsonl line 1: expected a record with text in 'text', found a list"),
        ("r.jsonl", b'{"text": "a"}\n{"text": \n', "r.jsonl line 2: not a JSON record"),
        ("r.jsonl", b'{"text": "\\ud800"}\n', "r.jsonl line 1: 'text' holds half of a surrogate pair"),
        ("r.jsonl", b"\xff\xfe\n", "r.jsonl line 1: not a JSON record"),
        ("r.jsonl", b"[" * 200_000 + b"\n", "r.jsonl line 1: not a JSON record"),
        ("r.jsonl", b"\n\n", "holds no text"),
        ("r.jsonl", b'{"text": ""}\n', "holds no text"),
    ],
)
def test_text_that_cannot_be_used_is_one_line_that_names_file_and_place(name, content, words, tmp_path):
    source = make_folder(tmp_path / "in", {name: content})
    with pytest.raises(DataError) as caught:
        open_dataset(config(source / name, tmp_path))
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*.tmp")) and not list((tmp_path / "cache").glob("*/meta.json"))


def test_missing_and_empty_sources_are_named(tmp_path):
    with pytest.raises(DataError, match="there is no file or folder .*nowhere"):
        open_dataset(config(tmp_path / "nowhere", tmp_path))
    (tmp_path / "void").mkdir()
    with pytest.raises(DataError, match="the folder .*void holds no text"):
        open_dataset(config(tmp_path / "void", tmp_path))


def test_prepared_data_is_keyed_by_content_and_not_by_place_or_name(tmp_path):
    one = open_dataset(config(make_folder(tmp_path / "one", TEXTS), tmp_path))
    moved = open_dataset(config(make_folder(tmp_path / "two", TEXTS), tmp_path))
    assert moved.folder == one.folder
    changed = TEXTS | {"b.txt": TEXTS["b.txt"].replace("zwei", "drei")}
    renamed = {("e.txt" if name == "d.txt" else name): text for name, text in TEXTS.items()}
    others = [
        open_dataset(config(make_folder(tmp_path / str(i), t), tmp_path)) for i, t in enumerate((changed, renamed))
    ]
    bpe = open_dataset(config(tmp_path / "one", tmp_path, tokenizer="bpe", vocab_size=260))
    assert len({one.folder, bpe.folder, *(other.folder for other in others)}) == 4


def test_a_killed_writer_leaves_nothing_that_is_taken_for_data(tmp_path):
    source = make_folder(tmp_path / "in", TEXTS)
    whole = open_dataset(config(source, tmp_path)).folder
    cut_short = (
        tmp_path / "cache2" / f"{whole.name}.tmp"
    )  # what a kill leaves: files without meta.json, under another name
    cut_short.mkdir(parents=True)
    (cut_short / "train.tokens").write_bytes(b"1")
    again = open_dataset(DataConfig(source=str(source), cache_dir=str(tmp_path / "cache2"))).folder
    assert not cut_short.exists()
    for file in whole.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_damaged_file_is_named(tmp_path):
    source = make_folder(tmp_path / "in", TEXTS)
    folder = open_dataset(config(source, tmp_path)).folder
    tokens = folder / "train.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(DataError, match="train.tokens: is damaged"):
        open_dataset(config(source, tmp_path))
    tokens.unlink()
    with pytest.raises(DataError, match="train.tokens: cannot be read"):
        open_dataset(config(source, tmp_path))


def _open_many(arguments):
    return str(open_dataset(config(*arguments)).folder)


def test_processes_that_prepare_at_once_agree(tmp_path):
    source = make_folder(tmp_path / "in", {f"{i}.txt": f"text {i} " * 400 for i in range(60)})
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(_open_many, [(source, tmp_path)] * 4, chunksize=1)
    assert len(set(folders)) == 1
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [pathlib.Path(folders[0]).name]


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    source = make_folder(tmp_path / "in", TEXTS)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="cannot write prepared data to .*file/cache.*data.cache_dir"):
        open_dataset(config(source, tmp_path / "file"))


def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path):
    source = make_folder(tmp_path / "in", {"a.txt": "text\n" * 20000})
    program = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # a file stops growing here, as on a full disk
from moejax.config import DataConfig
from moejax.data import DataError, open_dataset
try:
    open_dataset(DataConfig(source={str(source)!r}, cache_dir={str(tmp_path / "cache")!r}))
except DataError as error:
    sys.exit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("cannot write prepared data to ")
    assert done.stderr.count("\n") == 1
    assert not [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"]


def test_bytes_are_their_own_ids():
    tokenizer = ByteTokenizer()
    text = "é\n\0€😀"
    assert tokenizer.encode(text) == list(text.encode()) and tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.bos, 104, 105, tokenizer.eos]) == "hi"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"  # half a character


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([path.read_bytes() for path in sorted(pathlib.Path(json.__file__).parent.glob("*.py"))], 400)


def test_bpe_gives_any_text_back_and_is_shorter_on_what_it_knows(bpe):
    assert bpe.vocab_size == 400 and {bpe.bos, bpe.eos} == {0, 1}
    for text in (
        "def loads(self):\n    return None\n",
        "日本語 é😀\t\x00\x7f",
        " ",
        "<bos>not a token<eos>",
        "a" * 999,
    ):
        ids = bpe.encode(text)
        assert bpe.decode(ids) == text and not {bpe.bos, bpe.eos} & set(ids) and max(ids) < bpe.vocab_size
    source = pathlib.Path(json.decoder.__file__).read_text()
    assert len(bpe.encode(source)) < 0.6 * len(source.encode())


def test_bpe_is_learned_from_training_documents_only_and_counts_bytes_of_the_text(tmp_path):
    names = [f"part{i:02}.txt" for i in range(60)]
    texts = {name: ("quarkquark " if held_out(name) else "streusel ") * 40 for name in names}
    dataset = open_dataset(config(make_folder(tmp_path / "in", texts), tmp_path, tokenizer="bpe", vocab_size=300))
    vocabulary = json.loads((dataset.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("streusel" in word for word in vocabulary) and not any(
        "q" in word for word in vocabulary if len(word) > 1
    )
    out = sorted(name for name in names if held_out(name))
    assert texts_of(dataset.heldout, dataset.tokenizer) == [texts[name] for name in out]
    assert dataset.heldout.num_bytes == sum(len(texts[name]) for name in out)


def test_a_tokenizer_comes_back_from_its_file(bpe, tmp_path):
    text = "class Ünï(dict): pass  # <eos>"
    for tokenizer in (bpe, ByteTokenizer()):
        path = tmp_path / "tokenizer.json"
        path.write_text(tokenizer.to_json())
        again = load_tokenizer(path)
        assert (again.bos, again.eos, again.vocab_size) == (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size)
        assert again.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_without_bos_gets_ids_above_its_own(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "[UNK]": 2}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    source = make_folder(tmp_path / "in", {"t.txt": "a b a\n" * 50})
    dataset = open_dataset(config(source, tmp_path, tokenizer=str(tmp_path / "words.json")))
    assert (dataset.tokenizer.bos, dataset.tokenizer.eos, dataset.vocab_size) == (8, 9, 10)
    assert dataset.train.tokens[:4].tolist() == [8, 0, 7, 0]
    assert dataset.heldout.num_bytes + dataset.train.num_bytes == 300


def test_a_tokenizer_that_loses_text_is_warned_about(tmp_path, caplog):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    inner.save(str(tmp_path / "lossy.json"))
    open_dataset(config(make_folder(tmp_path / "in", TEXTS), tmp_path, tokenizer=str(tmp_path / "lossy.json")))
    assert "does not give a.md back exactly" in caplog.text


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    source = make_folder(tmp_path / "in", TEXTS)
    (tmp_path / "not.json").write_text('{"model": 3}')
    for name, words in (
        ("not.json", "not.json is no tokenizer.json"),
        ("absent.json", "there is no file .*absent.json"),
    ):
        with pytest.raises(DataError, match=words):
            open_dataset(config(source, tmp_path, tokenizer=str(tmp_path / name)))


def test_prepare_writes_a_folder_that_is_a_source(tmp_path):
    source = make_folder(tmp_path / "in", TEXTS)
    command = [sys.executable, "-m", "moejax.data.prepare", str(source), "--out", str(tmp_path / "ready")]
    command += ["--tokenizer", "bpe", "--vocab-size", "270"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "vocabulary 270" in done.stdout and "train: 4 documents" in done.stdout
    moved = (tmp_path / "ready").rename(tmp_path / "elsewhere")
    ready = open_dataset(config(moved, tmp_path))
    assert not (tmp_path / "cache").exists() and ready.vocab_size == 270
    direct = open_dataset(config(source, tmp_path, tokenizer="bpe", vocab_size=270))
    assert np.array_equal(ready.train.tokens, direct.train.tokens)
    again = subprocess.run([*command[:5], str(moved)], capture_output=True, text=True, timeout=120)
    assert again.returncode == 2 and again.stderr.startswith("error: --out: ") and again.stderr.count("\n") == 1


def test_a_bpe_vocabulary_too_large_to_allocate_is_one_line(tmp_path, capsys):
    source = make_folder(tmp_path / "in", TEXTS)
    out = str(tmp_path / "out")
    code = prepare_command([str(source), "--out", out, "--tokenizer", "bpe", "--vocab-size", "99999999999"])
    said = capsys.readouterr().err
    assert code == 2 and said.startswith("error: --vocab-size is 99999999999; at most ") and said.count("\n") == 1
