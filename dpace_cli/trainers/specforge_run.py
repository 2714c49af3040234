"""The course of a training by SpecForge: what it logs becomes metrics, its checkpoints become DFlash checkpoints.

Everything of SpecForge's is in `specforge/` of the arm's folder: its config, its log, its checkpoints, and
`state.json`, which says how far dpace has come with them.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from dflash.model import DFlashDraftModel

from dpace_cli import console
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.checkpoint import STATE_JSON, checkpoint_name, prune, save_checkpoint
from dpace_cli.records import read_json, write_json, writing
from dpace_cli.trainers.base import Job, Outcome
from dpace_cli.trainers.specforge_config import Schedule, nodes
from dpace_cli.trainers.specforge_process import Program, StepLog, drafter_weights, saved_steps, stop
from dpace_cli.trainers.trackers import Trackers

POLL_S = 0.2
"""Seconds between two looks at SpecForge's log."""

METRICS = {"lr": "learning_rate", "loss": "loss", "grad_norm": "grad_norm", "acc": "accuracy"}
"""SpecForge's names of what it logs, and ours."""


class Course:
    """One training by SpecForge, from its first start to its last checkpoint.

    Args:
        job: the drafter to train.
        schedule: its steps.
        hashes: of what paired arms share.
        drafter: makes a drafter of the right shape; called once, when the first checkpoint is there.
        validate: simulated acceptance length of a drafter; None where it cannot be measured.
    """

    def __init__(
        self, job: Job, schedule: Schedule, hashes: Mapping[str, str], drafter: Callable[[], DFlashDraftModel],
        validate: Callable[[DFlashDraftModel], float | None],
    ) -> None:  # fmt: skip
        self.job, self.train, self.schedule = job, job.config.train, schedule
        self._make_drafter, self._drafter, self._validate = drafter, None, validate
        self.work = job.output / "specforge"
        self.checkpoints = self.work / "checkpoints"
        self.config_file = self.work / "config.yaml"
        self.log = StepLog(self.work / "specforge.log")
        self.identity: dict[str, Any] = {}
        self.state: dict[str, Any] = {
            "hashes": dict(hashes), "best": {"tau": None, "checkpoint": None}, "converted": 0, "loss": None,
            "done": False, "seconds": 0.0, "step_seconds": 0.0,
        }  # fmt: skip
        self._earlier = (0.0, 0.0)  # seconds and step_seconds of earlier starts
        self._began: float | None = None  # SpecForge's process, in this start

    @property
    def done(self) -> bool:
        return self.state["done"]

    def saved(self, after: int = 0) -> dict[int, Path]:
        """SpecForge's complete checkpoints by step."""
        return saved_steps(self.checkpoints, self.train.nproc * nodes(self.job.config), after)

    def begin(self, identity: Mapping[str, Any]) -> bool:
        """Read what an earlier start left; False where that was another training, of which nothing is worth keeping.

        Args:
            identity: what decides the result.
        Raises:
            UsageError: another training has left checkpoints here.
        """
        if any(self.job.output.glob(f"step-*/{STATE_JSON}")):
            raise UsageError(
                f"{self.job.output} holds a training by --engine native",
                "choose another --output or run name, or pass --restart to begin anew",
            )
        self.identity = json.loads(json.dumps(identity))
        saved = read_json(self.work / "state.json") if (self.work / "state.json").exists() else {}
        then = saved.pop("identity", {})
        changed = [f"{key}: {then.get(key)} -> {self.identity.get(key)}" for key in sorted({*then, *self.identity})
                   if then.get(key) != self.identity.get(key)]  # fmt: skip
        if not changed:
            self.state |= saved
            self._earlier = (self.state["seconds"], self.state["step_seconds"])
        elif saved and (saved["done"] or self.saved()):
            raise UsageError(
                f"{self.job.output} holds a training under another config; changed: {'; '.join(changed)}",
                "undo the change, choose another --output or run name, or pass --restart to begin anew",
            )
        self._save_state()
        return not changed

    def write_config(self, generated: Mapping[str, Any]) -> None:
        """Write SpecForge's config file."""
        with writing(self.config_file) as file:
            yaml.safe_dump(dict(generated), file, sort_keys=False)

    def follow(self, program: Program, version: str, resumed: int) -> None:
        """Run SpecForge from a step to its end.

        Raises:
            RunError: it failed, or the loss is not finite.
            Interrupted: a signal came in; SpecForge is stopped.
        """
        self.read_log(resumed)
        console.note(f"SpecForge {version} trains with {self.train.nproc} process(es); its log is {self.log.path}")
        self._began, last, ended = time.monotonic(), resumed, False
        with (
            console.meter("train (specforge)", self.schedule.steps, "steps", resumed) as progress,
            Trackers(self.train.report_to, self.job.output, self.job.config.model_dump(mode="json")) as trackers,
            open(self.log.path, "ab") as log,
        ):
            process = program.start(self.config_file, log, self.job.lock)
            try:
                while not ended:
                    ended = process.poll() is not None  # asked first: what it wrote last is then in the log
                    for step, numbers in self.log.new_steps():
                        if step > last:  # every process logs the same line
                            last = step
                            trackers.log(self._log_step(step, numbers), step)
                            progress.update(step, f"loss {numbers['loss']:.4g}")
                    self.convert()
                    if not ended:
                        time.sleep(POLL_S)
            finally:
                stop(process)
                self._save_state()
                self._earlier, self._began = (self._earlier[0], self.state["step_seconds"]), None
        if process.returncode != 0:
            raise RunError(f"SpecForge failed ({_ending(process)}): {self.log.reason()}", f"its log is {self.log.path}")

    def convert(self) -> None:
        """Turn SpecForge's new checkpoints into DFlash's format, and measure them."""
        for step, path in self.saved(after=self.state["converted"]).items():
            self._drafter = self._drafter or self._make_drafter()
            try:
                self._drafter.load_state_dict(drafter_weights(path))
            except FileNotFoundError:
                continue  # a newer one has taken its place
            name = checkpoint_name(step)
            save_checkpoint(self.job.output / name, self._drafter)
            tau, best = self._validate(self._drafter), self.state["best"]
            if tau is not None and (best["tau"] is None or tau > best["tau"]):
                self.state["best"] = {"tau": tau, "checkpoint": name}
            self.state["converted"] = step
            self._save_state()
            kept = self.state["best"]["checkpoint"] if self.train.keep_best else None
            prune(self.job.output, self.train.keep_last, kept)

    def finish(self) -> None:
        """Note that the last step is there.

        Raises:
            RunError: it is not.
        """
        if self.state["converted"] != self.schedule.steps:
            raise RunError(
                f"SpecForge ended at step {self.state['converted']}, not at {self.schedule.steps}",
                f"its log is {self.log.path}",
            )
        self.state["done"] = True
        self._save_state()

    def clear(self, *folders: Path) -> None:
        """Delete what only SpecForge needs, unless it is to be kept."""
        if not self.train.specforge.keep_files:
            for folder in (self.checkpoints, *folders):
                shutil.rmtree(folder, ignore_errors=True)

    def outcome(self) -> Outcome:
        """What `train` returns of a finished training."""
        return Outcome(
            checkpoint=self.job.output / checkpoint_name(self.schedule.steps),
            steps=self.schedule.steps,
            loss=math.nan if self.state["loss"] is None else self.state["loss"],
            tokens=round(self.schedule.steps * self.schedule.sequences * self._mean_tokens()),
            seconds=self.state["seconds"],
            step_seconds=self.state["step_seconds"],
            hashes=self.state["hashes"],
            simulated_tau=self.state["best"]["tau"],
        )

    def read_log(self, until: int) -> None:
        """Begin the files of metrics with the logged steps up to `until`.

        The log has every step of every start; those after the checkpoint are trained again.
        """
        steps = {step: self._lines(step, numbers) for step, numbers in self.log.new_steps() if step <= until}
        for name, part in (("metrics.jsonl", 0), ("timing.jsonl", 1)):
            with writing(self.job.output / name) as file:
                file.writelines(json.dumps(steps[step][part]) + "\n" for step in sorted(steps))
        if steps:
            self.state["loss"] = steps[max(steps)][0]["loss"]

    # --- metrics -----------------------------------------------------------------------------------------

    def _log_step(self, step: int, numbers: Mapping[str, float]) -> dict[str, Any]:
        """One line of metrics and one of timing.

        Raises:
            RunError: the loss is not finite.
        """
        line, timing = self._lines(step, numbers)
        if not math.isfinite(line["loss"]):
            raise RunError(
                f"the loss of step {step} is {line['loss']}; SpecForge was stopped",
                "a lower train.learning_rate often helps; --restart begins anew",
            )
        for name, value in (("metrics.jsonl", line), ("timing.jsonl", timing)):
            with open(self.job.output / name, "a", encoding="utf-8") as file:
                file.write(json.dumps(value) + "\n")
        self.state["loss"] = line["loss"]
        return {**line, "tokens_per_s": timing["tokens_per_s"]}

    def _lines(self, step: int, numbers: Mapping[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
        line = {"step": step, "epoch": step * self.schedule.sequences / len(self.job.rows)}
        line |= {ours: numbers[name] for name, ours in METRICS.items() if name in numbers}
        rate = numbers.get("perf/global_samples_per_second", 0.0) * self._mean_tokens()
        return line, {"step": step, "tokens_per_s": rate}

    def _mean_tokens(self) -> float:
        return sum(len(row.input_ids) for row in self.job.rows) / len(self.job.rows)

    def _save_state(self) -> None:
        now = time.monotonic()
        self.state["seconds"] = self._earlier[0] + now - self.job.started
        self.state["step_seconds"] = self._earlier[1] + (now - self._began if self._began is not None else 0.0)
        write_json(self.work / "state.json", {**self.state, "identity": self.identity})


def _ending(process: subprocess.Popen) -> str:
    code = process.returncode
    return f"ended by signal {-code}" if code < 0 else f"exit code {code}"
