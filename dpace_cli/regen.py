"""The target's own answers to the prompts: `regen/train.jsonl`.

While it runs, `tokens.jsonl` and then `train.jsonl` grow by one line for each finished row, and a row is done
when it is in both; the end puts both into the input's order. What went wrong is in `errors.jsonl`, and is
tried again by the next run.
"""

from __future__ import annotations

import itertools
import statistics
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
from dpace_cli.data.answers import Answers, Prompts, Row
from dpace_cli.data.jsonl import RowLog, read_rows
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines.base import Engine, Request, make_engine
from dpace_cli.engines.conversation import Conversation
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import RunFolder, only_one

WINDOW_GROUPS = 64
"""Batches whose rows are sorted by length together."""

_DRY_RUN_ROWS = 200

_FREE_SETTINGS = {
    "engine", "base_urls", "api_key_env", "concurrency", "timeout_s", "max_retries", "batch_size", "limit", "overwrite",
    "return_token_ids",
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
        UsageError: the input is missing or damaged, was answered with other settings, or is being answered by
            another process.
        RunError: no server answers, or a server refuses every request.
    """
    prompts, files = Prompts.scan(data or folder.prompts, config.regen.limit), Answers(output or folder.answers)
    if files.rows.resolve() == prompts.path.resolve():
        raise UsageError(f"{files.rows} is the input, and would be replaced by the answers", "choose another output")
    settings = _settings(config)
    plan = {"limit": prompts.limit, "input_sha256": prompts.sha256, "batch_size": config.regen.batch_size}
    files.check(prompts, settings, config.regen.overwrite)
    if result := files.finished(prompts, plan):
        return RegenResult(**{**result, "output": files.rows, "resumed": result["done"]})
    engine = make_engine(config)
    try:
        head = {
            "settings": settings,
            "config": {"regen": config.regen, "target": config.target},
            "input": {"path": prompts.path, "sha256": prompts.sha256, "rows": len(prompts.ids)},
            "versions": {name: version(name) for name in ("dpace-cli", "torch", "transformers", "openai")},
        }
        with only_one(files.rows.with_name("lock")):
            files.prepare(prompts, plan, head)
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
        prompt_tokens: tokens of all first prompts together, estimated from some of them.
        most_tokens: generated tokens at most, if every answer ran into `regen.max_new_tokens`.
        first_id: id of the first row.
        first_prompt: its first prompt as the target sees it.
    """

    rows: int
    done: int
    answers: int
    prompt_tokens: int
    most_tokens: int
    first_id: str
    first_prompt: str


def dry_run(config: Config, folder: RunFolder, data: Path | None = None, output: Path | None = None) -> DryRun:
    """Read the input and render its first prompt; no model is loaded and nothing is written.

    Raises:
        UsageError: the input or the tokenizer is missing, or no row has a turn to answer.
    """
    from dpace_cli.modeling.target import load_tokenizer

    prompts, files = Prompts.scan(data or folder.prompts, config.regen.limit), Answers(output or folder.answers)
    tokenizer, options = load_tokenizer(config.target), config.target.template_options()
    step = max(1, len(prompts.ids) // _DRY_RUN_ROWS)
    rendered: list[tuple[str, list[int]]] = []
    for row in itertools.islice(prompts.rows(), 0, None, step):
        conversation = Conversation(row, config.regen)
        if not conversation.over:
            request = conversation.request()
            rendered.append((row["id"], generation_prompt(tokenizer, request.messages, options, request.tools)))
    if not rendered:
        raise UsageError(f"{prompts.path} has no user turn to answer", "`dpace prep stats` shows what is in it")
    done = sum(row["id"] in prompts.ids for row in read_rows(files.rows)) if files.rows.exists() else 0
    answers = prompts.turns if config.regen.multi_turn else len(prompts.ids)
    return DryRun(
        rows=len(prompts.ids),
        done=done,
        answers=answers,
        prompt_tokens=round(statistics.fmean(len(ids) for _, ids in rendered) * len(prompts.ids)),
        most_tokens=answers * config.regen.max_new_tokens,
        first_id=rendered[0][0],
        first_prompt=tokenizer.decode(rendered[0][1]),
    )


class _Regeneration:
    def __init__(self, config: Config, prompts: Prompts, files: Answers, engine: Engine) -> None:
        self.config, self.prompts, self.files, self.engine = config, prompts, files, engine

    def run(self) -> RegenResult:
        with ExitStack() as stack:
            self.tokens = stack.enter_context(RowLog(self.files.tokens))
            self.answers = stack.enter_context(RowLog(self.files.rows))
            self.errors = stack.enter_context(RowLog(self.files.errors))
            resumed = sum(key in self.prompts.ids for key in self.answers.ids)
            console.note(_cost(self.config, self.prompts, resumed))
            started, generated, finished = time.monotonic(), 0, resumed
            together = self.engine.group_rows or self.config.regen.concurrency * len(self.config.regen.base_urls)
            shown = stack.enter_context(console.meter("regen", len(self.prompts.ids), "rows", resumed, together))
            for group in self._groups():
                for conversation in self._converse(group):
                    generated += conversation.tokens
                    finished += self._write(conversation)
                    rate = generated / max(time.monotonic() - started, 1e-9)
                    shown.update(finished, f"{generated:,} tokens, {rate:,.0f} tokens/s")
            seconds = time.monotonic() - started
        self.files.complete(self.prompts)
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
        before = self.files.base_ids()
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
            {"id": conversation.id, "fingerprint": self.engine.fingerprint if whole else None,
             "truncated": conversation.truncated, "turns": conversation.turns}
        )  # fmt: skip
        self.answers.append(conversation.result())
        return True

    def _finish(self, resumed: int, generated: int, seconds: float) -> RegenResult:
        ids = self.prompts.ids
        failed = [row for row in read_rows(self.files.errors) if row["id"] in ids]
        truncated = dropped = sum(row["dropped"] for row in failed)
        tokens = 0
        for row in read_rows(self.files.tokens):
            if row["id"] in ids:
                truncated += row["truncated"]
                tokens += sum(turn["tokens"] for turn in row["turns"])
        result = RegenResult(
            rows=len(ids),
            done=sum(key in ids for key in self.answers.ids),
            errors=len(failed) - dropped,
            dropped=dropped,
            truncated=truncated,
            tokens=tokens,
            tokens_per_s=generated / seconds if generated else 0.0,
            output=self.files.rows,
            resumed=resumed,
            seconds=seconds,
        )
        engine = {"name": self.engine.name, "fingerprint": self.engine.fingerprint, **self.engine.facts()}
        self.files.sign(engine=engine, result=result)
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


def _cost(config: Config, prompts: Prompts, resumed: int) -> str:
    answers = prompts.turns if config.regen.multi_turn else len(prompts.ids)
    most = config.regen.max_new_tokens
    done = f"; {resumed:,} rows are done" if resumed else ""
    tokens = f"{answers:,} answers of up to {most:,} tokens, {answers * most:,} in all"
    return f"regen: {len(prompts.ids):,} rows, {tokens}{done}"


def _size(row: Row) -> int:
    """Bytes of the first prompt, near enough to its tokens for sorting."""
    return sum(len(str(m.get("content")).encode()) for m in itertools.takewhile(_not_answer, row["conversations"]))


def _batched(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    source = iter(rows)
    while batch := list(itertools.islice(source, size)):
        yield batch


def _not_answer(message: dict[str, Any]) -> bool:
    return message["role"] != "assistant"
