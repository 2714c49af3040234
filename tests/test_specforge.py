"""`--engine specforge`: SpecForge trains on features that dpace captured, and the result is a DFlash checkpoint."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import yaml
from conftest import make_tiny_target, write_rows
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter
from transformers import AutoModelForCausalLM

from dpace_cli import train
from dpace_cli.config import Config
from dpace_cli.data.batches import TrainingRow
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.capture import States
from dpace_cli.modeling.drafter import build_drafter
from dpace_cli.modeling.target import load_target
from dpace_cli.records import RunFolder, only_one
from dpace_cli.settings import load_config
from dpace_cli.trainers.specforge import write_features
from dpace_cli.trainers.specforge_online import OnlinePlan
from dpace_cli.trainers.specforge_process import drafter_weights, read_step, saved_steps

SMALL = [
    "train.num_draft_layers=1", "train.block_size=4", "train.num_anchors=6", "train.batch_size=4",
    "train.max_length=128", "train.max_steps=6", "train.save_steps=2", "train.logging_steps=1",
    "train.learning_rate=3e-3", "train.val_rows=4", "train.weight_decay=0",
]  # fmt: skip


def configured(target: Path, data: Path, *overrides: str, engine: str = "specforge") -> Config:
    flags = {"target.path": str(target), "train.data": str(data), "train.engine": engine}
    return load_config(flags=flags, overrides=[*SMALL, *overrides], environ={})[0]


def arm(run: Path) -> Path:
    return run / "train" / "dpace-seed0"


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (arm(run) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


@pytest.fixture
def few_rows(tmp_path) -> Path:
    write_rows(tmp_path / "few.jsonl", 8)
    return tmp_path / "few.jsonl"


# --- training ---------------------------------------------------------------------------------------------


def test_specforge_takes_the_same_steps_as_the_native_trainer(tiny_target, few_rows, tmp_path):
    """All rows in every step and every candidate an anchor: then the two trainers have nothing left to differ in.

    So features, initial weights, objective, schedule and conversion are all checked by another implementation.
    """
    every = ["train.batch_size=8", "train.num_anchors=512", "train.val_rows=0", "train.lr_scheduler_type=constant",
             "train.warmup_ratio=0", "train.max_steps=4"]  # fmt: skip
    theirs = train.run(configured(tiny_target, few_rows, *every), RunFolder(tmp_path / "specforge"))
    ours = train.run(configured(tiny_target, few_rows, *every, engine="native"), RunFolder(tmp_path / "native"))
    assert theirs.steps == ours.steps == 4
    assert theirs.hashes["initial_weights"] == ours.hashes["initial_weights"]
    expected = losses(tmp_path / "native")
    assert losses(tmp_path / "specforge") == pytest.approx(expected, rel=1e-5)
    assert expected[4] < expected[1]
    one, two = (load_file(Path(result.checkpoint) / "model.safetensors") for result in (theirs, ours))
    assert one.keys() == two.keys()
    for name in two:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=1e-4)

    checkpoint = Path(theirs.checkpoint)
    saved = json.loads((checkpoint / "config.json").read_text())
    assert saved == json.loads((Path(ours.checkpoint) / "config.json").read_text())
    assert (saved["block_size"], saved["dtype"]) == (4, "float32")
    for kind in (DFlashDraftModel, SpecForgeDrafter):
        loaded, info = kind.from_pretrained(checkpoint, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert (loaded.block_size, loaded.mask_token_id) == (4, saved["dflash_config"]["mask_token_id"])

    left = {path.name for path in (arm(tmp_path / "specforge") / "specforge").iterdir()}
    assert left == {"config.yaml", "specforge.log", "state.json"}
    assert train.run(configured(tiny_target, few_rows, *every), RunFolder(tmp_path / "specforge")) == theirs
    with pytest.raises(UsageError, match=r"another config; changed: .*training\.learning_rate: 0\.003 -> 0\.1"):
        train.run(
            configured(tiny_target, few_rows, *every, "train.learning_rate=0.1"), RunFolder(tmp_path / "specforge")
        )
    with pytest.raises(UsageError, match="holds a training by --engine native"):
        train.run(configured(tiny_target, few_rows, *every), RunFolder(tmp_path / "native"))
    with pytest.raises(UsageError, match="holds a training by --engine specforge"):
        train.run(configured(tiny_target, few_rows, *every, engine="native"), RunFolder(tmp_path / "specforge"))


def command(target: Path, data: Path, run: Path, *overrides: str) -> list[str]:
    files = ["--run", str(run), "--target", str(target), "--data", str(data)]
    return [sys.executable, "-m", "dpace_cli", "train", "--json", "--engine", "specforge", *files, *SMALL, *overrides]


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_stopped_training_goes_on_at_the_last_checkpoint_of_specforge(tiny_target, answered_rows, tmp_path, nproc):
    overrides = [f"train.nproc={nproc}", "train.batch_size=2", "train.max_steps=40", "train.save_steps=10"]
    whole = train.run(configured(tiny_target, answered_rows, *overrides), RunFolder(tmp_path / "whole"))
    stopped = subprocess.Popen(command(tiny_target, answered_rows, tmp_path / "stopped", *overrides))
    first = arm(tmp_path / "stopped") / "step-000010"
    while not (first / "model.safetensors").exists():
        assert stopped.poll() is None
        time.sleep(0.02)
    stopped.terminate()
    assert stopped.wait(90) == 128 + signal.SIGTERM
    with only_one(arm(tmp_path / "stopped") / "lock"):
        pass  # SpecForge is gone
    again = train.run(configured(tiny_target, answered_rows, *overrides), RunFolder(tmp_path / "stopped"))
    assert again.steps == whole.steps == 40
    assert (arm(tmp_path / "stopped") / "metrics.jsonl").read_text() == (
        arm(tmp_path / "whole") / "metrics.jsonl"
    ).read_text()
    one, two = (load_file(Path(result.checkpoint) / "model.safetensors") for result in (whole, again))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert again.simulated_tau == whole.simulated_tau
    kept = sorted(path.name for path in arm(tmp_path / "stopped").glob("step-*"))
    assert kept == sorted(path.name for path in arm(tmp_path / "whole").glob("step-*"))


@pytest.mark.slow
def test_a_killed_dpace_leaves_a_specforge_that_the_next_start_notices(tiny_target, answered_rows, tmp_path):
    overrides = ["train.max_steps=2000", "train.save_steps=10", "train.num_epochs=300"]
    killed = subprocess.Popen(command(tiny_target, answered_rows, tmp_path, *overrides))
    lock = arm(tmp_path) / "lock"
    while not (arm(tmp_path) / "step-000010").exists():
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    left = int(lock.read_text())
    try:
        with pytest.raises(UsageError, match=rf"another process \({left}\) is at work in"):
            train.run(configured(tiny_target, answered_rows, *overrides), RunFolder(tmp_path))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGTERM)


# --- features ---------------------------------------------------------------------------------------------


def test_features_are_the_outputs_of_the_tapped_layers_and_a_capture_resumes(tiny_target, tmp_path):
    target = load_target(configured(tiny_target, tmp_path).target)
    torch.manual_seed(0)
    ids = [torch.randint(0, 250, (length,)).tolist() for length in (30, 7, 60, 12, 30, 3)]
    rows = [TrainingRow.make(str(n), row, [0, 1] + [1] * (len(row) - 2)) for n, row in enumerate(ids)]
    done = []
    write_features(tmp_path / "f", rows, States(target, ids, [0, 2], False), torch.float32, done.append)
    files = sorted((tmp_path / "f").iterdir())
    assert [path.name for path in files] == [f"{n:08d}.ckpt" for n in range(6)]
    assert sum(done) == sum(map(len, ids))
    reference = AutoModelForCausalLM.from_pretrained(tiny_target)
    for path, row in zip(files, rows):
        feature = torch.load(path, weights_only=True)
        assert feature["input_ids"].tolist() == row.input_ids and feature["loss_mask"].tolist() == row.loss_mask
        states = reference(torch.tensor([row.input_ids]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[1][0], states[3][0]], dim=-1)
        torch.testing.assert_close(feature["hidden_states"], expected, rtol=1e-4, atol=1e-4)

    files[0].unlink()
    files[2].write_bytes(files[2].read_bytes()[:1000])  # cut short by a power failure
    before = {path: path.stat().st_mtime_ns for path in files[3:]}
    captured = []
    states = States(target, ids, [0, 2], False)
    batch = states.batch
    states.batch = lambda indices: captured.extend(indices) or batch(indices)
    write_features(tmp_path / "f", rows, states, torch.float32, lambda tokens: None)
    assert sorted(captured) == [0, 2]
    assert {path: path.stat().st_mtime_ns for path in files[3:]} == before
    assert torch.load(files[2], weights_only=True)["input_ids"].tolist() == ids[2]


def test_features_that_are_too_large_are_refused_before_specforge_starts(tiny_target, few_rows, tmp_path):
    with pytest.raises(UsageError, match=r"features take 0\.0 GiB; train\.cache_limit_gb is 1e-06"):
        train.run(configured(tiny_target, few_rows, "train.cache_limit_gb=1e-6"), RunFolder(tmp_path))


# --- when SpecForge fails ---------------------------------------------------------------------------------


def stand_in(path: Path, training: str) -> str:
    """An interpreter whose SpecForge accepts every config and then does `training`."""
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent("""\
        import sys, time
        if sys.argv[1] == "-c":
            print("0.2.0")
        elif "--plan" in sys.argv:
            print("{}")
        else:
        """) + textwrap.indent(textwrap.dedent(training), "    "))  # fmt: skip
    path.chmod(0o755)
    return f"train.specforge.python={path}"


def test_a_loss_that_is_not_finite_stops_specforge(tiny_target, few_rows, tmp_path):
    python = stand_in(tmp_path / "python", """\
        print("step 1: {'acc': 0.0, 'loss': 2.5, 'grad_norm': 1.0, 'lr': 0.1}", flush=True)
        print("step 2: {'acc': 0.0, 'loss': nan, 'grad_norm': nan, 'lr': 0.1}", flush=True)
        time.sleep(600)
        """)  # fmt: skip
    with pytest.raises(RunError, match="the loss of step 2 is nan"):
        train.run(configured(tiny_target, few_rows, python), RunFolder(tmp_path))
    assert losses(tmp_path) == {1: 2.5}
    with only_one(arm(tmp_path) / "lock"):
        pass  # it was ended


def test_a_failure_is_reported_with_the_error_of_specforge(tiny_target, few_rows, tmp_path):
    python = stand_in(tmp_path / "python", """\
        print("Traceback (most recent call last):")
        print('  File "x.py", line 1, in f')
        print("ValueError: the features do not match", flush=True)
        sys.exit(3)
        """)  # fmt: skip
    with pytest.raises(RunError, match=r"exit code 3\): ValueError: the features do not match") as failed:
        train.run(configured(tiny_target, few_rows, python), RunFolder(tmp_path))
    assert "specforge.log" in failed.value.hint


def test_ending_before_the_last_step_is_a_failure(tiny_target, few_rows, tmp_path):
    python = stand_in(tmp_path / "python", "print('done')\n")
    with pytest.raises(RunError, match="ended at step 0, not at 6"):
        train.run(configured(tiny_target, few_rows, python), RunFolder(tmp_path))
    given = yaml.safe_load((arm(tmp_path) / "specforge" / "config.yaml").read_text())["model"]["draft_checkpoint_path"]
    initial = DFlashDraftModel.from_pretrained(given)
    expected = build_drafter(initial.config, seed=0).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in initial.state_dict().items())


def test_an_interpreter_without_specforge_is_said(tiny_target, few_rows, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    for path, message in ((tmp_path / "python", "SpecForge is not installed for"), (tmp_path / "none", "cannot run")):
        with pytest.raises(UsageError, match=message):
            train.run(configured(tiny_target, few_rows, f"train.specforge.python={path}"), RunFolder(tmp_path))


def test_a_config_that_specforge_refuses_names_its_reason(tiny_target, few_rows, tmp_path):
    wrong = configured(tiny_target, few_rows, "train.specforge.extra.training.no_such_key=1")
    with pytest.raises(UsageError, match=r"(?s)SpecForge refuses .*training\.no_such_key"):
        train.run(wrong, RunFolder(tmp_path))


def test_a_torchrun_around_dpace_is_refused(tiny_target, few_rows, tmp_path, monkeypatch):
    from dpace_cli.trainers.base import Job, Ranks
    from dpace_cli.trainers.specforge import train as specforge_train

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = configured(tiny_target, few_rows)
    job = Job(config, [], [], "", tmp_path, tmp_path)
    with pytest.raises(UsageError, match="starts its own processes"):
        specforge_train(job, load_target(config.target), Ranks())


# --- its log and its checkpoints --------------------------------------------------------------------------


def test_lines_of_the_log_are_read_as_specforge_writes_them(capsys):
    from specforge.training.assembly import _logger

    _logger({"loss": 1.5, "acc": math.nan, "lr": 1e-05, "grad_norm": math.inf, "list": [1.0, 2.0]}, 12)
    step, numbers = read_step(capsys.readouterr().out.rstrip("\n"))
    assert step == 12 and numbers["loss"] == 1.5 and numbers["lr"] == 1e-05
    assert math.isnan(numbers["acc"]) and numbers["grad_norm"] == math.inf
    for other in ("", "Loading weights", "step 3", "step x: {}", " step 3: {}"):
        assert read_step(other) is None


def saved_checkpoint(folder: Path, step: int, processes: int) -> Path:
    path = folder / f"dpace-step{step}"
    path.mkdir(parents=True)
    for name in ("training_state.pt", *(f"training_state_rank{rank}.pt" for rank in range(processes))):
        torch.save({"draft_state_dict": {"a": torch.ones(2, dtype=torch.bfloat16)}}, path / name)
    return path


def test_only_checkpoints_that_every_process_finished_count(tmp_path):
    for step in (10, 20, 30, 40):
        saved_checkpoint(tmp_path, step, 2)
    (tmp_path / "dpace-step20" / "training_state_rank1.pt").unlink()
    whole = (tmp_path / "dpace-step30" / "training_state.pt").read_bytes()
    (tmp_path / "dpace-step30" / "training_state.pt").write_bytes(whole[:-30])
    (tmp_path / "dpace-latest").symlink_to("dpace-step40")
    assert list(saved_steps(tmp_path, 2)) == [10, 40]
    assert list(saved_steps(tmp_path, 2, after=10)) == [40]
    weights = drafter_weights(tmp_path / "dpace-step10")
    assert weights["a"].dtype == torch.float32 and weights["a"].tolist() == [1, 1]


class Harmful:
    """What a pickle from elsewhere could do."""

    def __reduce__(self):
        return (os.mkdir, ("harm",))


def test_no_object_of_a_checkpoint_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"draft_state_dict": Harmful()}, saved_checkpoint(tmp_path, 1, 1) / "training_state.pt")
    with pytest.raises(RunError, match="cannot read SpecForge's checkpoint"):
        drafter_weights(tmp_path / "dpace-step1")
    assert not Path("harm").exists()


# --- online -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3_8b(tiny_target, tmp_path_factory) -> Path:
    """The shapes of Qwen/Qwen3-8B without its weights, and a small tokenizer in place of its own."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    make_tiny_target(folder)
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": False, "layer_types": ["full_attention"] * 36,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_online_the_preset_for_qwen3_8b_gives_a_plan_that_specforge_accepts(qwen3_8b, answered_rows, tmp_path):
    flags = {"target.path": str(qwen3_8b), "train.data": str(answered_rows), "train.engine": "specforge",
             "train.specforge.mode": "online"}  # fmt: skip
    config = load_config(preset="qwen3-8b-3l", flags=flags, environ={})[0]
    result = train.run(config, RunFolder(tmp_path))
    assert isinstance(result, OnlinePlan)
    assert [name.removeprefix("train.specforge.") for name in result.missing] == [
        "server_urls", "mooncake_metadata_server", "mooncake_master_server_addr",
    ]  # fmt: skip
    plan = json.loads(Path(result.plan).read_text())  # as `specforge train --plan` printed it
    assert plan["kind"] == "supervisor" and [c["label"] for c in plan["commands"]] == ["producer", "consumer"]
    mooncake, capture = result.servers
    assert "mooncake_master" in mooncake and "--enable-spec-capture" in capture
    assert "--spec-capture-method dflash --spec-capture-aux-layer-ids 1 17 33 " in capture
    rows = [json.loads(line) for line in (arm(tmp_path) / "specforge" / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 36 and rows[0].keys() == {"input_ids", "loss_mask"} and sum(rows[0]["loss_mask"]) > 2
    from specforge.data.prompt_builder import prepare_prompt_tasks

    read = prepare_prompt_tasks(
        arm(tmp_path) / "specforge" / "prompts.jsonl", None, chat_template=None, max_length=2048,
        is_preformatted=False, train_only_last_turn=False, cache_dir=None, cache_key=None, num_proc=None,
    )  # fmt: skip
    assert [prompt["payload"] for prompt in read] == rows


def online(target: Path, data: Path, *overrides: str) -> Config:
    return configured(
        target, data, "train.specforge.mode=online", "train.specforge.server_urls=[http://127.0.0.1:9]",
        "train.specforge.mooncake_metadata_server=http://127.0.0.1:9/metadata",
        "train.specforge.mooncake_master_server_addr=127.0.0.1:9", *overrides,
    )  # fmt: skip


def test_online_a_server_that_does_not_answer_is_named_before_anything_starts(tiny_target, few_rows, tmp_path):
    python = stand_in(tmp_path / "python", "sys.exit('started')\n")
    with pytest.raises(RunError, match=r"capture server http://127\.0\.0\.1:9 does not answer"):
        train.run(online(tiny_target, few_rows, python), RunFolder(tmp_path))


def test_online_a_checkpoint_of_a_training_started_by_hand_becomes_a_dflash_checkpoint(tiny_target, few_rows, tmp_path):
    python = stand_in(tmp_path / "python", "sys.exit('started')\n")
    config = online(tiny_target, few_rows, python, "train.max_steps=3")
    with pytest.raises(RunError, match="does not answer"):  # writes the files that SpecForge is started with
        train.run(config, RunFolder(tmp_path))
    work = arm(tmp_path) / "specforge"
    drafter = SpecForgeDrafter(SpecForgeDrafter.config_class.from_dict(json.loads((work / "drafter.json").read_text())))
    path = saved_checkpoint(work / "checkpoints", 3, 1)
    torch.save({"draft_state_dict": drafter.to(torch.bfloat16).state_dict()}, path / "training_state.pt")
    (work / "specforge.log").write_text("step 3: {'acc': 0.5, 'loss': 1.25, 'grad_norm': 1.0, 'lr': 0.0}\n")
    result = train.run(config, RunFolder(tmp_path))
    assert (result.steps, result.loss, losses(tmp_path)) == (3, 1.25, {3: 1.25})
    loaded = DFlashDraftModel.from_pretrained(result.checkpoint, dtype=torch.bfloat16)
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.slow
def test_online_several_machines_get_one_command_each(tiny_target, few_rows, tmp_path):
    config = online(tiny_target, few_rows, "train.specforge.extra.deployment={trainer: {nnodes: 2, master_addr: one}, "
                    "disaggregated: {consumer_state_dir: /var/tmp/state}}")  # fmt: skip
    result = train.run(config, RunFolder(tmp_path))
    assert result.missing == [] and len(result.start) == 3
    assert "--role producer" in result.start[0]
    assert "--role consumer --node-rank 0" in result.start[1] and "--role consumer --node-rank 1" in result.start[2]
    producer, *consumers = json.loads(Path(result.plan).read_text())
    assert producer["role"] == "producer" and all("--nnodes" in c["commands"][0]["argv"] for c in consumers)
