"""Bench records made by hand, for the tests of statistics, tables and report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpace_cli.results import BenchRecord, Decoded, PromptResult


def decoded(lengths: Sequence[int], seconds: float, finish_reason: str = "stop") -> Decoded:
    """An answer of the prefill's token and what each step produced."""
    tokens = 1 + sum(lengths)
    return Decoded(tokens, list(lengths), 0.01, seconds, finish_reason, list(range(tokens)))


def prompt(
    number: int, lengths: Sequence[int] | None, draft_s: float = 1.0, baseline_s: float | None = 2.0, turn: int = 0,
    **more: Any,
) -> PromptResult:  # fmt: skip
    """One request; no lengths: the arm failed on it."""
    tokens = 1 + sum(lengths or [9])
    baseline = None if baseline_s is None else decoded([1] * (tokens - 1), baseline_s)
    draft = None if lengths is None else decoded(lengths, draft_s)
    error = "out of memory" if lengths is None else None
    return PromptResult(f"p{number}", number, turn, 20, baseline, draft, **{"error": error, **more})


def record(prompts: Sequence[PromptResult], arm: str = "dpace", **changes: Any) -> BenchRecord:
    """A record of these requests."""
    made = BenchRecord(
        arm=arm, seed=0, objective={"name": arm}, checkpoint=f"train/{arm}-seed0/step-000400",
        checkpoint_sha256=f"{arm}-hash", step=400, target="demo", engine="local", dataset="gsm8k", data_sha256="d" * 64,
        temperature=0.0, top_p=1.0, top_k=0, block_size=8, num_draft_layers=3, max_new_tokens=64, template_options={},
        versions={"dpace-cli": "0.1.0", "torch": "2.13.0"}, device="cpu", bench_seed=0,
        started="2026-08-01T10:00:00+00:00", seconds=1.0, prompts=list(prompts), dtype="float32",
    )  # fmt: skip
    return replace(made, **changes)


def drawn(
    arm: str, rate: float, count: int = 12, *, turns: int = 1, failed: Sequence[int] = (), lossless: bool = True,
    block_size: int = 8, **changes: Any,
) -> BenchRecord:  # fmt: skip
    """A record whose drafts are right with some probability; the prompts are as hard in every arm."""
    own = random.Random(repr((arm, rate, sorted(changes.items(), key=str))))
    shared = random.Random(changes.get("dataset", "gsm8k"))
    prompts = []
    for number in range(count):
        ease, total = shared.uniform(-0.1, 0.1), shared.randint(30, 60)
        for turn in range(turns):
            lengths, left = [], total
            while left:
                length = 1
                while length < min(block_size, left) and own.random() < rate + ease:
                    length += 1
                lengths.append(length)
                left -= length
            slow = own.uniform(0.97, 1.03)
            more = {"lossless": True} if lossless else {}
            prompts.append(prompt(
                number, None if number in failed else lengths, 0.013 * len(lengths) * slow, 0.0065 * total, turn,
                **({} if number in failed else more),
            ))  # fmt: skip
    return record(prompts, arm, block_size=block_size, **changes)


def save_run(folder: Path, records: Sequence[BenchRecord]) -> Path:
    """Records where `dpace bench` puts them."""
    for one in records:
        step = f"-step{one.step}" if one.step != 400 else ""
        name = f"{one.dataset}-t{one.temperature:g}{step}.json"
        one.save(folder / "bench" / f"{one.arm}-seed{one.seed}" / name)
    return folder
