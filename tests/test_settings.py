"""Config: strength of sources, clear errors, files that read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dpace_cli.config import Config, decay_length
from dpace_cli.errors import UsageError
from dpace_cli.settings import commented, described, is_override, load_config, preset_names


def loaded(*overrides: str, **sources: object) -> Config:
    return load_config(**{"environ": {}, **sources}, overrides=overrides)[0]


def test_strength_from_preset_to_override(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("preset: demo\ntrain: {learning_rate: 1, batch_size: 2, num_anchors: 3, block_size: 4}\n")
    environ = {"DPACE_TRAIN__BATCH_SIZE": "20", "DPACE_TRAIN__NUM_ANCHORS": "30", "DPACE_TRAIN__BLOCK_SIZE": "40"}
    config, origins = load_config(
        file=file, environ=environ, flags={"train.num_anchors": 300, "train.block_size": 400, "train.seed": None},
        overrides=["train.block_size=4000"],
    )  # fmt: skip
    train = config.train
    assert (train.max_steps, train.learning_rate, train.batch_size, train.num_anchors, train.block_size) == (
        1600, 1, 20, 300, 4000,
    )  # fmt: skip
    assert origins["train.max_steps"] == "preset demo"
    assert origins["train.batch_size"] == "environment DPACE_TRAIN__BATCH_SIZE"
    assert origins["train.block_size"] == "command line"


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid_and_survive_a_round_trip(name, tmp_path):
    config = loaded(preset=name)
    (tmp_path / "c.yaml").write_text(commented(config))
    (tmp_path / "c.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert loaded(file=tmp_path / "c.yaml") == config == loaded(file=tmp_path / "c.json")
    assert [arm.label for arm in config.expand_arms()] == ["dflash", "dpace"]


def test_the_papers_settings():
    train = loaded(preset="qwen3-4b-5l").train
    assert (train.max_length, train.num_anchors, train.num_epochs, train.learning_rate) == (2048, 512, 6, 6e-4)
    assert (train.warmup_ratio, train.max_grad_norm, train.block_size, train.num_draft_layers) == (0.04, 1.0, 16, 5)
    assert (train.lr_scheduler_type, train.objective.alpha) == ("cosine", 0.5)


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("train.learning_rat=1", "unknown config key train.learning_rat", "train.learning_rate"),
        ("trian.learning_rate=1", "unknown config key trian", "train"),
        ("learning_rate=1", "unknown config key learning_rate", "train.learning_rate"),
        ("train.specforge.pyton=1", "unknown config key train.specforge.pyton", "train.specforge.python"),
        ("train.objective=dpase", "no objective 'dpase'", "dpace"),
        ("arms.objectives=[dflash, dpacee]", "no objective 'dpacee'", "dpace"),
        ("train.objective.alpha=1.5", "train.objective.alpha is 1.5", "command line"),
        ("train.objective={name: dflash, alpha: 0.5}", "dflash takes no alpha", "dpace"),
        ("train.objective.alhpa=0.3", "unknown config key train.objective.alhpa", "train.objective.alpha"),
        ("train.objective={name: dflash, gamma: -1}", "gamma is -1", ""),
        ("train.batch_size=many", "train.batch_size is 'many'", "it was set on the command line"),
        ("train.zzz=1", "unknown config key train.zzz", "`dpace config show` lists every key"),
        ("train=3", "train is 3; it is a section", ""),
        ("regen.engine=http", "regen.base_urls is empty", ""),
        ("bench.temperatures=[]", "at least one temperature", ""),
        ("nothing", "not of the form", ""),
    ],
)
def test_a_wrong_key_or_value_is_one_clear_error(override, message, hint):
    with pytest.raises(UsageError) as error:
        loaded(override)
    assert message in error.value.message and hint in error.value.hint
    assert error.value.exit_code == 2


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "bad.yaml").write_text("a: [1")
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "empty.yaml").write_text("")
    for name in ("bad.yaml", "list.yaml", "missing.yaml"):
        with pytest.raises(UsageError, match=name):
            loaded(file=tmp_path / name)
    assert loaded(file=tmp_path / "empty.yaml") == Config()
    with pytest.raises(UsageError, match="no preset 'nope'"):
        loaded(preset="nope")


def test_another_objective_does_not_inherit_fields(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {objective: {name: dpace, alpha: 0.7}}")
    assert loaded("train.objective=dflash", file=file).train.objective.gamma == "auto"
    assert loaded("train.objective.reduction=token", file=file).train.objective.alpha == 0.7
    custom = loaded("train.objective=my_package.losses:mine").train.objective
    assert (custom.name, custom.function) == ("custom", "my_package.losses:mine")


def test_numbers_in_scientific_notation():
    assert loaded("train.learning_rate=1e-3").train.learning_rate == 1e-3


def test_arms_are_the_product_of_the_factors():
    config = loaded("arms.objectives=[dflash, dpace]", "arms.alpha=[0.1, 0.5]", "arms.block_size=[8, 16]",
                    "arms.seeds=[0, 1]")  # fmt: skip
    arms = config.expand_arms()
    assert [arm.label for arm in arms[::2]] == [
        "dflash-k8", "dflash-k16", "dpace-a0.1-k8", "dpace-a0.1-k16", "dpace-a0.5-k8", "dpace-a0.5-k16",
    ]  # fmt: skip
    assert len({arm.folder for arm in arms}) == len(arms) == 12
    last = arms[-1].config.train
    assert (last.objective.alpha, last.block_size, last.seed) == (0.5, 16, 1)
    assert [arm.folder for arm in Config().expand_arms()] == ["dpace-seed0"]


def test_decay_lengths_of_the_dflash_paper():
    assert [decay_length("auto", k) for k in (8, 10, 16)] == [4.0, 5.0, 7.0]
    assert decay_length(None, 16) is None and decay_length(3.0, 16) == 3.0
    lengths = [decay_length("auto", k) for k in range(2, 65)]
    assert lengths == sorted(lengths) and lengths[0] > 0


def test_a_path_is_not_taken_for_an_override():
    assert is_override("train.seed=1") and is_override("name=x")
    assert not is_override("data/a=b.json") and not is_override("file.json") and not is_override("/tmp/train.seed=1")


def test_show_says_where_each_value_came_from():
    text = described(*load_config(preset="demo", environ={}, overrides=["train.seed=3"]))
    assert "train.seed: 3  # command line" in text and "train.batch_size: 4  # preset demo" in text
    assert yaml.safe_load(text)["train.learning_rate"] == 0.002
    assert "regen.top_k: 0  # default" in text


def test_no_secret_has_a_place_in_the_config():
    names = {name for section in Config.model_fields.values()
             for name in getattr(section.annotation, "model_fields", {})}  # fmt: skip
    assert not names & {"api_key", "token", "hf_token", "password", "secret"}
    assert "api_key_env" in names  # the name of a variable, never its value


def test_the_run_config_is_written_whole(tmp_path):
    from dpace_cli.settings import save_config

    config = loaded(preset="demo")
    save_config(config, tmp_path / "run" / "config.yaml")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["config.yaml"]
    assert load_config(file=Path(tmp_path / "run" / "config.yaml"), environ={})[0] == config


def test_objectives_of_one_name_and_other_settings_are_arms_of_their_own():
    objectives = "[dpace, {name: dpace, reduction: weight}, {name: dpace, alpha: 0.9}, {name: topk-prefix, top_k: 4}, "
    arms = loaded(f"arms.objectives={objectives}{{name: topk-prefix, top_k: 8}}, dpace]").expand_arms()
    assert [arm.label for arm in arms] == ["dpace", "dpace-weight", "dpace-a0.9", "topk-prefix", "topk-prefix-top8"]
    assert [arm.config.train.objective.reduction for arm in arms[:2]] == ["sequence", "weight"]
    swept = loaded("arms.objectives=[dpace, {name: dpace, reduction: weight}]", "arms.alpha=[0.3, 0.7]")
    assert [arm.label for arm in swept.expand_arms()] == [
        "dpace-a0.3", "dpace-a0.7", "dpace-a0.3-weight", "dpace-a0.7-weight",
    ]  # fmt: skip
    own = "[{name: custom, function: 'a.b:c'}, {name: custom, function: 'a.b:c', params: {beta: 0.5}}]"
    assert [arm.label for arm in loaded(f"arms.objectives={own}").expand_arms()] == ["a.b.c", "a.b.c-beta0.5"]


def test_an_empty_section_changes_nothing_and_a_value_is_no_section(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train:\n  # all of it commented out\n")
    assert load_config(preset="demo", file=file, environ={}, overrides=["train.seed=3"])[0].train.batch_size == 4
    assert load_config(file=file, environ={})[0] == Config()
    with pytest.raises(UsageError, match="train was given the value 5; it is a section"):
        load_config(environ={}, overrides=["train=5", "train.seed=3"])
