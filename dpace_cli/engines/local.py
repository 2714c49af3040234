"""Generation with Transformers on this machine, in batches of rows of like length.

Shapes: B rows still running, L cached positions (left-padding included), V vocabulary.

The loop is its own and not `model.generate`, because rows that are finished leave the batch, each row draws
from its own seed, and nothing is computed for the padding of rows that are done.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpace_cli.config import Config, RegenConfig
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines.base import Completion, Request, split_reasoning, split_tool_calls
from dpace_cli.errors import DpaceError, RunError
from dpace_cli.modeling import cpu
from dpace_cli.modeling.target import Target, load_target, tokenizer_fingerprint

COMPACT_BELOW = 0.9
"""The batch is made smaller when at most this share of its rows is still running."""


@dataclass
class _Row:
    request: Request
    prompt_ids: list[int]
    most_tokens: int
    random: random.Random
    answer_ids: list[int] = field(default_factory=list)


class LocalEngine:
    """Transformers, on any device.

    A row's answer depends on the other rows of its batch only through the rounding of sums.
    """

    name = "local"

    def __init__(self, config: Config, target: Target | None = None) -> None:
        self.options: RegenConfig = config.regen
        self.template_options = config.target.template_options()
        self.group_rows: int | None = config.regen.batch_size
        self.target = load_target(config.target) if target is None else target
        self.fingerprint: str | None = tokenizer_fingerprint(self.target.tokenizer)
        self.stop = set(self.target.stop_token_ids)
        if self.target.device.type == "cpu":
            cpu.speed_up(self.target.model)

    def close(self) -> None:
        """Nothing to give back."""

    def facts(self) -> dict[str, Any]:
        """Device, number type and threads: what roundings depend on."""
        return {
            "device": str(self.target.device),
            "dtype": str(self.target.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Collect what is ready, answer it in batches, and ask for more."""
        source = iter(requests)
        while True:
            rows: list[_Row] = []
            more = False
            for request in source:
                if request is None:
                    more = True
                    break
                try:
                    rows.append(self._row(request))
                except DpaceError as error:
                    yield Completion(request.id, error=error.message, permanent=True)
            rows.sort(key=lambda row: (-len(row.prompt_ids), row.request.id))
            for start in range(0, len(rows), self.options.batch_size):
                yield from self._answer(rows[start : start + self.options.batch_size])
            if not more:
                return

    def _row(self, request: Request) -> _Row:
        prompt = generation_prompt(self.target.tokenizer, request.messages, self.template_options, request.tools)
        positions = (
            getattr(self.target.config, "max_position_embeddings", None) or len(prompt) + self.options.max_new_tokens
        )
        if len(prompt) >= positions:
            raise RunError(f"the prompt has {len(prompt)} tokens; the target has positions for {positions}")
        most = min(self.options.max_new_tokens, positions - len(prompt))
        return _Row(request, prompt, most, random.Random(request.seed))

    @torch.inference_mode()
    def _answer(self, rows: list[_Row]) -> Iterator[Completion]:
        """Generate for one batch; a row is yielded as soon as it is finished."""
        device = self.target.device
        longest = max(len(row.prompt_ids) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, row in enumerate(rows):
            ids[i, longest - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[i, longest - len(row.prompt_ids) :] = 1
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = cpu.make_cache(self.target.model.config)
        done = [False] * len(rows)
        seen: Tensor | None = None
        while True:
            logits = self._forward(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
            if self.options.repetition_penalty != 1:
                if seen is None:
                    seen = torch.zeros_like(logits, dtype=torch.bool)
                    for i, row in enumerate(rows):
                        seen[i, row.prompt_ids] = True
                else:
                    seen.scatter_(1, ids, True)
            chosen = self._choose(logits, rows, seen)
            for i, token in enumerate(chosen.tolist()):
                if not done[i]:
                    rows[i].answer_ids.append(token)
                    if token in self.stop or len(rows[i].answer_ids) >= rows[i].most_tokens:
                        done[i] = True
                        yield self._completion(rows[i])
            running = [i for i, finished in enumerate(done) if not finished]
            if not running:
                return
            if len(running) <= COMPACT_BELOW * len(rows):
                kept = torch.tensor(running, device=device)
                cache.batch_select_indices(kept)
                mask, positions, chosen = mask[kept], positions[kept], chosen[kept]
                seen = seen[kept] if seen is not None else None
                rows, done = [rows[i] for i in running], [False] * len(running)
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _forward(self, **inputs: Any) -> Tensor:
        """[B, V] float32 logits of the position after the last."""
        try:
            return self.target.model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].float()
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of memory with {len(inputs['input_ids'])} rows: {str(error).splitlines()[0]}",
                "lower regen.batch_size and run the same command again; finished rows are kept",
            ) from None

    def _choose(self, logits: Tensor, rows: list[_Row], seen: Tensor | None) -> Tensor:
        """[B] next token of each row from its [B, V] logits."""
        options = self.options
        if seen is not None:
            logits = penalised(logits, seen, options.repetition_penalty)
        if options.temperature == 0:
            return logits.argmax(-1)
        uniform = torch.tensor([row.random.random() for row in rows], dtype=torch.float64)
        return draw(logits, uniform, options.temperature, options.top_k, options.top_p)

    def _completion(self, row: _Row) -> Completion:
        tokenizer = self.target.tokenizer
        stopped = row.answer_ids[-1] in self.stop
        ids = row.answer_ids[:-1] if stopped else row.answer_ids
        # Where the marks of reasoning and calls are special tokens, they are text here, or nothing could be split.
        marks = {"<think>", "</think>", "<tool_call>", "</tool_call>"} & set(tokenizer.all_special_tokens)
        text = _decode(tokenizer, ids, marks)
        content, reasoning = split_reasoning(
            text, _decode(tokenizer, row.prompt_ids[-8:], marks).rstrip().endswith("<think>")
        )
        calls = None
        if row.request.tools:
            content, calls = split_tool_calls(content)
        return Completion(
            row.request.id,
            text=content,
            reasoning=reasoning,
            prompt_ids=row.prompt_ids,
            answer_ids=row.answer_ids,
            finish_reason="length" if not stopped else "tool_calls" if calls else "stop",
            tokens=len(row.answer_ids),
            tool_calls=calls,
        )


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """[B, V] logits with those of tokens that the row holds already made smaller (arXiv 1909.05858)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """One token of each row, by inversion: the draw depends on the row's own number alone.

    Args:
        logits: [B, V].
        uniform: [B] float64 in [0, 1).
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together hold this probability.
    Returns:
        [B] token ids.
    """
    scores = logits / temperature
    if top_k:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    shares = scores.softmax(-1)
    if top_p < 1:
        falling, order = shares.sort(dim=-1, descending=True)
        beyond = falling.cumsum(-1) - falling >= top_p  # the token that crosses top_p stays
        shares = shares.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), 0.0)
    sums = shares.to(torch.float32 if shares.device.type == "mps" else torch.float64).cumsum(-1)
    total = sums[:, -1:]
    at = torch.minimum(uniform.to(sums)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(sums, at, right=True).squeeze(-1)


def _decode(tokenizer: Any, ids: list[int], marks: set[str]) -> str:
    """Text without special tokens other than `marks`."""
    if marks:
        unwanted = set(tokenizer.all_special_ids) - set(tokenizer.convert_tokens_to_ids(sorted(marks)))
        return tokenizer.decode([i for i in ids if i not in unwanted], skip_special_tokens=False)
    return tokenizer.decode(ids, skip_special_tokens=True)
