"""Small models and data made here, so that no test needs a hub or a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests run side by side, one a core
os.environ.setdefault("HF_HUB_OFFLINE", "1")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _no_run_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("DPACE_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of four layers and width 32 with a byte-level tokenizer and a ChatML template."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))


def make_tiny_target(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write a random Qwen3 as a model folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
        chat_template=CHATML,
    )
    torch.manual_seed(seed)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None, "initializer_range": 0.2,
    }  # fmt: skip
    model = Qwen3ForCausalLM(Qwen3Config(**{**settings, **changes}))
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answered_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short conversations of very unequal length, as `dpace regen` leaves them."""
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    write_rows(path, 40)
    return path


def write_rows(path: Path, count: int) -> None:
    """Rows whose answers are predictable enough for a drafter to learn something."""
    with open(path, "w", encoding="utf-8") as file:
        for number in range(count):
            answer = f"The answer to number {number} is {number}. " * (1 + number % 4)
            conversation = [{"role": "user", "content": f"What is {number}?"}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"row-{number}", "conversations": conversation}) + "\n")
