"""Training rows from a file of answers: read as ids with their masks, cut, and counted where they are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpace_cli.config import Config
from dpace_cli.data.batches import TrainingRow
from dpace_cli.data.jsonl import read_rows
from dpace_cli.data.tokens import Encoded, encode_row, encode_stored
from dpace_cli.errors import UsageError
from dpace_cli.records import RunFolder


def training_file(config: Config, folder: RunFolder) -> Path:
    """The file whose rows a training reads: `train.data`, else the answers of the run."""
    return Path(config.train.data).expanduser() if config.train.data else folder.answers


def read_training_rows(
    data: Path, tokenizer: Any, fingerprint: str, options: Mapping[str, Any], max_length: int
) -> tuple[list[TrainingRow], Counter[str]]:
    """Rows that can be trained on, and why others are left out.

    The ids that the target itself saw and wrote, stored by `dpace regen` beside the answers, are used where
    they were made with this tokenizer; everything else is rendered with the chat template.

    Args:
        data: rows in SpecForge's format.
        fingerprint: of the tokenizer.
        options: of the chat template.
        max_length: tokens at which a row is cut.
    Raises:
        UsageError: a line is not such a row.
    """
    stored_file = data.with_name("tokens.jsonl")
    stored = {}
    if stored_file.exists():
        stored = {r["id"]: r["turns"] for r in read_rows(stored_file) if r["fingerprint"] == fingerprint}
    rows: list[TrainingRow] = []
    skipped: Counter[str] = Counter()
    for row in read_rows(data):
        if not isinstance(row.get("id"), str) or not isinstance(row.get("conversations"), list):
            raise UsageError(
                f"{data}: a row has no id or no conversations: {str(row)[:100]}", "`dpace prep` makes rows"
            )
        if row["id"] in stored:
            pieces = encode_stored(stored[row["id"]])
        else:
            pieces = encode_row(tokenizer, row, options, None)
        for number, piece in enumerate(pieces):
            made = _cut(row["id"] if len(pieces) == 1 else f"{row['id']}#{number}", piece, max_length, skipped)
            if len(made.candidates):
                rows.append(made)
            else:
                skipped["fewer than two supervised tokens"] += 1
    return rows, skipped


def _cut(row_id: str, piece: Encoded, max_length: int, skipped: Counter[str]) -> TrainingRow:
    if len(piece.input_ids) > max_length:
        skipped["cut at train.max_length"] += 1
    return TrainingRow.make(row_id, piece.input_ids[:max_length], piece.loss_mask[:max_length])
