"""Which target, and which machine: what a record says about them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from dpace_cli.config import TargetConfig
from dpace_cli.errors import UsageError
from dpace_cli.modeling.target import (
    Target,
    load_target_config,
    load_tokenizer,
    target_location,
    tokenizer_fingerprint,
)


def target_sha256(config: TargetConfig) -> str:
    """Hash of what decides the target's answers, without reading all its weights.

    Tokenizer, chat template and config; of local weights their names, sizes and ends; of hub weights the commit.
    """
    loaded = load_target_config(config)
    settings = {key: value for key, value in loaded.to_dict().items() if key != "_name_or_path"}
    parts = [tokenizer_fingerprint(load_tokenizer(config)), json.dumps(settings, sort_keys=True, default=str)]
    folder = Path(target_location(config)).expanduser()
    if folder.is_dir():
        for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            with open(file, "rb") as opened:
                ends = opened.read(1 << 20)
                opened.seek(max(file.stat().st_size - (1 << 20), 0))
                ends += opened.read()
            parts.append(f"{file.name} {file.stat().st_size} {hashlib.sha256(ends).hexdigest()}")
    else:
        parts.append(str(getattr(loaded, "_commit_hash", None)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def check_fits(drafter: Any, target: Target, path: Path) -> None:
    """Is the drafter made for a target of this shape, and does it draft?

    Raises:
        UsageError: it is not.
    """
    theirs, ours = drafter.config.hidden_size, target.config.hidden_size
    if theirs != ours:
        raise UsageError(
            f"the drafter in {path} is {theirs} wide, and target {target.path} is {ours}",
            "a drafter works with the target that it was trained for alone",
        )
    if max(drafter.target_layer_ids) >= target.config.num_hidden_layers:
        raise UsageError(
            f"the drafter in {path} reads layer {max(drafter.target_layer_ids)}, and target {target.path} has "
            f"{target.config.num_hidden_layers}",
            "a drafter works with the target that it was trained for alone",
        )
    if drafter.block_size < 2:
        raise UsageError(
            f"the drafter in {path} has blocks of {drafter.block_size}: it drafts nothing",
            "block_size counts the anchor: 2 or more",
        )
    if drafter.mask_token_id >= len(target.embedding):
        raise UsageError(
            f"the drafter in {path} has mask token {drafter.mask_token_id}, and the embedding of target {target.path} "
            f"has {len(target.embedding)} rows",
            "a drafter works with the target that it was trained for alone",
        )


def device_name(device: torch.device) -> str:
    """A device as a reader of the record would want it named."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else device.type
