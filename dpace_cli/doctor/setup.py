"""What all checks share: the config, and the parts of the target that could be read."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dpace_cli.checks import Check, error, warning
from dpace_cli.config import Config, TargetConfig
from dpace_cli.data.audit import DataAudit
from dpace_cli.data.training import training_file
from dpace_cli.errors import DpaceError
from dpace_cli.modeling.checker import TensorInfo
from dpace_cli.records import RunFolder

HUB_TIMEOUT_S = 3.0
"""Seconds that the hub has to take a connection."""


class NotChecked(Exception):
    """A check cannot run; the text says why."""


@dataclass
class Setup:
    """A config, where its run is, and what was found of its target.

    Attributes:
        checkpoints: drafter folders to look at.
        folder: the target's files, where they are on this machine.
        target: config section with which the target's parts are loaded: its cached files, where they are.
        text: the target's Transformers text config.
        tokenizer: the target's, chat template included.
        stop_token_ids: tokens that end an answer.
        tensors: names and shapes of the target's weights.
        drafter: config.json of the first checkpoint, or of the drafter that a training would make.
        audit: what the training rows look like.
        launch: for each checkpoint, the command that uses it, by program.
    """

    config: Config
    run: RunFolder
    checkpoints: list[Path]
    folder: Path | None = None
    target: TargetConfig | None = None
    text: Any = None
    tokenizer: Any = None
    stop_token_ids: list[int] = field(default_factory=list)
    tensors: dict[str, TensorInfo] | None = None
    drafter: dict[str, Any] | None = None
    audit: DataAudit | None = None
    launch: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def data(self) -> Path:
        """The rows that a training would read."""
        return training_file(self.config, self.run)

    def need_config(self) -> Any:
        if self.text is None:
            raise NotChecked("the target's config could not be read")
        return self.text

    def need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise NotChecked("the target's tokenizer could not be read")
        return self.tokenizer


def look(names: Iterable[str], find: Callable[[], Iterable[Check]]) -> list[Check]:
    """The findings of one group of checks; whatever happens in it becomes a finding.

    Args:
        names: of the checks of the group.
        find: makes them, in any number.
    """
    first, *rest = names
    found: list[Check] = []
    try:
        found.extend(find())  # what was found before an error is kept
    except NotChecked as reason:
        found += [warning(name, f"not checked: {reason}") for name in [first, *rest] if not _has(found, name)]
    except DpaceError as reason:
        found.append(error(first, reason.message, reason.hint))
        found += [warning(name, f"not checked: {first} failed") for name in rest if not _has(found, name)]
    except Exception as reason:  # a doctor that dies of its patient is of no use
        text = " ".join(f"{type(reason).__name__}: {reason}".split())[:200]
        found.append(error(first, f"the check itself failed ({text})", "this is a mistake in dpace: please report it"))
    return found


def _has(found: list[Check], name: str) -> bool:
    return any(check.name == name for check in found)


@functools.cache
def hub_answers() -> str | None:
    """Why the Hugging Face hub cannot be reached, or None where it takes a connection."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    address = urlsplit(constants.ENDPOINT)
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    if proxy:
        address = urlsplit(proxy)
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=HUB_TIMEOUT_S).close()
    except OSError as reason:
        return f"{constants.ENDPOINT} does not answer ({reason.strerror or reason})"
    return None
