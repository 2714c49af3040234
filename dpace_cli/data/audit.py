"""A look at a file of answers before it is trained on: a sample of its rows against the tokenizer."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpace_cli.data.tokens import Encoded, TemplateError, encode_row, encode_stored, generation_prompt
from dpace_cli.errors import UsageError

SAMPLE_ROWS = 256
"""Rows that are tokenized; they are spread evenly over the file."""

_DRIFT_ROWS = 16


@dataclass(frozen=True)
class DataAudit:
    """What the sampled rows look like to a training.

    Attributes:
        rows: lines of the file.
        sampled: rows that were read as the training would.
        tokens: mean tokens of a sequence, cut at the maximum length.
        longest: tokens of the longest sequence of the sample, uncut.
        cut: sequences of the sample that are cut.
        empty: rows of the sample with fewer than two supervised tokens in a row, after the cut.
        refused: why rows could not be rendered, by message.
        anchors: mean places where an anchor can stand.
        most_anchors: most of them in one sequence.
        supervised: mean positions that a block of `block_size` supervises.
        supervised_share: of all tokens.
        contains_mask: rows of the sample in which the mask token occurs.
        ended: share of answers that end with one of the stop tokens.
    """

    rows: int
    sampled: int
    tokens: float
    longest: int
    cut: int
    empty: int
    refused: Mapping[str, int]
    anchors: float
    most_anchors: int
    supervised: float
    supervised_share: float
    contains_mask: int
    ended: float


@dataclass(frozen=True)
class StoredTokens:
    """The token ids that regen stored beside the answers, against the tokenizer of now.

    Attributes:
        rows: stored rows that were looked at.
        other_tokenizer: rows made with another tokenizer or chat template; they are rendered anew.
        compared: rows whose prompt was rendered again.
        rendered_otherwise: those of them that come out otherwise, so that other template options were in force.
    """

    rows: int
    other_tokenizer: int
    compared: int
    rendered_otherwise: int


def audit_rows(
    path: Path, tokenizer: Any, fingerprint: str, options: Mapping[str, Any], *, max_length: int, block_size: int,
    mask_token_id: int | None, stop_token_ids: list[int], stored: Path | None = None,
) -> DataAudit:  # fmt: skip
    """Read a sample of the rows of a file as a training would.

    Args:
        path: rows in SpecForge's format.
        fingerprint: of the tokenizer; stored ids are used where theirs is the same.
        options: of the chat template.
        stored: regen's tokens.jsonl, where there is one.
    Raises:
        UsageError: the file cannot be read, or a sampled line is not a row.
    """
    count, lines = _sample(path, SAMPLE_ROWS)
    if not lines:
        raise UsageError(f"{path} has no rows", "`dpace regen` fills it")
    ids = _stored_turns(stored, fingerprint) if stored is not None and stored.exists() else {}
    pieces: list[Encoded] = []
    refused: Counter[str] = Counter()
    empty = sampled = with_mask = ends = answered = 0
    for number, line in lines:
        row = _row(line, path, number)
        sampled += 1
        try:
            own = encode_stored(ids[row["id"]]) if row["id"] in ids else encode_row(tokenizer, row, options, None)
        except TemplateError as error:
            refused[error.message] += 1
            continue
        trained = [piece for piece in own if _candidates(piece, max_length).any()]
        empty += not trained
        with_mask += any(mask_token_id in piece.input_ids for piece in own)
        for piece in own:
            answered += 1
            ends += bool(piece.loss_mask[-1]) and piece.input_ids[-1] in stop_token_ids
        pieces += trained
    lengths = [len(piece.input_ids) for piece in pieces]
    anchors = [int(_candidates(piece, max_length).sum()) for piece in pieces]
    positions = [_supervised_positions(piece, max_length, block_size) for piece in pieces]
    cut_lengths = [min(length, max_length) for length in lengths]
    supervised = sum(sum(piece.loss_mask[:max_length]) for piece in pieces)
    return DataAudit(
        rows=count, sampled=sampled, tokens=statistics.fmean(cut_lengths or [0]), longest=max(lengths, default=0),
        cut=sum(length > max_length for length in lengths), empty=empty, refused=refused,
        anchors=statistics.fmean(anchors or [0]), most_anchors=max(anchors, default=0),
        supervised=statistics.fmean(positions or [0]), supervised_share=supervised / max(sum(cut_lengths), 1),
        contains_mask=with_mask, ended=ends / max(answered, 1),
    )  # fmt: skip


def audit_stored(
    path: Path, stored: Path, tokenizer: Any, fingerprint: str, options: Mapping[str, Any]
) -> StoredTokens:
    """Compare what regen stored with what the tokenizer and the template options make now.

    Raises:
        UsageError: a file cannot be read.
    """
    _, lines = _sample(stored, SAMPLE_ROWS)
    rows = [_row(line, stored, number) for number, line in lines]
    other = sum(row.get("fingerprint") != fingerprint for row in rows)
    # Both files are written row by row in one order, so that the first rows of one are among the first of the other.
    answers = {}
    for number, line in _head(path, 4 * _DRIFT_ROWS):
        row = _row(line, path, number)
        answers[row["id"]] = row
    compared = otherwise = 0
    for number, line in _head(stored, 4 * _DRIFT_ROWS):
        row = _row(line, stored, number)
        if row.get("fingerprint") != fingerprint or row["id"] not in answers or not row.get("turns"):
            continue
        messages = answers[row["id"]]["conversations"]
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
        if first is None:
            continue
        compared += 1
        try:
            now = generation_prompt(tokenizer, messages[:first], options, answers[row["id"]].get("tools"))
        except TemplateError:
            now = []
        otherwise += now != list(row["turns"][0]["prompt_ids"])
    return StoredTokens(len(rows), other, compared, otherwise)


def _candidates(piece: Encoded, max_length: int) -> np.ndarray:
    """Where an anchor can stand: at a supervised token before another one."""
    mask = np.asarray(piece.loss_mask[:max_length], dtype=bool)
    return mask[:-1] & mask[1:]


def _supervised_positions(piece: Encoded, max_length: int, block_size: int) -> float:
    """Mean over the places of an anchor of the supervised positions behind it in its block."""
    mask = np.asarray(piece.loss_mask[:max_length], dtype=np.int64)
    before = np.concatenate([[0], mask.cumsum(), np.full(block_size, mask.sum())])
    places = np.flatnonzero(_candidates(piece, max_length))
    return float((before[places + block_size] - before[places + 1]).mean()) if len(places) else 0.0


def _stored_turns(stored: Path, fingerprint: str) -> dict[str, Any]:
    """Stored turns by row id, of as many rows as are sampled, evenly spread."""
    _, lines = _sample(stored, SAMPLE_ROWS)
    rows = [_row(line, stored, number) for number, line in lines]
    return {row["id"]: row["turns"] for row in rows if row.get("fingerprint") == fingerprint}


def _sample(path: Path, size: int) -> tuple[int, list[tuple[int, bytes]]]:
    """The number of non-blank lines, and at most `size` of them, evenly spread, with their line numbers.

    Read once and in bounded memory: every `step`-th line is held, and `step` doubles when too many are.
    """
    step, count = 1, 0
    held: list[tuple[int, bytes]] = []
    for line in _lines(path):
        if count % step == 0:
            held.append(line)
            if len(held) > 2 * size:
                held, step = held[::2], 2 * step
        count += 1
    if len(held) > size:
        held = [held[place * len(held) // size] for place in range(size)]
    return count, held


def _head(path: Path, size: int) -> list[tuple[int, bytes]]:
    return [line for _, line in zip(range(size), _lines(path))]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _row(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if isinstance(row["id"], str) and isinstance(row.get("conversations", row.get("turns")), list):
            return row
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{path}, line {number}: not a row with id and conversations", "`dpace prep jsonl` reads it")
