"""Measure without decoding: the target's greedy answers are made once, in batches, and kept; every drafter then
walks through all of them at once (`dpace_cli/modeling/simulate.py`).

Gives the acceptance lengths of greedy decoding and everything that follows from them, and no speed-up.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.benchmarks import BenchPrompt, PromptSet
from dpace_cli.data.jsonl import RowLog, read_rows
from dpace_cli.engines.measure_base import Done, Pending, conversation, utc_now
from dpace_cli.engines.measure_local import LocalBench
from dpace_cli.errors import UsageError
from dpace_cli.modeling.decode import greedy_batch
from dpace_cli.modeling.simulate import simulate
from dpace_cli.records import CheckpointRef
from dpace_cli.results import Decoded, PromptResult


class SimulateBench(LocalBench):
    """Records of checkpoints by simulated acceptance, at temperature 0."""

    def __init__(self, config: Config, refs: Sequence[CheckpointRef], root: Path) -> None:
        super().__init__(config, refs, root)
        if any(config.bench.temperatures):
            raise UsageError(
                f"bench.temperatures is {config.bench.temperatures}; engine simulate is greedy and knows 0 alone",
                "use engine local for other temperatures",
            )

    def measure(self, prompts: PromptSet, temperature: float) -> Done:
        """Records of all checkpoints on one data set."""
        jobs = [self.pending(ref, prompts, temperature) for ref in self.refs]
        if any(job.done is None for job in jobs):
            answers = self._answers(prompts)
            for ref, job in zip(self.refs, jobs):
                if job.done is None:
                    self._simulate(ref, job, prompts, answers)
        return [(job.path, job.done) for job in jobs]

    def file_name(self, prompts: PromptSet, temperature: float) -> str:
        return f"{prompts.name}-t{temperature:g}-simulated"

    def _simulate(
        self, ref: CheckpointRef, job: Pending, prompts: PromptSet, answers: dict[str, list[dict[str, Any]]]
    ) -> None:
        drafter, started, begin = self.drafter(ref), utc_now(), time.perf_counter()
        turns = [
            (index, prompt.id, number, turn)
            for index, prompt in enumerate(prompts.prompts)
            for number, turn in enumerate(answers[prompt.id])
        ]
        rows = [
            (t["prompt_ids"] + t["answer_ids"], [0] * len(t["prompt_ids"]) + [1] * len(t["answer_ids"]))
            for *_, t in turns
        ]
        limits = [len(t["prompt_ids"]) + self.bench.max_new_tokens for *_, t in turns]
        with console.meter(f"{prompts.name}, {ref.folder}, simulated", len(rows), "answers") as meter:
            found = simulate(
                drafter, self.target, rows, block_size=job.record.block_size, limits=limits, every_anchor=False,
                progress=meter.advance,
            )  # fmt: skip
        results = [
            PromptResult(
                id=prompt_id, index=index, turn=number, prompt_tokens=len(turn["prompt_ids"]), baseline=None,
                draft=Decoded(len(turn["answer_ids"]), answer.steps or [], 0.0, 0.0, turn["finish_reason"],
                              turn["answer_ids"]),
            )
            for (index, prompt_id, number, turn), answer in zip(turns, found.answers)
        ]  # fmt: skip
        overall = {
            name: getattr(found, name)
            for name in ("anchors", "mean_acceptance", "accuracy", "accuracy_given_prefix", "accepted")
        }
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


def _chunks(prompts: Sequence[BenchPrompt], size: int) -> Iterator[Sequence[BenchPrompt]]:
    """Prompts of like length together; the length in characters is near enough."""
    ordered = sorted(prompts, key=lambda prompt: -sum(map(len, prompt.turns)))
    for begin in range(0, len(ordered), size):
        yield ordered[begin : begin + size]
