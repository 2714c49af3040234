"""The target's own answers to the prompts: `regen/train.jsonl`.

While it runs, `tokens.jsonl` and then `train.jsonl` grow by one line for each finished row, and a row is done
when it is in both; the end puts both into the input's order. What went wrong is in `errors.jsonl`, and is
tried again by the next run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.jsonl import RowLog, encode_line, read_rows
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines.base import Engine, Request, make_engine
from dpace_cli.engines.conversation import Conversation, Row
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import RunFolder, file_sha256, read_json, write_json, writing

WINDOW_GROUPS = 64
"""Batches whose rows are sorted by length together."""

_FREE_SETTINGS = {
    "engine", "base_urls", "api_key_env", "concurrency", "timeout_s", "max_retries", "batch_size", "limit", "overwrite",
}  # fmt: skip
"""Fields of RegenConfig that may change between two runs: they decide how answers are made, not which."""


@dataclass(frozen=True)
class RegenResult:
    """What a regeneration did: rows == done + errors + dropped.

    Attributes:
        rows: rows of the input, up to `regen.limit`.
        done: rows in `output`.
        errors: rows that failed; they are tried again by the next run.
        dropped: rows left out because their answer was cut off and `regen.truncated` is drop.
        truncated: rows with an answer that the token limit cut off, kept or dropped.
        tokens: generated tokens of the rows that are done.
        tokens_per_s: speed of this run alone; 0 where it had nothing to do.
        resumed: rows that an earlier run had done.
        seconds: time that this run took to generate.
    """

    rows: int
    done: int
    errors: int
    dropped: int
    truncated: int
    tokens: int
    tokens_per_s: float
    output: Path
    resumed: int
    seconds: float


def run(config: Config, folder: RunFolder, data: Path | None = None, output: Path | None = None) -> RegenResult:
    """Answer every row of the input that has no answer yet.

    Args:
        data: prompts in SpecForge's row format; default: `prep/prompts.jsonl` of the run.
        output: where the rows go; the other files are beside it. Default: `regen/train.jsonl` of the run.
    Raises:
        UsageError: the input is missing or damaged, or was answered with other settings.
        RunError: no server answers, or a server refuses every request.
    """
    prompts, files = Prompts.scan(data or folder.prompts, config.regen.limit), Answers(output or folder.answers)
    files.prepare(config, prompts)
    console.note(f"regen: {_cost(config, prompts)}")
    engine = make_engine(config)
    try:
        return _Regeneration(config, prompts, files, engine).run()
    finally:
        engine.close()


@dataclass(frozen=True)
class DryRun:
    """What a regeneration would do.

    Attributes:
        rows: rows of the input, up to `regen.limit`.
        done: rows that have an answer already.
        answers: answers that the rows ask for, one for each turn.
        most_tokens: generated tokens at most, if every answer ran into `regen.max_new_tokens`.
        first_id: id of the first row.
        prompt: its first prompt as the target sees it.
        prompt_tokens: length of that prompt.
    """

    rows: int
    done: int
    answers: int
    most_tokens: int
    first_id: str
    prompt: str
    prompt_tokens: int


def dry_run(config: Config, folder: RunFolder, data: Path | None = None, output: Path | None = None) -> DryRun:
    """Read the input and render the first prompt; no model is loaded and nothing is written."""
    from dpace_cli.modeling.target import load_tokenizer

    prompts, files = Prompts.scan(data or folder.prompts, config.regen.limit), Answers(output or folder.answers)
    tokenizer = load_tokenizer(config.target)
    row = next(prompts.rows())
    request = Conversation(row, config.regen).request()
    ids = generation_prompt(tokenizer, request.messages, config.target.template_options(), request.tools)
    done = sum(row["id"] in prompts.ids for row in read_rows(files.rows)) if files.rows.exists() else 0
    return DryRun(
        rows=len(prompts.ids),
        done=done,
        answers=prompts.answers,
        most_tokens=prompts.answers * config.regen.max_new_tokens,
        first_id=row["id"],
        prompt=tokenizer.decode(ids),
        prompt_tokens=len(ids),
    )


@dataclass(frozen=True)
class Prompts:
    """The input, checked; rows are read again as they are needed, so that only their ids are held.

    Attributes:
        ids: id of each row in `limit`, in order, to its place.
        answers: turns to be answered.
        every_id: as `ids`, of the whole file.
    """

    path: Path
    limit: int | None
    sha256: str
    ids: dict[str, int]
    every_id: dict[str, int]
    answers: int

    @classmethod
    def scan(cls, path: Path, limit: int | None) -> Prompts:
        """Read through the file once.

        Raises:
            UsageError: it is missing, is empty, or a row is not in SpecForge's format or has the id of another.
        """
        if not path.exists():
            raise UsageError(f"there are no prompts at {path}", "`dpace prep` makes them, or pass --data FILE")
        every_id: dict[str, int] = {}
        answers = 0
        for number, row in enumerate(read_rows(path)):
            key, messages = row.get("id"), row.get("conversations")
            whole = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
            if not isinstance(key, str) or not whole:
                raise UsageError(
                    f"{path}: row {number + 1} has no id or no conversations", "`dpace prep jsonl` makes rows"
                )
            if key in every_id:
                raise UsageError(f"{path}: two rows have the id {key!r}", "`dpace prep jsonl` makes ids unique")
            every_id[key] = number
            if limit is None or number < limit:
                answers += sum(message["role"] == "user" for message in messages)
        if not every_id:
            raise UsageError(f"{path} has no rows", "`dpace prep` makes them")
        ids = dict(itertools.islice(every_id.items(), limit))
        return cls(path, limit, file_sha256(path), ids, every_id, answers)

    def rows(self) -> Iterator[Row]:
        return itertools.islice(read_rows(self.path), self.limit)


class Answers:
    """The files of one regeneration, beside each other."""

    def __init__(self, output: Path) -> None:
        prefix = "" if output.name == "train.jsonl" else f"{output.stem}."
        self.rows = output
        self.tokens = output.with_name(f"{prefix}tokens.jsonl")
        self.errors = output.with_name(f"{prefix}errors.jsonl")
        self.manifest = output.with_name(f"{prefix}manifest.json")
        self.retry: set[str] = set()
        self.base = 0

    def prepare(self, config: Config, prompts: Prompts) -> None:
        """Make sure that what is there belongs to this regeneration, and is whole.

        Raises:
            UsageError: it was made with other settings, from other prompts, or by something else.
        """
        settings = _settings(config)
        before = self._manifest_or_refuse(settings, prompts, config.regen.overwrite)
        with ExitStack() as stack:
            tokens, rows, _ = (stack.enter_context(RowLog(path)) for path in (self.tokens, self.rows, self.errors))
            answered, orphans = set(rows.ids), tokens.ids - rows.ids
        if orphans:  # killed between the two lines of a row
            _rewrite(self.tokens, (row for row in read_rows(self.tokens) if row["id"] in answered))
        failed = list(read_rows(self.errors))
        settled = [row for row in failed if row.get("dropped") and row["id"] not in answered]
        self.retry = {row["id"] for row in failed if not row.get("dropped") and row["id"] not in answered}
        if len(settled) < len(failed):
            _rewrite(self.errors, settled)
        plan = {"limit": prompts.limit, "input_sha256": prompts.sha256, "batch_size": config.regen.batch_size}
        going_on = before is not None and not before["complete"] and before["plan"] == plan
        self.base = before["answered_before"] if going_on else len(answered)
        self.head = {
            "settings": settings,
            "plan": plan,
            "answered_before": self.base,
            "config": {"regen": config.regen, "target": config.target},
            "input": {"path": str(prompts.path), "sha256": prompts.sha256, "rows": len(prompts.ids)},
            "versions": {name: version(name) for name in ("dpace-cli", "torch", "transformers", "openai")},
        }
        write_json(self.manifest, {"complete": False, **self.head})

    def _manifest_or_refuse(self, settings: dict, prompts: Prompts, overwrite: bool) -> dict | None:
        there = [path for path in (self.rows, self.tokens, self.errors) if path.exists()]
        before = read_json(self.manifest) if self.manifest.exists() else None
        reason = None
        if before is None:
            reason = f"{there[0]} was not written by `dpace regen`" if there else None
        elif "settings" not in before or "plan" not in before:
            reason = f"{self.manifest} is not one of `dpace regen`"
        elif changed := [key for key in settings if before["settings"].get(key) != settings[key]]:
            was = ", ".join(f"{key} {before['settings'].get(key)!r}, now {settings[key]!r}" for key in changed)
            reason = f"{self.rows} was made with other settings ({was})"
        elif before["plan"]["input_sha256"] != prompts.sha256 and (row_id := self._other_prompt(prompts)):
            reason = f"{self.rows} holds the answer to another prompt for row {row_id!r} than {prompts.path}"
        if reason is None:
            return before
        if not overwrite:
            raise UsageError(reason, "choose another output, or pass regen.overwrite=true to answer all rows anew")
        for path in (self.manifest, *there):
            path.unlink(missing_ok=True)
        return None

    def _other_prompt(self, prompts: Prompts) -> str | None:
        """The first row that was answered for another conversation than the input has now."""
        if not self.rows.exists():
            return None
        with RowLog(self.rows):
            pass  # a torn last line is cut off
        answered = {row["id"]: _asked(row) for row in read_rows(self.rows)}
        if missing := next((key for key in answered if key not in prompts.every_id), None):
            return missing
        for row in read_rows(prompts.path):
            asked = answered.get(row["id"])
            if asked is not None and _asked(row)[: len(asked)] != asked:
                return row["id"]
        return None

    def put_in_order(self, order: dict[str, int]) -> None:
        """Sort the finished files as the input is, so that the order of completion leaves no trace."""
        for path in (self.tokens, self.rows, self.errors):
            with open(path, "rb") as file:
                spans, at = [], 0
                for line in file:
                    spans.append((order[json.loads(line)["id"]], at, len(line)))
                    at += len(line)
                if spans == sorted(spans):
                    continue
                with writing(path, "wb") as sorted_file:
                    for _, at, length in sorted(spans):
                        file.seek(at)
                        sorted_file.write(file.read(length))


class _Regeneration:
    def __init__(self, config: Config, prompts: Prompts, files: Answers, engine: Engine) -> None:
        self.config, self.prompts, self.files, self.engine = config, prompts, files, engine

    def run(self) -> RegenResult:
        with ExitStack() as stack:
            self.tokens = stack.enter_context(RowLog(self.files.tokens))
            self.answers = stack.enter_context(RowLog(self.files.rows))
            self.errors = stack.enter_context(RowLog(self.files.errors))
            resumed = sum(key in self.prompts.ids for key in self.answers.ids)
            started, generated, finished = time.monotonic(), 0, resumed
            shown = stack.enter_context(console.meter("regen", len(self.prompts.ids), "rows", resumed))
            for group in self._groups():
                for conversation in self._converse(group):
                    generated += conversation.tokens
                    finished += self._write(conversation)
                    rate = generated / max(time.monotonic() - started, 1e-9)
                    shown.update(finished, f"{generated:,} tokens, {rate:,.0f} tokens/s")
            seconds = time.monotonic() - started
        self.files.put_in_order(self.prompts.every_id)
        return self._finish(resumed, generated, seconds)

    def _settled(self, row: Row) -> bool:
        return row["id"] in self.answers.ids or row["id"] in self.errors.ids

    def _groups(self) -> Iterator[Iterable[Row]]:
        """Rows that go to the engine together.

        Where answers are made in batches, rounding depends on who is in the batch. So the batches are fixed by
        the rows that were open when the work began, whatever has been done since: one that was broken off is
        answered again as a whole, and a run that was killed ends with the same answers as one that was not.
        """
        size = self.engine.group_rows
        if size is None:
            yield (row for row in self.prompts.rows() if not self._settled(row))
            return
        yield from _batched((row for row in self.prompts.rows() if row["id"] in self.files.retry), size)
        with open(self.files.rows, "rb") as file:
            before = {json.loads(line)["id"] for line in itertools.islice(file, self.files.base)}
        planned = (row for row in self.prompts.rows() if row["id"] not in before)
        for window in _batched(planned, WINDOW_GROUPS * size):
            for group in _batched(sorted(window, key=_size, reverse=True), size):
                if not all(map(self._settled, group)):
                    yield group

    def _converse(self, rows: Iterable[Row]) -> Iterator[Conversation]:
        """Answer the rows turn by turn; the next turn of one goes out while others are still at their first."""
        source, ready = iter(rows), deque()
        active: dict[str, Conversation] = {}
        hopeless: deque[Conversation] = deque()

        def requests() -> Iterator[Request | None]:
            while True:
                if ready:
                    yield ready.popleft()
                elif (row := next(source, None)) is not None:
                    conversation = Conversation(row, self.config.regen, row["id"] in self.files.retry)
                    if conversation.over:
                        hopeless.append(conversation)
                        continue
                    active[row["id"]] = conversation
                    yield conversation.request()
                elif active:
                    yield None
                else:
                    return

        for completion in self.engine.complete(requests()):
            conversation = active[completion.id]
            conversation.take(completion)
            if conversation.over:
                yield active.pop(completion.id)
            else:
                ready.append(conversation.request())
        yield from hopeless

    def _write(self, conversation: Conversation) -> bool:
        """Append a finished row, ids first; False where an earlier run has it already."""
        if self._settled(conversation.row):
            return False
        if conversation.error is not None:
            self.errors.append(
                {"id": conversation.id, "error": conversation.error, "turn": len(conversation.turns),
                 "dropped": conversation.dropped}
            )  # fmt: skip
            return True
        whole = all(turn["answer_ids"] for turn in conversation.turns)
        self.tokens.append(
            {"id": conversation.id, "fingerprint": self.engine.fingerprint if whole else None, "truncated": conversation.truncated,
             "turns": conversation.turns}
        )  # fmt: skip
        self.answers.append(conversation.result())
        return True

    def _finish(self, resumed: int, generated: int, seconds: float) -> RegenResult:
        ids = self.prompts.ids
        stored = [row for row in read_rows(self.files.tokens) if row["id"] in ids]
        failed = [row for row in read_rows(self.files.errors) if row["id"] in ids]
        dropped = sum(row["dropped"] for row in failed)
        result = RegenResult(
            rows=len(ids),
            done=len(stored),
            errors=len(failed) - dropped,
            dropped=dropped,
            truncated=sum(row["truncated"] for row in stored) + dropped,
            tokens=sum(turn["tokens"] for row in stored for turn in row["turns"]),
            tokens_per_s=generated / seconds if generated else 0.0,
            output=self.files.rows,
            resumed=resumed,
            seconds=seconds,
        )
        engine = {"name": self.engine.name, "fingerprint": self.engine.fingerprint, **self.engine.facts()}
        write_json(self.files.manifest, {"complete": True, **self.files.head, "engine": engine, "result": result})
        if result.errors:
            console.warn(f"{result.errors} rows failed; the same command tries them again ({self.files.errors})")
        if result.errors and not result.done:
            raise RunError(
                f"no row could be answered; the first error: {failed[0]['error']}", f"see {self.files.errors}"
            )
        return result


def _settings(config: Config) -> dict[str, Any]:
    """What decides the answers."""
    regen = config.regen.model_dump(mode="json", exclude=_FREE_SETTINGS)
    target = config.target.model_dump(mode="json", exclude={"device", "trust_remote_code"})
    return {**{f"regen.{k}": v for k, v in regen.items()}, **{f"target.{k}": v for k, v in target.items()}}


def _cost(config: Config, prompts: Prompts) -> str:
    most = prompts.answers * config.regen.max_new_tokens
    return f"{len(prompts.ids):,} rows, {prompts.answers:,} turns to answer, {most:,} tokens at most"


def _size(row: Row) -> int:
    """Bytes of the first prompt, near enough to its tokens for sorting."""
    return sum(len(str(m.get("content")).encode()) for m in itertools.takewhile(_not_answer, row["conversations"]))


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    source = iter(rows)
    while batch := list(itertools.islice(source, size)):
        yield batch


def _not_answer(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant"


def _asked(row: Row) -> list[dict[str, Any]]:
    """What a conversation asks, without the answers."""
    return list(filter(_not_answer, row["conversations"]))


def _rewrite(path: Path, rows: Iterable[Row]) -> None:
    with writing(path, "wb") as file:
        for row in rows:
            file.write(encode_line(row))
