"""Measure without decoding: the target's greedy answers are made once, in batches, and kept; every drafter then
walks through all of them at once (`dpace_cli/modeling/simulate.py`).

Gives the acceptance lengths of greedy decoding and everything that follows from them, and no speed-up.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.benchmarks import BenchPrompt, PromptSet
from dpace_cli.data.jsonl import RowLog, read_rows
from dpace_cli.engines.measure_base import Done, Pending, conversation, utc_now
from dpace_cli.engines.measure_local import LocalBench
from dpace_cli.errors import UsageError
from dpace_cli.modeling.cpu import GROUPED
from dpace_cli.modeling.decode import greedy_batch
from dpace_cli.modeling.simulate import padded_states, simulate
from dpace_cli.modeling.target import Target, load_target
from dpace_cli.records import CheckpointRef
from dpace_cli.results import Decoded, PromptResult

STATES_BYTES = 2 << 30
"""Most that the target's states may take where several drafters share them."""


class SimulateBench(LocalBench):
    """Records of checkpoints by simulated acceptance, at temperature 0."""

    def __init__(self, config: Config, refs: Sequence[CheckpointRef], root: Path) -> None:
        super().__init__(config, refs, root)
        if any(config.bench.temperatures):
            raise UsageError(
                f"bench.temperatures is {config.bench.temperatures}; engine simulate is greedy and knows 0 alone",
                "use engine local for other temperatures",
            )

    @cached_property
    def target(self) -> Target:
        target = load_target(self.config.target)
        if target.device.type == "cpu":
            target.model.set_attn_implementation(GROUPED)  # for the answers, a token at a time
        return target

    def measure(self, prompts: PromptSet, temperature: float) -> Done:
        """Records of all checkpoints on one data set."""
        jobs = [self.pending(ref, prompts, temperature) for ref in self.refs]
        todo = [(ref, job) for ref, job in zip(self.refs, jobs) if job.done is None]
        if todo:
            answers = self._answers(prompts)
            turns = [
                _Turn(index, prompt.id, number, **turn)
                for index, prompt in enumerate(prompts.prompts)
                for number, turn in enumerate(answers[prompt.id])
            ]
            states = SharedStates(self.target, [turn.ids for turn in turns]) if len(todo) > 1 else None
            for ref, job in todo:
                self._simulate(ref, job, turns, states)
        return [(job.path, job.done) for job in jobs]

    def file_name(self, prompts: PromptSet, temperature: float) -> str:
        return f"{prompts.name}-t{temperature:g}-simulated"

    def _simulate(self, ref: CheckpointRef, job: Pending, turns: Sequence[_Turn], states: SharedStates | None) -> None:
        drafter, started, begin = self.drafter(ref), utc_now(), time.perf_counter()
        label = f"{job.record.dataset}, {ref.folder}, simulated"
        with console.meter(label, len(turns), "answers") as meter:
            found = simulate(
                drafter, self.target, [(turn.ids, turn.mask) for turn in turns],
                block_size=job.record.block_size, every_anchor=False, progress=meter.advance,
                limits=[len(turn.prompt_ids) + self.bench.max_new_tokens for turn in turns],
                states=states.of(drafter.target_layer_ids) if states is not None else None,
            )  # fmt: skip
        results = [
            PromptResult(
                id=turn.prompt_id, index=turn.index, turn=turn.number, prompt_tokens=len(turn.prompt_ids),
                baseline=None, draft=Decoded(len(turn.answer_ids), answer.steps or [], 0.0, 0.0, turn.finish_reason,
                                             turn.answer_ids),
            )
            for turn, answer in zip(turns, found.answers)
        ]  # fmt: skip
        names = ("anchors", "mean_acceptance", "accuracy", "accuracy_given_prefix", "accepted")
        overall = {name: getattr(found, name) for name in names}
        job.write(results, started=started, seconds=time.perf_counter() - begin, simulated=overall)

    # --- the target's answers -----------------------------------------------------------------------------

    def _answers(self, prompts: PromptSet) -> dict[str, list[dict[str, Any]]]:
        """Prompt and answer ids of every turn, by prompt id: from the file of an earlier call, or made now."""
        settings = [
            prompts.sha256, self._target_sha256, self.bench.max_new_tokens, self.config.target.template_options(),
            str(self.dtype), self.device.type,
        ]  # fmt: skip
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        path = self.root / "answers" / f"{prompts.name}-{key}.jsonl"
        with RowLog(path) as log:
            left = [prompt for prompt in prompts.prompts if prompt.id not in log.ids]
            if left:
                total = len(prompts.prompts)
                label = f"{prompts.name}, the target's answers"
                with console.meter(label, total, "prompts", total - len(left)) as meter:
                    for group in _chunks(left, self.config.regen.batch_size):
                        for row in self._answer_group(group):
                            log.append(row)
                        meter.advance(len(group))
        return {row["id"]: row["turns"] for row in read_rows(path)}

    def _answer_group(self, group: Sequence[BenchPrompt]) -> list[dict[str, Any]]:
        turns: dict[str, list[dict[str, Any]]] = {prompt.id: [] for prompt in group}
        texts: dict[str, list[str]] = {prompt.id: [] for prompt in group}
        stops = self.target.stop_token_ids
        for turn in range(max(len(prompt.turns) for prompt in group)):
            asked = [prompt for prompt in group if turn < len(prompt.turns)]
            ids = [self.render(conversation(prompt, texts[prompt.id])) for prompt in asked]
            answers = greedy_batch(self.target.model, ids, self.bench.max_new_tokens, stops)
            for prompt, prompt_ids, answer in zip(asked, ids, answers):
                reason = "stop" if answer[-1] in stops else "length"
                turns[prompt.id].append({"prompt_ids": prompt_ids, "answer_ids": answer, "finish_reason": reason})
                texts[prompt.id].append(self.target.tokenizer.decode(answer, skip_special_tokens=True))
        return [{"id": prompt_id, "turns": found} for prompt_id, found in turns.items()]


@dataclass(frozen=True)
class _Turn:
    """One answer of the target, and which request it answers."""

    index: int
    prompt_id: str
    number: int
    prompt_ids: list[int]
    answer_ids: list[int]
    finish_reason: str

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    @property
    def mask(self) -> list[int]:
        return [0] * len(self.prompt_ids) + [1] * len(self.answer_ids)


class SharedStates:
    """The target's states of all answers, made once for the drafters that read the same layers."""

    def __init__(self, target: Target, rows: Sequence[list[int]]) -> None:
        self.target, self.rows = target, rows
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._layers: list[int] = []

    def of(self, layer_ids: Sequence[int]) -> Callable[[Sequence[int]], Tensor] | None:
        """States of rows by index; None where they are too many to be kept."""
        tokens = sum(len(row) for row in self.rows)
        size = tokens * len(layer_ids) * self.target.config.hidden_size * self.target.model.dtype.itemsize
        if size > STATES_BYTES:
            return None
        if self._layers != list(layer_ids):
            self._layers, self._kept = list(layer_ids), {}

        def states(indices: Sequence[int]) -> Tensor:
            key = tuple(indices)
            if key not in self._kept:
                self._kept[key] = padded_states(self.target, [self.rows[i] for i in indices], self._layers)
            return self._kept[key]

        return states


def _chunks(prompts: Sequence[BenchPrompt], size: int) -> Iterator[Sequence[BenchPrompt]]:
    """Prompts of like length together; the length in characters is near enough."""
    ordered = sorted(prompts, key=lambda prompt: -sum(map(len, prompt.turns)))
    for begin in range(0, len(ordered), size):
        yield ordered[begin : begin + size]
