"""The whole pipeline: what `dpace run` reports, what it skips, and that a kill at any stage changes nothing."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dpace_cli import run
from dpace_cli.config import Config
from dpace_cli.errors import UsageError
from dpace_cli.records import RunFolder, find_checkpoints
from dpace_cli.settings import load_config

SMALL = [
    "prep.max_rows=48", "regen.max_new_tokens=48", "regen.batch_size=16", "train.max_steps=4", "train.save_steps=2",
    "train.val_rows=4", "train.num_draft_layers=1", "bench.num_prompts=2", "bench.max_new_tokens=24",
    "bench.datasets=[demo-math, demo-code]", "report.bootstrap_samples=200", "weights.num_rows=4",
]  # fmt: skip


def small(*overrides: str) -> Config:
    return load_config(preset="demo", overrides=[*SMALL, *overrides], environ={})[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[RunFolder, run.RunResult]:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "demo")
    return folder, run.run(small(), folder)[0]


def test_every_stage_leaves_its_files(finished):
    folder, result = finished
    for name in ("prep/prompts.jsonl", "prep/manifest.json", "regen/train.jsonl", "regen/manifest.json",
                 "train/dpace-seed0/step-000004/model.safetensors", "bench/dflash-seed0/demo-math-t0.json",
                 "report/report.md", "report/report.html"):  # fmt: skip
        assert (folder / name).exists(), name
    assert all(Path(file).exists() for file in result.report.values())
    assert len((folder / "regen/train.jsonl").read_text().splitlines()) == 48


def test_arms_are_paired_and_compared_with_the_first(finished):
    _, result = finished
    assert result.paired == {"initial_weights": True, "data_order": True, "anchors": True}
    first, second = result.arms
    assert (first["arm"], second["arm"]) == ("dflash", "dpace")
    for arm in result.arms:
        for dataset in ("demo-math", "demo-code"):
            measured = arm["datasets"][dataset]
            assert measured["tau"] >= 1 and measured["sr"] > 0 and measured["lossless"] == 1.0
    for name in ("delta_tau", "delta_sr"):
        assert second[name]["low"] <= second[name]["value"] <= second[name]["high"]


def test_a_second_run_does_nothing_again(finished):
    folder, _ = finished
    before = {path: path.stat().st_mtime_ns for stage in ("prep", "regen", "train", "bench")
              for path in (folder / stage).rglob("*") if path.is_file() and path.name != "lock"}  # fmt: skip
    run.run(small(), folder)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_arms_trained_on_other_draws_are_refused(finished):
    folder, _ = finished
    manifest = folder / "train/dpace-seed0/manifest.json"
    original = manifest.read_text()
    changed = json.loads(original)
    changed["result"]["hashes"]["anchors"] = "other"
    manifest.write_text(json.dumps(changed))
    try:
        with pytest.raises(run.RunError, match="do not share anchors"):
            run.run(small(), folder)
    finally:
        manifest.write_text(original)


def test_an_online_training_is_refused_before_anything_is_made(tmp_path):
    config = small("train.engine=specforge", "train.specforge.mode=online")
    with pytest.raises(UsageError, match="dpace run cannot train online") as refused:
        run.run(config, RunFolder(tmp_path / "run"))
    assert "dpace train --engine specforge" in refused.value.hint and not (tmp_path / "run").exists()


def test_checkpoints_are_found_by_run_and_by_pattern(finished):
    folder, _ = finished
    assert [ref.folder for ref in find_checkpoints(folder, None)] == ["dflash-seed0", "dpace-seed0"]
    trajectory = find_checkpoints(folder, [str(folder / "train/dpace-seed0/step-*")])
    assert [(ref.arm, ref.seed, ref.step) for ref in trajectory] == [("dpace", 0, 2), ("dpace", 0, 4)]
    with pytest.raises(UsageError, match="no folder with a config"):
        find_checkpoints(folder, ["nowhere/step-*"])
    with pytest.raises(UsageError, match="has no checkpoint"):
        find_checkpoints(RunFolder(folder.root / "empty"), None)


@pytest.mark.slow
def test_kill_9_in_every_stage_changes_nothing(finished, tmp_path):
    whole, _ = finished
    killed = RunFolder(tmp_path / "demo")
    command = [sys.executable, "-m", "dpace_cli", "run", "--preset", "demo", "--run", str(killed.root), *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    draw = random.Random(0)
    for stage in range(1, 8):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for line in process.stderr:
            if line.startswith(f"[{stage}/7]"):
                break
        time.sleep(draw.uniform(0, 1.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert results(killed) == results(whole)


TIMINGS = re.compile(r"seconds|started|_s$|_per_s|^sr|delta_sr|time|speed")


def results(folder: RunFolder) -> dict[str, Any]:
    """Every result file of a run, timings and paths taken out."""
    found: dict[str, Any] = {}
    for path in sorted(p for p in folder.root.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder.root))
        if (name.startswith(("prep/", "regen/")) and path.suffix == ".jsonl") or name.endswith(
            ("metrics.jsonl", "model.safetensors")
        ):
            found[name] = path.read_bytes()
        elif name.startswith(("bench/", "weights/")) and path.suffix == ".json":
            found[name] = without_timings(json.loads(path.read_text()), str(folder.root))
    return found


def without_timings(value: Any, root: str) -> Any:
    if isinstance(value, dict):
        return {k: without_timings(v, root) for k, v in value.items() if not TIMINGS.search(k)}
    if isinstance(value, list):
        return [without_timings(item, root) for item in value]
    return value.replace(root, "RUN") if isinstance(value, str) else value
