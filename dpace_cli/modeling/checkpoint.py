"""Drafter checkpoints on disk: DFlash's own format, with the trainer's state in two files beside it.

`step-000400/` holds `config.json` and `model.safetensors`, which are a complete DFlash checkpoint, and
`trainer_state.json` and `trainer_state.safetensors`, which only a resume reads. No file is a pickle.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import read_json, step_folders, step_of, write_json, writing_folder

STATE_JSON = "trainer_state.json"
STATE_TENSORS = "trainer_state.safetensors"


def checkpoint_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def save_checkpoint(
    folder: Path, drafter: DFlashDraftModel, state: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Write a checkpoint, complete or not at all.

    Raises:
        RunError: the folder cannot be written.
    """
    with writing_folder(folder) as temporary:
        try:
            drafter.save_pretrained(temporary)
            if tensors is not None:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary / STATE_TENSORS)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise RunError(
                f"cannot write {folder}: {error}", "free some space, then run the same command again"
            ) from None
        if state is not None:
            write_json(temporary / STATE_JSON, state)


def load_drafter(
    path: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> DFlashDraftModel:
    """Load a DFlash checkpoint for use, in evaluation mode and without gradients.

    Args:
        path: a checkpoint folder.
    Raises:
        UsageError: it is not a DFlash checkpoint, or its files are damaged.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise UsageError(f"{path / 'config.json'} holds a {type(config).__name__}; it is not a DFlash checkpoint")
    fields = config.get("dflash_config") or {}
    for name in ("mask_token_id", "target_layer_ids"):
        if fields.get(name, config.get(name)) is None:
            raise UsageError(f"{path / 'config.json'} has no {name}; it is not a DFlash checkpoint")
    try:
        drafter, info = DFlashDraftModel.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot load the drafter in {path}: {' '.join(str(error).split())[:300]}") from None
    if info["missing_keys"]:
        raise UsageError(f"{path / 'model.safetensors'} lacks {sorted(info['missing_keys'])[0]}")
    for name, values in drafter.named_parameters():
        if not bool(values.isfinite().all()):
            raise UsageError(
                f"{name} of the drafter in {path} holds values that are not finite; it would draft nothing",
                "take an earlier checkpoint",
            )
    return drafter.to(device).eval().requires_grad_(False)


@dataclass(frozen=True)
class Saved:
    """A checkpoint that a training run can go on from."""

    path: Path
    step: int
    state: dict[str, Any]
    drafter: dict[str, Tensor]
    tensors: dict[str, Tensor]


def newest_whole(folder: Path, warn: Any) -> Saved | None:
    """The newest checkpoint of a training run that can be read to its end; damaged ones are named and passed over."""
    for path in reversed(step_folders(folder)):
        if not (path / STATE_JSON).exists():
            continue
        try:
            return Saved(
                path=path,
                step=step_of(path),
                state=read_json(path / STATE_JSON),
                drafter=load_file(path / "model.safetensors"),
                tensors=load_file(path / STATE_TENSORS),
            )
        except (UsageError, OSError, SafetensorError) as error:
            warn(f"checkpoint {path} is damaged ({' '.join(str(error).split())[:120]}); the one before it is used")
    return None


def prune(folder: Path, keep_last: int, best: str | None) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one."""
    for path in step_folders(folder)[:-keep_last]:
        if path.name != best:
            shutil.rmtree(path)
