"""What every way of measuring shares: a record in the making, what it depends on, and whether it is done."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpace_cli import __version__, console
from dpace_cli.config import DEMO_TARGET, Config
from dpace_cli.data.benchmarks import BenchPrompt, PromptSet
from dpace_cli.data.jsonl import RowLog, read_rows
from dpace_cli.demo import target_path
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import CheckpointRef, file_sha256, read_json
from dpace_cli.results import BenchRecord, PromptResult, prompt_result, to_row

Done = list[tuple[Path, BenchRecord]]
"""Records and their files."""

_KEY_FIELDS = (
    "arm", "seed", "step", "checkpoint_sha256", "target_sha256", "engine", "dataset", "data_sha256", "temperature",
    "top_p", "top_k", "block_size", "max_new_tokens", "template_options", "versions", "dtype", "bench_seed",
    "concurrency",
)  # fmt: skip


class Pending:
    """A record that may be done, half done or not begun.

    What its counts depend on makes its key. A finished record with the same key is kept; rows in the log
    beside it that carry the same key are kept too; a log of another measurement is replaced, and a record
    of one is kept beside it as NAME.json.replaced, which reports leave out.

    Args:
        path: the record's file.
        record: the record without prompts, seconds and start.
        extra: what the key holds besides the record's own settings.
    """

    def __init__(self, path: Path, record: BenchRecord, extra: dict[str, Any]) -> None:
        self.path = path
        self.log_path = path.with_name(f"{path.stem}.partial.jsonl")
        settings = {name: getattr(record, name) for name in _KEY_FIELDS}
        key = hashlib.sha256(json.dumps({**settings, **extra}, sort_keys=True).encode()).hexdigest()
        self.record = replace(record, key=key)
        self.done = self._finished()

    def _finished(self) -> BenchRecord | None:
        if not self.path.is_file():
            return None
        try:
            found = BenchRecord.load(self.path)
        except UsageError as error:
            console.warn(f"{error.message}; it is measured again")
            return None
        if found.key == self.record.key:
            return found
        kept = self.path.with_name(f"{self.path.name}.replaced")
        self.path.replace(kept)
        console.warn(f"{self.path} is of other settings or another checkpoint; it is kept as {kept.name}")
        return None

    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of the log that belong to this measurement, by prompt id."""
        if not self.log_path.is_file():
            return {}
        with RowLog(self.log_path):
            pass  # opening cuts off a line that a kill has torn
        return {row["id"]: row for row in read_rows(self.log_path) if row.get("key") == self.record.key}

    def open(self) -> RowLog:
        """The log; its `ids` are the prompts that are done."""
        if not self.rows():
            self.log_path.unlink(missing_ok=True)
        return RowLog(self.log_path)

    def row(self, prompt: BenchPrompt, results: Sequence[PromptResult], seconds: float) -> dict[str, Any]:
        """What the log keeps of one prompt."""
        return {
            "id": prompt.id, "key": self.record.key, "at": utc_now(), "seconds": seconds,
            "results": [to_row(result) for result in results],
        }  # fmt: skip

    def finish(self, prompts: PromptSet, **more: Any) -> None:
        """Write the record from the log's rows, in the prompts' order, and remove the log.

        Args:
            more: fields of the record that are known now.
        Raises:
            RunError: no prompt was answered.
        """
        rows = self.rows()
        ordered = [rows[prompt.id] for prompt in prompts.prompts]
        self.write(
            [prompt_result(result) for row in ordered for result in row["results"]],
            started=min(row["at"] for row in ordered), seconds=sum(row["seconds"] for row in ordered), **more,
        )  # fmt: skip

    def write(self, results: list[PromptResult], **more: Any) -> None:
        """Write the record, whole or not at all, and remove the log.

        Raises:
            RunError: no prompt was answered.
        """
        record = replace(self.record, prompts=results, **more)
        if record.finished:
            record.save(self.path)
        self.log_path.unlink(missing_ok=True)
        if not record.finished:
            raise RunError(f"no prompt of {record.dataset} was answered; the first: {record.prompts[0].error}")
        self.done = record


def utc_now() -> str:
    """The time as records hold it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def request_seed(bench_seed: int, prompt_id: str, turn: int) -> int:
    """Seed of one request: any order, selection or resumption of the prompts leaves it the same."""
    digest = hashlib.sha256(f"{bench_seed}\0{prompt_id}\0{turn}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def conversation(prompt: BenchPrompt, answers: Sequence[str]) -> list[dict[str, str]]:
    """Messages up to the turn that follows the given answers."""
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, answer in zip(prompt.turns, answers):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": prompt.turns[len(answers)]}]


def new_record(
    config: Config, ref: CheckpointRef, prompts: PromptSet, temperature: float, target_sha256: str, **more: Any
) -> BenchRecord:
    """A record with everything but its measurements.

    Args:
        more: further fields.
    Raises:
        UsageError: `ref` is no checkpoint.
    """
    drafter = read_json(ref.path / "config.json")
    bench = config.bench
    fields = {
        "arm": ref.arm, "seed": ref.seed, "objective": training_config(ref).get("train", {}).get("objective", {}),
        "checkpoint": str(ref.path), "checkpoint_sha256": checkpoint_sha256(ref.path), "step": ref.step,
        "target": config.target.path, "target_sha256": target_sha256, "engine": bench.engine,
        "dataset": prompts.name, "data_sha256": prompts.sha256, "temperature": temperature,
        "top_p": bench.top_p, "top_k": bench.top_k, "block_size": block_size_of(drafter, bench.block_size),
        "num_draft_layers": drafter.get("num_hidden_layers", 0), "max_new_tokens": bench.max_new_tokens,
        "template_options": config.target.template_options(), "versions": _versions(), "device": "",
        "bench_seed": bench.seed, "started": "", "seconds": 0.0, "prompts": [],
    }  # fmt: skip
    return BenchRecord(**{**fields, **more})


def block_size_of(drafter: dict[str, Any], asked: int | None) -> int:
    """The block size that is asked for, else that of a drafter's config, found where DFlash finds it."""
    return asked or int((drafter.get("dflash_config") or {}).get("block_size", drafter.get("block_size", 16)))


def target_name(config: Config) -> str:
    """What a server calls the target, where it was given no other name: the hub id or the folder."""
    return str(target_path()) if config.target.path == DEMO_TARGET else config.target.path


def record_path(root: Path, ref: CheckpointRef, refs: Sequence[CheckpointRef], name: str) -> Path:
    """`ARM/NAME.json`, and `ARM/NAME-stepN.json` where a call measures several steps of one arm."""
    several = sum(other.folder == ref.folder for other in refs) > 1
    return root / ref.folder / f"{name}-step{ref.step}.json" if several else root / ref.folder / f"{name}.json"


def training_config(ref: CheckpointRef) -> dict[str, Any]:
    """The config that a checkpoint was trained with, from its arm's manifest; empty where there is none."""
    manifest = ref.path.parent / "manifest.json"
    return (read_json(manifest).get("config") or {}) if manifest.is_file() else {}


def warn_of_other_training(config: Config, refs: Sequence[CheckpointRef]) -> None:
    """Say loudly where prompts are rendered otherwise, or by another target, than in training."""
    now = config.target.template_options()
    for ref in refs:
        then = training_config(ref).get("target")
        if not then:
            continue
        thinking = {} if then.get("enable_thinking") is None else {"enable_thinking": then["enable_thinking"]}
        options = {**thinking, **(then.get("chat_template_kwargs") or {})}
        if options != now:
            console.warn(f"{ref.path} was trained with template options {options}, and is measured with {now}")
        if then.get("path") != config.target.path:
            console.warn(f"{ref.path} was trained for {then.get('path')}, and is measured with {config.target.path}")


def checkpoint_sha256(path: Path) -> str:
    """Hash of a checkpoint's weights and config; the trainer's state beside them does not matter here.

    Raises:
        UsageError: one of the two is not there.
    """
    for name in ("config.json", "model.safetensors"):
        if not (path / name).is_file():
            raise UsageError(f"{path} is not a checkpoint folder: it has no {name}")
    hashes = [file_sha256(path / name) for name in ("config.json", "model.safetensors")]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


@cache
def _versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "transformers", "dflash")}
    return {"dpace": __version__, **packages, "python": platform.python_version()}
