"""The scripts in benchmarks/ run and print one JSON document; what they measure is for a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
TINY = ("--shape", "tiny", "--rounds", "2", "--no-memory")


def run(name: str, *options: str) -> dict:
    done = subprocess.run([sys.executable, str(SCRIPTS / name), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_head_and_loss_agree_with_specforge_where_they_are_compared():
    results = run("objective.py", *TINY)["results"]
    assert [r["objective"] for r in results] == ["dflash", "dpace"]
    assert all(r["loss_difference"] < 1e-5 and r["gradient_difference"] < 1e-5 for r in results)
    assert all(r["times_the_floor"] > 0 and r["speedup_over_specforge"] > 0 for r in results)


def test_steps_agree_with_specforge_where_they_are_compared():
    (result,) = run("step.py", *TINY)["results"]
    differences = [value for found in result["agreement"].values() for value in found.values()]
    assert len(differences) == 4 and max(differences) < 1e-5
    assert {"speedup_over_specforge", "dpace_over_dflash", "times_the_floor"} <= result.keys()


def test_captured_states_are_those_of_the_whole_pass():
    (result,) = run("capture.py", *TINY)["results"]
    assert result["states_equal"]
    assert set(result["read_tokens_per_s"]) == {"none", "memory", "disk", "specforge_files"}


def test_simulated_steps_are_those_of_decoding_where_they_are_compared():
    found = run("simulate.py", "--prompts", "3", "--max-new-tokens", "12", "--rounds", "1")
    (drafter,) = found["drafters"]
    assert drafter["equal_steps"] == [drafter["equal_answers"]] * 2 == [3, 3]
    assert all(ratio > 0 for ratio in found["times_as_fast"].values())


def test_the_gpu_script_runs_at_a_small_size_without_one():
    found = run("gpu.py", "--small", "--rounds", "1")
    assert found["small"] and not found["failed"]
    assert {"dpace", "dpace_uncached", "dflash", "dflash_uncached", "capture"} <= found["step_ms"].keys()
    assert found["losses"]["dpace"] == found["losses"]["dpace_uncached"]


@pytest.mark.slow
def test_the_memory_of_each_arm_is_measured_in_its_own_process():
    (result,) = run("step.py", "--shape", "demo", "--rounds", "1")["results"]
    assert 0 < result["peak_bytes"]["dpace"] < result["peak_bytes"]["specforge"]


@pytest.mark.slow
def test_whole_trainings_are_compared():
    found = run("train_run.py", "--quick", "--steps", "4", "--rows", "64", "--threads", "1")
    assert {r["engine"] for r in found["runs"]} == {"native", "specforge"}
    assert all(r["steps"] == 4 and r["peak_bytes"] > 0 for r in found["runs"])


@pytest.mark.slow
def test_estimates_are_compared_with_a_measured_training():
    found = run("estimate.py", "--case", "demo")["demo"]
    assert 0.5 < found["memory_ratio"] < 2
