"""Decoding on any device, around `dflash_generate`, which is the reference and does the work.

What it lacks is added here, and only here:

- Its clock (`dflash.model._cuda_time`) needs CUDA and waits for the current GPU, which need not be the
  target's. `device_clock` puts one in its place that waits for the device in use.
- It does not say why an answer ended; `decode` works it out from the last token.
- With `max_new_tokens` 0 it divides by zero; `decode` asks for at least 1.
- It draws from PyTorch's global generator; `decode` seeds that for each request, so that the counts of a
  request depend on nothing that was decoded before it.

Two things about its acceptance lengths are right and easily misread: they count tokens that a verify step
*produced* (bonus token included, cut by an end token or by the maximum length), and within a block of the
maximum length it drafts a shorter block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dflash.model
import torch
from torch import Tensor, nn

from dpace_cli.modeling.cpu import make_cache
from dpace_cli.results import Decoded


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn from the target; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


def synchronize(device: torch.device) -> None:
    """Wait until everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def device_clock(device: torch.device) -> Iterator[None]:
    """Let `dflash_generate(return_stats=True)` tell the time of any device for the length of a block."""

    def now() -> float:
        synchronize(device)
        return time.perf_counter()

    original = dflash.model._cuda_time
    dflash.model._cuda_time = now
    try:
        yield
    finally:
        dflash.model._cuda_time = original


def decode(
    drafter: nn.Module,
    target: nn.Module,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_token_ids: Sequence[int],
    sampling: Sampling = Sampling(),
    block_size: int | None = None,
    seed: int = 0,
    generate: Callable[..., Any] = dflash.model.dflash_generate,
) -> Decoded:
    """Answer one prompt with DFlash; block size 1 is the target alone, in the same loop.

    Args:
        drafter: a DFlashDraftModel in evaluation mode, of the target's type and on its device.
        target: the target's Transformers model.
        prompt_ids: the rendered prompt.
        max_new_tokens: at least 1.
        stop_token_ids: tokens that end the answer; the first of them is part of it.
        block_size: null: the drafter's.
        seed: of every random draw of this request.
        generate: for tests.
    """
    if max_new_tokens < 1 or not prompt_ids:
        raise ValueError("an answer needs a prompt and at least one new token")
    device = target.device
    torch.manual_seed(seed)
    ids = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
    with device_clock(device):
        result = generate(
            drafter,
            target,
            ids,
            max_new_tokens,
            list(stop_token_ids) or None,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            block_size=block_size,
            return_stats=True,
        )
    output_ids = result.output_ids[0, result.num_input_tokens :].tolist()
    return Decoded(
        tokens=result.num_output_tokens,
        acceptance_lengths=list(result.acceptance_lengths),
        prefill_s=result.time_to_first_token,
        # Undo DFlash's division; `Decoded.time_per_output_token` does it again.
        decode_s=result.time_per_output_token * result.num_output_tokens,
        finish_reason="stop" if output_ids[-1] in stop_token_ids else "length",
        output_ids=output_ids,
    )


@torch.inference_mode()
def greedy_batch(
    target: nn.Module, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_token_ids: Sequence[int]
) -> list[list[int]]:
    """The target's greedy answers to several prompts at once, each up to and including its first end token.

    Padding changes the order of sums, so a near-tie may fall the other way than in `decode`.
    """
    longest = max(len(prompt) for prompt in prompts)
    device = target.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    stops = torch.tensor(list(stop_token_ids), dtype=torch.long, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    cache = make_cache(target.config)
    for _ in range(max_new_tokens):
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        logits = target(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        ids = logits.argmax(dim=-1, keepdim=True)
        for row, token in zip(running, ids[:, 0].tolist()):
            answers[row].append(token)
        going = (~torch.isin(ids[:, 0], stops)).nonzero()[:, 0]
        if len(going) == 0:
            break
        if len(going) < len(running):
            running = [running[i] for i in going.tolist()]
            ids, mask = ids[going], mask[going]
            cache.batch_select_indices(going)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return answers


# --- is the output the target's own? ----------------------------------------------------------------------


def tie_tolerance(dtype: torch.dtype) -> float:
    """Largest gap between two logits, in proportion to the row's largest, that rounding may decide.

    A verify step computes a token's logits together with its block's, the baseline alone: the same sums in
    another order. Seen on two targets were differences of up to 3e-6 of a row's largest logit in float32, and
    of up to 4.3 units (eps) in bfloat16, where every residual is rounded (docs/results-format.md). A gap is
    the difference of two logits, so half precision gets 8 units; float32 gets some forty times what was seen,
    which fewer than one position in a thousand of those targets lies within.
    """
    return 1e-4 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part.

    Attributes:
        position: first output position that differs.
        logit_gap: the target's best logit there minus its second best; None where one output just ends.
        near_tie: are both outputs' tokens within the tolerance of the best?
    """

    position: int
    logit_gap: float | None
    near_tie: bool


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First index at which two sequences differ, the end of the shorter one included; None where equal."""
    for index, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@torch.inference_mode()
def compare_greedy(
    target: nn.Module, prompt_ids: Sequence[int], own: Sequence[int], drafted: Sequence[int]
) -> Difference | None:
    """Compare the target's own greedy output with the drafted one; None where they are equal.

    Where they differ, one forward pass over the common prefix says how sure the target was.
    """
    position = first_difference(own, drafted)
    if position is None:
        return None
    if position >= len(own) or position >= len(drafted):
        return Difference(position, None, near_tie=False)  # one of them went on after an end: no rounding does that
    prefix = torch.tensor([[*prompt_ids, *own[:position]]], dtype=torch.long, device=target.device)
    logits: Tensor = target(prefix, logits_to_keep=1).logits[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    chosen = min(logits[own[position]].item(), logits[drafted[position]].item())
    allowed = tie_tolerance(target.dtype) * logits.abs().max().item()
    return Difference(position, best - second, near_tie=best - chosen <= allowed)
