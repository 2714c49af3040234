"""SpecForge's config is made from ours: checked by SpecForge's own schema and its own arithmetic of steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specforge.config import Config as SpecForgeConfig
from specforge.training.schedule import (
    resolve_online_total_steps,
    resolve_total_steps,
    validate_fixed_accumulation_plan,
)

from dpace_cli.config import Config
from dpace_cli.errors import UsageError
from dpace_cli.settings import load_config
from dpace_cli.trainers.specforge_config import check, flatten, generate, identity, nest, schedule, with_extra


def configured(*overrides: str) -> Config:
    return load_config(overrides=["train.engine=specforge", *overrides], environ={})[0]


def generated(config: Config) -> dict:
    made = generate(config, check(config, 100), target="target", drafter=Path("drafter.json"), output=Path("out"),
                    dtype="float32", on_gpu=False)  # fmt: skip
    made["data"]["hidden_states_path"] = "features"
    return with_extra(config, made)


def understood(config: Config) -> SpecForgeConfig:
    """What SpecForge reads from the config that we generate."""
    return SpecForgeConfig.model_validate(generated(config))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.objective=dpace"], ("dpace", 0.5, None)),
        (["train.objective.alpha=0.25"], ("dpace", 0.25, None)),
        (["train.objective={name: dpace-cumulative-confidence-only, alpha: 0.3}"],
         ("dpace-cumulative-confidence-only", 0.3, None)),
        (["train.objective=dpace-continuation-value-only"], ("dpace-continuation-value-only", 0.5, None)),
        (["train.objective=dflash"], ("dflash", 0.5, 7.0)),
        (["train.objective=dflash", "train.block_size=8"], ("dflash", 0.5, 4.0)),
        (["train.objective={name: dflash, gamma: 2.5}"], ("dflash", 0.5, 2.5)),
        (["train.objective={name: dflash, gamma: null}"], ("dflash", 0.5, None)),
    ],
)  # fmt: skip
def test_each_objective_is_the_same_one_in_specforge(overrides, expected):
    training = understood(configured(*overrides)).training
    assert (training.loss_type, training.dpace_alpha, training.loss_decay_gamma) == expected
    assert training.strategy == "dflash"


def test_every_setting_arrives_under_its_name_there():
    config = configured(
        "train.learning_rate=3e-3", "train.warmup_ratio=0.1", "train.max_grad_norm=2", "train.batch_size=3",
        "train.accumulation_steps=2", "train.num_anchors=17", "train.max_length=77", "train.seed=5",
        "train.save_steps=11", "train.logging_steps=4", "train.keep_last=3", "train.nproc=2", "train.max_steps=9",
        "train.lr_scheduler_type=constant",
    )  # fmt: skip
    read = understood(config)
    training = read.training
    assert (training.learning_rate, training.warmup_ratio, training.max_grad_norm) == (3e-3, 0.1, 2)
    assert (training.batch_size, training.accumulation_steps, training.num_anchors) == (3, 2, 17)
    assert (training.save_interval, training.log_interval, training.max_checkpoints) == (11, 4, 3)
    assert (training.seed, training.max_steps, training.lr_scheduler) == (5, 9, "constant")
    assert (read.data.max_length, read.deployment.trainer.nproc_per_node) == (77, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.objective=lk"], "no objective lk; it has dflash (reduction weight), dpace (reduction sequence), "
                                 "dpace-cumulative-confidence-only (reduction sequence), "
                                 "dpace-continuation-value-only (reduction sequence)"),
        (["train.objective=package.module:function"], "no objective package.module.function"),
        (["train.objective.reduction=token"], "divides dpace by sequence"),
        (["train.objective={name: dflash, reduction: block}"], "divides dflash by weight"),
        (["train.lr_scheduler_type=linear"], "train.lr_scheduler_type linear"),
        (["train.adam_beta2=0.95"], "train.adam_beta1 and train.adam_beta2"),
        (["target.revision=abc"], "target.revision"),
        (["train.batch_size=101"], "100 rows make no optimizer step of 101"),
        (["train.batch_size=30", "train.nproc=4"], "4 processes x batch 30 x accumulation 1"),
        (["train.accumulation_steps=200", "train.num_epochs=1"], "accumulation 200"),
    ],
)  # fmt: skip
def test_what_specforge_lacks_is_refused_before_anything_is_loaded(overrides, message):
    with pytest.raises(UsageError) as refused:
        check(configured(*overrides), 100)
    assert message in refused.value.message
    assert refused.value.hint


def test_a_key_of_specforge_reaches_it_with_dots_or_as_sections():
    for extra in ("{training.objective_chunk_blocks: 64}", "{training: {objective_chunk_blocks: 64}}"):
        assert understood(configured(f"train.specforge.extra={extra}")).training.objective_chunk_blocks == 64
    assert understood(configured("train.specforge.extra.profiling.enabled=true")).profiling.enabled


@pytest.mark.parametrize("key", ["training.seed", "run_id", "training.loss_type", "data.hidden_states_path"])
def test_a_key_that_one_of_our_fields_decides_is_refused(key):
    with pytest.raises(UsageError, match=f"sets {key}, which dpace sets itself"):
        generated(configured(f"train.specforge.extra={{{key}: 1}}"))


sizes = st.integers(1, 9)


@settings(deadline=None)
@given(st.integers(1, 200), sizes, sizes, st.integers(1, 4), sizes, st.none() | st.integers(1, 50))
def test_offline_steps_are_what_specforge_counts(rows, batch, accumulation, nproc, epochs, max_steps):
    config = configured(
        f"train.batch_size={batch}", f"train.accumulation_steps={accumulation}", f"train.nproc={nproc}",
        f"train.num_epochs={epochs}", f"train.max_steps={'null' if max_steps is None else max_steps}",
    )  # fmt: skip
    # A process of SpecForge has the rows of torch's DistributedSampler.
    theirs = {"num_samples": math.ceil(rows / nproc), "batch_size": batch, "accumulation_steps": accumulation}
    try:
        made = schedule(config, rows)
    except UsageError:
        with pytest.raises(ValueError, match="no optimizer step"):
            resolve_total_steps(
                total_steps=None, max_steps=None, num_epochs=epochs if max_steps is None else 1000, **theirs
            )
        return
    if max_steps is None:
        assert made.steps == resolve_total_steps(total_steps=None, max_steps=None, num_epochs=epochs, **theirs)
    else:
        assert made.steps == max_steps
        reached = resolve_total_steps(total_steps=None, max_steps=None, num_epochs=made.epochs, **theirs)
        assert reached >= max_steps  # the epochs are enough
    validate_fixed_accumulation_plan(num_epochs=made.epochs, max_steps=made.steps, **theirs)
    assert made.sequences == batch * accumulation * nproc


@settings(deadline=None)
@given(st.integers(1, 200), sizes, sizes, st.integers(1, 4), sizes)
def test_online_steps_are_what_specforge_counts(rows, batch, accumulation, nproc, epochs):
    config = configured(
        f"train.batch_size={batch}", f"train.accumulation_steps={accumulation}", f"train.nproc={nproc}",
        f"train.num_epochs={epochs}", "train.specforge.mode=online",
    )  # fmt: skip
    theirs = {"num_prompts": rows, "prompt_epochs": epochs, "dp_size": nproc, "batch_size": batch,
              "accumulation_steps": accumulation}  # fmt: skip
    try:
        made = schedule(config, rows)
    except UsageError:
        with pytest.raises(ValueError, match="no optimizer step"):
            resolve_online_total_steps(**theirs)
        return
    assert (made.steps, made.epochs) == (resolve_online_total_steps(**theirs), epochs)


def test_steps_and_intervals_that_do_not_change_the_result_may_change_in_a_resume():
    base = identity(generated(configured()))
    same = identity(generated(configured("train.save_steps=7", "train.logging_steps=3", "train.keep_last=1",
                                         "train.specforge.extra.data.dataloader_num_workers=0")))  # fmt: skip
    other = identity(generated(configured("train.num_anchors=7")))
    assert base == same
    assert {key for key in base if base[key] != other[key]} == {"training.num_anchors"}


names = st.text("abc", min_size=1, max_size=3)
leaves = st.integers() | st.lists(st.integers(), max_size=2)
sections = st.dictionaries(names, leaves | st.dictionaries(names, leaves, min_size=1, max_size=2), max_size=3)


@settings(deadline=None)
@given(sections)
def test_sections_survive_being_flattened(written):
    assert nest(flatten(written)) == written
