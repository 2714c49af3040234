"""What the benchmarks share: shapes, equal inputs for both tools, interleaved timing, peak memory.

Timings are compared within a round only: each round runs every arm once, in an order drawn anew, and a ratio
is the median over rounds of the ratio inside a round. So a machine that slows down for a while slows all arms.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from dpace_cli import config
from dpace_cli.config import Dflash, Dpace
from dpace_cli.data.batches import Blocks
from dpace_cli.head import HeadOutput, objective_head
from dpace_cli.trainers.drafter_loss import DrafterLoss


@dataclass(frozen=True)
class Shape:
    """Sizes of a batch and of the models.

    Attributes:
        length: tokens of a sequence.
        blocks: anchors drawn in a sequence.
    """

    width: int
    vocabulary: int
    heads: int
    key_heads: int
    head_dim: int
    mlp: int
    layers: int
    batch: int
    length: int
    blocks: int
    block_size: int


SHAPES = {
    "demo": Shape(128, 768, 4, 2, 32, 384, 3, 16, 96, 24, 16),
    "smollm2": Shape(576, 49152, 9, 3, 64, 1536, 3, 1, 512, 64, 8),
    "long": Shape(576, 49152, 9, 3, 64, 1536, 3, 1, 1024, 128, 16),
    "tiny": Shape(32, 96, 4, 2, 8, 64, 1, 2, 48, 6, 4),
}
"""`tiny` only shows that a script runs."""
TAPS = 3
TINY = 1e-12
"""Learning rate: every step is to be the same."""


class Batch:
    """Random weights, target states, tokens and anchors, the same for both tools."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype = shape, dtype
        self.mask_token = shape.vocabulary - 1
        self.drafter = DFlashDraftModel(drafter_config(shape)).float()
        self.embedding = torch.randn(shape.vocabulary, shape.width) * 0.02
        self.head = torch.randn(shape.vocabulary, shape.width) * 0.05
        self.states = torch.randn(shape.batch, shape.length, TAPS * shape.width)
        self.input_ids = torch.randint(shape.vocabulary - 1, (shape.batch, shape.length))
        # The answer is all but the first eighth; anchors have a supervised token after them.
        self.loss_mask = torch.zeros(shape.batch, shape.length)
        first = shape.length // 8
        self.loss_mask[:, first:] = 1
        draws = [torch.randperm(shape.length - 1 - first)[: shape.blocks] + first for _ in range(shape.batch)]
        self.anchors = torch.stack(draws).sort(1).values
        self.keep = torch.ones_like(self.anchors, dtype=torch.bool)
        places = self.anchors[..., None] + torch.arange(shape.block_size)
        inside = places < shape.length
        rows = torch.arange(shape.batch)[:, None, None]
        self.targets = self.input_ids[rows, places.clamp(max=shape.length - 1)]
        self.supervised = inside & (self.loss_mask[rows, places.clamp(max=shape.length - 1)] > 0)
        self.supervised[..., 0] = False
        self.noise_ids = torch.full_like(self.targets, self.mask_token)
        self.noise_ids[..., 0] = self.targets[..., 0]

    @property
    def tokens(self) -> int:
        """Supervised positions."""
        return int(self.supervised.sum())

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32)


def drafter_config(shape: Shape) -> Qwen3Config:
    made = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=["full_attention"] * shape.layers,
    )
    made.num_target_layers = 30
    made.block_size = shape.block_size
    made.dflash_config = {
        "mask_token_id": shape.vocabulary - 1,
        "target_layer_ids": list(range(1, TAPS + 1)),
        "block_size": shape.block_size,
    }
    made._attn_implementation = "sdpa"
    return made


class Ours:
    """dpace's drafter step, by its native trainer's own loss."""

    def __init__(self, batch: Batch, objective: Any, chunk_tokens: int) -> None:
        self.batch, self.drafter = batch, batch.drafter
        self.train = config.TrainConfig(
            objective=objective,
            block_size=batch.shape.block_size,
            head_chunk_tokens=chunk_tokens,
            compute_dtype=str(batch.dtype).removeprefix("torch."),
        )
        target = SimpleNamespace(
            device=torch.device("cpu"),
            embedding=batch.embedding,
            head=batch.head.to(batch.dtype),
            config=SimpleNamespace(),
            model=SimpleNamespace(get_input_embeddings=lambda: None),
        )
        self.loss = DrafterLoss(self.drafter, target, self.train)
        self.blocks = Blocks(batch.input_ids, batch.anchors, batch.keep, batch.targets, batch.supervised)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=TINY, weight_decay=0.01, fused=True)

    def head(self, hidden: Tensor) -> HeadOutput:
        """Numerator and divisor for hidden states [T, H] of the supervised positions."""
        batch = self.batch
        return objective_head(
            hidden,
            self.loss.target.head,
            batch.targets[:, :, 1:].flatten(0, 1),
            batch.supervised[:, :, 1:].flatten(0, 1),
            self.train.objective,
            num_sequences=batch.shape.batch,
            block_size=batch.shape.block_size,
            chunk_tokens=self.train.head_chunk_tokens,
            buffers=self.loss.buffers,
        )

    def gradients(self) -> float:
        """One forward and backward pass; the gradients are left on the drafter."""
        self.drafter.zero_grad(set_to_none=True)
        output = self.loss(self.blocks, self.batch.states, None)
        output.loss_sum.backward()
        torch._foreach_div_([p.grad for p in self.drafter.parameters()], output.divisor)
        return float(output.loss_sum.detach() / output.divisor)

    def step(self) -> float:
        loss = self.gradients()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), self.train.max_grad_norm)
        self.optimizer.step()
        return loss


class Theirs:
    """SpecForge 0.2.0's drafter step, as its offline trainer makes it on a CPU."""

    def __init__(self, batch: Batch, objective: Any) -> None:
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter
        from specforge.optimizer import BF16Optimizer

        shape = batch.shape
        self.batch = batch
        self.drafter = SpecForgeDrafter(drafter_config(shape)).float()
        self.drafter.load_state_dict(batch.drafter.state_dict())
        head = nn.Linear(shape.width, shape.vocabulary, bias=False, device="meta")
        head.weight = nn.Parameter(batch.head, requires_grad=False)
        embedding = nn.Embedding(shape.vocabulary, shape.width, device="meta")
        embedding.weight = nn.Parameter(batch.embedding, requires_grad=False)
        is_dflash = objective.name == "dflash"
        self.model = OnlineDFlashModel(
            self.drafter,
            head,
            embedding,
            batch.mask_token,
            block_size=shape.block_size,
            attention_backend="sdpa",
            loss_type=objective.name,
            loss_decay_gamma=config.decay_length(objective.gamma, shape.block_size) if is_dflash else None,
            dpace_alpha=0.5 if is_dflash else objective.alpha,
        )
        self.model._sample_anchor_positions = lambda *_: (batch.anchors, batch.keep)
        self.optimizer = BF16Optimizer(self.drafter, lr=TINY, weight_decay=0.01, max_grad_norm=1.0)

    def loss(self, hidden: Tensor) -> Tensor:
        """The loss for hidden states [B, N, K, H], by the part of its forward pass that follows the drafter."""
        from specforge.core.chunking import checkpointed_chunk_reduce

        model, batch = self.model, self.batch
        numerator, divisor, _, _ = checkpointed_chunk_reduce(
            model._dflash_objective_chunk_terms,
            hidden,
            batch.targets,
            batch.supervised.float(),
            chunk_size=model.objective_chunk_blocks,
            dim=1,
        )
        return numerator / (divisor if model.loss_type == "dflash" else float(batch.shape.batch))

    def gradients(self) -> float:
        self.drafter.zero_grad(set_to_none=True)
        with self.batch.autocast():
            loss, _, _ = self.model(self.batch.input_ids, self.batch.states, self.batch.loss_mask)
        loss.backward()
        return float(loss.detach())

    def step(self) -> float:
        loss = self.gradients()
        self.optimizer.step()
        return loss


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

# --- timing and memory -----------------------------------------------------------------------------------


def interleaved(arms: dict[str, Callable[[], Any]], rounds: int, clock: str) -> dict[str, list[float]]:
    """Seconds of each arm in each round; the first call of each is thrown away."""
    now = CLOCKS[clock]
    for run in arms.values():
        run()
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for round_number in range(rounds):
            # Not a rotation: an arm must not always follow the same other, whose caches and heap it finds.
            random.Random(round_number).shuffle(names)
            for name in names:
                start = now()
                arms[name]()
                seconds[name].append(now() - start)
    finally:
        gc.enable()
    return seconds


def median_ratio(seconds: dict[str, list[float]], above: str, below: str) -> float:
    """Median over rounds of the ratio of two arms in a round."""
    return statistics.median(a / b for a, b in zip(seconds[above], seconds[below]))


def relative_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def peak_bytes(run: Callable[[], Any]) -> int:
    """Growth of this process's resident memory at its highest during `run`, from just before it (Linux)."""
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def peaks_of(arms: Iterable[str], shape: str, options: argparse.Namespace, prefix: str = "") -> dict[str, int]:
    """Run this script again for each arm's memory alone, so that no arm profits from another's allocations."""
    if options.no_memory:
        return {}
    same = ["--shape", shape, "--dtype", options.dtype, "--chunk-tokens", str(options.chunk_tokens)]
    found = {}
    for arm in arms:
        command = [sys.executable, sys.argv[0], *same, "--threads", str(options.threads), "--peak", prefix + arm]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[arm] = int(json.loads(done.stdout)["peak_bytes"])
    return found


def ratio(values: dict[str, int], above: str, below: str) -> float | None:
    """Of two arms' memory; None where it was not measured."""
    return values[above] / values[below] if values else None


def arguments(description: str) -> argparse.Namespace:
    """The command line of a benchmark, with its threads set."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--clock", choices=list(CLOCKS), default="wall", help="cpu: seconds of processor time, for a busy machine"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--chunk-tokens", type=int, default=config.TrainConfig().head_chunk_tokens)
    parser.add_argument("--quick", action="store_true", help="three rounds, the demo's and SmolLM2's shapes alone")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory out: a process for each arm less")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # one arm's memory, in a process of its own
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.rounds = 3 if options.quick else options.rounds
    return options


def shapes(options: argparse.Namespace) -> list[str]:
    if options.shape != "all":
        return [options.shape]
    return ["demo", "smollm2"] if options.quick else ["demo", "smollm2", "long"]


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "processor": _processor(),
        "threads": options.threads,
        "clock": options.clock,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


OBJECTIVES = {"dflash": Dflash(), "dpace": Dpace()}
