"""The native trainer: data-parallel AdamW over DFlash's own drafter, exact after any interruption.

An optimizer step sums the objective's numerator and divisor, and the gradient of the numerator, over all
micro-batches and processes, and divides once. So the step does not depend on how its rows were spread.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from signal import SIGTERM
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dpace_cli import console
from dpace_cli.config import TrainConfig
from dpace_cli.data.batches import TrainingRow, collate, draw_anchors, epoch_batches
from dpace_cli.errors import Interrupted, RunError, UsageError
from dpace_cli.modeling.capture import States
from dpace_cli.modeling.checkpoint import Saved, checkpoint_name, load_drafter, newest_whole, prune, save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config, embedding_scale, weights_hash
from dpace_cli.modeling.simulate import simulate
from dpace_cli.modeling.target import Target
from dpace_cli.objectives import source_hash
from dpace_cli.records import read_json, write_json, writing
from dpace_cli.trainers.base import Job, Outcome, Ranks
from dpace_cli.trainers.drafter_loss import DrafterLoss, needs_target
from dpace_cli.trainers.trackers import Trackers

HARMLESS = {
    "data", "output", "logging_steps", "save_steps", "keep_last", "keep_best", "report_to", "cache",
    "cache_limit_gb", "nproc", "specforge", "head_chunk_tokens", "compile",
}  # fmt: skip
"""Fields of `train` that may change between an interrupted run and its resume."""


def train(job: Job, target: Target, ranks: Ranks) -> Outcome:
    """Train a drafter to its last step, from the newest whole checkpoint where there is one.

    Raises:
        UsageError: the checkpoint was made under another config or other data.
        RunError: the loss is not finite, or a checkpoint cannot be written.
        Interrupted: a signal came in; everything is saved.
    """
    return _Training(job, target, ranks).run()


class _Step(NamedTuple):
    """What one optimizer step works on.

    Attributes:
        epoch, indices, drawn: rows of all processes, and the anchors drawn in each.
        own: (row, anchors) of this process. micro_batches: the same in parts, or one row without anchors.
    """

    epoch: int
    indices: list[int]
    drawn: list[np.ndarray]
    own: list[tuple[int, np.ndarray]]
    micro_batches: list[list[tuple[int, np.ndarray]]]


class _Training:
    """The state of one training: what a checkpoint holds, and the loop that moves it on."""

    def __init__(self, job: Job, target: Target, ranks: Ranks) -> None:
        self.job, self.target, self.ranks, self.train = job, target, ranks, job.config.train
        config = drafter_config(target.config, target.tokenizer, self.train, embedding_scale(target.model))
        self.drafter = build_drafter(config, self.train.seed).to(target.device)
        self.hashes = {"initial_weights": weights_hash(self.drafter), "data_order": "", "anchors": ""}
        self.loss = DrafterLoss(self.drafter, target, self.train)
        self.parameters = dict(self.drafter.named_parameters())
        self.optimizer = _optimizer(self.parameters.values(), self.train)
        self.lengths = [len(row.input_ids) for row in job.rows]
        self.step_rows = self.train.batch_size * ranks.world * self.train.accumulation_steps
        self.steps_per_epoch = math.ceil(len(job.rows) / self.step_rows)
        self.total_steps = self.train.max_steps or self.steps_per_epoch * self.train.num_epochs
        self.step = 0
        self.running: dict[str, Tensor] = {}  # sums since the last line of metrics
        self.last_loss = math.nan
        self.best: dict[str, Any] = {"tau": None, "checkpoint": None}
        self.tokens = 0
        self.earlier = {"seconds": 0.0, "step_seconds": 0.0}  # of the starts before this one
        self.began: float | None = None  # the first step of this start

    # --- the loop ----------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        if (self.job.output / "specforge").exists():
            raise UsageError(
                f"{self.job.output} holds a training by --engine specforge",
                "choose another --output or run name, or pass --restart to begin anew",
            )
        saved = newest_whole(self.job.output, console.warn)
        if saved is not None:
            self._restore(saved)
        if self.step >= self.total_steps:
            return self._outcome()
        self.states = self._states(self.job.rows, cached=True)
        self.began, first = time.monotonic(), self.step
        first_tokens = self.tokens
        shown = console.meter("train", self.total_steps, "steps", first) if self.ranks.is_first else nullcontext()
        steps, ahead = itertools.tee(self._steps())
        wanted = ([i for i, _ in micro] for step in ahead for micro in step.micro_batches)
        reading = closing(self.states.ahead(wanted, in_thread=self.target.device.type != "cpu"))
        with console.deferred_stop() as stopped, shown as progress, self._trackers() as trackers, reading as states:
            for step in steps:
                finished = self._one_step(step, states, stopped())
                if self.step % self.train.logging_steps == 0 or self.step == self.total_steps:
                    rate = (self.tokens - first_tokens) / (time.monotonic() - self.began)
                    self._log(trackers, rate)
                if self._is_due(self.train.save_steps) or finished:
                    self._save()
                if progress is not None:
                    progress.update(self.step, f"loss {self.last_loss:.4g}")
                if finished:
                    raise Interrupted(finished)
        return self._outcome()

    def _steps(self) -> Iterator[_Step]:
        """What each optimizer step that is still to do works on; nothing here depends on how steps turn out."""
        train, rank, world = self.train, self.ranks.rank, self.ranks.world
        first = self.step
        for step in range(first, self.total_steps):
            epoch, place = divmod(step, self.steps_per_epoch)
            if step == first or place == 0:
                batches = epoch_batches(self.lengths, self.step_rows, train.seed, epoch)
            indices = batches[place]
            drawn = [draw_anchors(self.job.rows[i], i, train.num_anchors, train.seed, epoch) for i in indices]
            own = list(zip(indices, drawn))[rank::world]
            # A process without rows still runs one empty micro-batch: it needs the names and shapes of the sums.
            shares = own or [(indices[0], drawn[0][:0])]
            micro = [shares[start : start + train.batch_size] for start in range(0, len(shares), train.batch_size)]
            yield _Step(epoch, indices, drawn, own, micro)

    def _one_step(self, step: _Step, states: Iterator[tuple[Tensor, Tensor | None]], stop_signal: int) -> int:
        """One optimizer step; returns the signal at which all processes are to stop, or 0."""
        self._chain("data_order", json.dumps(step.indices).encode())
        self._chain("anchors", b"".join(own.astype("<i8").tobytes() for own in step.drawn))
        loss, divisor, signals = 0.0, 0.0, float(stop_signal)
        totals: dict[str, Tensor] = {}
        for micro in step.micro_batches:
            rows = [self.job.rows[index] for index, _ in micro]
            blocks = collate(rows, [anchors for _, anchors in micro], self.train.block_size)
            output = self.loss(blocks, *next(states))
            if output.loss_sum.requires_grad:
                output.loss_sum.backward()
            loss += output.loss_sum.detach().double()
            divisor += output.divisor.double()
            for name, value in output.metrics.items():
                totals[name] = totals.get(name, 0) + value.double()
        loss, divisor, signals, totals = self._reduce(loss, divisor, signals, totals)
        if not math.isfinite(loss):
            raise self._not_finite(step.own, step.epoch, loss)
        self._update(divisor)
        self.step += 1
        self.tokens += sum(self.lengths[i] for i in step.indices)
        self.last_loss = loss / divisor if divisor else 0.0
        totals |= {"loss_sum": torch.tensor(loss), "divisor": torch.tensor(divisor), "steps": torch.tensor(1.0)}
        for name, value in totals.items():
            self.running[name] = self.running.get(name, 0) + value.double()
        return int(signals)

    def _reduce(self, loss: Any, divisor: Any, signal: float, totals: dict[str, Tensor]) -> tuple:
        """Sum a step's numbers and gradients over all processes, in one message each."""
        device = self.target.device
        if self.ranks.world > 1:
            flat = torch.cat([p.grad.flatten() if p.grad is not None else torch.zeros_like(p).flatten()
                              for p in self.parameters.values()])  # fmt: skip
            self.ranks.sum(flat)
            for parameter, part in zip(
                self.parameters.values(), flat.split([p.numel() for p in self.parameters.values()])
            ):
                parameter.grad = part.view_as(parameter)
        names = sorted(totals)
        numbers = torch.cat([
            torch.tensor([float(loss), float(divisor), signal], dtype=torch.float64, device=device),
            *(totals[name].flatten().to(device) for name in names),
        ])  # fmt: skip
        self.ranks.sum(numbers)
        parts = numbers.cpu().split([1, 1, 1, *(totals[name].numel() for name in names)])
        summed = {name: part.view_as(totals[name]) for name, part in zip(names, parts[3:])}
        # A process that got no signal itself stops with the others.
        stop = signal or (float(SIGTERM) if parts[2].item() else 0.0)
        return parts[0].item(), parts[1].item(), stop, summed

    def _update(self, divisor: float) -> None:
        """Divide, clip, step. A step without a supervised position changes nothing but the schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, self.step, self.total_steps)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.zeros(())
        if divisor > 0 and gradients:
            torch._foreach_div_(gradients, divisor)
            norm = nn.utils.clip_grad_norm_(self.parameters.values(), self.train.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.running["grad_norm_sum"] = self.running.get("grad_norm_sum", 0) + norm.detach().double().cpu()

    # --- target states -----------------------------------------------------------------------------------

    def _states(self, rows: Any, cached: bool) -> States:
        """The target's states of the rows, kept as `train.cache` says."""
        ids = [row.input_ids for row in rows]
        states = States(self.target, ids, self.drafter.target_layer_ids, needs_target(self.train.objective))
        where = self.train.cache
        if where == "memory" and self.ranks.world > 1:
            where = "disk"  # the processes of one machine share what is on its disk
        if not cached or where == "none":
            return states
        size = states.bytes / 2**30
        if size > self.train.cache_limit_gb:
            raise UsageError(
                f"the target's states take {size:.1f} GiB; train.cache_limit_gb is {self.train.cache_limit_gb:g}",
                "raise it, shorten train.max_length, or set train.cache=none to make them anew in every epoch",
            )
        tokens = sum(len(row.input_ids) for row in rows)
        shown = console.meter(f"capture ({size:.2f} GiB)", tokens, "tokens") if self.ranks.is_first else nullcontext()
        with shown as progress:
            advance = progress.advance if progress is not None else lambda _: None
            if where == "memory":
                states.keep_in_memory(advance)
            else:
                states.keep_on_disk(self.job.cache, advance, self.ranks.rank, self.ranks.world, self.ranks.barrier)
        return states

    # --- checkpoints and metrics -------------------------------------------------------------------------

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total_steps

    def _save(self) -> None:
        """Write this step's checkpoint; the first process alone does."""
        if self.ranks.is_first:
            name = checkpoint_name(self.step)
            simulated = self._validate() if self._is_due(self.train.save_steps) else None
            if simulated is not None and (self.best["tau"] is None or simulated > self.best["tau"]):
                self.best = {"tau": simulated, "checkpoint": name}
            tensors = {f"running.{key}": value for key, value in self.running.items()}
            for key, parameter in self.parameters.items():
                for moment in ("exp_avg", "exp_avg_sq"):
                    if parameter in self.optimizer.state:
                        tensors[f"{moment}.{key}"] = self.optimizer.state[parameter][moment]
            state = {
                "step": self.step, "tokens": self.tokens, "loss": self.last_loss, "hashes": self.hashes,
                "best": self.best, "simulated_tau": simulated, "updates": self._updates(), "identity": self._identity(),
                **self._spent(),
            }  # fmt: skip
            save_checkpoint(self.job.output / name, self.drafter, state, tensors)
            prune(self.job.output, self.train.keep_last, self.best["checkpoint"] if self.train.keep_best else None)
        self.ranks.barrier()

    def _updates(self) -> int:
        """Optimizer steps that changed the weights, which Adam's bias correction counts."""
        return max((int(s["step"]) for s in self.optimizer.state.values()), default=0)

    def _restore(self, saved: Saved) -> None:
        self._check_identity(saved.state["identity"])
        self.drafter.load_state_dict(saved.drafter)
        for key, parameter in self.parameters.items():
            if f"exp_avg.{key}" in saved.tensors:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(float(saved.state["updates"])),
                    "exp_avg": saved.tensors[f"exp_avg.{key}"].to(parameter.device),
                    "exp_avg_sq": saved.tensors[f"exp_avg_sq.{key}"].to(parameter.device),
                }
        self.running = {
            key.removeprefix("running."): value for key, value in saved.tensors.items() if key.startswith("running.")
        }
        self.step, self.tokens, self.last_loss = saved.step, saved.state["tokens"], saved.state["loss"]
        self.hashes, self.best = saved.state["hashes"], saved.state["best"]
        self.earlier = {name: saved.state.get(name, 0.0) for name in self.earlier}
        if self.ranks.is_first:
            if self.step < self.total_steps:
                console.note(f"going on from {saved.path} (step {self.step} of {self.total_steps})")
            _cut_after(self.job.output / "metrics.jsonl", self.step)

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share with the one that wrote the checkpoint."""
        fields = {k: v for k, v in self.train.model_dump(mode="json").items() if k not in HARMLESS}
        # Rows of a step count, however they are spread over micro-batches and processes.
        for name in ("batch_size", "accumulation_steps", "num_epochs", "max_steps"):
            fields.pop(name)
        return {
            **{f"train.{name}": value for name, value in fields.items()},
            "rows in a step": self.step_rows, "total steps": self.total_steps,
            **{f"target.{name}": value for name, value in self.job.config.target.model_dump(mode="json").items()
               if name not in ("device", "trust_remote_code")},
            "training data (sha256)": self.job.data_sha256, "objective (source)": source_hash(self.train.objective),
        }  # fmt: skip

    def _check_identity(self, then: Mapping[str, Any]) -> None:
        now = self._identity()
        changed = [f"{key}: {then.get(key)} -> {now[key]}" for key in now if then.get(key) != now[key]]
        if changed:
            raise UsageError(
                f"{self.job.output} holds a training under another config; changed: {'; '.join(changed)}",
                "undo the change, choose another --output or run name, or pass --restart to begin anew",
            )

    def _validate(self) -> float | None:
        """Simulated acceptance length on the held-out rows."""
        if not self.job.held_out:
            return None
        states = self._states(self.job.held_out, cached=False)
        rows = [(row.input_ids, row.loss_mask) for row in self.job.held_out]
        self.drafter.eval()
        result = simulate(
            self.drafter, self.target, rows, block_size=self.train.block_size,
            states=lambda indices: states.batch(indices)[0],
        )  # fmt: skip
        self.drafter.train()
        return result.tau

    def _log(self, trackers: Trackers, tokens_per_s: float) -> None:
        """One line of metrics.jsonl, the same in every run of this config; timings go to a file of their own."""
        running, self.running = self.running, {}
        if not self.ranks.is_first:
            return
        line = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "learning_rate": learning_rate(self.train, self.step - 1, self.total_steps),
            "loss": float(running["loss_sum"] / running["divisor"].clamp_min(1e-30)),
            "grad_norm": float(running["grad_norm_sum"] / running["steps"]),
            **_summary(running),
        }
        _append(self.job.output / "metrics.jsonl", line)
        _append(self.job.output / "timing.jsonl", {"step": self.step, "tokens_per_s": tokens_per_s})
        trackers.log({**line, "tokens_per_s": tokens_per_s}, self.step)

    def _trackers(self) -> Trackers:
        names = self.train.report_to if self.ranks.is_first else []
        return Trackers(names, self.job.output, self.job.config.model_dump(mode="json"))

    def _chain(self, name: str, data: bytes) -> None:
        """Running hash of all draws so far; equal in the paired arms of a comparison."""
        self.hashes[name] = hashlib.sha256(self.hashes[name].encode() + data).hexdigest()

    def _spent(self) -> dict[str, float]:
        """Seconds of all starts together: from their beginnings, and from their first steps."""
        now = time.monotonic()
        since = {"seconds": self.job.started, "step_seconds": now if self.began is None else self.began}
        return {name: earlier + now - since[name] for name, earlier in self.earlier.items()}

    def _outcome(self) -> Outcome:
        return Outcome(
            checkpoint=self.job.output / checkpoint_name(self.step),
            steps=self.step, loss=self.last_loss, tokens=self.tokens, hashes=self.hashes,
            simulated_tau=self.best["tau"], **self._spent(),
        )  # fmt: skip

    def _not_finite(self, own: list[tuple[int, Any]], epoch: int, loss: float) -> RunError:
        """Save what is needed to run the step again, and say how."""
        folder = self.job.output / f"failed-{checkpoint_name(self.step)}-rank{self.ranks.rank}"
        save_checkpoint(folder, self.drafter)
        write_json(folder / "batch.json", {
            "step": self.step, "epoch": epoch, "loss": str(loss), "config": self.job.config,
            "rows": [
                {"id": r.id, "input_ids": r.input_ids, "loss_mask": r.loss_mask, "anchors": anchors.tolist()}
                for r, anchors in ((self.job.rows[i], anchors) for i, anchors in own)
            ],
        })  # fmt: skip
        return RunError(
            f"the loss of step {self.step} is {loss}; its rows, anchors and weights are in {folder}",
            f"`dpace train --replay {folder}` runs that step again; a lower train.learning_rate often helps",
        )


def replay(folder: Path, target: Target, config: TrainConfig) -> list[dict[str, Any]]:
    """Run a failed step again, row by row.

    Args:
        folder: what `train` left when the loss was not finite.
    Returns:
        For each row its id, loss, and whether states, drafter output and gradient are finite.
    """
    saved = read_json(folder / "batch.json")
    drafter = load_drafter(folder, target.device).requires_grad_(True)
    loss = DrafterLoss(drafter, target, config)
    found = []
    for entry in saved["rows"]:
        row = TrainingRow.make(entry["id"], entry["input_ids"], entry["loss_mask"])
        blocks = collate([row], [torch.tensor(entry["anchors"]).numpy()], config.block_size)
        states, last = States(target, [row.input_ids], drafter.target_layer_ids, needs_target(config.objective)).batch(
            [0]
        )
        output = loss(blocks, states, last)
        output.loss_sum.backward()
        gradients = [p.grad for p in drafter.parameters() if p.grad is not None]
        found.append({
            "id": row.id, "loss": float(output.loss_sum.detach()), "anchors": len(entry["anchors"]),
            "states_finite": bool(states.isfinite().all()),
            "weights_finite": all(bool(p.isfinite().all()) for p in drafter.parameters()),
            "gradient_finite": all(bool(g.isfinite().all()) for g in gradients),
        })  # fmt: skip
        drafter.zero_grad(set_to_none=True)
    return found


def learning_rate(train: TrainConfig, step: int, total: int) -> float:
    """Rate of step 0, 1, ...: linear warm-up over `warmup_ratio` of all steps, then the schedule down to 0."""
    warmup = round(train.warmup_ratio * total)
    if step < warmup:
        return train.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    factor = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return train.learning_rate * factor[train.lr_scheduler_type]


def _optimizer(parameters: Any, train: TrainConfig) -> torch.optim.AdamW:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(train.adam_beta1, train.adam_beta2), fused=True)


def _summary(sums: Mapping[str, Tensor]) -> dict[str, Any]:
    """Means of a line of metrics from the head's sums: over supervised positions, and by position."""
    supervised = sums["supervised"].clamp_min(1)
    by_position = sums["supervised_count"].clamp_min(1)
    blocks = sums["blocks"].clamp_min(1)
    return {
        "accuracy": float(sums["correct"] / supervised),
        "expected_accepted": float(sums["expected_accepted"] / blocks),
        "blocks": int(sums["blocks"]),
        "weight_by_position": (sums["weight_sum"] / by_position).tolist(),
        "confidence_by_position": (sums["confidence_sum"] / by_position).tolist(),
        "accepted_by_position": (sums["accepted_sum"] / by_position).tolist(),
    }


def _append(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _cut_after(path: Path, step: int) -> None:
    """Drop the lines that steps after `step` wrote, and a torn last line: those steps are run again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text("utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    with writing(path) as file:
        file.writelines(kept)
