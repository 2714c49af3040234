"""`dpace doctor --estimate` against trainings that are really run: memory, time of a step, disk.

    python benchmarks/estimate.py [--case NAME ...]

Each case makes a target with random weights and rows of random words, asks the doctor what a training needs, and
runs trainings of two lengths, each in a process of its own. Times are processor time on one thread, so that other
work on the machine disturbs them little: a step is the difference of the two trainings by their number of steps.
Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMOLLM2 = (576, 49152, 4, 9, 3, 1536)
CASES: dict[str, dict[str, Any]] = {
    # width, vocabulary, target layers, heads, key heads, MLP; rows, words of an answer; settings of train
    "demo": {"model": (128, 768, 6, 4, 2, 384), "rows": 48, "words": 22, "steps": (2, 6),
             "train": {"batch_size": 16, "num_anchors": 24, "block_size": 16, "max_length": 256}},
    "smollm2": {"model": SMOLLM2, "rows": 8, "words": 115, "steps": (1, 4),
                "train": {"batch_size": 1, "num_anchors": 64, "block_size": 8, "max_length": 512}},
    "uncached": {"model": SMOLLM2, "rows": 8, "words": 115, "steps": (1, 4),
                 "train": {"batch_size": 1, "num_anchors": 64, "block_size": 8, "max_length": 512,
                           "cache": "none"}},
    "anchors": {"model": SMOLLM2, "rows": 8, "words": 115, "steps": (1, 4),
                "train": {"batch_size": 1, "num_anchors": 128, "block_size": 8, "max_length": 512}},
    "long": {"model": SMOLLM2, "rows": 4, "words": 235, "steps": (1, 3),
             "train": {"batch_size": 1, "num_anchors": 128, "block_size": 16, "max_length": 1024}},
    "layers": {"model": (320, 8192, 12, 5, 5, 960), "rows": 8, "words": 115, "steps": (1, 4),
               "train": {"batch_size": 4, "num_anchors": 48, "block_size": 12, "max_length": 512,
                         "num_draft_layers": 5}},
    "bfloat16": {"model": SMOLLM2, "rows": 8, "words": 115, "steps": (1, 3),
                 "train": {"batch_size": 1, "num_anchors": 64, "block_size": 8, "max_length": 512,
                           "compute_dtype": "bfloat16"}},
    "lk": {"model": SMOLLM2, "rows": 8, "words": 115, "steps": (1, 3),
           "train": {"batch_size": 1, "num_anchors": 64, "block_size": 8, "max_length": 512,
                     "objective": "lk"}},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable; default: all")
    parser.add_argument("--child", nargs=3, metavar=("CASE", "FOLDER", "STEPS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case, folder, steps = options.child
        print(json.dumps(child(CASES[case], Path(folder), int(steps))))
        return
    found = {}
    for name in options.case or CASES:
        found[name] = measure(name)
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=2))


def measure(name: str) -> dict[str, Any]:
    """Estimate and measurement of one case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_target(folder / "target", *case["model"])
        make_rows(folder / "run" / "regen" / "train.jsonl", case["rows"], case["words"])
        estimate = in_process(name, folder, 0)
        short, long = (in_process(name, folder, steps) for steps in case["steps"])
        written = sum(file.stat().st_size for file in (folder / "run" / "train").rglob("*") if file.is_file())
    step = (long["cpu_s"] - short["cpu_s"]) / (case["steps"][1] - case["steps"][0])
    floor = sum(estimate["floor_s"].values())
    return {
        "memory_estimate": estimate["memory_bytes"], "memory_measured": long["peak_bytes"],
        "memory_ratio": round(estimate["memory_bytes"] / long["peak_bytes"], 3), "parts": estimate["memory"],
        "floor_s": estimate["floor_s"], "step_s": round(step, 4), "step_over_floor": round(step / floor, 3),
        "checkpoints_estimate": estimate["checkpoint_bytes"], "checkpoints_measured": written,
        "rates": estimate["rates"],
    }  # fmt: skip


def in_process(name: str, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, str(folder), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(case: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """The estimate where `steps` is 0, else one training of that many steps."""
    from dpace_cli import doctor, train
    from dpace_cli.config import Config
    from dpace_cli.records import RunFolder

    settings = {"val_rows": 0, "save_steps": 10**6, "keep_last": 1, "keep_best": False, "max_steps": max(steps, 1)}
    config = Config(
        target={"path": str(folder / "target"), "device": "cpu"},
        train={**settings, **case["train"]}, bench={"datasets": ["demo-math"]},
    )  # fmt: skip
    run = RunFolder(folder / "run")
    if steps == 0:
        found = doctor.run(config, run, [], estimate=True)
        need = found.estimate
        setup = [f"{check.name}: {check.message}" for check in found.checks if check.level == "error"]
        assert not setup, setup
        return {
            "memory": need.memory, "memory_bytes": need.memory_bytes, "floor_s": need.floor_s,
            "rates": [need.rates.head, need.rates.drafter], "checkpoint_bytes": need.disk["checkpoints"] // 2,
        }  # fmt: skip
    begun = time.process_time()
    train.run(config, run, restart=True)
    return {
        "cpu_s": time.process_time() - begun,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def make_target(folder: Path, width: int, vocabulary: int, layers: int, heads: int, key_heads: int, mlp: int) -> None:
    """A Qwen3 with random weights and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"], chat_template=template,
    )  # fmt: skip
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=width // heads,
        max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_rows(path: Path, count: int, words: int) -> None:
    """Rows of one question and an answer of random words, of three letters and a space each."""
    path.parent.mkdir(parents=True)
    draw = random.Random(0)
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            answer = " ".join("".join(draw.choices("abcdefgh", k=3)) for _ in range(words))
            turns = [{"role": "user", "content": f"Say {number}."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": str(number), "conversations": turns}) + "\n")


if __name__ == "__main__":
    main()
