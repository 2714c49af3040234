"""A drafter step at Qwen3-4B's shapes on one GPU, by the native trainer's own loss; random weights, no download.

    python benchmarks/gpu.py            # on a GPU: under six minutes; without one: a small size on the CPU
    python benchmarks/gpu.py --small    # the small size anywhere

Prints one JSON document: milliseconds of a step with the target's states made anew in it (`train.cache: none`) and
read from memory, for D-PACE and for decayed cross-entropy, compiled and not; the peak memory of each; and how near a
step comes to the matrix products that it cannot avoid, at the bfloat16 rates measured in the same run. The D-PACE
paper reports 177 ms for its step on one H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import OBJECTIVES, TAPS, Shape, drafter_config, interleaved, machine, median_ratio, peak_bytes
from dflash.model import DFlashDraftModel, build_target_layer_ids
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dpace_cli.config import Config, TrainConfig
from dpace_cli.data.batches import TrainingRow, collate, draw_anchors
from dpace_cli.doctor import measure_rates
from dpace_cli.estimate import Batch, products, step_floor
from dpace_cli.estimate import shapes as estimated_shapes
from dpace_cli.modeling.capture import States
from dpace_cli.modeling.target import Target
from dpace_cli.trainers.drafter_loss import DrafterLoss

QWEN3_4B = (Shape(2560, 151936, 32, 8, 128, 9728, 3, 2, 2048, 512, 16), 36)
SMALL = (Shape(128, 1024, 4, 2, 32, 384, 3, 2, 128, 16, 16), 6)
PAPER_MS = 177.0
"""The step of arXiv 2605.18810 on an H200."""


class Bench:
    """Target, drafter and one batch, whose answers begin after an eighth of each row."""

    def __init__(self, shape: Shape, layers: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.config = Config(
            target={"path": "random", "device": str(device), "dtype": "bfloat16"},
            train={"block_size": shape.block_size, "num_draft_layers": shape.layers, "num_anchors": shape.blocks,
                   "batch_size": shape.batch, "max_length": shape.length, "compute_dtype": "bfloat16"},
        )  # fmt: skip
        target_config = Qwen3Config(
            vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.mlp,
            num_hidden_layers=layers, num_attention_heads=shape.heads, num_key_value_heads=shape.key_heads,
            head_dim=shape.head_dim, max_position_embeddings=4096, tie_word_embeddings=True,
            attn_implementation="sdpa", dtype=torch.bfloat16,
        )  # fmt: skip
        with device:
            model = Qwen3ForCausalLM._from_config(target_config, dtype=torch.bfloat16).eval().requires_grad_(False)
        self.target = Target("random", model, tokenizer=None)
        self.layer_ids = build_target_layer_ids(layers, TAPS)
        made = drafter_config(shape)
        made.num_target_layers, made.dflash_config["target_layer_ids"] = layers, self.layer_ids
        with device:
            self.drafter = DFlashDraftModel(made).float()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-12, weight_decay=0.01, fused=True)
        rows = [self._row(str(number)) for number in range(shape.batch)]
        anchors = [draw_anchors(row, i, shape.blocks, 0, 0) for i, row in enumerate(rows)]
        self.blocks = collate(rows, anchors, shape.block_size)
        ids = [row.input_ids for row in rows]
        self.uncached = States(self.target, ids, self.layer_ids, last=False)
        self.cached = States(self.target, ids, self.layer_ids, last=False)
        self.cached.keep_in_memory(lambda _: None)
        self.all_rows = range(shape.batch)
        self.estimated = estimated_shapes(
            target_config.to_dict(), self.config, self.layer_ids, target_bytes=2, compute_bytes=2, device=device.type
        )
        kept = float(self.blocks.keep.sum()) / shape.batch
        supervised = float(self.blocks.supervised.sum()) / float(self.blocks.keep.sum())
        self.batch = Batch(shape.batch, shape.length, kept, supervised)

    def _row(self, name: str) -> TrainingRow:
        length, prompt = self.shape.length, self.shape.length // 8
        ids = torch.randint(self.shape.vocabulary - 1, (length,)).tolist()
        return TrainingRow.make(name, ids, [0] * prompt + [1] * (length - prompt))

    def arm(self, objective: str, states: States, compile: bool = False) -> Callable[[], float]:
        """A whole optimizer step, to its end on the device; the weights stay as they are to rounding."""
        train = TrainConfig(**{**self.config.train.model_dump(), "objective": OBJECTIVES[objective],
                               "compile": compile})  # fmt: skip
        loss = DrafterLoss(self.drafter, self.target, train)

        def step() -> float:
            self.optimizer.zero_grad(set_to_none=True)
            output = loss(self.blocks, states.batch(self.all_rows)[0], None)
            output.loss_sum.backward()
            torch._foreach_div_([p.grad for p in self.drafter.parameters()], output.divisor)
            nn.utils.clip_grad_norm_(self.drafter.parameters(), train.max_grad_norm)
            self.optimizer.step()
            value = float(output.loss_sum.detach() / output.divisor)
            self.wait()
            return value

        return step

    def capture(self) -> None:
        self.uncached.batch(self.all_rows)
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak(self, run: Callable[[], Any]) -> int:
        """Highest memory while `run` runs: on a GPU all of it with the models, on a CPU its growth."""
        if self.device.type != "cuda":
            return peak_bytes(run)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device)


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    arms: dict[str, Callable[[], Any]] = {
        "dpace": bench.arm("dpace", bench.cached),
        "dpace_uncached": bench.arm("dpace", bench.uncached),
        "dflash": bench.arm("dflash", bench.cached),
        "dflash_uncached": bench.arm("dflash", bench.uncached),
        "capture": bench.capture,
    }
    failed = {}
    if bench.device.type == "cuda":
        compiled = bench.arm("dpace", bench.cached, compile=True)
        try:  # what the compiler cannot do here must not cost the figures of the rest
            compiled()
            arms["dpace_compiled"] = compiled
        except Exception as error:
            failed["dpace_compiled"] = f"{type(error).__name__}: {error}"[:500]
    losses = {name: arm() for name, arm in arms.items() if name != "capture"}
    seconds = interleaved(arms, options.rounds, "wall")
    peaks = {name: bench.peak(arm) for name, arm in arms.items()}
    rates = measure_rates(bench.config, bench.estimated, bench.batch)
    operations = products(bench.estimated, bench.batch)
    floor = {
        cache: sum(step_floor(config_with(bench.config, cache), bench.estimated, bench.batch, rates).values())
        for cache in ("memory", "none")
    }
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    done = {name: sum(operations[part] for part in parts_of(name)) for name in arms}
    return {
        "step_ms": {name: 1000 * taken for name, taken in medians.items()},
        "paper_step_ms": PAPER_MS if bench.shape is QWEN3_4B[0] else None,
        "dpace_over_dflash": {
            "cached": median_ratio(seconds, "dpace", "dflash"),
            "uncached": median_ratio(seconds, "dpace_uncached", "dflash_uncached"),
        },
        "peak_bytes": peaks,
        "operations": operations,
        "rates": {"head": rates.head, "drafter": rates.drafter, "how": rates.how},
        "rate_fraction": {name: done[name] / medians[name] / max(rates.head, rates.drafter) for name in arms},
        "times_the_floor": {
            name: medians[name] / floor["none" if name.endswith("uncached") else "memory"]
            for name in arms if name != "capture"
        },
        "losses": losses,
        "failed": failed,
        "seconds": seconds,
    }  # fmt: skip


def config_with(config: Config, cache: str) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"cache": cache})})


def parts_of(arm: str) -> tuple[str, ...]:
    """The products that an arm makes."""
    if arm == "capture":
        return ("capture",)
    return ("head", "drafter", "capture") if arm.endswith("uncached") else ("head", "drafter")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small size; the only one without a GPU")
    parser.add_argument("--rounds", type=int, default=None, help="default: 20 on a GPU, 3 at the small size")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = options.small or device.type == "cpu"
    options.rounds = options.rounds or (3 if small else 20)
    options.clock, options.dtype = "wall", "bfloat16"
    started = time.perf_counter()
    shape, layers = SMALL if small else QWEN3_4B
    found = measure(Bench(shape, layers, device), options)
    about = {**machine(options), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    took = time.perf_counter() - started
    print(json.dumps({"benchmark": "gpu", "machine": about, "small": small, "took_s": took, **found}, indent=2))


if __name__ == "__main__":
    main()
