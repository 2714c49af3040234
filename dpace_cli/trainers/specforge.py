"""SpecForge as the trainer, offline: dpace captures the target's states, SpecForge trains on them.

The states go to `specforge/features/` of the arm's folder, one file a row, in SpecForge's format. The drafter
begins with the weights that the native trainer would begin with: SpecForge is told to start from them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel

from dpace_cli import console
from dpace_cli.config import Config, TrainConfig
from dpace_cli.data.batches import TrainingRow
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.capture import CAPTURE_TOKENS, States
from dpace_cli.modeling.checkpoint import save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config, embedding_scale, weights_hash
from dpace_cli.modeling.identity import target_sha256
from dpace_cli.modeling.simulate import simulate
from dpace_cli.modeling.target import Target, target_location
from dpace_cli.records import write_error
from dpace_cli.trainers.base import Job, Outcome, Ranks
from dpace_cli.trainers.specforge_config import check, generate, identity, with_extra
from dpace_cli.trainers.specforge_process import TESTED_VERSION, Program
from dpace_cli.trainers.specforge_run import Course


def train(job: Job, target: Target, ranks: Ranks) -> Outcome:
    """Train a drafter with SpecForge, from its last checkpoint where there is one.

    Raises:
        UsageError: SpecForge lacks something that is asked for, is not installed, refuses the config, or the
            folder holds another training.
        RunError: it failed, the loss is not finite, or features cannot be written.
        Interrupted: a signal came in; SpecForge is stopped, and the next start goes on from its last checkpoint.
    """
    if ranks.world > 1:
        raise UsageError(
            "--engine specforge starts its own processes", "set train.nproc, and start dpace itself without torchrun"
        )
    return _Training(job, target).run()


class _Training:
    """One offline training: the initial drafter, the features, SpecForge's config."""

    def __init__(self, job: Job, target: Target) -> None:
        self.job, self.target, self.train = job, target, job.config.train
        self.schedule = check(job.config, len(job.rows))
        config = drafter_config(target.config, target.tokenizer, self.train, embedding_scale(target.model))
        refuse_scaled(config)
        self.drafter = build_drafter(config, self.train.seed)
        hashes = {"initial_weights": weights_hash(self.drafter), "data_order": order_hash(job)}
        self.course = Course(job, self.schedule, hashes, lambda: self.drafter, self._simulated)
        self.features, self.initial = self.course.work / "features", self.course.work / "initial"
        # SpecForge holds drafter, embedding, head and features in one type; its master weights are float32.
        on_gpu = target.device.type == "cuda"
        self.dtype = self.train.compute_dtype
        if self.dtype == "auto":
            self.dtype = "bfloat16" if on_gpu else "float32"
        self.generated = generate(
            job.config, self.schedule, target=target_name(job.config), dtype=self.dtype, on_gpu=on_gpu,
            drafter=(self.initial / "config.json").absolute(), output=self.course.checkpoints.absolute(),
        )  # fmt: skip
        self.generated["data"]["hidden_states_path"] = str(self.features.absolute())
        self.generated = with_extra(job.config, self.generated)

    def run(self) -> Outcome:
        course = self.course
        if not course.begin(self._identity()):
            for folder in (self.features, self.initial):
                shutil.rmtree(folder, ignore_errors=True)
        if not course.done:
            program = Program(self.train.specforge.python, self.target.device.type)
            version = program.version()
            warn_of_differences(version, self.train)
            resumed = self._write_config()
            program.plan(course.config_file)
            self._capture()
            if not self.job.held_out and self.target.device.type == "cuda":
                self.target.model.to("cpu")  # nothing here needs it any more, and SpecForge needs the memory
                torch.cuda.empty_cache()
            course.follow(program, version, resumed)
            course.finish()
        course.clear(self.features, self.initial)
        return course.outcome()

    def _identity(self) -> dict[str, Any]:
        return {
            **identity(self.generated),
            "drafter": hashlib.sha256(self.drafter.config.to_json_string().encode()).hexdigest(),
            "target": target_sha256(self.job.config.target),
            "training data (sha256)": self.job.data_sha256,
            "rows": len(self.job.rows),
        }

    def _write_config(self) -> int:
        """Write the initial drafter and SpecForge's config; returns the step that it goes on from."""
        if not (self.initial / "model.safetensors").exists():
            save_checkpoint(self.initial, self.drafter)
        saved = self.course.saved()
        step = max(saved, default=0)
        if step:
            self.generated["training"]["resume_from"] = str(saved[step].absolute())
            console.note(f"SpecForge goes on from step {step} of {self.schedule.steps}")
        else:
            self.generated["model"]["draft_checkpoint_path"] = str(self.initial.absolute())
        self.course.write_config(self.generated)
        return step

    def _capture(self) -> None:
        states = States(self.target, [row.input_ids for row in self.job.rows], self.drafter.target_layer_ids, False)
        dtype = getattr(torch, self.dtype)
        tokens = sum(len(row.input_ids) for row in self.job.rows)
        needed = tokens * states.width * dtype.itemsize
        _check_space(self.features, needed, self.train.cache_limit_gb)
        with console.meter(f"capture ({needed / 2**30:.2f} GiB)", tokens, "tokens") as progress:
            write_features(self.features, self.job.rows, states, dtype, progress.advance)

    def _simulated(self, drafter: DFlashDraftModel) -> float | None:
        """Simulated acceptance length on the held-out rows."""
        if not self.job.held_out:
            return None
        rows = [(row.input_ids, row.loss_mask) for row in self.job.held_out]
        result = simulate(drafter.to(self.target.device).eval(), self.target, rows, block_size=self.train.block_size)
        drafter.to("cpu")
        return result.tau


# --- features --------------------------------------------------------------------------------------------


def write_features(
    folder: Path, rows: Sequence[TrainingRow], states: States, dtype: torch.dtype, progress: Callable[[int], None]
) -> None:
    """Write one SpecForge feature file a row; whole files of an interrupted capture are kept.

    Args:
        rows: rows in the order that SpecForge shuffles, which is that of the files' names.
        states: their tapped states, of which each file holds [L, T * H].
        dtype: type that SpecForge trains in.
        progress: told the number of tokens that are done.
    Raises:
        RunError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    present = {path.name: path.stat().st_size for path in folder.glob("*.ckpt")}
    todo = []
    for index, row in enumerate(rows):
        # A file that a power failure cut short is smaller than its states.
        if present.get(_feature_name(index), 0) > states.width * dtype.itemsize * len(row.input_ids):
            progress(len(row.input_ids))
        else:
            todo.append(index)
    todo.sort(key=lambda index: (-len(rows[index].input_ids), index))
    while todo:
        count = max(1, CAPTURE_TOKENS // len(rows[todo[0]].input_ids))
        group, todo = todo[:count], todo[count:]
        captured = states.batch(group)[0].to("cpu", dtype)
        for place, index in enumerate(group):
            row = rows[index]
            _save_feature(folder / _feature_name(index), {
                "input_ids": torch.tensor(row.input_ids),
                "loss_mask": torch.tensor(row.loss_mask),
                "hidden_states": captured[place, : len(row.input_ids)].clone(),
            })  # fmt: skip
        progress(sum(len(rows[index].input_ids) for index in group))


def _feature_name(index: int) -> str:
    return f"{index:08d}.ckpt"


def _save_feature(path: Path, feature: dict[str, torch.Tensor]) -> None:
    """Written whole or not at all; without waiting for the disk, which thousands of small files would feel."""
    temporary = path.with_suffix(".tmp")
    try:
        torch.save(feature, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    except RuntimeError as error:  # how torch reports a full disk
        raise RunError(f"cannot write {path}: {error}", "free some space, then run the same command again") from None
    finally:
        temporary.unlink(missing_ok=True)


def _check_space(folder: Path, needed: int, limit_gb: float) -> None:
    """Are the features allowed, and do they fit?

    Raises:
        UsageError: they take more than `train.cache_limit_gb`, or more than the disk has left.
    """
    size = f"SpecForge's features take {needed / 2**30:.1f} GiB"
    if needed / 2**30 > limit_gb:
        raise UsageError(
            f"{size}; train.cache_limit_gb is {limit_gb:g}",
            "raise it, shorten train.max_length, or capture as training goes: train.specforge.mode=online",
        )
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(path.stat().st_size for path in folder.glob("*.ckpt"))
    free = shutil.disk_usage(folder).free
    if needed - there > free:
        raise UsageError(
            f"{size}; {folder} has {free / 2**30:.1f} GiB left",
            "choose another --output, or shorten train.max_length",
        )


# --- shared with online training -------------------------------------------------------------------------


def target_name(config: Config) -> str:
    """The target as SpecForge finds it from any working folder: an absolute folder, or a hub id."""
    folder = Path(target_location(config.target)).expanduser()
    return str(folder.absolute()) if folder.is_dir() else target_location(config.target)


def refuse_scaled(drafter: Any) -> None:
    """SpecForge's trainer has neither a factor on the embedding nor a soft cap on the logits.

    Args:
        drafter: the drafter's config.
    Raises:
        UsageError: the target needs one.
    """
    needed = [name for name in ("input_embedding_scale", "final_logit_softcapping") if name in drafter.dflash_config]
    if needed:
        raise UsageError(f"SpecForge has no {' and no '.join(needed)}, which this target needs", "use --engine native")


def warn_of_differences(version: str, train: TrainConfig) -> None:
    """Say what SpecForge does in another way, where that can change the result."""
    if version != TESTED_VERSION:
        console.warn(f"SpecForge {version} is installed; dpace was tested with {TESTED_VERSION}")
    if train.weight_decay > 0:
        console.warn(f"SpecForge trains without weight decay (train.weight_decay is {train.weight_decay:g})")


def order_hash(job: Job) -> str:
    """Names what decides SpecForge's order of rows and its draw of anchors; equal in paired arms."""
    train = job.config.train
    parts = [train.seed, train.batch_size, train.accumulation_steps, train.nproc, train.num_anchors,
             [row.id for row in job.rows]]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
