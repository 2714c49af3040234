"""What is in a file of rows: turns, lengths, scripts, roles, share supervised; and one row as the target sees it."""

from __future__ import annotations

import itertools
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from dpace_cli.data.jsonl import read_rows
from dpace_cli.data.tokens import TemplateError, encode_row
from dpace_cli.errors import UsageError
from dpace_cli.render.terminal import Bars

SAMPLE_ROWS = 2000
"""Rows that are tokenized; they are spread evenly over the file."""
_QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
_BINS = 16
_NO_LETTERS = bytes(i for i in range(128) if not chr(i).isalpha())


@dataclass(frozen=True)
class Spread:
    """Least, quantiles and most of some lengths.

    Attributes:
        quantiles: values at 0, 5, 25, 50, 75, 95 and 100 percent.
        edges, counts: a histogram; `edges` has one value more than `counts`, evenly spaced on a log scale.
    """

    total: int
    mean: float
    quantiles: list[float]
    edges: list[float]
    counts: list[int]

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread | None:
        """The spread of some lengths, or None where there are none."""
        if not values:
            return None
        numbers = np.asarray(values, dtype=float)
        low, high = max(numbers.min(), 1), max(numbers.max(), 1)
        edges = np.unique(np.round(np.geomspace(low, high + 1, _BINS + 1)))
        counts, _ = np.histogram(np.maximum(numbers, 1), edges if len(edges) > 1 else np.array([low, low + 1]))
        return cls(
            int(numbers.sum()),
            float(numbers.mean()),
            [float(q) for q in np.quantile(numbers, _QUANTILES)],
            [float(edge) for edge in (edges if len(edges) > 1 else (low, low + 1))],
            [int(count) for count in counts],
        )


@dataclass(frozen=True)
class StatsResult:
    """What `dpace prep stats` found.

    Attributes:
        roles: role to number of turns.
        turns: number of user turns in a row, to number of rows.
        scripts: main script of a row's letters, to number of rows.
        user_chars, assistant_chars: characters of a turn.
        row_tokens: tokens of a row as the target sees it, of `tokenized` rows spread over the file.
        prompt_tokens: of them, those before the last answer.
        supervised: share of those rows' tokens that are supervised.
        refused: of those rows, how many the chat template refuses.
        sequences: training sequences that they make; more than rows where the template rewrites earlier turns.
        plot: file that the plot was written to.
    """

    file: str
    rows: int
    roles: dict[str, int]
    turns: dict[int, int]
    scripts: dict[str, int]
    with_tools: int
    with_reasoning: int
    without_answer: int
    user_chars: Spread | None
    assistant_chars: Spread | None
    target: str | None = None
    tokenized: int = 0
    refused: int = 0
    sequences: int = 0
    row_tokens: Spread | None = None
    prompt_tokens: Spread | None = None
    supervised: float | None = None
    plot: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _counts(self)
        table = Table(
            "", "mean", "min", "5%", "25%", "median", "75%", "95%", "max", title="Lengths", title_justify="left"
        )
        for name, spread in self._spreads():
            cells = [f"{spread.mean:,.0f}", *(f"{value:,.0f}" for value in spread.quantiles)]
            table.add_row(name, *cells)
        yield table
        for name, spread in self._spreads()[-2:] if self.row_tokens else self._spreads():
            edges = spread.edges
            texts = [(f"{low:,.0f}", f"{count:,}") for low, count in zip(edges, spread.counts)]
            yield Bars(name, ("from", "count"), texts, spread.counts)

    def _spreads(self) -> list[tuple[str, Spread]]:
        named = [
            ("characters of a user turn", self.user_chars),
            ("characters of an answer", self.assistant_chars),
            ("tokens before the last answer", self.prompt_tokens),
            ("tokens of a row", self.row_tokens),
        ]
        return [(name, spread) for name, spread in named if spread is not None]


def _counts(result: StatsResult) -> Table:
    table = Table("", "", title=result.file, title_justify="left", show_header=False)
    table.add_row("rows", f"{result.rows:,}")
    table.add_row("turns by role", ", ".join(f"{role} {count:,}" for role, count in result.roles.items()))
    table.add_row("user turns in a row", ", ".join(f"{n}: {count:,}" for n, count in _few(result.turns)))
    table.add_row("main script", ", ".join(f"{name} {count:,}" for name, count in _few(result.scripts)))
    for name, count in (
        ("rows with tools", result.with_tools),
        ("rows with reasoning", result.with_reasoning),
        ("rows without an answer", result.without_answer),
    ):
        if count:
            table.add_row(name, f"{count:,}")
    if result.supervised is not None:
        table.add_row("supervised tokens", f"{result.supervised:.1%} with the chat template of {result.target}")
    if result.refused:
        table.add_row("refused by the chat template", f"{result.refused:,} of {result.tokenized:,}")
    if result.tokenized and result.tokenized < result.rows:
        table.add_row("tokens are of", f"{result.tokenized:,} rows, spread over the file")
    return table


def _few(counts: Mapping[Any, int], most: int = 8) -> list[tuple[Any, int]]:
    """The first entries, and the rest as one."""
    entries = list(counts.items())
    rest = sum(count for _, count in entries[most:])
    return [*entries[:most], *([("more", rest)] if rest else [])]


@dataclass
class _Tally:
    """Counts over all rows."""

    rows: int = 0
    roles: Counter[str] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    with_tools: int = 0
    with_reasoning: int = 0
    without_answer: int = 0
    user_chars: list[int] = field(default_factory=list)
    assistant_chars: list[int] = field(default_factory=list)

    def add(self, row: Mapping[str, Any]) -> None:
        messages = row["conversations"]
        roles = Counter(message["role"] for message in messages)
        self.rows += 1
        self.roles.update(roles)
        self.turns[roles["user"]] += 1
        self.without_answer += not roles["assistant"]
        self.with_tools += bool(row.get("tools")) or any(m.get("tool_calls") or m["role"] == "tool" for m in messages)
        self.with_reasoning += any(message.get("reasoning_content") for message in messages)
        for message in messages:
            if message["role"] in ("user", "assistant"):
                lengths = self.user_chars if message["role"] == "user" else self.assistant_chars
                lengths.append(len(message["content"] or ""))
        self.scripts[main_script(message["content"] or "" for message in messages)] += 1


def summarize(
    path: Path, tokenizer: Any = None, options: Mapping[str, Any] | None = None, target: str = ""
) -> StatsResult:
    """Read a file of rows and count.

    Args:
        tokenizer: the target's, for lengths in tokens and the share supervised; None leaves them out.
        options: keyword arguments of the chat template.
        target: what the target is called.
    Raises:
        UsageError: the file is missing, or is not one of rows.
    """
    tally = _Tally()
    for row in conversations(path):
        tally.add(row)
    if not tally.rows:
        raise UsageError(f"{path} has no rows")
    counted = {
        "file": str(path),
        "rows": tally.rows,
        "roles": dict(tally.roles.most_common()),
        "turns": dict(sorted(tally.turns.items())),
        "scripts": dict(tally.scripts.most_common()),
        "with_tools": tally.with_tools,
        "with_reasoning": tally.with_reasoning,
        "without_answer": tally.without_answer,
        "user_chars": Spread.of(tally.user_chars),
        "assistant_chars": Spread.of(tally.assistant_chars),
    }
    tokens = _tokens(path, tally.rows, tokenizer, options or {}) if tokenizer is not None else {}
    return StatsResult(**counted, **tokens, target=target if tokenizer is not None else None)


def _tokens(path: Path, rows: int, tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    step = max(1, -(-rows // SAMPLE_ROWS))
    lengths, prompts = [], []
    tokenized = refused = sequences = total = supervised = 0
    for number, row in enumerate(conversations(path)):
        if number % step:
            continue
        tokenized += 1
        try:
            encoded = encode_row(tokenizer, row, options, None)
        except TemplateError:
            refused += 1
            continue
        if not encoded:
            continue
        sequences += len(encoded)
        lengths.append(len(encoded[-1].input_ids))
        mask = encoded[-1].loss_mask
        last = len(mask) - 1 - mask[::-1].index(1)
        before = next((i for i in range(last, -1, -1) if not mask[i]), -1)
        prompts.append(before + 1)
        total += sum(len(sequence.input_ids) for sequence in encoded)
        supervised += sum(sum(sequence.loss_mask) for sequence in encoded)
    return {
        "tokenized": tokenized,
        "refused": refused,
        "sequences": sequences,
        "row_tokens": Spread.of(lengths),
        "prompt_tokens": Spread.of(prompts),
        "supervised": supervised / total if total else None,
    }


def plot(result: StatsResult, path: Path) -> None:
    """Draw the histograms of a result into a PNG, PDF or SVG file."""
    from matplotlib.figure import Figure

    spreads = result._spreads()
    figure = Figure(figsize=(6.4, 2.2 * len(spreads)), layout="constrained")
    for number, (name, spread) in enumerate(spreads, start=1):
        axes = figure.add_subplot(len(spreads), 1, number)
        axes.stairs(spread.counts, spread.edges, fill=True)
        axes.set_xscale("log")
        axes.set_xlabel(name)
        axes.set_ylabel("count")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def conversations(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, each checked to be a conversation.

    Raises:
        UsageError: the file is missing, or a row is no conversation.
    """
    for number, row in enumerate(read_rows(path), start=1):
        messages = row.get("conversations")
        if not isinstance(messages, list) or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content") or "", str)
            for m in messages
        ):
            raise UsageError(f"{path}, row {number}: no conversation with role and content", "`dpace prep` makes rows")
        yield row


@cache
def _script(character: str) -> str:
    """Script of a letter by its Unicode name; empty for what is no letter."""
    if not character.isalpha():
        return ""
    name = unicodedata.name(character, "UNKNOWN").split()[0].removesuffix("-COMPATIBILITY")
    return {"HIRAGANA": "Japanese", "KATAKANA": "Japanese", "CJK": "Han"}.get(name, name.capitalize())


def main_script(texts: Iterable[str]) -> str:
    """The script of most letters; text with kana is Japanese, whatever the share of Han characters."""
    counts: Counter[str] = Counter()
    for text in texts:
        if text.isascii():
            counts["Latin"] += len(text.encode().translate(None, _NO_LETTERS))
            continue
        for character, count in Counter(text).items():
            counts[_script(character)] += count
    del counts[""]
    if counts["Japanese"] and counts["Japanese"] * 10 > counts["Han"]:
        counts["Japanese"] += counts.pop("Han", 0)
    best = counts.most_common(1)
    return best[0][0] if best and best[0][1] else "none"


# --- one row ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Preview:
    """A row as the target sees it.

    Attributes:
        sequences: for each training sequence, runs of tokens as (text, supervised), in order.
        tokens, supervised: how many of each sequence there are.
    """

    id: str
    target: str
    sequences: list[list[tuple[str, bool]]]
    tokens: list[int]
    supervised: list[int]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, runs in enumerate(self.sequences):
            of_several = f", sequence {number + 1} of {len(self.sequences)}" if len(self.sequences) > 1 else ""
            counts = f"{self.supervised[number]:,} of {self.tokens[number]:,} tokens are supervised"
            yield Text(f"{self.id}{of_several}: {counts} ({self.target})", style="bold")
            text = Text()
            for piece, supervised in runs:
                # Brackets as well, so that it can be told where there is no colour.
                shown = f"⟦{piece}⟧" if supervised and not console.color_system else piece
                text.append(shown, style="bold green" if supervised else "dim")
            yield text
        if not self.sequences:
            yield Text(f"{self.id}: nothing is supervised, there is no answer")


def view(path: Path, number: int, tokenizer: Any, options: Mapping[str, Any], target: str) -> Preview:
    """One row of a file, cut into runs of supervised and other tokens.

    Args:
        number: which row, from 0.
    Raises:
        UsageError: there is no such row.
        TemplateError: the chat template refuses it.
    """
    row = next((row for index, row in enumerate(conversations(path)) if index == number), None)
    if row is None:
        raise UsageError(f"{path} has no row {number}", "rows are counted from 0")
    encoded = encode_row(tokenizer, row, options, None)
    return Preview(
        str(row.get("id", number)),
        target,
        [_runs(tokenizer, sequence.input_ids, sequence.loss_mask) for sequence in encoded],
        [len(sequence.input_ids) for sequence in encoded],
        [sum(sequence.loss_mask) for sequence in encoded],
    )


def _runs(tokenizer: Any, ids: Sequence[int], mask: Sequence[int]) -> list[tuple[str, bool]]:
    borders = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [
        (
            tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False),
            bool(mask[start]),
        )
        for start, end in itertools.pairwise(borders)
    ]
