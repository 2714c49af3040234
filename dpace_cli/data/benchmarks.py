"""Prompts to measure on: DFlash's data sets in its own formats and order, demo prompts, and any JSONL file.

A row of the published benchmark is the same row here: DFlash's table gives source and format, and its
shuffle gives the order. Alpaca is the paper's addition; its format is that of DFlash's earlier releases.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.benchmark import DATASETS, _select_dataset

from dpace_cli.data.jsonl import read_rows
from dpace_cli.demo import prompts as demo
from dpace_cli.errors import UsageError

DATA_DIR_VARIABLE = "DPACE_DATA_DIR"
DEMO_PREFIX = "demo-"
DEMO_PROMPTS = 64
"""Held-out demo prompts where no number is asked for."""

MBPP_TEST_IDS = range(11, 511)
"""`task_id`s of MBPP's test split; the public sanitized file holds all splits in one."""


def _alpaca(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n\nInput:\n{row['input']}" if row.get("input") else row["instruction"]


TABLE: dict[str, dict[str, Any]] = {
    **DATASETS,
    "alpaca": {"load_args": ("tatsu-lab/alpaca",), "load_kwargs": {"split": "train"}, "format": _alpaca},
}
"""Name to hub id, split and prompt format; `multi_turn` where a prompt is a list of turns."""

DEMO_NAMES = tuple(f"{DEMO_PREFIX}{kind}" for kind in demo.KINDS)


@dataclass(frozen=True)
class BenchPrompt:
    """One conversation to be answered: what the user says, turn by turn."""

    id: str
    turns: list[str]
    system: str | None = None


@dataclass(frozen=True)
class PromptSet:
    """The chosen prompts of a data set, in order, and their hash."""

    name: str
    prompts: list[BenchPrompt]
    sha256: str


def load_prompts(dataset: str, data_dir: str | None, count: int | None, seed: int = 0) -> PromptSet:
    """Prompts of a named data set or of a JSONL file, shuffled as DFlash does, the first `count` of them.

    Args:
        dataset: gsm8k, math500, humaneval, mbpp, mt-bench, alpaca, demo-math, demo-code, demo-story, or a path.
        data_dir: folder with NAME.jsonl; null: DPACE_DATA_DIR, and where that is not set, the hub.
        count: null: all of them.
        seed: of the demo's generator.
    Raises:
        UsageError: no such data set or file, a row without a prompt, or the hub cannot be reached.
    """
    if dataset in DEMO_NAMES:
        samples = demo.samples(dataset.removeprefix(DEMO_PREFIX), count or DEMO_PROMPTS, seed, "heldout")
        return _prompt_set(dataset, [BenchPrompt(sample.id, [sample.prompt]) for sample in samples])
    folder = data_dir or os.environ.get(DATA_DIR_VARIABLE)
    if dataset in TABLE:
        rows = _rows_from_folder(dataset, Path(folder)) if folder else _rows_from_hub(dataset)
        prompts = [_named(dataset, index, row, folder) for index, row in enumerate(rows)]
    elif _is_path(dataset):
        prompts = list(_from_file(Path(dataset)))
    else:
        raise UsageError(
            f"there is no data set {dataset!r}",
            f"known: {', '.join([*TABLE, *DEMO_NAMES])}, or a JSONL file of prompts",
        )
    if not prompts:
        raise UsageError(f"data set {dataset} has no rows")
    return _prompt_set(dataset_name(dataset), _select_dataset(prompts, count))


def dataset_name(dataset: str) -> str:
    """What a data set is called in file names and tables; a file goes by its stem."""
    return Path(dataset).stem if dataset not in TABLE and _is_path(dataset) else dataset


def _is_path(dataset: str) -> bool:
    return "/" in dataset or os.sep in dataset or dataset.endswith((".jsonl", ".json"))


def _prompt_set(name: str, prompts: list[BenchPrompt]) -> PromptSet:
    text = json.dumps([[p.id, p.system, p.turns] for p in prompts], ensure_ascii=False)
    return PromptSet(name, prompts, hashlib.sha256(text.encode()).hexdigest())


# --- named data sets --------------------------------------------------------------------------------------


def _rows_from_folder(name: str, folder: Path) -> Iterable[dict[str, Any]]:
    path = folder.expanduser() / f"{name}.jsonl"
    if not path.is_file():
        raise UsageError(
            f"{folder} has no {name}.jsonl",
            "put it there with the hub data set's field names, or leave --data-dir and DPACE_DATA_DIR unset",
        )
    rows = list(read_rows(path))
    if name == "mbpp":
        rows = [row for row in rows if row.get("task_id", MBPP_TEST_IDS[0]) in MBPP_TEST_IDS]
    return rows


def _rows_from_hub(name: str) -> Iterable[dict[str, Any]]:
    entry = TABLE[name]
    hub_id = entry["load_args"][0]
    try:
        from datasets import load_dataset  # a slow import

        return load_dataset(*entry["load_args"], **entry["load_kwargs"])
    except Exception as error:  # datasets, huggingface_hub and httpx each raise their own
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"cannot load data set {name} ({hub_id}) from the hub: {reason}",
            f"check the network (HF_ENDPOINT, HF_HUB_OFFLINE), or give a folder with {name}.jsonl: "
            f"--data-dir FOLDER or {DATA_DIR_VARIABLE}",
        ) from None


def _named(name: str, index: int, row: dict[str, Any], folder: str | None) -> BenchPrompt:
    entry = TABLE[name]
    try:
        text = entry["format"](row)
        turns = list(text) if entry.get("multi_turn") else [text]
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"row {index + 1} of {name}{f' in {folder}' if folder else ''} has no {error}",
            "the fields are those of the hub data set",
        ) from None
    return BenchPrompt(f"{name}-{index:05d}", turns)


# --- a file of prompts ------------------------------------------------------------------------------------

_ROLES = {"user": "user", "human": "user", "system": "system"}


def _from_file(path: Path) -> Iterator[BenchPrompt]:
    if not path.expanduser().is_file():
        raise UsageError(f"{path} does not exist", f"known data sets: {', '.join([*TABLE, *DEMO_NAMES])}")
    seen: set[str] = set()
    for number, row in enumerate(read_rows(path.expanduser()), start=1):
        turns, system = _turns_of(row)
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise UsageError(
                f"row {number} of {path} has no prompt",
                'a row holds "prompt" (text), "turns" (texts), or user turns in "conversations" or "messages"',
            )
        row_id = str(row.get("id", f"{path.stem}-{number - 1:05d}"))
        if row_id in seen:
            raise UsageError(f"row {number} of {path}: id {row_id!r} is there twice")
        seen.add(row_id)
        yield BenchPrompt(row_id, turns, system)


def _turns_of(row: dict[str, Any]) -> tuple[list[Any], str | None]:
    """What the user says in a row, in any of the layouts, and the system prompt."""
    for key in ("turns", "prompt"):
        if key in row:
            return row[key] if isinstance(row[key], list) else [row[key]], row.get("system")
    said = [
        (_ROLES.get(message.get("role", message.get("from"))), message.get("content", message.get("value")))
        for message in row.get("conversations") or row.get("messages") or []
        if isinstance(message, dict)
    ]
    system = next((text for role, text in said if role == "system"), None)
    return [text for role, text in said if role == "user"], system
