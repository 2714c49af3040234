"""SpecForge as a program of its own: starting and stopping it, its log, its checkpoints.

It may live in an environment with other versions of torch and Transformers, so nothing of it is imported.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import held_by
from dpace_cli.trainers.specforge_config import RUN_ID

TESTED_VERSION = "0.2.0"

STOP_GRACE_S = 45.0
"""Seconds for SpecForge to end after a signal; it grants its own processes 30."""

_STEP = re.compile(r"^step (\d+): \{(.*)\}\s*$")
_NUMBER = re.compile(r"'(?:train/)?([^']+)': (-?(?:nan|inf|[0-9][0-9.e+-]*))")
_STATE = "training_state.pt"


class Program:
    """SpecForge in the interpreter where it is installed.

    Args:
        python: path of that interpreter; None: this one.
        device: "cpu" keeps it from taking a GPU that is there.
    """

    def __init__(self, python: str | None, device: str) -> None:
        self.python = python or sys.executable
        self.foreign = python is not None
        # A torchrun around dpace would be taken for SpecForge's own.
        skipped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        self.environment = {key: value for key, value in os.environ.items() if key not in skipped}
        self.environment["PYTHONUNBUFFERED"] = "1"
        if device == "cpu":
            self.environment["SPECFORGE_DEVICE"] = "cpu"

    def version(self) -> str:
        """Version of the installed SpecForge.

        Raises:
            UsageError: it is not installed there, or there is no such interpreter.
        """
        if not self.foreign:
            try:
                return importlib.metadata.version("specforge")
            except importlib.metadata.PackageNotFoundError:
                raise self._missing() from None
        code = "import importlib.metadata as m; print(m.version('specforge'))"
        try:
            asked = subprocess.run([self.python, "-c", code], capture_output=True, text=True, env=self.environment)
        except OSError as error:
            raise UsageError(f"cannot run train.specforge.python {self.python}: {error.strerror or error}") from None
        if asked.returncode != 0:
            raise self._missing()
        return asked.stdout.strip()

    def _missing(self) -> UsageError:
        return UsageError(
            f"SpecForge is not installed for {self.python}",
            f"`pip install --no-deps specforge=={TESTED_VERSION}` puts it beside dpace; train.specforge.python names "
            "the interpreter of an environment of its own",
        )

    def command(self, config: Path, *options: str) -> list[str]:
        """The command line that trains with a config."""
        return [self.python, "-m", "specforge.cli", "train", "--config", str(config), *options]

    def plan(self, config: Path, *options: str) -> dict[str, Any]:
        """Have SpecForge check a config against its own schema and resolve the processes that it would start.

        Raises:
            UsageError: it refuses the config; its own reason is given.
        """
        command = self.command(config, "--plan", *options)
        asked = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if asked.returncode != 0:
            raise UsageError(f"SpecForge refuses {config}: {_reason(asked.stderr)}", "see train.specforge.extra")
        return json.loads(asked.stdout)

    def start(self, config: Path, log: IO[bytes], lock: IO[str]) -> subprocess.Popen:
        """Start a training; all that it says goes to `log`. It inherits `lock`."""
        process = subprocess.Popen(
            self.command(config), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            env=self.environment, pass_fds=(lock.fileno(),), start_new_session=True,
        )  # fmt: skip
        held_by(lock, process.pid)
        return process


def stop(process: subprocess.Popen) -> None:
    """End SpecForge and the processes that it started; it does not save at a signal."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- the log ---------------------------------------------------------------------------------------------


class StepLog:
    """The steps that SpecForge's log tells of, read as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new_steps(self) -> list[tuple[int, dict[str, float]]]:
        """(step, numbers) of the whole lines written since the last call."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        lines = whole.decode(errors="replace").splitlines()
        return [read for line in lines if (read := read_step(line)) is not None]

    def reason(self) -> str:
        """What the log ends with, for an error."""
        return _reason(self.path.read_text("utf-8", errors="replace"))


def read_step(line: str) -> tuple[int, dict[str, float]] | None:
    """Step and numbers of a line such as `step 10: {'loss': 2.5, 'acc': 0.1}`; None for any other line."""
    found = _STEP.match(line)
    if found is None:
        return None
    return int(found[1]), {name: float(number) for name, number in _NUMBER.findall(found[2])}


def _reason(text: str) -> str:
    """The last error in a program's output: what follows its last traceback's frames."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        # Not torchrun's own summary of a failed process, which comes last and says nothing.
        if re.match(r"^(\[rank\d+\]: ?)?[A-Za-z_][\w.]*(Error|Exception)\b", lines[at]) and "Child" not in lines[at]:
            return " ".join(line.strip() for line in lines[at : at + 6])[:600]
    return " ".join(lines[-3:])[:600] or "it said nothing"


# --- checkpoints -----------------------------------------------------------------------------------------


def saved_steps(folder: Path, processes: int, after: int = 0) -> dict[int, Path]:
    """SpecForge's complete checkpoints by step: every process has written its file, and none is cut short.

    Args:
        processes: how many wrote them.
        after: leave out this step and earlier ones.
    """
    found = {}
    for path in folder.glob(f"{RUN_ID}-step*"):
        step = path.name.removeprefix(f"{RUN_ID}-step")
        names = [_STATE, *(f"training_state_rank{rank}.pt" for rank in range(processes))]
        if step.isdigit() and int(step) > after and all(zipfile.is_zipfile(path / name) for name in names):
            found[int(step)] = path
    return dict(sorted(found.items()))


def drafter_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The drafter's tensors, on the CPU in float32. Nothing but tensors and plain values is unpickled.

    Raises:
        RunError: the file is not what SpecForge writes.
        FileNotFoundError: SpecForge has deleted this checkpoint for a newer one.
    """
    try:
        state: Mapping[str, Any] = torch.load(checkpoint / _STATE, map_location="cpu", weights_only=True)
        weights: Mapping[str, Tensor] = state["draft_state_dict"]
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load has no error of its own
        raise RunError(
            f"cannot read SpecForge's checkpoint {checkpoint}: {' '.join(str(error).split())[:300]}"
        ) from None
    return {name: tensor.float() for name, tensor in weights.items()}


def render(command: Sequence[str], environment: Mapping[str, str | None] | None = None) -> str:
    """A command as one types it into a shell, with the variables that it needs before it."""
    import shlex

    variables = [f"{name}={shlex.quote(value or '')}" for name, value in (environment or {}).items()]
    return " ".join([*variables, *(shlex.quote(part) for part in command)])
