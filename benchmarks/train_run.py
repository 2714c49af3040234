"""A whole training run of the demo: dpace's native trainer against SpecForge 0.2.0's offline trainer.

    python benchmarks/train_run.py --quick
    python benchmarks/train_run.py --run runs/demo

Both start from the same rows with answers, capture the target's states (the same capture, its time counted in
both), take the same number of steps and measure simulated acceptance on the same held-out rows. Each run is a
process of its own, from its start to its end. Prints one JSON document; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from _common import machine

ENGINES = ("native", "specforge")

EQUAL = ["train.weight_decay=0", "train.keep_last=1"]
"""SpecForge has no weight decay."""

SAMPLE_S = 0.2
"""Seconds between two looks at the memory of a run."""


def main() -> None:
    options = arguments()
    with tempfile.TemporaryDirectory() as scratch:
        run = options.run or make_rows(Path(scratch) / "rows", options)
        runs: list[dict[str, Any]] = []
        for number in range(options.rounds):
            for engine in ENGINES if number % 2 == 0 else ENGINES[::-1]:
                output = Path(scratch) / f"{engine}-{number}"
                runs.append({"round": number, "engine": engine, **measure(engine, run, output, options)})
                print(json.dumps(runs[-1]), file=sys.stderr)
    print(json.dumps(summary(runs, options), indent=2))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="run folder of the demo with answers; default: one is made")
    parser.add_argument("--rows", type=int, default=2048, help="prompts that are answered where no run is given")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each trainer")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--objective", default="dpace")
    parser.add_argument("--quick", action="store_true", help="one round, few rows, few steps")
    parser.add_argument("overrides", nargs="*", help="config values for both, such as train.cache=none")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.rows = 1, min(options.steps, 20), min(options.rows, 128)
    options.clock, options.dtype = "wall", "float32"
    return options


def make_rows(run: Path, options: argparse.Namespace) -> Path:
    """Prompts of the embedded generator, answered by the embedded target."""
    dpace("prep", "demo", "--preset", "demo", "--run", str(run), "--max-rows", str(options.rows), options=options)
    dpace("regen", "--run", str(run), options=options)
    return run


def measure(engine: str, run: Path, output: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, in a process of its own.

    Returns:
        Wall and processor seconds of the run with all its processes, their highest memory together, and what
        came out of it.
    """
    config = [
        f"train.max_steps={options.steps}", f"train.save_steps={options.steps}", f"train.nproc={options.nproc}",
        f"train.objective={options.objective}", *EQUAL, *options.overrides,
    ]  # fmt: skip
    started = time.perf_counter()
    process = start("train", "--json", "--run", str(run), "--output", str(output), "--engine", engine, *config,
                    options=options)  # fmt: skip
    memory = Memory(process.pid)
    answer = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    memory.stop()
    if status != 0:
        raise SystemExit(f"the training by {engine} failed; its error is above")
    result = json.loads(answer)
    return {
        "wall_s": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": memory.peak,
        "simulated_tau": result["simulated_tau"],
        "loss": result["loss"],
        "steps": result["steps"],
        "rows": result["rows"],
        **steps_alone(output / "specforge" / "specforge.log"),
    }


def steps_alone(log: Path) -> dict[str, float]:
    """Seconds of a step as SpecForge itself logs it, its start left out."""
    found = re.findall(r"'perf/optimizer_step_time_s': ([0-9.e-]+)", log.read_text("utf-8")) if log.exists() else []
    return {"logged_step_s": statistics.median(map(float, found))} if found else {}


class Memory:
    """The highest memory of a process and its descendants together; pages that they share are counted once."""

    def __init__(self, pid: int) -> None:
        self.peak, self._root, self._ended = 0, psutil.Process(pid), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            total = 0
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    total += _resident(process)
            except psutil.Error:  # one has just ended
                continue
            self.peak = max(self.peak, total)


def _resident(process: psutil.Process) -> int:
    full = process.memory_full_info()
    return getattr(full, "pss", full.rss)


def summary(runs: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    def ratio(field: str) -> float:
        """Median over rounds of native / specforge."""
        rounds = [[r[field] for engine in ENGINES for r in runs if (r["round"], r["engine"]) == (number, engine)]
                  for number in range(options.rounds)]  # fmt: skip
        return statistics.median(ours / theirs for ours, theirs in rounds)

    def median(field: str) -> dict[str, float]:
        return {engine: statistics.median(r[field] for r in runs if r["engine"] == engine) for engine in ENGINES}

    return {
        "machine": machine(options),
        "steps": options.steps,
        "rows": runs[0]["rows"],
        "nproc": options.nproc,
        "objective": options.objective,
        "ratio_native_to_specforge": {field: ratio(field) for field in ("wall_s", "cpu_s", "peak_bytes")},
        "wall_ratio_aimed_at": {"most": 2 / 3, "hoped": 1 / 2},
        "median": {field: median(field) for field in ("wall_s", "cpu_s", "peak_bytes", "simulated_tau")},
        "runs": runs,
    }


def dpace(*command: str, options: argparse.Namespace) -> None:
    process = start(*command, options=options)
    process.stdout.read()
    if process.wait() != 0:
        raise SystemExit(f"dpace {command[0]} failed; its error is above")


def start(*command: str, options: argparse.Namespace) -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DPACE_")}
    environment["OMP_NUM_THREADS"] = str(options.threads)
    return subprocess.Popen(
        [sys.executable, "-m", "dpace_cli", *command], stdout=subprocess.PIPE, env=environment, text=True
    )


if __name__ == "__main__":
    main()
