"""The target's tapped states: a pass that stops at the highest tapped layer, and the three ways to keep them.

    python benchmarks/capture.py --quick

Prints one JSON document. SpecForge 0.2.0 captures with SGLang on a GPU alone, through every layer and up to the last
hidden state; `all_layers` is that pass by Transformers, and `with_logits` the same with the logits, as a model's plain
call gives them. All arms run the same rows with the same weights. `read` is what a batch costs afterwards: made anew
(`train.cache: none`), from memory, from dpace's memory-mapped shards, and from SpecForge's feature files.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import (
    SHAPES,
    TAPS,
    Shape,
    arguments,
    interleaved,
    machine,
    median_ratio,
    peak_bytes,
    peaks_of,
    ratio,
    shapes,
)
from dflash.model import build_target_layer_ids
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from dpace_cli.data.batches import TrainingRow
from dpace_cli.modeling.capture import States, tapped_states
from dpace_cli.modeling.target import Target
from dpace_cli.trainers.specforge import write_features

LAYERS = {"demo": 6, "smollm2": 30, "long": 30, "tiny": 5}
READ_ROUNDS = 5


class Case:
    """A target with random weights, and a batch of rows of unequal length."""

    def __init__(self, name: str, options: object) -> None:
        torch.manual_seed(0)
        self.shape, self.dtype = SHAPES[name], getattr(torch, options.dtype)
        layers = LAYERS[name]
        model = Qwen3ForCausalLM(target_config(self.shape, layers)).to(self.dtype).eval().requires_grad_(False)
        self.target = Target(name, model, tokenizer=None)
        self.layer_ids = build_target_layer_ids(layers, TAPS)
        count = max(self.shape.batch, 2)
        lengths = [self.shape.length - place * self.shape.length // (4 * count) for place in range(count)]
        self.rows = [torch.randint(self.shape.vocabulary, (length,)).tolist() for length in lengths]
        self.ids = pad_sequence([torch.tensor(row) for row in self.rows], batch_first=True)
        self.mask = (torch.arange(self.ids.shape[1])[None] < torch.tensor(lengths)[:, None]).long()
        self.tokens = sum(lengths)
        self.arms: dict[str, Callable[[], Tensor]] = {
            "dpace": lambda: tapped_states(self.target, self.ids, self.layer_ids),
            "all_layers": lambda: self.whole(model.model),
            "with_logits": lambda: self.whole(model),
        }

    @torch.no_grad()
    def whole(self, model: torch.nn.Module) -> Tensor:
        """Tapped states of a pass through all layers."""
        output = model(input_ids=self.ids, attention_mask=self.mask, use_cache=False, output_hidden_states=True)
        return torch.cat([output.hidden_states[layer + 1] for layer in self.layer_ids], dim=-1)

    def agreement(self) -> dict[str, Any]:
        """Are the states of all arms the same at every token?"""
        made = {name: run()[self.mask.bool()] for name, run in self.arms.items()}
        largest = max(float((made["dpace"] - other).abs().max()) for other in made.values())
        return {
            "states_equal": all(torch.equal(made["dpace"], other) for other in made.values()),
            "largest_difference": largest,
        }

    def states(self) -> States:
        return States(self.target, self.rows, self.layer_ids, last=False)


def target_config(shape: Shape, layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )


def read_rates(case: Case, options: object) -> dict[str, float]:
    """Tokens a second of one batch of all rows, by where its states come from."""
    from specforge.runtime.data_plane.feature_store import load_feature_file

    everything = range(len(case.rows))
    with tempfile.TemporaryDirectory() as scratch:
        none, memory, disk = case.states(), case.states(), case.states()
        memory.keep_in_memory(lambda _: None)
        disk.keep_on_disk(Path(scratch) / "cache", lambda _: None)
        features = Path(scratch) / "features"
        rows = [TrainingRow.make(str(place), row, [1] * len(row)) for place, row in enumerate(case.rows)]
        write_features(features, rows, case.states(), case.dtype, lambda _: None)
        files = sorted(map(str, features.glob("*.ckpt")))

        def specforge() -> Tensor:
            return pad_sequence([load_feature_file(file)["hidden_states"] for file in files], batch_first=True)

        seconds = interleaved(
            {
                "none": lambda: none.batch(everything),
                "memory": lambda: memory.batch(everything),
                "disk": lambda: disk.batch(everything),
                "specforge_files": specforge,
            },
            min(options.rounds, READ_ROUNDS),
            options.clock,
        )
    return {name: case.tokens / statistics.median(taken) for name, taken in seconds.items()}


def measure(name: str, options: object) -> dict[str, Any]:
    case = Case(name, options)
    agreement = case.agreement()
    seconds = interleaved(case.arms, options.rounds, options.clock)
    memory = peaks_of(case.arms, name, options)
    others = [arm for arm in case.arms if arm != "dpace"]
    return {
        "shape": name,
        "tokens": case.tokens,
        "layers": LAYERS[name],
        "tapped": case.layer_ids,
        "speedup": {arm: median_ratio(seconds, arm, "dpace") for arm in others},
        "peak_bytes": memory,
        "peak_ratio": {arm: ratio(memory, "dpace", arm) for arm in others},
        **agreement,
        "tokens_per_s": {arm: case.tokens / statistics.median(taken) for arm, taken in seconds.items()},
        "read_tokens_per_s": read_rates(case, options),
        "state_bytes_per_token": case.states().bytes // case.tokens,
        "seconds": seconds,
    }


def main() -> None:
    options = arguments(__doc__)
    if options.peak:
        print(json.dumps({"peak_bytes": peak_bytes(Case(options.shape, options).arms[options.peak])}))
        return
    names = ["demo"] if options.quick and options.shape == "all" else shapes(options)
    results = [measure(name, options) for name in names]
    print(json.dumps({"benchmark": "capture", "machine": machine(options), "results": results}, indent=2))


if __name__ == "__main__":
    main()
