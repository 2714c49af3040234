"""Measure running SGLang and vLLM servers: one with speculation, one without, or one of them alone.

A server tells less than the local loop. Times are whole requests, prefill and waiting included. SGLang gives
each answer's verify steps and mean acceptance length; vLLM counts over all requests, at `/metrics`. What a
server does not tell stays empty in the record. Nothing here needs torch.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai
from openai import AsyncOpenAI

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.benchmarks import BenchPrompt, PromptSet
from dpace_cli.data.jsonl import RowLog
from dpace_cli.engines.measure_base import (
    Done,
    Pending,
    conversation,
    new_record,
    record_path,
    request_seed,
    target_name,
    utc_now,
    warn_of_other_training,
)
from dpace_cli.engines.probe import ServerFacts, probe
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import CheckpointRef
from dpace_cli.results import Decoded, PromptResult

API_KEY_VARIABLE = "OPENAI_API_KEY"
_STOPS_ALL = (401, 403, 404, 422)
"""Answers that every further request would get too."""

_HINTS = {404: "check target.path and the address", 422: "is it the server that bench.engine names?"}

_COUNTERS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(\{.*\})?\s+(\S+)(?:\s+\d+)?$")


@dataclass(frozen=True)
class Answer:
    """One turn as a server answered it."""

    prompt_tokens: int
    decoded: Decoded | None
    text: str = ""
    error: str | None = None


class ServerBench:
    """Records of the drafter that a server runs, for each concurrency."""

    def __init__(self, config: Config, refs: Sequence[CheckpointRef], root: Path) -> None:
        self.config, self.bench, self.refs, self.root = config, config.bench, refs, root
        urls = {"baseline": self.bench.baseline_url, "draft": self.bench.base_url}
        self.urls = {arm: url.rstrip("/").removesuffix("/v1") for arm, url in urls.items() if url}
        if not self.urls:
            raise UsageError(
                f"bench.engine {self.bench.engine} measures running servers and none is named",
                "--base-url URL (with speculation), --baseline-url URL (without), or both; "
                "`dpace bench --dry-run` prints the commands that launch them",
            )
        if len(refs) > 1:
            raise UsageError(
                f"a server runs one drafter, and {len(refs)} checkpoints are named", "name the one with --checkpoint"
            )
        if not self.bench.concurrency or min(self.bench.concurrency) < 1:
            raise UsageError(f"bench.concurrency is {self.bench.concurrency}; it is a list of numbers from 1")
        warn_of_other_training(config, refs)
        self.api_key = os.environ.get(API_KEY_VARIABLE) or None
        self._models: dict[str, str] = {}

    def measure(self, prompts: PromptSet, temperature: float) -> Done:
        """Records of one data set at one temperature, one for each concurrency."""
        jobs = [(c, self._pending(prompts, temperature, c)) for c in self.bench.concurrency]
        for concurrency, job in jobs:
            if job.done is None:
                self._check_servers(job)
                self._measure(job, prompts, temperature, concurrency)
        return [(job.path, job.done) for _, job in jobs]

    def _pending(self, prompts: PromptSet, temperature: float, concurrency: int) -> Pending:
        [ref] = self.refs
        record = new_record(
            self.config, ref, prompts, temperature, "", concurrency=concurrency,
            dtype=self.config.target.dtype, warmup_tokens=self.bench.warmup_tokens, device=self.bench.engine,
        )  # fmt: skip
        name = f"{prompts.name}-t{temperature:g}-{self.bench.engine}-c{concurrency}"
        return Pending(record_path(self.root, ref, self.refs, name), record, {"urls": self.urls})

    def _check_servers(self, job: Pending) -> None:
        """Which model does each server serve, and does it speculate as it should?

        Raises:
            RunError: a server serves several models and none of them is the target.
        """
        for arm, url in self.urls.items():
            if arm not in self._models:
                facts = probe(url, self.api_key)
                self._models[arm] = self._model(facts)
                self._warn(arm, facts, job.record.block_size)

    def _model(self, facts: ServerFacts) -> str:
        """The name that requests use: the only one that is served, or the target's own."""
        own = target_name(self.config)
        if len(facts.models) == 1:
            return facts.models[0]
        if own in facts.models or not facts.models:
            return own
        raise RunError(f"the server at {facts.url} serves {', '.join(facts.models)}", "name one of them as target.path")

    def _warn(self, arm: str, facts: ServerFacts, block_size: int) -> None:
        if arm == "baseline" and facts.speculation:
            console.warn(f"the baseline server at {facts.url} speculates; SR would be measured against speculation")
        if arm == "draft" and facts.speculation is False:
            console.warn(f"the server at {facts.url} does not speculate")
        if arm == "draft" and facts.draft_tokens not in (None, block_size):
            console.warn(
                f"the server at {facts.url} drafts blocks of {facts.draft_tokens}, the checkpoint {block_size}"
            )

    # --- one record ---------------------------------------------------------------------------------------

    def _measure(self, job: Pending, prompts: PromptSet, temperature: float, concurrency: int) -> None:
        """Pass over all prompts with each server, then write the record."""
        with job.open() as log:
            for arm in self.urls:
                asyncio.run(self._pass(arm, job, log, prompts, temperature, concurrency))
        rows = job.rows()
        results = [
            result
            for index, prompt in enumerate(prompts.prompts)
            for result in self._compared(
                index, prompt, {arm: rows[f"{arm}/{prompt.id}"] for arm in self.urls}, temperature
            )
        ]
        attempts = [row for row in rows.values() if "attempt" in row]
        wall = {arm: _wall([row for row in attempts if row["id"].startswith(f"{arm}/")]) for arm in self.urls}
        job.write(
            results, started=min(row["at"] for row in rows.values()), seconds=sum(wall.values()), wall_s=wall,
            counters=_summed([row["counters"] for row in rows.values() if row.get("counters")]),
        )  # fmt: skip
        if "draft" in self.urls and job.done.tau_pooled is None:
            console.warn(f"{self.urls['draft']} told nothing about acceptance; {job.path} has times alone")

    async def _pass(
        self, arm: str, job: Pending, log: RowLog, prompts: PromptSet, temperature: float, concurrency: int
    ) -> None:
        """Answer the prompts that the log lacks, `concurrency` of them at a time."""
        left = [prompt for prompt in prompts.prompts if f"{arm}/{prompt.id}" not in log.ids]
        if not left:
            return
        total, attempt = len(prompts.prompts), uuid.uuid4().hex
        # A retry would be timed with the request, so there is none.
        client = AsyncOpenAI(
            base_url=f"{self.urls[arm]}/v1", api_key=self.api_key or "none", timeout=self.bench.timeout_s, max_retries=0
        )
        histories = _texts(job.rows(), "baseline") if arm == "draft" else {}
        queue = iter(left)
        async with client:
            await self._warm_up(client, arm, left, temperature, concurrency)
            before = self._counters(arm)
            with console.meter(f"{prompts.name}, {arm}, {concurrency} in flight", total, "prompts",
                               total - len(left)) as meter:  # fmt: skip

                async def work() -> None:
                    for prompt in queue:
                        begin = time.time()
                        answers = await self._converse(client, arm, prompt, temperature, histories.get(prompt.id))
                        log.append({
                            "id": f"{arm}/{prompt.id}", "key": job.record.key, "at": utc_now(), "attempt": attempt,
                            "begin": begin, "end": time.time(), "answers": [asdict(answer) for answer in answers],
                        })  # fmt: skip
                        meter.advance(1)

                workers = [asyncio.create_task(work()) for _ in range(min(concurrency, len(left)))]
                try:
                    await asyncio.gather(*workers)
                finally:
                    for worker in workers:
                        worker.cancel()
        if before is not None:
            after = self._counters(arm) or {}
            counted = {name: after.get(name, 0) - value for name, value in before.items()}
            log.append({"id": f"counters/{attempt}", "key": job.record.key, "at": utc_now(),
                        "counters": {"requests": sum(len(prompt.turns) for prompt in left), **counted}})  # fmt: skip

    async def _warm_up(
        self, client: AsyncOpenAI, arm: str, prompts: Sequence[BenchPrompt], temperature: float, concurrency: int
    ) -> None:
        """As many short answers at once as will be in flight, before anything is timed."""
        tokens = min(self.bench.warmup_tokens, self.bench.max_new_tokens)
        if not tokens:
            return
        chosen = [prompts[i % len(prompts)] for i in range(concurrency)]
        await asyncio.gather(
            *(self._ask(client, arm, conversation(prompt, []), temperature, 0, tokens) for prompt in chosen)
        )

    async def _converse(
        self, client: AsyncOpenAI, arm: str, prompt: BenchPrompt, temperature: float, history: Sequence[str] | None
    ) -> list[Answer]:
        """All turns of a prompt; after the baseline's answers where there are some, so that prompts are paired."""
        said: list[str] = []
        answers: list[Answer] = []
        for turn in range(len(prompt.turns)):
            if answers and answers[-1].error:
                answers.append(Answer(0, None, error=answers[-1].error))
                continue
            seed = request_seed(self.bench.seed, prompt.id, turn) % 2**31
            answer = await self._ask(client, arm, conversation(prompt, said), temperature, seed)
            answers.append(answer)
            said.append(history[turn] if history else answer.text)
        return answers

    async def _ask(
        self, client: AsyncOpenAI, arm: str, messages: list[dict[str, str]], temperature: float, seed: int,
        max_tokens: int | None = None,
    ) -> Answer:  # fmt: skip
        """One request; what is wrong with it alone becomes part of the answer.

        Raises:
            RunError: no request to this server can succeed.
        """
        options = self.config.target.template_options()
        extra: dict[str, Any] = {"chat_template_kwargs": options} if options else {}
        if self.bench.top_k:
            extra["top_k"] = self.bench.top_k
        if self.bench.engine == "sglang":
            extra["return_meta_info"] = True
        begin = time.perf_counter()
        try:
            response = await client.chat.completions.create(
                model=self._models[arm], messages=messages, temperature=temperature, top_p=self.bench.top_p, seed=seed,
                max_tokens=max_tokens or self.bench.max_new_tokens, extra_body=extra,
            )  # fmt: skip
        except openai.APIStatusError as error:
            reason = f"{error.status_code} {' '.join(error.response.text.split())[:300]}"
            if error.status_code in _STOPS_ALL:
                raise RunError(
                    f"the {arm} server at {self.urls[arm]} refuses requests: {reason}",
                    _HINTS.get(error.status_code, f"the API key is read from {API_KEY_VARIABLE}"),
                ) from None
            return Answer(0, None, error=reason)
        except openai.APITimeoutError:
            return Answer(0, None, error=f"no answer within {self.bench.timeout_s:g} s")
        except openai.APIConnectionError as error:
            raise RunError(
                f"the {arm} server at {self.urls[arm]} cannot be reached: {error.__cause__ or error}",
                "start it (`dpace bench --dry-run` prints how), then run the same command again",
            ) from None
        return _answer(response.model_dump(), time.perf_counter() - begin)

    def _counters(self, arm: str) -> dict[str, float] | None:
        """vLLM's counters now; None for other engines and servers that have none."""
        if self.bench.engine != "vllm" or arm != "draft":
            return None
        try:
            with urllib.request.urlopen(f"{self.urls[arm]}/metrics", timeout=30) as response:
                return spec_decode_counters(response.read().decode("utf-8", "replace"))
        except (urllib.error.URLError, OSError):
            return None

    def _compared(
        self, index: int, prompt: BenchPrompt, rows: Mapping[str, dict[str, Any]], temperature: float
    ) -> list[PromptResult]:
        """Both arms' answers to one prompt, turn by turn; outputs are compared as text."""
        results = []
        for turn in range(len(prompt.turns)):
            arms = {arm: row["answers"][turn] for arm, row in rows.items()}
            error = next((answer["error"] for answer in arms.values() if answer["error"]), None)
            decoded = {arm: Decoded(**arms[arm]["decoded"]) if arm in arms and arms[arm]["decoded"] else None
                       for arm in ("baseline", "draft")}  # fmt: skip
            comparable = len(arms) == 2 and error is None and temperature == 0 and self.bench.check_lossless
            results.append(PromptResult(
                id=prompt.id, index=index, turn=turn, error=error, **decoded,
                prompt_tokens=max(answer["prompt_tokens"] for answer in arms.values()),
                lossless=arms["baseline"]["text"] == arms["draft"]["text"] if comparable else None,
            ))  # fmt: skip
        return results


def _answer(response: Mapping[str, Any], seconds: float) -> Answer:
    """What a chat completion says, SGLang's `meta_info` included, which is part of the choice or beside it."""
    choices, usage = response.get("choices") or [], response.get("usage") or {}
    if not choices or "completion_tokens" not in usage:
        return Answer(0, None, error="the response has no choice or no usage")
    message, meta = choices[0]["message"], choices[0].get("meta_info") or response.get("meta_info") or {}
    steps = int(meta.get("spec_verify_ct") or 0)
    tokens = int(usage["completion_tokens"])
    mean = meta.get("spec_accept_length") or ((tokens - 1) / steps if steps else None)
    decoded = Decoded(
        tokens=tokens, acceptance_lengths=[], prefill_s=0.0, decode_s=seconds,
        finish_reason="length" if choices[0].get("finish_reason") == "length" else "stop",
        steps=steps or None, mean_acceptance=float(mean) if steps and mean else None,
    )  # fmt: skip
    reasoning = message.get("reasoning_content") or ""
    return Answer(int(usage.get("prompt_tokens") or 0), decoded, reasoning + (message.get("content") or ""))


def spec_decode_counters(metrics: str) -> dict[str, float] | None:
    """vLLM's speculation counters from a Prometheus page, summed over engines; None where it has none.

    Returns:
        `drafts`, `accepted`, and `accepted@K` for position K, from 1.
    """
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name, labels, value = sample.groups()
        if name in _COUNTERS:
            found[_COUNTERS[name]] = found.get(_COUNTERS[name], 0.0) + float(value)
        elif name == _PER_POSITION and (position := re.search(r'position="(\d+)"', labels or "")):
            key = f"accepted@{int(position[1]) + 1}"
            found[key] = found.get(key, 0.0) + float(value)
    return found if "drafts" in found else None


def _summed(counted: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """The counters of all attempts together, the positions as a list."""
    if not counted:
        return None
    total = {name: sum(counters.get(name, 0) for counters in counted) for name in counted[-1]}
    positions = sorted((name for name in total if "@" in name), key=lambda name: int(name.split("@")[1]))
    return {
        **{name: int(total.get(name, 0)) for name in ("requests", "drafts", "accepted")},
        "accepted_per_position": [int(total[name]) for name in positions],
    }


def _wall(rows: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that a pass took, from its first request to its last, over all attempts."""
    attempts: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        attempts.setdefault(row["attempt"], []).append(row)
    return sum(max(r["end"] for r in group) - min(r["begin"] for r in group) for group in attempts.values())


def _texts(rows: Mapping[str, Mapping[str, Any]], arm: str) -> dict[str, list[str]]:
    """What an arm said, turn by turn, by prompt id."""
    return {
        row_id.removeprefix(f"{arm}/"): [answer["text"] for answer in row["answers"]]
        for row_id, row in rows.items()
        if row_id.startswith(f"{arm}/")
    }
