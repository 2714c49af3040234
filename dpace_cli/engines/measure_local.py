"""Measure with DFlash on Transformers, here; the baseline is the same loop at block size 1.

Every prompt is answered by the target alone and by each drafter, one after the other, so that all of them
meet the machine in the same state; who begins changes from prompt to prompt. The target's own answer is
shared by all drafters of a call, and goes into the next turn's prompt, so that all drafters see the same
prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.benchmarks import BenchPrompt, PromptSet
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines.measure_base import (
    Done,
    Pending,
    conversation,
    new_record,
    record_path,
    request_seed,
    warn_of_other_training,
)
from dpace_cli.modeling.checkpoint import load_drafter
from dpace_cli.modeling.decode import Sampling, compare_greedy, decode, tie_tolerance
from dpace_cli.modeling.identity import check_fits, device_name, target_sha256
from dpace_cli.modeling.target import Target, load_target, resolve_device, resolve_dtype
from dpace_cli.records import CheckpointRef
from dpace_cli.results import Decoded, PromptResult

BASELINE = -1
"""Number of the baseline among the arms; drafters count from 0."""


class LocalBench:
    """Records of checkpoints, one data set and temperature after the other.

    Args:
        refs: drafters of one target.
        root: folder of the records.
    """

    def __init__(self, config: Config, refs: Sequence[CheckpointRef], root: Path) -> None:
        self.config, self.bench, self.refs, self.root = config, config.bench, refs, root
        self.device = resolve_device(config.target.device)
        self.dtype = resolve_dtype(config.target.dtype, self.device)
        self._drafters: dict[Path, Any] = {}
        warn_of_other_training(config, refs)

    @cached_property
    def target(self) -> Target:
        return load_target(self.config.target)

    @cached_property
    def _target_sha256(self) -> str:
        return target_sha256(self.config.target)

    def drafter(self, ref: CheckpointRef) -> Any:
        """A drafter on the target's device; each is loaded once."""
        if ref.path not in self._drafters:
            drafter = load_drafter(ref.path, self.target.device, self.target.model.dtype)
            check_fits(drafter, self.target, ref.path)
            self._drafters[ref.path] = drafter
        return self._drafters[ref.path]

    def measure(self, prompts: PromptSet, temperature: float) -> Done:
        """Records of all checkpoints on one data set at one temperature; what is done is not done again."""
        jobs = [self.pending(ref, prompts, temperature) for ref in self.refs]
        todo = [(ref, job) for ref, job in zip(self.refs, jobs) if job.done is None]
        if todo:
            self._answer_all(todo, prompts, Sampling(temperature, self.bench.top_p, self.bench.top_k))
        return [(job.path, job.done) for job in jobs]

    def pending(self, ref: CheckpointRef, prompts: PromptSet, temperature: float) -> Pending:
        """The record of one checkpoint, done or not."""
        record = new_record(
            self.config, ref, prompts, temperature, self._target_sha256, device=device_name(self.device),
            dtype=str(self.dtype).removeprefix("torch."), warmup_tokens=self.bench.warmup_tokens,
            tie_tolerance=tie_tolerance(self.dtype),
        )  # fmt: skip
        path = record_path(self.root, ref, self.refs, self.file_name(prompts, temperature))
        return Pending(path, record, {"check_lossless": self.bench.check_lossless, "device": self.device.type})

    def file_name(self, prompts: PromptSet, temperature: float) -> str:
        """What a record of this engine is called, without its ending."""
        return f"{prompts.name}-t{temperature:g}"

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation that waits for an answer."""
        return generation_prompt(self.target.tokenizer, messages, self.config.target.template_options())

    def _answer_all(
        self, todo: Sequence[tuple[CheckpointRef, Pending]], prompts: PromptSet, sampling: Sampling
    ) -> None:
        """Answer the prompts that some record lacks, then write those records."""
        arms = {BASELINE: self._arm(todo[0][0], 1, sampling)}
        arms |= {place: self._arm(ref, job.record.block_size, sampling) for place, (ref, job) in enumerate(todo)}
        total = len(prompts.prompts)
        with ExitStack() as stack:
            logs = [stack.enter_context(job.open()) for _, job in todo]
            left = [(i, p) for i, p in enumerate(prompts.prompts) if any(p.id not in log.ids for log in logs)]
            if left:
                self._warm_up(arms, left[0][1])
            label = f"{prompts.name}, temperature {sampling.temperature:g}"
            meter = stack.enter_context(console.meter(label, total, "prompts", total - len(left)))
            for index, prompt in left:
                places = [place for place in arms if place == BASELINE or prompt.id not in logs[place].ids]
                started = time.perf_counter()
                answers = self._answer(prompt, index, {place: arms[place] for place in places}, sampling)
                seconds = time.perf_counter() - started
                for place, results in answers.items():
                    logs[place].append(todo[place][1].row(prompt, results, seconds / len(answers)))
                meter.advance(1, _last_tau(answers))
        for _, job in todo:
            job.finish(prompts)

    def _arm(self, ref: CheckpointRef, block_size: int, sampling: Sampling) -> _Arm:
        return _Arm(self.drafter(ref), self.target, block_size, sampling, self.bench.max_new_tokens)

    def _warm_up(self, arms: Mapping[int, _Arm], prompt: BenchPrompt) -> None:
        """Decode a little with every arm before any is timed, as DFlash's benchmark does."""
        tokens = min(self.bench.warmup_tokens, self.bench.max_new_tokens)
        if tokens:
            ids = self.render(conversation(prompt, []))
            for arm in arms.values():
                arm.decode(ids, 0, tokens, [])

    def _answer(
        self, prompt: BenchPrompt, index: int, arms: Mapping[int, _Arm], sampling: Sampling
    ) -> dict[int, list[PromptResult]]:
        """All turns of one prompt, by drafter."""
        answers: list[str] = []
        results: dict[int, list[PromptResult]] = {place: [] for place in arms if place != BASELINE}
        failed: str | None = None
        for turn in range(len(prompt.turns)):
            ids: list[int] = []
            decoded: dict[int, Decoded | str] = {}
            if failed is None:
                ids = self.render(conversation(prompt, answers))
                seed = request_seed(self.bench.seed, prompt.id, turn)
                decoded = {place: arms[place].attempt(ids, seed) for place in _rotated(list(arms), index + turn)}
                if isinstance(decoded[BASELINE], str):
                    failed = decoded[BASELINE]  # without an answer there is no next turn either
            for place, rows in results.items():
                common = {"id": prompt.id, "index": index, "turn": turn, "prompt_tokens": len(ids)}
                outcome = failed or decoded[place]
                if isinstance(outcome, str):
                    rows.append(PromptResult(**common, baseline=None, draft=None, error=outcome))
                else:
                    rows.append(self._compared(common, ids, decoded[BASELINE], outcome, sampling))
            if failed is None:
                answers.append(self.target.tokenizer.decode(decoded[BASELINE].output_ids, skip_special_tokens=True))
        return results

    def _compared(
        self, common: Mapping[str, Any], ids: list[int], baseline: Decoded, draft: Decoded, sampling: Sampling
    ) -> PromptResult:
        if sampling.temperature > 0 or not self.bench.check_lossless:
            return PromptResult(**common, baseline=baseline, draft=draft)
        found = compare_greedy(self.target.model, ids, baseline.output_ids, draft.output_ids)
        if found is None:
            return PromptResult(**common, baseline=baseline, draft=draft, lossless=True)
        return PromptResult(
            **common, baseline=baseline, draft=draft, lossless=False, first_difference=found.position,
            logit_gap=found.logit_gap, near_tie=found.near_tie,
        )  # fmt: skip


class _Arm:
    """One way to answer: a drafter with its block size, or block size 1."""

    def __init__(self, drafter: Any, target: Target, block_size: int, sampling: Sampling, max_new_tokens: int) -> None:
        self.drafter, self.target, self.block_size = drafter, target, block_size
        self.sampling, self.max_new_tokens = sampling, max_new_tokens

    def decode(self, ids: Sequence[int], seed: int, max_new_tokens: int, stop_token_ids: Sequence[int]) -> Decoded:
        return decode(
            self.drafter, self.target.model, ids, max_new_tokens=max_new_tokens, stop_token_ids=stop_token_ids,
            sampling=self.sampling, block_size=self.block_size, seed=seed,
        )  # fmt: skip

    def attempt(self, ids: Sequence[int], seed: int) -> Decoded | str:
        """An answer, or why there is none; running out of memory alone is the prompt's own failure."""
        try:
            return self.decode(ids, seed, self.max_new_tokens, self.target.stop_token_ids)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            return f"out of memory with a prompt of {len(ids)} tokens: {str(error).splitlines()[0][:160]}"


def _rotated(places: list[int], by: int) -> Iterator[int]:
    by %= len(places)
    yield from places[by:] + places[:by]


def _last_tau(answers: Mapping[int, list[PromptResult]]) -> str:
    taus = [r.draft.acceptance for rows in answers.values() for r in rows[-1:] if r.draft and r.draft.acceptance]
    if len(taus) > 4:  # a line has no room for each
        return f"last tau {min(taus):.2f} to {max(taus):.2f}"
    return f"last tau {', '.join(f'{tau:.2f}' for tau in taus)}" if taus else ""
