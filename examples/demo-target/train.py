"""Train the demo target of dpace from nothing: a byte-level BPE tokenizer and a small Qwen3 model.

    python examples/demo-target/train.py --output /tmp/demo-target

Everything follows from the seed (on one machine, with one version of PyTorch). Nothing is downloaded and
nothing is written outside the output folder.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dpace_cli.demo.prompts import KINDS, Sample, check, samples

PAD, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
VOCABULARY = 768

# Trim nothing and inject nothing: the text of a turn is exactly what the caller gave.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful assistant. Answer briefly.",
    "Answer the question of the user.",
    "You help with math, code and stories.",
)
SYSTEM_SHARE = 0.1
MULTI_TURN_SHARE = 0.1
# Sums take the model longest to learn, so it sees more of them.
KIND_WEIGHTS = {"math": 3, "code": 1, "story": 1}

IGNORED = -100  # the label that cross_entropy leaves out


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the texts the model will see."""
    tokenizer = Tokenizer(models.BPE())
    # Single digits: a number is then copied and computed digit by digit, whatever stands around it.
    digits = pre_tokenizers.Split(Regex(r"[0-9]"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, TURN_START, TURN_END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for sample in samples(None, 12_000, seed, "train") for text in (sample.prompt, sample.answer))
    roles = ["system\n", "user\n", "assistant\n"] * 2_000
    tokenizer.train_from_iterator([*texts, *roles, *SYSTEM_PROMPTS * 50], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START, MASK],
        mask_token=MASK,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save the tokenizer under the names that versions 4 and 5 of transformers both read."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("backend", "is_local", "local_files_only"):  # how it was loaded here is nobody's concern
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "extra_special_tokens" in config:
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Make the untrained model."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_theta=10_000.0,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def conversations(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield training conversations without end: mostly one turn, some with two or with a system prompt."""
    rng = random.Random(f"conversations/{seed}")
    streams = {kind: samples(kind, 10**9, seed, "train") for kind in KINDS}
    while True:
        turns = 2 if rng.random() < MULTI_TURN_SHARE else 1
        kinds = rng.choices(KINDS, [KIND_WEIGHTS[kind] for kind in KINDS], k=turns)
        messages = []
        if rng.random() < SYSTEM_SHARE:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for kind in kinds:
            sample = next(streams[kind])
            messages.append({"role": "user", "content": sample.prompt})
            messages.append({"role": "assistant", "content": sample.answer})
        yield messages


def encode(messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the tokens of a conversation, and its labels: the answers and the ends of their turns."""
    tokens: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"{TURN_START}{message['role']}\n")
        body = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
        tail = tokenizer.encode("\n")
        learn = message["role"] == "assistant"
        tokens += head + body + tail
        labels += [IGNORED] * len(head) + (body if learn else [IGNORED] * len(body)) + [IGNORED] * len(tail)
    return tokens, labels


def batches(seed: int, size: int, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of tokens and labels, each of conversations of about the same length."""
    rng = random.Random(f"batches/{seed}")
    stream = conversations(seed)
    while True:
        # Sorting a pool by length saves most of the padding; shuffling its batches keeps the steps mixed.
        pool = sorted((encode(next(stream), tokenizer) for _ in range(size * 16)), key=lambda row: len(row[0]))
        groups = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(groups)
        for rows in groups:
            width = -(-max(len(tokens) for tokens, _ in rows) // 16) * 16
            tokens = torch.full((size, width), tokenizer.pad_token_id)
            labels = torch.full((size, width), IGNORED)
            for index, (row_tokens, row_labels) in enumerate(rows):
                tokens[index, : len(row_tokens)] = torch.tensor(row_tokens)
                labels[index, : len(row_labels)] = torch.tensor(row_labels)
            yield tokens, labels


def make_optimizers(model: Qwen3ForCausalLM, muon_rate: float, adam_rate: float) -> list[torch.optim.Optimizer]:
    """Use Muon for the matrices inside the layers, where it needs fewer steps, and AdamW for the rest."""
    matrices = [value for name, value in model.named_parameters() if value.ndim == 2 and "embed" not in name]
    chosen = {id(value) for value in matrices}
    others = [value for value in model.parameters() if id(value) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> float:
    """Train the model in place and return the mean loss of the last hundred steps."""
    optimizers = make_optimizers(model, options.muon_rate, options.adam_rate)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    forward = torch.compile(model.forward, dynamic=True) if options.compile else model.forward
    losses: list[float] = []
    started = time.monotonic()
    data = batches(options.seed, options.batch, tokenizer)
    for step in range(1, options.steps + 1):
        tokens, labels = next(data)
        # The rate rises over the first hundred steps (a tenth of a short run), then falls along a cosine.
        progress = step / options.steps
        scale = min(1.0, step / min(100, options.steps / 10)) * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * scale

        # Padding stands on the right and attention is causal, so no mask is needed.
        logits = forward(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        losses.append(loss.item())
        if step % 50 == 0 or step == options.steps:
            seconds = time.monotonic() - started
            recent = sum(losses[-50:]) / len(losses[-50:])
            remaining = seconds / step * (options.steps - step)
            print(
                f"step {step}/{options.steps}  loss {recent:.4f}  {step / seconds:.2f} steps/s  "
                f"{seconds:.0f} s elapsed  {remaining:.0f} s to go",
                flush=True,
            )
    return sum(losses[-100:]) / len(losses[-100:])


@torch.inference_mode()
def answer_greedily(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, asked: list[Sample], new_tokens: int = 200
) -> list[str]:
    """Answer all prompts in one batch at temperature 0."""
    chats = [[{"role": "user", "content": sample.prompt}] for sample in asked]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        tokenizer_kwargs={"padding_side": "left"},
    )  # fmt: skip
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int, seed: int) -> dict:
    """Judge greedy answers to held-out prompts of every kind."""
    report = {}
    for kind in KINDS:
        asked = list(samples(kind, count, seed, "heldout"))
        answers: list[str] = []
        for start in range(0, count, 50):
            answers += answer_greedily(model, tokenizer, asked[start : start + 50])
        verdicts = [check(sample, answer) for sample, answer in zip(asked, answers, strict=True)]
        lengths = [len(tokenizer.encode(sample.answer)) for sample in asked]
        report[kind] = {
            "prompts": count,
            "form": sum(form for form, _ in verdicts) / count,
            "substance": sum(substance for _, substance in verdicts) / count,
            "answer_tokens_mean": round(sum(lengths) / count, 1),
            "answer_tokens_range": [min(lengths), max(lengths)],
        }
    return report


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--start-from", type=Path, help="train the model in this folder further")
    parser.add_argument("--steps", type=int, default=2_200, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="conversations in a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--muon-rate", type=float, default=8e-3, help="peak rate of Muon (default: %(default)s)")
    parser.add_argument("--adam-rate", type=float, default=4e-3, help="peak rate of AdamW (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=200, help="held-out prompts per kind (default: %(default)s)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not use torch.compile")
    return parser.parse_args()


def main() -> None:
    """Train, save in bfloat16, and evaluate what was saved."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.start_from:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.start_from)
        model = Qwen3ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(options.seed)
        model = build_model(tokenizer)
    started = time.monotonic()
    loss = train(model, tokenizer, options)
    seconds = time.monotonic() - started

    options.output.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(options.output)
    save_tokenizer(tokenizer, options.output)

    # Judge the weights as they were rounded, computing in float32.
    reloaded = Qwen3ForCausalLM.from_pretrained(options.output, dtype=torch.float32).eval()
    report = {"loss": round(loss, 4), "seconds": round(seconds), "parameters": reloaded.num_parameters()}
    report |= evaluate(reloaded, tokenizer, options.heldout, options.seed + 1)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
