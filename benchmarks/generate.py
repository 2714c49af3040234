"""Tokens a second of regen's local engine and of `model.generate`, on the same prompts in one process.

    python benchmarks/generate.py --target models/smollm2-135m --rows 64 --batch-size 32 --max-new-tokens 80

Each way answers the same rows in batches of the same size, sorted by length; rounds alternate, and the best round
of each counts. Answers are compared token by token. Prints one JSON document; where other processes keep the cores
busy, `tokens_per_cpu_s` with one thread is the figure that still means something.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from dpace_cli.config import Config
from dpace_cli.demo.prompts import samples
from dpace_cli.engines.base import Request
from dpace_cli.engines.local import LocalEngine
from dpace_cli.modeling.target import Target, load_target

Answers = dict[str, list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo", help="model folder or hub id")
    parser.add_argument("--data", help="rows in SpecForge's format; default: the embedded prompts")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = Config.model_validate(
        {
            "target": {"path": options.target},
            "regen": {"max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size},
        }
    )
    requests = [Request(str(n), [{"role": "user", "content": text}]) for n, text in enumerate(_prompts(options))]
    plain, engine = load_target(config.target), LocalEngine(config)
    prompts = {r.id: engine._row(r).prompt_ids for r in requests}
    ways: dict[str, Callable[[], Answers]] = {
        "model.generate": lambda: _generate(plain, prompts, options.batch_size, options.max_new_tokens),
        "local engine": lambda: {c.id: c.answer_ids for c in engine.complete(iter(requests))},
    }
    answers: dict[str, Answers] = {}
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            started, busy = time.perf_counter(), time.process_time()
            answers[name] = way()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(time.process_time() - busy)
    tokens = {name: sum(map(len, made.values())) for name, made in answers.items()}
    print(json.dumps({
        "options": vars(options), "torch": torch.__version__, "tokens": tokens,
        "tokens_per_s": {name: tokens[name] / min(wall[name]) for name in ways},
        "tokens_per_cpu_s": {name: tokens[name] / min(cpu[name]) for name in ways},
        "same_answers": sum(answers["model.generate"][key] == ids for key, ids in answers["local engine"].items()),
    }, indent=2))  # fmt: skip


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.data is None:
        return [sample.prompt for sample in samples(None, options.rows, 0, "train")]
    with open(options.data, encoding="utf-8") as file:
        return [json.loads(next(file))["conversations"][0]["content"] for _ in range(options.rows)]


@torch.inference_mode()
def _generate(target: Target, prompts: dict[str, list[int]], batch_size: int, max_new_tokens: int) -> Answers:
    """Transformers' own way, as one would write it: sorted, left-padded, one call for each batch."""
    answers: Answers = {}
    keys = sorted(prompts, key=lambda key: -len(prompts[key]))
    for start in range(0, len(keys), batch_size):
        batch = keys[start : start + batch_size]
        longest = max(len(prompts[key]) for key in batch)
        ids = torch.tensor([[0] * (longest - len(prompts[key])) + prompts[key] for key in batch])
        mask = torch.tensor([[0] * (longest - len(prompts[key])) + [1] * len(prompts[key]) for key in batch])
        made = target.model.generate(
            input_ids=ids.to(target.device), attention_mask=mask.to(target.device), do_sample=False,
            max_new_tokens=max_new_tokens, pad_token_id=0,
        )  # fmt: skip
        for key, row in zip(batch, made[:, longest:].tolist()):
            end = next((n + 1 for n, token in enumerate(row) if token in target.stop_token_ids), len(row))
            answers[key] = row[:end]
    return answers


if __name__ == "__main__":
    main()
