"""Configs: what is read, what wins over what, and what is refused with which words."""

import dataclasses
import json

import pytest

from moejax.config import Config
from moejax.config_load import (
    ConfigError,
    config_from_dict,
    config_to_dict,
    help_text,
    load,
    numerics_diff,
)


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def refused(*arguments):
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return str(caught.value)


def test_overrides_win_over_the_file_and_the_file_over_the_preset(tmp_path):
    path = write(tmp_path, "preset: olmoe-1b-7b\nmodel: {num_layers: 3}\nmoe: {num_experts: 16}\n")
    config = load(path, ["moe.num_experts=32", "moe.router.top_k=4"])
    assert config.model.d_model == 2048  # preset
    assert config.model.num_layers == 3  # file
    assert (config.moe.num_experts, config.moe.router.top_k) == (32, 4)  # command line
    assert config.moe.router.norm_topk is False  # the preset's other router values stay
    assert config.training == Config().training


def test_a_preset_named_on_the_command_line_is_refused_where_the_file_would_hide_it(tmp_path):
    own = write(tmp_path, "model: {num_layers: 5, d_model: 4096}\ntraining: {steps: 7}\n")  # d_model is the preset's
    message = refused(own, ["preset=mixtral-8x7b"])
    assert f"{own} has 1 of its values itself" in message and "model.num_layers 5 for 32" in message
    named = write(tmp_path, "preset: mixtral-8x7b\nmodel: {num_layers: 5}\n", "named.yaml")
    config = load(named, ["preset=mixtral-8x7b"])
    assert (config.model.num_layers, config.moe.expert_width) == (5, 14336)
    config = load(own, ["preset=mixtral-8x7b", "model.num_layers=5"])
    assert (config.model.num_layers, config.moe.expert_width, config.training.steps) == (5, 14336, 7)


@pytest.mark.parametrize("own", ["preset: mixtral-8x7b\n", ""])
def test_an_empty_section_of_the_file_hides_nothing_of_a_preset(tmp_path, own):
    path = write(tmp_path, f"{own}model:\n  # num_layers: 5\nmoe: {{router: }}\n")
    config = load(path, [] if own else ["preset=mixtral-8x7b"])
    assert (config.model.num_layers, config.model.d_model, config.moe.expert_width) == (32, 4096, 14336)
    assert config.moe.router == load(None, ["preset=mixtral-8x7b"]).moe.router


def test_presets_are_found_beside_the_users_own_model(tmp_path, monkeypatch):
    folder = tmp_path / "house" / "presets"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text("model: {d_model: 40}\n")
    (folder / "greedy.yaml").write_text("training: {steps: 1}\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = "model.module=house.mine:Model"
    assert load(None, ["preset=tiny", mine]).model.d_model == 40
    assert "preset greedy: holds training" in refused(None, ["preset=greedy", mine])
    assert "did you mean tiny?" in refused(None, ["preset=tini", mine])
    assert "package 'nowhere' cannot be found" in refused(None, ["preset=tiny", "model.module=nowhere.mine:Model"])


def test_run_dir_is_named_after_the_file_unless_given(tmp_path):
    path = write(tmp_path, "recipe: fp32\n", "night.yaml")
    assert load(path).run_dir == "runs/night"
    assert load(path, ["run_dir=/elsewhere/x"]).run_dir == "/elsewhere/x"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("moe.capacity_factor=1.25", "1.25"),  # text stays as typed: 1.10 is not 1.1
        ("moe.capacity_factor=1.10", "1.10"),
        ("moe.capacity_factor=null", None),
        ("moe.capacity_factor='1.5'", "1.5"),
        ("log.sample_prompt=12", "12"),
        ("log.sample_prompt=a = b", "a = b"),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.clip_norm=null", None),
        ("log.tensorboard=false", False),
        ("data.seed=7", 7),
    ],
)
def test_an_override_takes_the_type_of_its_field(override, value):
    section, field = override.split("=")[0].split(".")
    got = getattr(getattr(load(None, [override]), section), field)
    assert got == value and type(got) is type(value)


def test_lists_become_tuples():
    assert load(None, ["recipe=mxfp8", "moe.bf16_layers=[0,-1]"]).moe.bf16_layers == (0, -1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("moe.router.topk=3", "moe.router.topk: unknown key; did you mean moe.router.top_k?"),
        ("training.sequense_length=3", "training.sequense_length: unknown key; did you mean training.sequence_length?"),
        ("optimiser.b1=0.5", "optimiser: unknown key; did you mean optimizer?"),
        (
            "moe.ways=gathered",
            "moe.ways: unknown key; the ways of a product are no setting; `python -m moejax.tune` measures",
        ),
        ("top_k=3", "top_k: unknown key; did you mean moe.router.top_k?"),
        ("moe.top_k=3", "moe.top_k: unknown key; did you mean moe.router.top_k?"),
        ("recipe=bf61", 'recipe: expected one of fp32, bf16, mxfp8, got the text "bf61"; did you mean bf16?'),
        ("training.steps=1.5", "training.steps: expected a whole number, got the number 1.5"),
        ("training.steps='100'", 'training.steps: expected a whole number, got the text "100": remove the quotes'),
        (
            "optimizer.learning_rate=nan",
            'optimizer.learning_rate: expected a number, got the text "nan": it must be finite',
        ),
        ("training.steps=true", "training.steps: expected a whole number, got true"),
        ("training.steps=null", "training.steps: expected a whole number, got nothing"),
        ("training.steps=0", "training.steps: expected a finite number of at least 1, got the number 0"),
        ("training.steps=2147483648", "training.steps: expected a finite number of at least 1 and at most 2147483647"),
        ("moe.expert_width=10000000000", "moe.expert_width: expected a finite number of at least 1 and at most 21474"),
        ("mesh.data=99999999999", "mesh.data: expected a finite number of at most 2147483647"),
        ("training.seed=4294967296", "training.seed: expected a finite number of at least 0 and at most 4294967295"),
        (
            "data.vocab_size=99999999999",
            "data.vocab_size: expected a finite number of at least 259 and at most 1048576",
        ),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate: expected a finite number of more than 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: expected a number"),
        ("optimizer.b1=1.0", "optimizer.b1: expected a finite number of at least 0 and less than 1"),
        ("log.tensorboard=1", "log.tensorboard: expected true or false, got the number 1"),
        ("moe.bf16_layers=[0,x]", "moe.bf16_layers: expected a list of whole numbers"),
        ("moe=3", "moe: is a section with the keys num_experts,"),
        ("training.steps.more=3", "training.steps: expected a whole number"),
        ("training.steps", "training.steps: expected section.key=value"),
        ("data.source=${nope}", "data.source: cannot read the value '${nope}'"),
    ],
)
def test_a_wrong_key_or_type_is_one_line_that_names_it(override, words):
    message = refused(None, [override])
    assert message.startswith(words) and "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["moe.router.top_k=9"], "moe.router: top_k is 9 but there are 8 experts"),
        (["moe.router.top_k=1"], "moe.router: norm_topk with k = 1"),
        (
            ["moe.router.top_k=1", "moe.router.norm_topk=false", "moe.router.score_before_topk=false"],
            "moe.router: softmax over the chosen logits with k = 1",
        ),
        (["moe.router.n_group=3"], "moe.router: n_group is 3"),
        (["moe.router.n_group=4", "moe.router.top_k=3"], "moe.router: top_k is 3 but the 1 kept groups hold 2"),
        (["moe.router.hash_layers=5"], "moe.router.hash_layers is 5, but the model has 4 MoE layers"),
        (["moe.balance.bias_rate=0.001"], "moe.balance.bias_rate is 0.001, but there is no bias to move"),
        (["moe.balance.bias_recentre=true"], "moe.balance.bias_recentre is true, but moe.balance.bias_rate is 0"),
        (["moe.act.name=swiglu_clamped"], "moe.act: act.limit is None"),
        (["moe.act.limit=7"], "moe.act: act.limit is 7.0"),
        (["moe.capacity_factor=0.0"], "moe.capacity_factor: "),
        (["moe.capacity_factor=much"], "moe.capacity_factor: "),
        (["moe.capacity_factor=-1.5"], "moe.capacity_factor: "),
        (["moe.shared_gate=true"], "moe.shared_gate is true, but moe.shared_experts is 0"),
        (
            ["recipe=mxfp8", "moe.bf16_layers=[7]"],
            "moe.bf16_layers: layer 7 does not exist; the model has 4 MoE layers",
        ),
        (["recipe=mxfp8", "moe.bf16_layers=[3,-1]"], "moe.bf16_layers names MoE layer 3 more than once"),
        (["moe.bf16_layers=[0]"], "moe.bf16_layers has an effect only with recipe=mxfp8"),
        (
            ["recipe=bf16", "model.d_model=252"],
            "model.d_model is 252, but recipe=bf16 needs a multiple of 8: use 248 or 256",
        ),
        (
            ["recipe=mxfp8", "moe.expert_width=24"],
            "moe.expert_width is 24, but recipe=mxfp8 needs a multiple of 32: use 32",
        ),
        (
            ["model.num_kv_heads=3"],
            "model.num_kv_heads is 3, which does not divide model.num_heads=4: use one of 1, 2, 4",
        ),
        (["model.rope_fraction=0.33"], "model.rope_fraction is 0.33"),
        (["model.dense_layers=1"], "model.dense_width is not set, but model.dense_layers is 1"),
        (["model.dense_layers=5", "model.dense_width=8"], "model.dense_layers is 5, but model.num_layers is 4"),
        (["model.module=decoder"], "model.module is 'decoder'"),
        (
            ["training.global_batch=1000000000"],
            "training.global_batch is 1,000,000,000 sequences in one step: expected at most",
        ),
        (
            ["training.global_batch=1000000", "training.sequence_length=4096"],
            "training.global_batch x training.sequence_length is 4,096,000,000 tokens in one step",
        ),
        (["training.micro_batches=3"], "training.micro_batches is 3, which does not divide training.global_batch=16"),
        (
            ["training.remat=layer", "moe.save=gate_up"],
            "moe.save is gate_up, but training.remat=layer does not keep it",
        ),
        (["mesh.expert=3"], "mesh.expert is 3, which does not divide moe.num_experts=8: use one of 1, 2, 4, 8"),
        (["mesh.context=7"], "mesh.context is 7, which does not divide training.sequence_length=256"),
        (["mesh.expert=-1"], "mesh.expert is -1, and so is mesh.data"),
        (["mesh.fsdp=0"], "mesh.fsdp is 0"),
    ],
)
def test_contradicting_fields_are_one_line_that_names_them(overrides, words):
    message = refused(None, overrides)
    assert message.startswith(words) and "\n" not in message


def test_every_problem_is_reported_at_once(tmp_path):
    path = write(tmp_path, 'moe: {capacity_factor: 1.25, experts: 8}\ntraining: {steps: "9"}\n')
    lines = refused(path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["moe.capacity_factor", "moe.experts", "training.steps"]
    assert lines[0].endswith("put it in quotes") and lines[1].endswith("did you mean moe.num_experts?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("moe: {num_experts: 8\n", "not valid YAML"),
        ("moe: {}\nmoe: {num_experts: 4}\n", "not valid YAML"),  # the same key twice
        ("- 1\n- 2\n", "expected keys with values, found a list"),
    ],
)
def test_a_file_that_is_no_config_says_so(tmp_path, text, words):
    message = refused(write(tmp_path, text))
    assert words in message and "run.yaml" in message and "\n" not in message
    assert refused(write(tmp_path, "just text")).startswith("just text: unknown key")


def test_a_missing_file_suggests_a_neighbour(tmp_path):
    write(tmp_path, "", "quickstart.yaml")
    assert refused(tmp_path / "quikstart.yaml").endswith(f"did you mean {tmp_path / 'quickstart.yaml'}?")
    assert "is a folder" in refused(tmp_path)


def test_a_section_without_values_is_the_defaults(tmp_path):
    config = load(write(tmp_path, "moe:\n  # num_experts: 4\nrun_dir: x\n"))
    assert config == dataclasses.replace(Config(), run_dir="x")


def test_dict_and_back_is_the_same_config():
    config = load(None, ["recipe=mxfp8", "moe.bf16_layers=[1]", "moe.capacity_factor=1.25"])
    stored = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(stored) == config


def test_numerics_diff_lists_what_changes_numbers_and_nothing_else():
    old = load(None)
    same = ["log.every_steps=3", "checkpoint.keep=5", "run_dir=there", "data.cache_dir=/tmp/c", "mesh.fsdp=2"]
    assert numerics_diff(old, load(None, same)) == []
    changed = load(None, [*same, "optimizer.learning_rate=0.5", "moe.router.top_k=3", "training.steps=7"])
    expected = ["moe.router.top_k: 2 -> 3", "optimizer.learning_rate: 0.001 -> 0.5", "training.steps: 300 -> 7"]
    assert numerics_diff(old, changed) == expected
    assert numerics_diff(config_to_dict(old), changed) == expected


def test_what_is_saved_for_the_backward_changes_numbers_only_in_mxfp8():
    mxfp8 = ["recipe=mxfp8", "training.remat=none"]
    saves = {save: load(None, [*mxfp8, f"moe.save={save}"]) for save in ("recompute", "gate_up", "gate_up_mx")}
    assert numerics_diff(saves["recompute"], saves["gate_up"]) == []
    rounds = ['moe.save: "gate_up" -> "gate_up_mx"', "optimizer.learning_rate: 0.001 -> 0.5"]
    changed = load(None, [*mxfp8, "moe.save=gate_up_mx", "optimizer.learning_rate=0.5"])
    assert numerics_diff(config_to_dict(saves["gate_up"]), changed) == rounds
    assert numerics_diff(saves["gate_up_mx"], saves["recompute"]) == ['moe.save: "gate_up_mx" -> "recompute"']


def test_a_preset_and_its_values_spelt_out_are_the_same_numbers(tmp_path):
    preset = load(None, ["preset=olmoe-1b-7b"])
    spelt_out = config_to_dict(preset) | {"preset": None}
    assert numerics_diff(preset, config_from_dict(spelt_out)) == []


def test_a_run_with_constant_learning_rate_may_be_lengthened():
    constant = ["optimizer.schedule=constant"]
    assert numerics_diff(load(None, constant), load(None, [*constant, "training.steps=900"])) == []


def test_a_config_stored_before_a_field_existed_had_its_default():
    stored = config_to_dict(load(None))
    del stored["moe"]["balance"]
    assert numerics_diff(stored, load(None)) == []
    assert numerics_diff(stored, load(None, ["moe.balance.z_coef=0.1"])) == ["moe.balance.z_coef: 0.0 -> 0.1"]


def leaves(values, prefix=""):
    for key, value in values.items():
        yield from leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]


def test_help_lists_every_field_once_with_type_default_and_meaning():
    lines = help_text().splitlines()
    keys = [
        line.split(" = ")[0].strip() for line in lines if " = " in line and line.startswith("  ") and line[2] != " "
    ]
    assert sorted(keys) == sorted(leaves(config_to_dict(Config())))
    at = lines.index("  moe.router.score_fn = softmax")
    assert lines[at + 1].startswith("      one of softmax, sigmoid, sqrtsoftplus, identity: score of an expert")


def test_every_config_in_the_repository_loads(request):
    paths = sorted((request.config.rootpath / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        assert load(path).run_dir == f"runs/{path.stem}"
        head = path.read_text().splitlines()[:2]
        assert head[0].startswith("# Run:") and head[1].startswith("# Expect:"), (
            f"{path}: how to run it, what to expect"
        )


# notes: parameters of the releases, embedding and head, norms, biases and selection biases included, without MTP layers
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("olmoe-1b-7b", 6_919_161_856),
        ("glm-4.5", 352_797_829_024),
        ("glm-4.5-air", 106_852_251_264),
    ],
)
def test_a_preset_has_the_published_number_of_parameters(preset, parameters):
    config = load(None, [f"preset={preset}"])
    model, moe = config.model, config.moe
    qk_norm = {"none": 0, "head": 2, "full": model.num_heads + model.num_kv_heads}[model.qk_norm] * model.head_dim
    heads = model.num_heads + 2 * model.num_kv_heads
    attention = model.d_model * model.head_dim * (heads + model.num_heads) + qk_norm
    attention += heads * model.head_dim if model.attention_bias else 0
    experts = 3 * model.d_model * moe.expert_width * (moe.num_experts + moe.shared_experts)
    router = moe.num_experts * (model.d_model + (1 if moe.router.select_bias else 0))
    dense = 3 * model.d_model * (model.dense_width or 0)
    layers = model.num_layers * (attention + 2 * model.d_model)
    layers += (model.num_layers - model.dense_layers) * (experts + router) + model.dense_layers * dense
    assert layers + (2 * model.vocab_size + 1) * model.d_model == parameters
