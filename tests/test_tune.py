"""Ways of the grouped products: their tables, their choice in the compiled module, and the search for the fastest."""

import dataclasses
import json
import types

import jax.numpy as jnp
import pytest

from moejax import native, tune
from moejax.native import ways

needs_module = pytest.mark.skipif(native.missing("_cuda") is not None, reason="moejax.native._cuda is not built here")

ENTRY = ways.Entry(tokens=512, top_k=2, experts=16, d_model=256, width=64, ways={"gate_up": "gathered"})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "moejax" / "ways.json"


def test_a_table_is_read_as_it_was_written_and_overrides_the_shipped_one(cache):
    assert ways.cache_file() == cache
    shipped = ways.read(ways._SHIPPED)
    assert shipped, "the benchmark shapes"
    gpu, own = next((gpu, entries[0]) for gpu, entries in shipped.items())
    changed = dataclasses.replace(own, ways={"gate_up": "dispatched", "down": "tokens_n"})
    assert changed != own
    ways.write(cache, {gpu: [changed], "another": [ENTRY]})
    assert ways.read(cache) == {gpu: [changed], "another": [ENTRY]}
    found = ways.entries(gpu)
    assert changed in found and own not in found and len(found) == len(shipped[gpu])
    assert ways.entries("another") == [ENTRY] and ways.entries("none") == []


@pytest.mark.parametrize(
    "text,what",
    [
        ("{", "Expecting"),
        ('{"gpu": [{"tokens": 1}]}', "'ways'"),
        (json.dumps({"gpu": [dataclasses.asdict(ENTRY) | {"ways": {"down": "of_old"}}]}), "version .down: of_old"),
        (json.dumps({"gpu": [dataclasses.asdict(ENTRY) | {"width": -8}]}), "positive"),
        (json.dumps({"gpu": [dataclasses.asdict(ENTRY) | {"width": 10**20}]}), "below 2.31"),
        (json.dumps({"gpu": [dataclasses.asdict(ENTRY) | {"width": True}]}), "positive"),
        ("\xff", "can't decode"),
    ],
)
def test_a_damaged_table_is_named(cache, text, what):
    cache.parent.mkdir()
    cache.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=what) as caught:
        ways.entries("gpu")
    assert str(cache) in str(caught.value) and "delete it" in str(caught.value)


def test_a_table_that_the_module_refuses_is_named(cache, monkeypatch):
    def set_ways(given):
        raise ValueError("way 2 of product 1")

    monkeypatch.setattr(native, "module", lambda name: types.SimpleNamespace(set_ways=set_ways))
    with pytest.raises(ValueError, match="way 2 of product 1: delete ") as caught:
        ways.apply.__wrapped__()
    assert str(cache) in str(caught.value)


class FakeModule(types.SimpleNamespace):
    """Products with two ways each; a way's time and its result are looked up, not measured."""

    def ways_of(self, product, *sizes):
        return [1, 2] if ways.PRODUCTS[product] in ("gate_up", "down") else [1]

    def set_ways(self, entries):
        (entry,) = entries
        self.current = dict(zip(ways.PRODUCTS, (ways.WAYS[way] for way in entry[-1]), strict=True))


@pytest.fixture
def fake(monkeypatch):
    module = FakeModule(current={}, wrong=None)
    cost = {"gate_up": {"dispatched": 3.0, "gathered": 2.0}, "down": {"dispatched": 1.0, "gathered": 5.0}}

    def run():
        return jnp.full((4,), 1.0 if module.current.get("down") == module.wrong else 0.0)

    monkeypatch.setattr(native, "module", lambda name: module)
    monkeypatch.setattr(ways, "apply", lambda: None)
    monkeypatch.setattr(tune, "_problem", lambda entry, seed: (run, run))
    monkeypatch.setattr(
        tune,
        "_milliseconds",
        lambda run, calls: sum(c[module.current[p]] for p, c in cost.items() if module.current[p] in c),
    )
    return module


def test_the_fastest_way_of_each_product_is_kept(fake):
    lines: list[str] = []
    found = tune.tune(dataclasses.replace(ENTRY, ways={}), log=lines.append)
    assert found.ways == {"gate_up": "gathered", "down": "dispatched"}
    assert found.sizes() == ENTRY.sizes() and len(lines) == 2


def test_ways_of_different_bits_are_refused(fake):
    fake.wrong = "gathered"
    with pytest.raises(RuntimeError, match="down: gathered gives other bits than dispatched"):
        tune.tune(ENTRY, log=lambda line: None)


def test_the_checksum_sees_one_bit_and_two_places():
    x = jnp.arange(24, dtype=jnp.float32).reshape(2, 3, 4)
    sums = [
        int(tune._checksum(v))
        for v in (x, x.at[1, 2, 3].multiply(1 + 2**-23), x[:, ::-1], x.swapaxes(0, 1).reshape(2, 3, 4))
    ]
    assert sums[0] == int(tune._checksum(x + 0)) and len(set(sums)) == 4
    assert int(tune._checksum(x.astype(jnp.bfloat16))) != int(tune._checksum(-x.astype(jnp.bfloat16)))


@pytest.mark.parametrize(
    "changes,what",
    [
        ({"--experts": "0"}, "--experts is 0"),
        ({"--top-k": "9"}, "--top-k is 9 and --experts 8"),
        ({}, "JAX runs on cpu here"),
    ],
)
def test_the_command_line_refuses_what_it_cannot_do(capsys, monkeypatch, changes, what):
    monkeypatch.setenv("XLA_FLAGS", "")
    sizes = {"--experts": "8", "--top-k": "2", "--d-model": "64", "--width": "64", "--tokens": "128"} | changes
    assert tune.main([part for pair in sizes.items() for part in pair]) == 2
    assert what in capsys.readouterr().err


@needs_module
def test_the_module_knows_which_ways_a_shape_has():
    module = native.module("_cuda")
    named = lambda product, *sizes: [ways.WAYS[w] for w in module.ways_of(ways.PRODUCTS.index(product), *sizes)]  # noqa: E731
    many, one = (512, 2, 16, 256, 64), (512, 1, 16, 256, 64)
    of_gate_up = ["dispatched", "gathered", "tokens_n", "gathered_n", "beside"]
    assert named("gate_up", *many) == named("gate_up", *one) == of_gate_up
    assert named("down", *many) == ["dispatched", "tokens_n"]
    assert named("down", *one) == ["dispatched"]
    assert named("dgrad_down", *one) == ["dispatched", "tokens_n"]
    assert named("wgrad_down", *many) == ["dispatched", "resident_512", "resident_rows"]
    assert "gathered" not in named("gate_up", 2**20, 8, 64, 8192, 64), "offsets of 32 bits"


@needs_module
def test_the_module_takes_the_shipped_table_and_refuses_ways_that_a_shape_lacks():
    module = native.module("_cuda")
    for table in ways.read(ways._SHIPPED).values():
        module.set_ways([entry.as_native() for entry in table])
    with pytest.raises(ValueError, match="way 2 of product 1"):
        module.set_ways([dataclasses.replace(ENTRY, ways={"down": "gathered"}).as_native()])
    with pytest.raises(ValueError, match="2 ways"):
        module.set_ways([(*ENTRY.sizes(), [0, 0])])
    module.set_ways([])
