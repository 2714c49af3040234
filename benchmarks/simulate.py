"""Simulated acceptance against real greedy decoding: the same verify steps, in how much less time.

    python benchmarks/simulate.py --run runs/demo --prompts 32 --max-new-tokens 160 --threads 1

The target's greedy answers are made once. Then each round, in an order drawn anew, decodes every prompt with each
drafter (`dflash_generate`) and with the target alone, as `dpace bench --engine local` does, and simulates all
drafters on the known answers, as `dpace bench --engine simulate` does (the target's states are made once for all of
them), and as a trainer's validation does, with a block at every token.
Prints one JSON document: `equal_steps` counts the answers whose every verify step is the same, both ways, of
`equal_answers` that are the same to begin with (a batch may decide a near-tie otherwise). Where other processes keep
the cores busy, take `--clock cpu` and one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _common import CLOCKS, interleaved, machine, median_ratio

from dpace_cli.config import Config
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.demo.prompts import samples
from dpace_cli.engines.measure_simulate import SharedStates
from dpace_cli.modeling.checkpoint import load_drafter
from dpace_cli.modeling.cpu import GROUPED
from dpace_cli.modeling.decode import decode, greedy_batch
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.simulate import SimulatedAcceptance, simulate
from dpace_cli.modeling.target import Target, load_target
from dpace_cli.records import RunFolder
from dpace_cli.results import Decoded


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    config = Config.model_validate({"target": {"path": options.target, "dtype": "float32", "device": "cpu"}})
    target, simulated_target = load_target(config.target), load_target(config.target)
    simulated_target.model.set_attn_implementation(GROUPED)
    prompts = [
        generation_prompt(target.tokenizer, [{"role": "user", "content": sample.prompt}], {})
        for sample in samples(None, options.prompts, 0, "heldout")
    ]

    def answer() -> list[list[int]]:
        return greedy_batch(simulated_target.model, prompts, options.max_new_tokens, target.stop_token_ids)

    answers = answer()
    rows = [([*p, *a], [0] * len(p) + [1] * len(a)) for p, a in zip(prompts, answers)]
    limits = [len(p) + options.max_new_tokens for p in prompts]
    drafters = load(options.run, config, target)

    decoded: dict[str, list[Decoded]] = {}
    simulated: dict[tuple[str, bool], SimulatedAcceptance] = {}

    def real() -> None:
        for name, drafter in drafters.items():
            decoded[name] = [
                decode(drafter, target.model, p, max_new_tokens=options.max_new_tokens,
                       stop_token_ids=target.stop_token_ids)
                for p in prompts
            ]  # fmt: skip

    def baseline() -> None:
        for prompt in prompts:
            decode(next(iter(drafters.values())), target.model, prompt, max_new_tokens=options.max_new_tokens,
                   stop_token_ids=target.stop_token_ids, block_size=1)  # fmt: skip

    def known(every_anchor: bool) -> Callable[[], None]:
        def run() -> None:
            states = SharedStates(simulated_target, [input_ids for input_ids, _ in rows])
            for name, drafter in drafters.items():
                simulated[name, every_anchor] = simulate(
                    drafter,
                    simulated_target,
                    rows,
                    block_size=drafter.block_size,
                    limits=limits,
                    every_anchor=every_anchor,
                    states=states.of(drafter.target_layer_ids),
                )

        return run

    seconds = interleaved(
        {"decode": real, "baseline": baseline, "answers": answer, "simulate": known(False), "validation": known(True)},
        options.rounds, options.clock,
    )  # fmt: skip
    for first, second in (("answers", "simulate"), ("baseline", "decode")):
        seconds[f"{first} and {second}"] = [a + b for a, b in zip(seconds[first], seconds[second])]
    print(json.dumps({
        "machine": machine(options), "prompts": len(prompts), "answer_tokens": sum(map(len, answers)),
        "drafters": [
            compared(name, decoded[name], [simulated[name, every] for every in (False, True)], answers)
            for name in drafters
        ],
        "times_as_fast": {
            "answers known": median_ratio(seconds, "decode", "simulate"),
            "answers made first": median_ratio(seconds, "decode", "answers and simulate"),
            "a whole bench": median_ratio(seconds, "baseline and decode", "answers and simulate"),
            "answers known, a block at every token": median_ratio(seconds, "decode", "validation"),
        },
        "seconds": seconds,
    }, indent=2))  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="run folder with drafters; default: one with random weights")
    parser.add_argument("--target", default="demo", help="the run's target")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts of the demo")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.set_defaults(dtype="float32")
    return parser.parse_args()


def load(run: Path | None, config: Config, target: Target) -> dict[str, Any]:
    """Drafters by name."""
    if run is None:
        made = build_drafter(drafter_config(target.config, target.tokenizer, config.train), 0)
        return {"random": made.eval().requires_grad_(False)}
    refs = RunFolder(run).checkpoints()
    return {ref.folder: load_drafter(ref.path, target.device, target.model.dtype) for ref in refs}


def compared(
    name: str, decoded: list[Decoded], ways: list[SimulatedAcceptance], answers: list[list[int]]
) -> dict[str, Any]:
    """Are the verify steps the same, where the answers are?"""
    same = [real.output_ids == known for real, known in zip(decoded, answers)]
    lengths = [real.acceptance_lengths for real in decoded]
    return {
        "drafter": name,
        "tau": statistics.fmean(real.acceptance for real in decoded if real.acceptance),
        "rounds": sum(map(len, lengths)),
        "equal_answers": sum(same),
        "equal_steps": [
            sum(equal and found.steps == own for equal, found, own in zip(same, way.answers, lengths)) for way in ways
        ],
    }


if __name__ == "__main__":
    main()
