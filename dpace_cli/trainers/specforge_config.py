"""SpecForge's run config, made from ours: what each setting is called there, and which it lacks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpace_cli.config import Config, Dflash, TrainConfig, decay_length, objective_label
from dpace_cli.errors import UsageError

RUN_ID = "dpace"
"""SpecForge names its checkpoints `dpace-stepN`."""

OBJECTIVES = {
    "dflash": "weight",
    "dpace": "sequence",
    "dpace-cumulative-confidence-only": "sequence",
    "dpace-continuation-value-only": "sequence",
}
"""The losses of SpecForge's DFlash trainer, and what each divides its weighted sum by."""

OWN_FIELDS = (
    "run_id", "output_dir", "model.target_model_path", "model.draft_model_config", "model.draft_checkpoint_path",
    "data.hidden_states_path", "data.prompts_path", "data.train_data_path", "data.max_length", "training.strategy",
    "training.loss_type", "training.dpace_alpha", "training.loss_decay_gamma", "training.num_anchors",
    "training.num_epochs", "training.max_steps", "training.total_steps", "training.batch_size",
    "training.accumulation_steps", "training.learning_rate", "training.lr_scheduler", "training.warmup_ratio",
    "training.max_grad_norm", "training.seed", "training.resume_from", "training.role",
    "deployment.trainer.nproc_per_node",
)  # fmt: skip
"""Keys that `train.specforge.extra` must leave alone: they follow from fields of ours, or dpace relies on them."""

HARMLESS = ("training.save_interval", "training.log_interval", "training.max_checkpoints", "tracking.", "profiling.",
            "data.dataloader_num_workers")  # fmt: skip
"""Beginnings of keys that may change between an interrupted training and its resume."""


@dataclass(frozen=True)
class Schedule:
    """How SpecForge walks over the rows.

    Attributes:
        steps: optimizer steps in all.
        epochs: passes over the rows that hold them.
        sequences: rows in one optimizer step, over all processes.
    """

    steps: int
    epochs: int
    sequences: int


def check(config: Config, rows: int) -> Schedule:
    """Refuse what SpecForge cannot do, before a model is loaded.

    Args:
        rows: rows to train on.
    Raises:
        UsageError: an objective, reduction or setting that it lacks, or too few rows for one step.
    """
    train, target = config.train, config.target
    _objective(train)
    lacking = []
    if train.lr_scheduler_type == "linear":
        lacking.append("train.lr_scheduler_type linear (it has cosine and constant)")
    if (train.adam_beta1, train.adam_beta2) != (0.9, 0.999):
        lacking.append("train.adam_beta1 and train.adam_beta2 other than 0.9 and 0.999")
    if target.revision is not None:
        lacking.append("target.revision (download that revision and name its folder)")
    if lacking:
        raise UsageError(f"SpecForge lacks {'; '.join(lacking)}", "change it, or train with --engine native")
    return schedule(config, rows)


def schedule(config: Config, rows: int) -> Schedule:
    """Steps of a training; SpecForge drops partial batches and a partial last step.

    Raises:
        UsageError: the rows do not fill one step.
    """
    train = config.train
    processes = train.nproc * nodes(config)
    sequences = processes * train.batch_size * train.accumulation_steps
    if train.specforge.mode == "online":  # prompts are dealt out to whole steps, over all epochs
        units, step_units = rows, sequences
    else:  # each process has its share in whole batches, padded to an even split; steps may cross epochs
        units, step_units = math.ceil(rows / processes) // train.batch_size, train.accumulation_steps
    steps = train.max_steps or units * train.num_epochs // step_units
    if units == 0 or steps == 0:
        raise UsageError(
            f"{rows} rows make no optimizer step of {sequences} "
            f"({processes} processes x batch {train.batch_size} x accumulation {train.accumulation_steps})",
            "SpecForge drops partial batches; lower train.batch_size or train.accumulation_steps, or add rows",
        )
    epochs = math.ceil(steps * step_units / units) if train.max_steps else train.num_epochs
    return Schedule(steps, epochs, sequences)


def nodes(config: Config) -> int:
    """Machines that the trainer runs on; more than one for online runs alone."""
    return int(flatten(config.train.specforge.extra).get("deployment.trainer.nnodes", 1))


def generate(
    config: Config, plan: Schedule, *, target: str, drafter: Path, output: Path, dtype: str, on_gpu: bool,
) -> dict[str, Any]:  # fmt: skip
    """The part of SpecForge's config that offline and online training share.

    Args:
        target: folder or hub id of the target.
        drafter: the drafter's config.json.
        output: folder of SpecForge's checkpoints.
        dtype: type of the drafter's arithmetic and of the captured states.
    """
    train = config.train
    return {
        "run_id": RUN_ID,
        "output_dir": str(output),
        "model": {
            "target_model_path": target,
            "draft_model_config": str(drafter),
            "torch_dtype": dtype,
            "trust_remote_code": config.target.trust_remote_code,
        },
        "data": {"max_length": train.max_length},
        "training": {
            "strategy": "dflash",  # SpecForge's default is another method
            **_objective(train),
            "num_anchors": train.num_anchors,
            "num_epochs": plan.epochs,
            "max_steps": plan.steps,
            "batch_size": train.batch_size,
            "accumulation_steps": train.accumulation_steps,
            "learning_rate": train.learning_rate,
            "lr_scheduler": train.lr_scheduler_type,
            "warmup_ratio": train.warmup_ratio,
            "max_grad_norm": train.max_grad_norm,
            "attention_backend": "flex_attention" if on_gpu else "sdpa",
            "fsdp_sharding": "NO_SHARD",  # a drafter is small, and sharding does not run on a CPU
            "seed": train.seed,
            "save_interval": train.save_steps,
            "log_interval": min(train.logging_steps, plan.steps),
            "max_checkpoints": train.keep_last,
        },
        "deployment": {"trainer": {"nproc_per_node": train.nproc}},
    }


def with_extra(config: Config, generated: Mapping[str, Any]) -> dict[str, Any]:
    """The generated config with `train.specforge.extra` put in.

    Raises:
        UsageError: a key there belongs to a field of ours.
    """
    merged = flatten(generated)
    for key, value in flatten(config.train.specforge.extra).items():
        if key in OWN_FIELDS:
            raise UsageError(
                f"train.specforge.extra sets {key}, which dpace sets itself",
                "use the field of dpace that it follows from; `dpace config show` lists them",
            )
        merged[key] = value
    return nest(merged)


def identity(generated: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed training must share with the one that wrote the checkpoint, by SpecForge's key."""
    passing = ("model.draft_checkpoint_path", "training.resume_from", *HARMLESS)
    return {key: value for key, value in flatten(generated).items() if not key.startswith(passing)}


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections, or keys with dots, as keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots as nested sections."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return nested


def _objective(train: TrainConfig) -> dict[str, Any]:
    """The loss as SpecForge names it.

    Raises:
        UsageError: it has no such loss, or reduces it in another way.
    """
    objective = train.objective
    label = objective_label(objective)
    reduction = OBJECTIVES.get(label)
    if reduction is None:
        known = ", ".join(f"{name} (reduction {how})" for name, how in OBJECTIVES.items())
        raise UsageError(f"SpecForge has no objective {label}; it has {known}", "train it with --engine native")
    if objective.reduction != reduction:
        raise UsageError(
            f"SpecForge divides {label} by {reduction}; train.objective.reduction is {objective.reduction}",
            f"set train.objective.reduction={reduction}, or train with --engine native",
        )
    if isinstance(objective, Dflash):
        gamma = decay_length(objective.gamma, train.block_size)
        return {"loss_type": label} if gamma is None else {"loss_type": label, "loss_decay_gamma": gamma}
    return {"loss_type": label, "dpace_alpha": objective.alpha}
