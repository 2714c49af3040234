"""The native trainer: exact after any interruption, the same however its rows are spread."""

from __future__ import annotations

import importlib
import json
import linecache
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target, write_rows
from dflash.model import DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from dpace_cli import train
from dpace_cli.config import Config, TrainConfig
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import RunFolder, only_one
from dpace_cli.settings import load_config, save_config
from dpace_cli.trainers.native import learning_rate

SMALL = [
    "train.num_draft_layers=1", "train.block_size=4", "train.num_anchors=6", "train.batch_size=4",
    "train.max_length=128", "train.max_steps=6", "train.save_steps=2", "train.logging_steps=3",
    "train.learning_rate=3e-3", "train.val_rows=4",
]  # fmt: skip


def configured(target: Path, data: Path, *overrides: str) -> Config:
    flags = {"target.path": str(target), "train.data": str(data)}
    return load_config(flags=flags, overrides=[*SMALL, *overrides], environ={})[0]


def command(target: Path, data: Path, run: Path, *overrides: str) -> list[str]:
    where = ["--run", str(run), "--target", str(target), "--data", str(data)]
    return [sys.executable, "-m", "dpace_cli", "train", "--json", *where, *SMALL, *overrides]


def arm(run: Path) -> Path:
    return run / "train" / "dpace-seed0"


def final_weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted(arm(run).glob("step-*"))[-1] / "model.safetensors")


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (arm(run) / "metrics.jsonl").read_text().splitlines()]


def same_files(one: Path, two: Path) -> None:
    assert (arm(one) / "metrics.jsonl").read_bytes() == (arm(two) / "metrics.jsonl").read_bytes()
    assert sorted(p.name for p in arm(one).glob("step-*")) == sorted(p.name for p in arm(two).glob("step-*"))
    ours, theirs = final_weights(one), final_weights(two)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def undisturbed(tiny_target, answered_rows, tmp_path_factory) -> Path:
    """A training that nothing interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train.run(configured(tiny_target, answered_rows), RunFolder(folder))
    return folder


def test_training_lowers_the_loss_and_leaves_a_dflash_checkpoint(tiny_target, answered_rows, tmp_path):
    overrides = ["train.max_steps=60", "train.logging_steps=20", "train.learning_rate=1e-2", "train.num_anchors=24"]
    config = configured(tiny_target, answered_rows, *overrides, "train.objective=dflash")
    result = train.run(config, RunFolder(tmp_path))
    metrics = tmp_path / "train" / "dflash-seed0" / "metrics.jsonl"
    first, _, last = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert last["loss"] < 0.92 * first["loss"]
    assert last["accuracy"] > 1.1 * first["accuracy"]
    assert result.steps == 60 and math.isfinite(result.loss) and result.tokens_per_s > 0
    drafter = DFlashDraftModel.from_pretrained(result.checkpoint)
    assert drafter.block_size == 4
    assert result.rows == 36 and result.simulated_tau >= 1.0


def test_under_bf16_the_weights_stay_float32_and_the_losses_near(undisturbed, tiny_target, answered_rows, tmp_path):
    train.run(configured(tiny_target, answered_rows, "train.compute_dtype=bfloat16"), RunFolder(tmp_path))
    exact, rounded = final_weights(undisturbed), final_weights(tmp_path)
    assert all(tensor.dtype == torch.float32 for tensor in rounded.values())
    assert any(not torch.equal(exact[name], rounded[name]) for name in exact)
    assert losses(tmp_path) == pytest.approx(losses(undisturbed), rel=0.01)


def test_a_finished_training_is_not_run_again(undisturbed, tiny_target, answered_rows):
    made_at = (arm(undisturbed) / "step-000006" / "model.safetensors").stat().st_mtime_ns
    result = train.run(configured(tiny_target, answered_rows), RunFolder(undisturbed))
    assert result.steps == 6
    assert (arm(undisturbed) / "step-000006" / "model.safetensors").stat().st_mtime_ns == made_at


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_a_resumed_training_equals_an_undisturbed_one(tiny_target, answered_rows, tmp_path, cache):
    """The first part ends as a kill leaves it: after a checkpoint, with lines of metrics beyond it."""
    config = configured(tiny_target, answered_rows, f"train.cache={cache}", "train.accumulation_steps=2")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train.run(config, RunFolder(whole))
    shutil.copytree(whole, cut)
    (arm(cut) / "manifest.json").unlink()
    shutil.rmtree(arm(cut) / "step-000006")
    assert [p.name for p in sorted(arm(cut).glob("step-*"))][-1] == "step-000004"
    with open(arm(cut) / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    train.run(config, RunFolder(cut))
    same_files(cut, whole)


def test_kill_9_at_a_random_moment_changes_nothing(tiny_target, answered_rows, tmp_path, undisturbed):
    killed_and_resumed(command(tiny_target, answered_rows, tmp_path), tmp_path, kills=1, seed=time.time_ns())
    same_files(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["train.cache=disk"], ["train.cache=none", "train.accumulation_steps=2"]])
def test_twenty_kills_change_nothing(tiny_target, answered_rows, tmp_path, overrides):
    config = configured(tiny_target, answered_rows, *overrides, "train.max_steps=40")
    train.run(config, RunFolder(tmp_path / "whole"))
    arguments = command(tiny_target, answered_rows, tmp_path / "killed", *overrides, "train.max_steps=40")
    killed_and_resumed(arguments, tmp_path / "killed", kills=20, seed=1)
    same_files(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_kills_of_two_processes_change_nothing(tiny_target, answered_rows, tmp_path):
    for name, kills in (("whole", 0), ("killed", 5)):
        arguments = command(tiny_target, answered_rows, tmp_path / name, "train.nproc=2", "train.max_steps=40")
        killed_and_resumed(arguments, tmp_path / name, kills, seed=2)
    same_files(tmp_path / "killed", tmp_path / "whole")


def killed_and_resumed(arguments: list[str], run: Path, kills: int, seed: int) -> None:
    """Kill the command and all its processes at random moments after its start, then let it end."""
    draw = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(kills):
        process = subprocess.Popen(arguments, start_new_session=True, env=environment, stderr=subprocess.DEVNULL)
        wait_for_training(process, run)
        time.sleep(draw.uniform(0, 0.4))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(arguments, check=True, env=environment, stdout=subprocess.DEVNULL)


def wait_for_training(process: subprocess.Popen, run: Path) -> None:
    """Until the process has begun to train (its config is written after the imports), or is through."""
    before = time.time()
    while process.poll() is None and time.time() - before < 60:
        config = arm(run) / "config.yaml"
        if config.exists() and config.stat().st_mtime >= before - 1:
            return
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_first(tiny_target, answered_rows, tmp_path, number):
    arguments = command(tiny_target, answered_rows, tmp_path, "train.max_steps=100000", "train.save_steps=100000")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    metrics = arm(tmp_path) / "metrics.jsonl"
    limit = time.time() + 60
    while not metrics.exists() and time.time() < limit:
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, said
    assert "run the same command again" in said and "Traceback" not in said
    (saved,) = arm(tmp_path).glob("step-*")
    assert json.loads((saved / "trainer_state.json").read_text())["step"] >= 3


# --- one at a time ---------------------------------------------------------------------------------------


def training(arguments: list[str], run: Path) -> subprocess.Popen:
    """A process that is in the middle of a training without end."""
    endless = ["train.max_steps=100000", "train.save_steps=100000", "train.logging_steps=1"]
    process = subprocess.Popen(
        [*arguments, *endless], start_new_session=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    limit = time.time() + 120
    while not (arm(run) / "metrics.jsonl").exists():
        assert process.poll() is None and time.time() < limit
        time.sleep(0.05)
    return process


def is_free(lock: Path) -> bool:
    try:
        with only_one(lock):
            return True
    except UsageError:
        return False


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_training_of_an_arm_is_refused_while_the_first_is_at_work(tiny_target, answered_rows, tmp_path, nproc):
    first = training(command(tiny_target, answered_rows, tmp_path, f"train.nproc={nproc}"), tmp_path)
    try:
        holder = int((arm(tmp_path) / "lock").read_text())
        assert holder == first.pid or nproc == 2
        Path(f"/proc/{holder}").stat()
        for processes in (1, 2):
            second = configured(tiny_target, answered_rows, f"train.nproc={processes}", "train.cache=none")
            for restart in (False, True):
                with pytest.raises(UsageError, match=rf"another process \({holder}\) is at work in {arm(tmp_path)}"):
                    train.run(second, RunFolder(tmp_path), restart=restart)
        lines = (arm(tmp_path) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, len(lines) + 1))
        # Another arm of the same run may train at the same time.
        assert train.run(configured(tiny_target, answered_rows, "train.seed=1"), RunFolder(tmp_path)).steps == 6
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    # All processes die with their launcher, and the system lets go of a dead process's lock.
    limit = time.time() + 60
    while not is_free(arm(tmp_path) / "lock") and time.time() < limit:
        time.sleep(0.05)
    assert train.run(configured(tiny_target, answered_rows), RunFolder(tmp_path), restart=True).steps == 6


def test_an_objective_that_is_not_there_leaves_no_folder(tiny_target, answered_rows, tmp_path):
    config = configured(tiny_target, answered_rows, "train.objective=no_such_module_anywhere:loss")
    with pytest.raises(UsageError, match="no module no_such_module_anywhere"):
        train.run(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_restart_under_a_torchrun_of_the_user_forgets_the_earlier_training(tiny_target, answered_rows, tmp_path):
    first = train.run(configured(tiny_target, answered_rows), RunFolder(tmp_path))
    manifest = arm(tmp_path) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    save_config(configured(tiny_target, answered_rows), tmp_path / "again.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "-m", "dpace_cli", "train", "--config", str(tmp_path / "again.yaml"), "--restart", "--json"],
        check=True, capture_output=True, env={**os.environ, "DPACE_RUN": str(tmp_path)},
    )  # fmt: skip
    assert json.loads(done.stdout)["steps"] == first.steps, "one JSON object, of the first process"
    again = json.loads(manifest.read_text())
    assert manifest.stat().st_mtime_ns > before and again["result"]["steps"] == first.steps
    lines = (arm(tmp_path) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [3, 6]


def test_of_two_processes_of_dpaces_own_the_launcher_alone_prints_the_result(tiny_target, answered_rows, tmp_path):
    done = subprocess.run(
        command(tiny_target, answered_rows, tmp_path, "train.nproc=2"), check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout)["steps"] == 6
    assert '"checkpoint"' not in done.stderr and "training rows" in done.stderr


def test_the_time_of_all_starts_is_summed(tiny_target, answered_rows, tmp_path):
    config = configured(tiny_target, answered_rows)
    whole = train.run(config, RunFolder(tmp_path))
    (arm(tmp_path) / "manifest.json").unlink()
    shutil.rmtree(arm(tmp_path) / "step-000006")
    state = arm(tmp_path) / "step-000004" / "trainer_state.json"
    saved = json.loads(state.read_text())
    assert 0 < saved["step_seconds"] < saved["seconds"] < whole.seconds
    state.write_text(json.dumps({**saved, "seconds": 2e6, "step_seconds": 1e6}))
    again = train.run(config, RunFolder(tmp_path))
    assert 2e6 < again.seconds < 2.1e6
    assert 0 < again.tokens_per_s < 1  # of some thousand tokens


# --- memory ----------------------------------------------------------------------------------------------

LIMIT = 24 << 20
"""What a training may grow by in memory of its own."""


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory) -> Path:
    """A target with so wide states that a few rows of them are more than LIMIT."""
    return make_tiny_target(tmp_path_factory.mktemp("wide"), hidden_size=256, head_dim=64)


def own_memory(target: Path, data: Path, run: Path, *overrides: str) -> list[tuple[int, int]]:
    """(lines of metrics so far, bytes of a training's own memory), sampled as it goes.

    Pages of mapped files are not counted: the system takes them back where it needs them.
    """
    start = (
        "from dpace_cli.cli import main; from dpace_cli.modeling import capture; capture.SHARD_BYTES = 1 << 21; main()"
    )
    arguments = [sys.executable, "-c", start, *command(target, data, run, *overrides)[3:]]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    samples = []
    metrics = arm(run) / "metrics.jsonl"
    while process.poll() is None:
        lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
        if found:
            samples.append((lines, int(found[1]) << 10))
        time.sleep(0.02)
    assert process.returncode == 0
    return samples


def peak(samples: list[tuple[int, int]]) -> int:
    return max(size for _, size in samples)


def test_memory_stays_flat_over_a_long_run_and_with_a_cache_on_disk_beyond_its_limit(wide_target, tmp_path):
    long_run = ["train.target_layer_ids=[0,1,2]", "train.val_rows=0", "train.save_steps=1000", "train.logging_steps=10",
                "train.cache=disk"]  # fmt: skip
    used = {}
    for name, rows, steps in (("few", 8, 20), ("many", 320, 120)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
        used[name] = own_memory(wide_target, tmp_path / f"{name}.jsonl", tmp_path / name, *long_run,
                                f"train.max_steps={steps}")  # fmt: skip
    cache = sum(file.stat().st_size for file in (tmp_path / "many" / "train" / "cache").iterdir())
    assert cache > 3 * LIMIT
    assert peak(used["many"]) - peak(used["few"]) < LIMIT
    early, late = ([size for line, size in used["many"] if line in lines] for lines in ((2, 3, 4), (9, 10, 11)))
    assert early and late and max(late) - max(early) < LIMIT / 4
    # The same cache held in memory would be noticed.
    held = own_memory(wide_target, tmp_path / "many.jsonl", tmp_path / "held", *long_run, "train.cache=memory",
                      "train.max_steps=4")  # fmt: skip
    assert peak(held) - peak(used["few"]) > 3 * LIMIT


# --- processes -------------------------------------------------------------------------------------------


def on_two_processes(target: Path, data: Path, run: Path, *overrides: str) -> None:
    arguments = command(target, data, run, "train.nproc=2", "train.cache=none", *overrides)
    subprocess.run(arguments, check=True, timeout=200, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_two_processes_and_two_micro_batches_equal_one(tiny_target, answered_rows, tmp_path):
    steps = ["train.max_steps=10", "train.logging_steps=1", "train.save_steps=10"]
    for name, spread in (("one", ["train.batch_size=8"]), ("micro", ["train.accumulation_steps=2"])):
        config = configured(tiny_target, answered_rows, *steps, *spread, "train.cache=none")
        train.run(config, RunFolder(tmp_path / name))
    on_two_processes(tiny_target, answered_rows, tmp_path / "two", *steps)
    expected = losses(tmp_path / "one")
    assert len(expected) == 10
    for name in ("micro", "two"):
        assert losses(tmp_path / name) == pytest.approx(expected, rel=1e-5)
        for key, value in final_weights(tmp_path / "one").items():
            assert torch.allclose(final_weights(tmp_path / name)[key], value, atol=2e-4)


def test_a_process_without_rows_does_not_hang(tiny_target, tmp_path):
    data = tmp_path / "train.jsonl"
    row = {"id": "only", "conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcdef"}]}
    data.write_text(json.dumps(row) + "\n")
    train.run(configured(tiny_target, data, "train.max_steps=2", "train.cache=none"), RunFolder(tmp_path / "one"))
    on_two_processes(tiny_target, data, tmp_path / "two", "train.max_steps=2")
    for key, value in final_weights(tmp_path / "one").items():
        assert torch.allclose(final_weights(tmp_path / "two")[key], value, atol=1e-5)


def test_a_failed_process_ends_all_with_its_own_error(tiny_target, answered_rows, tmp_path):
    arguments = command(tiny_target, answered_rows, tmp_path, "train.nproc=2", "train.target_layer_ids=[9]")
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ids must ascend from 0 to 2" in done.stderr and "a training process failed" in done.stderr


# --- what goes wrong -------------------------------------------------------------------------------------


def test_harmless_changes_go_on_and_others_are_refused_by_name(undisturbed, tiny_target, answered_rows, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    refused = configured(tiny_target, answered_rows, "train.learning_rate=1e-3", "train.objective.alpha=0.7")
    with pytest.raises(UsageError) as error:
        train.run(refused, folder)
    assert "learning_rate: 0.003 -> 0.001" in error.value.message and "alpha" in error.value.message
    assert "block_size" not in error.value.message
    result = train.run(configured(tiny_target, answered_rows, "train.logging_steps=5"), folder)
    assert result.steps == 6
    assert train.run(refused, folder, restart=True).steps == 6


def test_other_data_is_refused(undisturbed, tiny_target, answered_rows, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(answered_rows.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(UsageError, match="training data"):
        train.run(configured(tiny_target, data), RunFolder(tmp_path / "run"))


def test_a_loss_that_is_not_finite_can_be_replayed(tmp_path, answered_rows):
    target = make_tiny_target(tmp_path / "broken")
    weights = load_file(target / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"][:] = float("inf")
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="the loss of step 0 is nan") as error:
        train.run(configured(target, answered_rows), RunFolder(tmp_path / "run"))
    (failed,) = arm(tmp_path / "run").glob("failed-*")
    assert str(failed) in error.value.hint
    rows = train.replay(failed).rows
    assert len(rows) == 4 and not any(row["states_finite"] for row in rows)
    assert all(row["weights_finite"] for row in rows)


def test_short_answers_train_on_what_they_have(tiny_target, tmp_path):
    data = tmp_path / "train.jsonl"
    answers = ["", "b", "a long enough answer for several blocks"]
    rows = [{"id": str(i), "conversations": [{"role": "user", "content": "x"}, {"role": "assistant", "content": a}]}
            for i, a in enumerate(answers)]  # fmt: skip
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = train.run(configured(tiny_target, data, "train.max_steps=2"), RunFolder(tmp_path / "run"))
    assert result.rows == 2 and sum(result.skipped.values()) == 1


@pytest.mark.parametrize(("text", "message"), [("", "no row to train on"), ('{"id": "x"}\n', "train.jsonl")])
def test_data_without_rows_ends_before_a_model_is_loaded(tiny_target, tmp_path, text, message, monkeypatch):
    monkeypatch.setattr(train, "load_target", None)
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises((UsageError, RunError), match=message):
        train.run(configured(tiny_target, tmp_path / "train.jsonl"), RunFolder(tmp_path / "run"))


def test_missing_data_says_which_stage_makes_it(tiny_target, tmp_path):
    with pytest.raises(UsageError) as error:
        train.run(configured(tiny_target, tmp_path / "none.jsonl"), RunFolder(tmp_path))
    assert "dpace regen" in error.value.hint


def test_states_beyond_the_limit_are_an_error_with_their_size(tiny_target, answered_rows, tmp_path):
    with pytest.raises(UsageError, match="cache_limit_gb"):
        train.run(configured(tiny_target, answered_rows, "train.cache_limit_gb=1e-9"), RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("kind", "theirs"), [("cosine", get_cosine_schedule_with_warmup), ("linear", get_linear_schedule_with_warmup)]
)
def test_the_schedule_is_that_of_transformers(kind, theirs):
    config = TrainConfig(learning_rate=0.5, warmup_ratio=0.1, lr_scheduler_type=kind)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule = theirs(optimizer, num_warmup_steps=10, num_training_steps=100)
    for step in range(100):
        # Transformers starts its warm-up at a rate of 0, which makes the first step do nothing.
        ours = learning_rate(config, step - 1 if step <= 10 else step, 100) if step else 0.0
        assert ours == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        schedule.step()


def test_arms_of_one_seed_share_weights_order_and_anchors(undisturbed, tiny_target, answered_rows, tmp_path):
    first = train.run(configured(tiny_target, answered_rows), RunFolder(undisturbed))
    other = train.run(configured(tiny_target, answered_rows, "train.objective=dflash"), RunFolder(tmp_path))
    assert first.hashes == other.hashes
    seeded = train.run(configured(tiny_target, answered_rows, "train.seed=1"), RunFolder(tmp_path))
    assert all(first.hashes[name] != seeded.hashes[name] for name in first.hashes)


def test_a_training_under_another_target_setting_or_an_edited_function_is_refused(
    tiny_target, answered_rows, undisturbed, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    with pytest.raises(UsageError, match=r"target\.dtype: auto -> bfloat16"):
        train.run(configured(tiny_target, answered_rows, "target.dtype=bfloat16"), RunFolder(folder))

    monkeypatch.chdir(tmp_path)
    own = tmp_path / "edited_losses.py"
    own.write_text("def loss(logq):\n    return -logq\n")
    chosen = configured(tiny_target, answered_rows, "train.objective=edited_losses:loss", "train.max_steps=2")
    train.run(chosen, RunFolder(tmp_path / "own"))
    train.run(chosen, RunFolder(tmp_path / "own"))  # the same function: nothing is left to do
    own.write_text("def loss(logq):\n    return -2 * logq\n")
    sys.modules.pop("edited_losses")
    linecache.clearcache()
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match=r"objective \(source\)"):
        train.run(chosen, RunFolder(tmp_path / "own"))


def test_a_copy_of_a_checkpoint_beside_it_disturbs_nothing(tiny_target, answered_rows, undisturbed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    last = sorted(arm(folder).glob("step-*"))[-1]
    shutil.copytree(last, last.with_name(f"{last.name}-backup"))
    assert [ref.path for ref in RunFolder(folder).checkpoints("all")][-1] == last
    assert train.run(configured(tiny_target, answered_rows), RunFolder(folder)).steps == 6
