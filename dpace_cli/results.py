"""The versioned record of one measurement: one drafter, one data set, one temperature.

`dpace bench` writes it; `report` and `weights` read it and need no model. `docs/results-format.md`
describes every field. The raw values of each prompt are kept, so that every figure can be worked out
anew, and by someone else's rule.

Counting follows DFlash: the acceptance length of a verify step is the number of tokens that it produced,
the target's own token at its end (the bonus token) included, and the first token, which comes from the
prefill, belongs to no step. A drafter that is never right has tau 1; one that is always right has the
block size.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

from dpace_cli.errors import UsageError
from dpace_cli.records import read_json, to_json, writing

RECORD_VERSION = 1


@dataclass(frozen=True)
class Decoded:
    """One answer as one arm decoded it.

    Attributes:
        tokens: output tokens, the prefill's one and the end token included.
        acceptance_lengths: tokens that each verify step produced, in order; their sum is `tokens - 1`.
            Empty where the engine does not tell (see `steps` and `mean_acceptance`).
        prefill_s: seconds up to the first token.
        decode_s: seconds from there to the end.
        finish_reason: stop | length.
        output_ids: the answer's token ids; empty where a server returns text alone.
        steps: verify steps, where only their number is known (servers).
        mean_acceptance: mean acceptance length as the server reports it.
    """

    tokens: int
    acceptance_lengths: list[int]
    prefill_s: float
    decode_s: float
    finish_reason: str
    output_ids: list[int] = field(default_factory=list)
    steps: int | None = None
    mean_acceptance: float | None = None

    @property
    def time_per_output_token(self) -> float:
        """Seconds; DFlash's own quotient, whose divisor counts the prefill's token too."""
        return self.decode_s / self.tokens if self.tokens else 0.0

    @property
    def rounds(self) -> int | None:
        """Verify steps that the answer took, whatever the machine; None where it is not known."""
        return len(self.acceptance_lengths) or self.steps

    @property
    def acceptance(self) -> float | None:
        """Mean acceptance length of this answer; None where it took no step or is not known."""
        if self.acceptance_lengths:
            return statistics.fmean(self.acceptance_lengths)
        return self.mean_acceptance


@dataclass(frozen=True)
class PromptResult:
    """One request: a prompt, or one turn of a conversation.

    Attributes:
        id: the prompt's id; all turns of a conversation share it.
        index: its place in the shuffled data set, from 0.
        turn: from 0.
        prompt_tokens: length of the rendered prompt.
        baseline: the target alone; None where it was not measured or failed.
        draft: with the drafter; None where it failed.
        lossless: is the output the target's own greedy output? None above temperature 0 or unchecked.
        first_difference: first output position that differs.
        logit_gap: there, the target's best logit minus its second best.
        near_tie: is that gap small enough for rounding to have decided? None where nothing differs, and where
            a server gave text alone.
        error: why an arm has no answer.
    """

    id: str
    index: int
    turn: int
    prompt_tokens: int
    baseline: Decoded | None
    draft: Decoded | None
    lossless: bool | None = None
    first_difference: int | None = None
    logit_gap: float | None = None
    near_tie: bool | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        """Did every arm that was asked answer?"""
        return self.error is None and (self.draft is not None or self.baseline is not None)


@dataclass(frozen=True)
class BenchRecord:
    """What was measured, of what, under which settings. The file of a record holds exactly this.

    Attributes:
        arm: label of the objective and its factors, shared by the arm's seeds.
        seed: the training's.
        objective: its config, as trained; empty where it is not known.
        checkpoint: folder. checkpoint_sha256: of its weights and config.
        step: optimizer step of the checkpoint; None where it is not known.
        target: hub id or folder. target_sha256: tokenizer fingerprint and config.
        engine: local | simulate | sglang | vllm.
        dataset: name. data_sha256: hash of the chosen prompts in order.
        template_options: what the chat template was given. Records that differ here measure other prompts.
        tie_tolerance: largest logit gap, in proportion to the best logit's size, that counts as a near-tie.
        concurrency: requests in flight.
        wall_s: seconds of a whole arm, by `baseline` and `draft` (servers).
        counters: what a server counted over the whole data set: `drafts`, `accepted`, `accepted_per_position`.
        simulated: over all drafted blocks (engine simulate): their number `anchors`, `mean_acceptance`,
            and by position `accuracy`, `accuracy_given_prefix`, `accepted`.
        key: hash of all settings that decide the counts; a record with the same key need not be made again.
        started: UTC, ISO 8601. seconds: of the measurement, over all its attempts.
    """

    arm: str
    seed: int
    objective: dict[str, Any]
    checkpoint: str
    checkpoint_sha256: str
    step: int | None
    target: str
    engine: str
    dataset: str
    data_sha256: str
    temperature: float
    top_p: float
    top_k: int
    block_size: int
    num_draft_layers: int
    max_new_tokens: int
    template_options: dict[str, Any]
    versions: dict[str, str]
    device: str
    bench_seed: int
    started: str
    seconds: float
    prompts: list[PromptResult]
    target_sha256: str = ""
    dtype: str = ""
    warmup_tokens: int = 0
    tie_tolerance: float | None = None
    concurrency: int = 1
    wall_s: dict[str, float] = field(default_factory=dict)
    counters: dict[str, Any] | None = None
    simulated: dict[str, Any] | None = None
    key: str = ""
    version: int = RECORD_VERSION

    # --- figures; None wherever nothing was measured that could give them ---------------------------------

    @property
    def finished(self) -> list[PromptResult]:
        """Requests that every arm answered. Figures are made of these alone."""
        return [prompt for prompt in self.prompts if prompt.finished]

    @property
    def sr(self) -> float | None:
        """Speed-up as DFlash has it: mean baseline seconds a token over mean seconds a token with the drafter."""
        pairs = [(p.baseline, p.draft) for p in self.finished if p.baseline is not None and p.draft is not None]
        if not pairs or self.engine == "simulate":
            return None
        baseline = statistics.fmean(b.time_per_output_token for b, _ in pairs)
        draft = statistics.fmean(d.time_per_output_token for _, d in pairs)
        return baseline / draft if draft > 0 else None

    @property
    def tau(self) -> float | None:
        """Mean over requests of each request's mean acceptance length (the published benchmark's rule)."""
        means = [draft.acceptance for draft in self._drafts() if draft.acceptance is not None]
        return statistics.fmean(means) if means else None

    @property
    def tau_pooled(self) -> float | None:
        """Mean acceptance length over all steps of all requests (the rule of vLLM and SGLang)."""
        if self.counters is not None:
            return 1 + self.counters["accepted"] / self.counters["drafts"] if self.counters["drafts"] else None
        known = [draft for draft in self._drafts() if draft.acceptance is not None and draft.rounds]
        rounds = sum(d.rounds for d in known)
        return sum(d.acceptance * d.rounds for d in known) / rounds if rounds else None

    @property
    def lossless(self) -> float | None:
        """Share of requests whose output is the target's own greedy output; None above temperature 0."""
        checked = [p.lossless for p in self.finished if p.lossless is not None]
        return sum(checked) / len(checked) if checked else None

    @property
    def near_ties(self) -> int:
        """Requests whose output differs where rounding decides."""
        return sum(p.near_tie is True for p in self.finished)

    @property
    def broken(self) -> int:
        """Requests whose output differs although the target was sure: the decoder or the drafter is wrong."""
        return sum(p.near_tie is False for p in self.finished)

    @property
    def rounds(self) -> int | None:
        """Verify steps of all requests; with equal prompts a measure that no machine changes."""
        known = [draft.rounds for draft in self._drafts() if draft.rounds is not None]
        return sum(known) if known else None

    @property
    def throughput(self) -> dict[str, float]:
        """Output tokens a second by arm, prefill and waiting included, where whole arms were timed (servers)."""
        tokens = {
            "baseline": sum(p.baseline.tokens for p in self.finished if p.baseline is not None),
            "draft": sum(draft.tokens for draft in self._drafts()),
        }
        return {arm: tokens[arm] / seconds for arm, seconds in self.wall_s.items() if seconds > 0}

    def steps(self) -> Iterator[int]:
        """Acceptance lengths of all steps of all requests."""
        return chain.from_iterable(draft.acceptance_lengths for draft in self._drafts())

    def _drafts(self) -> list[Decoded]:
        return [p.draft for p in self.finished if p.draft is not None]

    def histogram(self) -> list[float]:
        """Share of steps with acceptance length 0, 1, ... block size; empty where steps are not known."""
        counts = Counter(self.steps())
        total = counts.total()
        return [counts[length] / total for length in range(self.block_size + 1)] if total else []

    def acceptance_by_position(self) -> list[float | None]:
        """For position 1, 2, ... K-1: share accepted of the drafts whose earlier positions all were.

        The last step of an answer is cut by its end: what it produced was accepted, but what came after was
        never judged, so it is left out of the next position's trials and not counted as a failure.
        None where no draft came that far.
        """
        tried, accepted = [0] * self.block_size, [0] * self.block_size
        for lengths in (draft.acceptance_lengths for draft in self._drafts()):
            for index, length in enumerate(lengths):
                for position in range(1, length):
                    tried[position] += 1
                    accepted[position] += 1
                if length < self.block_size and index < len(lengths) - 1:
                    tried[length] += 1
        return [accepted[k] / tried[k] if tried[k] else None for k in range(1, self.block_size)]

    # --- files --------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the record whole or not at all: indented, each prompt on one line.

        Raises:
            RunError: the file cannot be written.
        """
        names = ["version", *(f.name for f in fields(self) if f.name not in ("version", "prompts"))]
        lines = [f"  {json.dumps(n)}: {json.dumps(to_json(getattr(self, n)), ensure_ascii=False)}" for n in names]
        prompts = ",\n    ".join(json.dumps(to_row(prompt), ensure_ascii=False) for prompt in self.prompts)
        with writing(path) as file:
            file.write("{\n" + ",\n".join(lines) + ',\n  "prompts": [\n    ' + prompts + "\n  ]\n}\n")

    @classmethod
    def load(cls, path: Path) -> BenchRecord:
        """Read a record of this version or of an older one.

        Raises:
            UsageError: there is no such file, it is no record, or a newer dpace wrote it.
        """
        value = read_json(path)
        if not isinstance(value, dict) or "prompts" not in value or "version" not in value:
            raise UsageError(f"{path} is not a bench record", "a record is a file that `dpace bench` wrote")
        if not isinstance(value["version"], int) or value["version"] > RECORD_VERSION:
            raise UsageError(
                f"{path} is a record of version {value['version']}; this dpace reads up to {RECORD_VERSION}",
                "update dpace-cli",
            )
        try:
            prompts = [prompt_result(row) for row in value["prompts"]]
            return _make(cls, {**value, "prompts": prompts, "version": RECORD_VERSION})
        except (TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{path} is not a whole bench record: {error}") from None


def prompt_result(row: dict[str, Any]) -> PromptResult:
    """A PromptResult from its JSON object."""
    arms = {arm: _make(Decoded, row[arm]) if row.get(arm) is not None else None for arm in ("baseline", "draft")}
    return _make(PromptResult, {**row, **arms})


def to_row(result: PromptResult) -> dict[str, Any]:
    """The JSON object of a PromptResult; as `dataclasses.asdict`, which copies every number of every list."""
    arms = {arm: vars(decoded) if (decoded := getattr(result, arm)) is not None else None
            for arm in ("baseline", "draft")}  # fmt: skip
    return {**vars(result), **arms}


def load_records(paths: Iterable[Path]) -> list[tuple[Path, BenchRecord]]:
    """Records of files and folders; a run folder stands for all records in its `bench`.

    Raises:
        UsageError: a path does not exist, or holds no record.
    """
    found: list[tuple[Path, BenchRecord]] = []
    for path in paths:
        if path.is_dir():
            is_run = (path / "bench").is_dir() or (path / "config.yaml").is_file()
            root = path / "bench" if is_run else path
            files = sorted(file for file in root.rglob("*.json") if not file.name.startswith("."))
            if not files:
                raise UsageError(f"there is no bench record in {path}", "run `dpace bench` first")
        else:
            files = [path]
        found += [(file, BenchRecord.load(file)) for file in files]
    return found


def _make(kind: Any, values: dict[str, Any]) -> Any:
    """An instance from a JSON object: keys that it does not know are left out, missing ones are named."""
    known = {f.name: f for f in fields(kind)}
    missing = [
        name for name, f in known.items()
        if name not in values and f.default is MISSING and f.default_factory is MISSING
    ]  # fmt: skip
    if missing:
        raise KeyError(f"{kind.__name__} without {', '.join(missing)}")
    return kind(**{name: value for name, value in values.items() if name in known})
