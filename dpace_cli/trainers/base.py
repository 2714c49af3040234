"""What every trainer is given and what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor

from dpace_cli.config import Config
from dpace_cli.data.batches import TrainingRow

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A drafter to train.

    Attributes:
        config: the resolved config of the arm.
        rows: rows to train on.
        held_out: rows for simulated acceptance.
        data_sha256: hash of the data file, so that a resume under other data is noticed.
        output: the arm's folder: checkpoints, metrics.
        cache: folder of cached target states, shared by the arms of a run.
        lock: the arm's lock, which the first process holds; null in the others.
        started: `time.monotonic()` of the start of this command.
    """

    config: Config
    rows: Sequence[TrainingRow]
    held_out: Sequence[TrainingRow]
    data_sha256: str
    output: Path
    cache: Path
    lock: IO[str] | None = None
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Outcome:
    """What a finished training leaves: where, and how it went.

    Attributes:
        steps, tokens: of all starts together.
        seconds: of all starts together, from their beginning; what a kill lost after the last checkpoint left out.
        step_seconds: those of them from the first step on: steps, validation, checkpoints.
    """

    checkpoint: Path
    steps: int
    loss: float
    tokens: int
    seconds: float
    step_seconds: float
    hashes: dict[str, str]
    simulated_tau: float | None


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when its parent dies, so that none is left at work alone.

    Linux only; elsewhere the arm's lock shows what is left.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


class Ranks:
    """The processes of a data-parallel training; a single process is the same with nothing to send."""

    def __init__(self) -> None:
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def __enter__(self) -> Ranks:
        if self.world > 1:
            end_with_parent(signal.SIGKILL)  # torchrun starts each process in a session of its own
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            if backend == "nccl":
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group(backend, timeout=timedelta(hours=2))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error the others may be waiting in a collective; tearing the group down would wait for them.
        if self.world > 1 and kind is None:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()
