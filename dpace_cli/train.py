"""Train a drafter: read the target's answers, tokenize them, hand them to a trainer.

With several processes, `run` starts torchrun, whose workers come back here; rank 0 alone talks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dpace_cli import console
from dpace_cli.config import Config, objective_label
from dpace_cli.data.batches import split_validation
from dpace_cli.data.training import read_training_rows, training_file
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.target import load_target, load_tokenizer, tokenizer_fingerprint
from dpace_cli.objectives import make_objective, source_hash
from dpace_cli.records import RunFolder, file_sha256, only_one, read_json, write_json
from dpace_cli.settings import save_config
from dpace_cli.trainers.base import Job, Outcome, Ranks, end_with_parent

if TYPE_CHECKING:
    from dpace_cli.trainers.specforge_online import OnlinePlan


@dataclass(frozen=True)
class TrainResult:
    """What `dpace train` reports.

    Attributes:
        checkpoint: folder of the last checkpoint, in DFlash's format.
        steps: optimizer steps done in all.
        loss: of the last step, as the objective's reduction defines it.
        tokens_per_s: training tokens a second, capture left out; null where nothing was left to do.
        seconds: of this training, all its interrupted parts together, from reading the rows on.
        simulated_tau: best simulated acceptance length on held-out rows.
        hashes: of the initial weights, and of all data-order and anchor draws; equal in paired arms.
    """

    checkpoint: str
    objective: str
    steps: int
    loss: float
    tokens_per_s: float | None
    seconds: float
    simulated_tau: float | None
    rows: int
    skipped: dict[str, int]
    hashes: dict[str, str]


LAUNCHED = "DPACE_LAUNCHED"
"""Environment variable that tells a training process that dpace itself has started torchrun, and reports for it."""

LOCK = "lock"
"""File in an arm's folder that the process at work there has locked."""


def default_arm(config: Config) -> str:
    """Folder name of the arm that `dpace train` writes."""
    return f"{objective_label(config.train.objective)}-seed{config.train.seed}"


def run(config: Config, folder: RunFolder, arm: str | None = None, restart: bool = False) -> TrainResult | OnlinePlan:
    """Train the drafter of one arm, or go on where an earlier run was stopped.

    An online training by SpecForge whose servers are not named yet gives the plan of what to start.

    Args:
        arm: name of its folder under `train`; default: objective and seed.
        restart: throw an earlier training of this arm away.
    Raises:
        UsageError: the data, the target or the config is wrong, or an earlier training differs.
        RunError: a process failed, or the loss is not finite.
    """
    output = Path(config.train.output) if config.train.output else folder.arm("train", arm or default_arm(config))
    data = training_file(config, folder)
    if not data.exists():
        raise UsageError(f"there is no training data at {data}", "`dpace regen` makes it, or pass --data FILE")
    make_objective(config.train.objective)  # a function that is not there leaves no folder behind
    if config.train.nproc > 1 and config.train.engine == "native" and "RANK" not in os.environ:
        return _launch(config, folder, output, data, restart)
    return _train(config, folder, output, data, restart)


def reports() -> bool:
    """Is it for this process to print the result? Of several it is for the first, or for dpace's own launcher."""
    return os.environ.get("RANK", "0") == "0" and LAUNCHED not in os.environ


@dataclass(frozen=True)
class ReplayResult:
    """A failed step, row by row: its loss, and what was finite."""

    step: int
    rows: list[dict]


def replay(failed: Path) -> ReplayResult:
    """Run a step again whose loss was not finite.

    Args:
        failed: the folder that the error named.
    """
    from dpace_cli.trainers import native

    saved = read_json(failed / "batch.json")
    config = Config.model_validate(saved["config"])
    return ReplayResult(saved["step"], native.replay(failed, load_target(config.target), config.train))


def _train(config: Config, folder: RunFolder, output: Path, data: Path, restart: bool) -> TrainResult | OnlinePlan:
    data_hash = file_sha256(data)
    finished = None if restart else _finished(config, output, data_hash)
    if finished is not None:
        return finished
    started = time.monotonic()
    tokenizer = load_tokenizer(config.target)
    rows, skipped = read_training_rows(
        data, tokenizer, tokenizer_fingerprint(tokenizer), config.target.template_options(), config.train.max_length
    )
    if not rows:
        raise UsageError(
            f"{data} has no row to train on ({_counts(skipped)})",
            "a row needs two supervised tokens in a row; `dpace prep preview` shows how rows are read",
        )
    rows, held_out = split_validation(rows, config.train.val_rows)
    trainer, needs_target = _trainer(config, len(rows))
    ranks = Ranks()
    with only_one(output / LOCK) if ranks.is_first else nullcontext() as lock, ranks:
        if restart:
            if ranks.is_first:
                _forget(output)
            ranks.barrier()
        if ranks.is_first:
            tokens = sum(len(row.input_ids) for row in rows)
            console.note(f"training rows: {len(rows):,} ({tokens:,} tokens), held out: {len(held_out)}"
                         + (f"; {_counts(skipped)}" if skipped else ""))  # fmt: skip
            save_config(config, output / "config.yaml")
        target = load_target(config.target) if needs_target else None
        job = Job(config, rows, held_out, data_hash, output, folder.root / "train" / "cache", lock, started)
        outcome = trainer(job, target, ranks)
        if not isinstance(outcome, Outcome):
            return outcome
        result = TrainResult(
            checkpoint=str(outcome.checkpoint),
            objective=objective_label(config.train.objective),
            steps=outcome.steps,
            loss=outcome.loss,
            tokens_per_s=outcome.tokens / outcome.step_seconds if outcome.step_seconds else None,
            seconds=outcome.seconds,
            simulated_tau=outcome.simulated_tau,
            rows=len(rows),
            skipped=dict(skipped),
            hashes=outcome.hashes,
        )
        if ranks.is_first:
            packages = {name: version(name) for name in ("dpace-cli", "torch", "transformers", "dflash")}
            write_json(output / "manifest.json", {
                "result": result, "config": config, "versions": packages,
                "data": {"path": str(data), "sha256": data_hash}, "identity": _identity(config, data_hash),
            })  # fmt: skip
    return result


def _trainer(config: Config, rows: int) -> tuple[Callable, bool]:
    """The trainer, and whether it needs the target's weights in this process."""
    if config.train.engine == "native":
        from dpace_cli.trainers.native import train

        return train, True
    from dpace_cli.trainers.specforge_config import check

    check(config, rows)  # before the target is loaded
    if config.train.specforge.mode == "online":
        from dpace_cli.trainers.specforge_online import train
    else:
        from dpace_cli.trainers.specforge import train
    return train, config.train.specforge.mode == "offline"


def _identity(config: Config, data_hash: str) -> dict:
    """What decides the result of a training, to know a finished one again."""
    return {"train": config.train.model_dump(mode="json", exclude={"output", "data"}),
            "target": config.target.model_dump(mode="json"), "data": data_hash,
            "objective_source": source_hash(config.train.objective)}  # fmt: skip


def _finished(config: Config, output: Path, data_hash: str) -> TrainResult | None:
    """The result of this very training, if it is complete."""
    manifest = output / "manifest.json"
    if not manifest.exists():
        return None
    saved = read_json(manifest)
    result = TrainResult(**saved["result"])
    same = saved["identity"] == _identity(config, data_hash)
    return result if same and (Path(result.checkpoint) / "model.safetensors").exists() else None


def _launch(config: Config, folder: RunFolder, output: Path, data: Path, restart: bool) -> TrainResult:
    """Start torchrun on this machine and wait for it. Its first process holds the arm's lock."""
    finished = None if restart else _finished(config, output, file_sha256(data))
    if finished is not None:
        return finished
    resolved = config.model_copy(update={"train": config.train.model_copy(
        update={"output": str(output), "data": str(data)})})  # fmt: skip
    with only_one(output / LOCK):  # before anything is written there
        if restart:
            _forget(output)
        save_config(resolved, output / "launch.yaml")
        (output / "manifest.json").unlink(missing_ok=True)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={config.train.nproc}",
        "-m", "dpace_cli", "train", "--config", str(output / "launch.yaml"),
    ]  # fmt: skip
    # By environment: torchrun takes an option --run of its script for an abbreviation of its own --run-path.
    worker = subprocess.Popen(
        command, stdout=sys.stderr, env={**os.environ, "DPACE_RUN": str(folder.root), LAUNCHED: "1"},
        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
    )  # fmt: skip
    try:
        code = worker.wait()
    except BaseException:
        worker.terminate()  # the workers save and stop
        worker.wait()
        raise
    if code != 0 or not (output / "manifest.json").exists():
        raise RunError(f"a training process failed (torchrun ended with {code})", "its own error is shown above")
    saved = read_json(output / "manifest.json")
    return TrainResult(**saved["result"])


def _forget(output: Path) -> None:
    import shutil

    for path in [*output.glob("step-*"), *output.glob("failed-*"), *output.glob("specforge")]:
        shutil.rmtree(path)
    for name in ("metrics.jsonl", "timing.jsonl", "manifest.json"):
        (output / name).unlink(missing_ok=True)


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items())) or "it is empty"
