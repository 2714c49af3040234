"""The files of a regeneration: the prompts it reads, and the answers that it writes row by row.

A row is done when it is in `tokens.jsonl` and in `train.jsonl`; it is written to them in this order. The manifest
holds the settings that decide the answers, so that no file ever mixes answers of two kinds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpace_cli.data.jsonl import RowLog, encode_line, read_rows
from dpace_cli.errors import UsageError
from dpace_cli.records import file_sha256, read_json, write_json, writing

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """The input, checked; rows are read again as they are needed, so that only their ids are held.

    Attributes:
        limit: how many rows from the top are answered; None: all.
        ids: id of each of these rows, in order.
        order: id of every row of the file to its place.
        turns: user turns in the rows that are answered.
    """

    path: Path
    limit: int | None
    sha256: str
    ids: dict[str, int]
    order: dict[str, int]
    turns: int

    @classmethod
    def scan(cls, path: Path, limit: int | None) -> Prompts:
        """Read through the file once.

        Raises:
            UsageError: it is missing, is empty, or a row is not in SpecForge's format or has the id of another.
        """
        if not path.exists():
            raise UsageError(f"there are no prompts at {path}", "`dpace prep` makes them, or pass --data FILE")
        order: dict[str, int] = {}
        turns = 0
        for number, row in enumerate(read_rows(path)):
            key = row.get("id")
            if not isinstance(key, str) or not _is_conversation(row.get("conversations")):
                raise UsageError(
                    f"{path}: row {number + 1} has no id or no conversations", "`dpace prep jsonl` makes rows"
                )
            if key in order:
                raise UsageError(f"{path}: two rows have the id {key!r}", "`dpace prep jsonl` makes ids unique")
            order[key] = number
            if limit is None or number < limit:
                turns += sum(message["role"] == "user" for message in row["conversations"])
        if not order:
            raise UsageError(f"{path} has no rows", "`dpace prep` makes them")
        return cls(path, limit, file_sha256(path), dict(itertools.islice(order.items(), limit)), order, turns)

    def rows(self) -> Iterator[Row]:
        return itertools.islice(read_rows(self.path), self.limit)


def _is_conversation(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)


class Answers:
    """The output files, beside each other.

    Attributes:
        retry: ids that failed in an earlier run.
        base: rows that were done when the work began; lines of `rows`, from the top.
    """

    def __init__(self, output: Path) -> None:
        prefix = "" if output.name == "train.jsonl" else f"{output.stem}."
        self.rows = output
        self.tokens = output.with_name(f"{prefix}tokens.jsonl")
        self.errors = output.with_name(f"{prefix}errors.jsonl")
        self.manifest = output.with_name(f"{prefix}manifest.json")
        self.retry: set[str] = set()
        self.base = 0
        self._before: dict[str, Any] | None = None
        self._replace = False

    def check(self, prompts: Prompts, settings: Mapping[str, Any], overwrite: bool) -> None:
        """Compare what is there with what is wanted; nothing is written.

        Args:
            settings: what decides the answers.
            overwrite: `prepare` is to remove answers of another kind.
        Raises:
            UsageError: there are answers that were made otherwise, from other prompts, or by something else.
        """
        filled = [path for path in (self.rows, self.tokens, self.errors) if path.exists() and path.stat().st_size]
        before = read_json(self.manifest) if self.manifest.exists() else None
        reason = None
        if before is None:
            reason = f"{filled[0]} was not written by `dpace regen`" if filled else None
        elif "settings" not in before or "plan" not in before:
            reason = f"{self.manifest} is not one of `dpace regen`"
        elif changed := _changes(before["settings"], settings):
            reason = f"{self.rows} was made with other settings ({changed})"
        elif before["plan"]["input_sha256"] != prompts.sha256 and (row_id := self._other_prompt(prompts)):
            reason = f"{self.rows} holds row {row_id!r}, which is not in {prompts.path} or asks something else there"
        if reason is None:
            self._before = before
            return
        nothing_answered = before is not None and self.rows not in filled
        if not overwrite and not nothing_answered:
            raise UsageError(reason, "choose another output, or pass regen.overwrite=true to answer all rows anew")
        self._replace = True

    def finished(self, prompts: Prompts, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of the run that did just this, if nothing of it is left to do."""
        before = self._before
        if before is None or not before["complete"] or before["plan"] != plan:
            return None
        if before["result"]["errors"] or not self.rows.exists():
            return None
        return before["result"]

    def prepare(self, prompts: Prompts, plan: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        """Mend what a killed run left, and write down what this one is about to do.

        Args:
            plan: what decides which rows are answered together.
            head: the rest of the manifest.
        """
        if self._replace:
            for path in (self.manifest, self.rows, self.tokens, self.errors):
                path.unlink(missing_ok=True)
        with ExitStack() as stack:
            tokens, rows, _ = (stack.enter_context(RowLog(path)) for path in (self.tokens, self.rows, self.errors))
            answered, orphans = rows.ids, tokens.ids - rows.ids
        if orphans:  # killed between the two lines of a row
            _rewrite(self.tokens, (row for row in read_rows(self.tokens) if row["id"] in answered))
        failed = [row for row in read_rows(self.errors) if row["id"] in prompts.order and row["id"] not in answered]
        self.retry = {row["id"] for row in failed if not row["dropped"] and row["id"] in prompts.ids}
        _rewrite(self.errors, (row for row in failed if row["id"] not in self.retry))
        before = self._before
        goes_on = before is not None and not before["complete"] and before["plan"] == plan
        self.base = before["answered_before"] if before is not None and goes_on else len(answered)
        self._head = {"plan": plan, "answered_before": self.base, **head}
        write_json(self.manifest, {"complete": False, **self._head})

    def complete(self, prompts: Prompts) -> None:
        """Sort the finished files as the input is, so that the order of completion leaves no trace."""
        for path in (self.tokens, self.rows, self.errors):
            with open(path, "rb") as file:
                spans, at = [], 0
                for line in file:
                    spans.append((prompts.order[json.loads(line)["id"]], at, len(line)))
                    at += len(line)
                if spans == sorted(spans):
                    continue
                with writing(path, "wb") as in_order:
                    for _, at, length in sorted(spans):
                        file.seek(at)
                        in_order.write(file.read(length))

    def sign(self, **more: Any) -> None:
        """Write the manifest of a run that came to its end."""
        write_json(self.manifest, {"complete": True, **self._head, **more})

    def base_ids(self) -> set[str]:
        """Ids of the rows that were done when the work began, however often it was broken off since."""
        with open(self.rows, "rb") as file:
            return {json.loads(line)["id"] for line in itertools.islice(file, self.base)}

    def _other_prompt(self, prompts: Prompts) -> str | None:
        """The first row that was answered for another conversation than the input has now."""
        if not self.rows.exists():
            return None
        with RowLog(self.rows):
            pass  # a torn last line is cut off
        answered = {row["id"]: _asked(row) for row in read_rows(self.rows)}
        if missing := next((key for key in answered if key not in prompts.order), None):
            return missing
        for row in read_rows(prompts.path):
            asked = answered.get(row["id"])
            if asked is not None and _asked(row)[: len(asked)] != asked:
                return row["id"]
        return None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {before.get(key)!r}, now {now.get(key)!r}"
        for key in {**before, **now}
        if before.get(key) != now.get(key)
    )


def _asked(row: Row) -> list[dict[str, Any]]:
    """What a conversation asks, without the answers."""
    return [message for message in row["conversations"] if message["role"] != "assistant"]


def _rewrite(path: Path, rows: Iterable[Row]) -> None:
    with writing(path, "wb") as file:
        for row in rows:
            file.write(encode_line(row))
