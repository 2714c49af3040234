"""dpace prep: conversations of any source to SpecForge's row format."""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpace_cli import __version__
from dpace_cli.config import Config
from dpace_cli.console import meter, note, warn
from dpace_cli.data.adapters import Cleaner, Rejected, Row
from dpace_cli.data.jsonl import encode_line
from dpace_cli.data.reading import RawRow, SourceFile
from dpace_cli.errors import UsageError
from dpace_cli.records import RunFolder, file_sha256, to_json, write_json, writing

DEMO_ROWS = 2048


@dataclass(frozen=True)
class PrepResult:
    """What `dpace prep` did. Every whole row is kept or rejected: read == kept + sum(rejected.values()).

    Attributes:
        read: whole rows of the input.
        kept: rows in `output` and, where rows were set apart, in `val_output`.
        rejected: reason to count.
        repaired: rule to count.
        partial: the input was cut off in the middle of a row.
        val: how many of the kept rows were set apart for validation.
    """

    read: int
    kept: int
    rejected: dict[str, int]
    repaired: dict[str, int]
    partial: bool
    val: int
    output: Path
    rejects: Path
    val_output: Path | None


def run(config: Config, folder: RunFolder) -> PrepResult:
    """Convert the configured source.

    Raises:
        UsageError: the input is missing or cannot be read.
        RunError: the output cannot be written.
    """
    prep = config.prep
    output = Path(prep.output) if prep.output else folder.prompts
    rejects = output.with_name("rejects.jsonl" if not prep.output else f"{output.stem}.rejects.jsonl")
    manifest = output.with_name("manifest.json" if not prep.output else f"{output.stem}.manifest.json")
    val_output = None
    if prep.val:
        val_output = output.with_name("val.jsonl" if not prep.output else f"{output.stem}.val.jsonl")
    counts, repaired = Counter(), Counter()
    with writing(output, "wb") as kept_file, writing(rejects, "wb") as rejects_file:
        val_file = open(val_output, "wb") if val_output else None
        kept = 0
        val = 0
        read = 0
        cut = False
        tokenizer = None
        if prep.max_prompt_tokens or prep.max_tokens:
            from dpace_cli.modeling.target import load_tokenizer

            tokenizer = load_tokenizer(config.target)
        rows: list[tuple[int, bytes]] = []
        ids: set[str] = set()
        if prep.source == "demo":
            source = _demo(prep.max_rows or DEMO_ROWS, prep.seed)
            files = []
        else:
            files = [SourceFile(path) for path in _inputs(prep.inputs)]
            source = (row for file in files for row in file.rows())
        cleaner = Cleaner(prep.source if prep.source != "demo" else "jsonl", frozenset(prep.disable))
        heap: list[int] = []
        for raw in source:
            read += 1
            try:
                if raw.reason:
                    raise Rejected(raw.reason)
                row = cleaner.row(raw.value)
                if not row.id:
                    row.id = hashlib.blake2b(json.dumps(row.messages).encode(), digest_size=8).hexdigest()
                    row.repairs.append("made_id")
                number, key = 1, row.id
                while row.id in ids:
                    number += 1
                    row.id = f"{key}-{number}"
                ids.add(row.id)
                if prep.first_turn or prep.max_turns:
                    row.messages = _turns(row.messages, 1 if prep.first_turn else prep.max_turns)
                rank = _hash(f"{prep.seed}:{row.id}")
                if prep.max_rows and len(heap) == prep.max_rows and rank >= -heap[0]:
                    raise Rejected("over_max_rows")
                if tokenizer is not None:
                    _check_length(tokenizer, row, config)
                try:
                    line = encode_line(row.to_json())
                except UnicodeEncodeError:
                    line = json.dumps(row.to_json()).encode() + b"\n"
                    row.repairs.append("replaced_surrogates")
                if prep.max_rows:
                    if len(heap) == prep.max_rows:
                        heapq.heappushpop(heap, -rank)
                        counts["over_max_rows"] += 1
                    else:
                        heapq.heappush(heap, -rank)
                rows.append((rank, line))
                repaired.update(set(row.repairs))
            except Rejected as rejection:
                counts[rejection.args[0]] += 1
                if rejection.args[0] != "over_max_rows":
                    rejects_file.write(encode_line({"reason": rejection.args[0], raw.place: raw.number, "row": raw.value}))
        limit = -heap[0] if heap else None
        for rank, line in rows:
            if limit is None or rank <= limit:
                kept_file.write(line)
                kept += 1
        cut = any(file.cut_at is not None for file in files)
        for file in files:
            if file.cut_at is not None:
                warn(f"{file.path} breaks off in the middle of a row at byte {file.cut_at}; every whole row was read")
    result = PrepResult(read, kept, dict(counts), dict(repaired), cut, val, output, rejects, val_output)
    write_json(manifest, {"version": __version__, "prep": to_json(prep), "result": to_json(result)})
    return result


def _check_length(tokenizer: Any, row: Row, config: Config) -> None:
    from dpace_cli.data.tokens import generation_prompt

    messages = row.messages
    last = max(index for index, message in enumerate(messages) if message["role"] == "user")
    options = config.target.template_options()
    if config.prep.max_prompt_tokens:
        ids = generation_prompt(tokenizer, messages[: last + 1], options, row.tools)
        if len(ids) > config.prep.max_prompt_tokens:
            raise Rejected("prompt_too_long")
    if config.prep.max_tokens and len(generation_prompt(tokenizer, messages, options, row.tools)) > config.prep.max_tokens:
        raise Rejected("too_long")


def _turns(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[count]] if len(users) > count else messages


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=8).digest())


def _inputs(inputs: list[str]) -> list[Path]:
    if not inputs:
        raise UsageError("no input is given", "dpace prep sharegpt FILE")
    paths = []
    for name in inputs:
        path = Path(name).expanduser()
        if not path.exists():
            raise UsageError(f"{name} does not exist")
        paths += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return paths


def _demo(count: int, seed: int) -> Iterator[RawRow]:
    from dpace_cli.demo.prompts import samples

    for number, sample in enumerate(samples(None, count, seed, "train"), start=1):
        turns = [{"role": "user", "content": sample.prompt}, {"role": "assistant", "content": sample.answer}]
        yield RawRow({"id": sample.id, "conversations": turns}, None, "", "line", number)
