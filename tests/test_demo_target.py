"""The packaged demo target: its prompts, its tokenizer and what the model answers."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpace_cli.demo import target_path
from dpace_cli.demo.prompts import KINDS, Sample, check, samples, split_of

ROOT = Path(__file__).resolve().parents[1]
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")


# --- prompts ------------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_hash_seed():
    program = (
        "from dpace_cli.demo.prompts import samples\n"
        "import hashlib\n"
        "text = repr([list(samples(None, 60, 7, split)) for split in ('train', 'heldout')])\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )
    digests = set()
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1


def test_the_seed_decides_the_samples():
    assert list(samples("math", 20, 1, "train")) == list(samples("math", 20, 1, "train"))
    assert list(samples("math", 20, 1, "train")) != list(samples("math", 20, 2, "train"))


def test_kinds_take_turns_and_ids_count_up():
    found = [sample.id for sample in samples(None, 4, 0, "heldout")]
    assert found == ["demo-math-000000", "demo-code-000001", "demo-story-000002", "demo-math-000003"]


def test_samples_refuse_unknown_names():
    with pytest.raises(ValueError, match="poem"):
        next(samples("poem", 1, 0, "train"))
    with pytest.raises(ValueError, match="test"):
        next(samples("math", 1, 0, "test"))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_many_and_splits_are_disjoint(kind: str):
    train = {sample.prompt for sample in samples(kind, 4_000, 0, "train")}
    heldout = {sample.prompt for sample in samples(kind, 1_000, 0, "heldout")}
    assert len(train) == 4_000
    assert len(heldout) == 1_000
    assert not train & heldout
    assert {split_of(prompt) for prompt in train} == {"train"}
    # Two seeds hardly ever meet, so the prompts there are far outnumber the prompts that were drawn.
    other = {sample.prompt for sample in samples(kind, 4_000, 1, "train")}
    assert len(train & other) < 200


# --- the judge ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_check_accepts_the_reference_answers(kind: str):
    for sample in samples(kind, 300, 5, "heldout"):
        assert check(sample, sample.answer) == (True, True), sample


@pytest.mark.parametrize("kind", KINDS)
def test_check_rejects_the_answer_to_another_prompt(kind: str):
    pairs = list(samples(kind, 200, 6, "heldout"))
    swapped = [check(one, other.answer)[1] for one, other in pairwise(pairs)]
    # Two word problems may well have the same result.
    assert sum(swapped) <= (12 if kind == "math" else 0)


def test_check_rejects_wrong_math():
    sample = Sample("", "math", "Ada has 20 nuts. Ben has 5 fewer. How many nuts do they have together?", "")
    assert check(sample, "They have 35.\nThe answer is 35.") == (True, True)
    assert check(sample, "They have 36.\nThe answer is 36.") == (True, False)
    assert check(sample, "The answer is 35") == (False, False)
    assert check(sample, "") == (False, False)


def test_check_rejects_wrong_code():
    prompt = (
        "Write a Python function `keep_big` that takes a list `rows`, keeps the items greater than 10 "
        "and returns each of them plus 2."
    )
    sample = Sample("", "code", prompt, "")

    def judge(body: str, name: str = "keep_big") -> tuple[bool, bool]:
        return check(sample, f"```python\ndef {name}(rows):\n    {body}\n```")

    assert judge("return [row + 2 for row in rows if row > 10]") == (True, True)
    assert judge("return [row + 2 for row in rows if row >= 10]") == (True, False)
    assert judge("return [row + 2 for row in rows if row > 10]", "keep_small") == (False, False)
    assert judge("return [row + 2 for row in") == (False, False)
    assert judge("return __import__('os').getcwd()") == (True, False)
    assert judge("for row in rows:\n        rows.append(row)") == (True, False)
    assert judge("while True:\n        pass") == (True, False)
    assert check(sample, "There is no code here.") == (False, False)


def test_check_rejects_wrong_stories():
    sample = next(samples("story", 1, 3, "heldout"))
    assert check(sample, sample.answer[:-1]) == (False, False)
    assert check(sample, "Once there was nothing. It was dark. Then came the end.") == (True, False)


# --- the packaged folder ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_path(), local_files_only=True)


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in target_path().iterdir()) <= 4 * 2**20


@settings(deadline=None, max_examples=150)
@given(text=st.text().filter(lambda text: not any(token in text for token in SPECIAL_TOKENS)))
def test_any_text_survives_the_tokenizer(tokenizer, text: str):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokens) == text
    assert not set(tokens) & set(tokenizer.all_special_ids)


def test_numbers_are_split_into_digits(tokenizer):
    assert tokenizer.tokenize("1207") == ["1", "2", "0", "7"]


def test_special_tokens(tokenizer):
    assert len(tokenizer) == 768
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.mask_token == "<|mask|>"
    for token in SPECIAL_TOKENS:
        assert tokenizer.encode(token, add_special_tokens=False) == [tokenizer.convert_tokens_to_ids(token)]


def test_chat_template(tokenizer):
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello\n"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hello\n<|im_end|>\n"
        "<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(turns[3:], tokenize=False) == "<|im_start|>user\nBye<|im_end|>\n"


@pytest.fixture(scope="module")
def model():
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_path(), local_files_only=True, dtype=torch.float32).eval()


def _greedy_answers(model, tokenizer, chats: list[list[dict[str, str]]]) -> list[str]:
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=160, do_sample=False)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generation_stops_at_the_end_of_a_turn(model, tokenizer):
    wanted = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert set(model.generation_config.eos_token_id) == wanted
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_to_heldout_prompts(model, tokenizer, kind: str):
    asked = list(samples(kind, 12, 2024, "heldout"))
    answers = _greedy_answers(model, tokenizer, [[{"role": "user", "content": sample.prompt}] for sample in asked])
    verdicts = [check(sample, answer) for sample, answer in zip(asked, answers, strict=True)]
    assert all(form for form, _ in verdicts), answers
    assert sum(substance for _, substance in verdicts) >= 10, answers


def test_a_second_turn_and_a_system_prompt(model, tokenizer):
    first, second = samples("story", 2, 11, "heldout")
    chat = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": first.prompt},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": second.prompt},
    ]
    [answer] = _greedy_answers(model, tokenizer, [chat])
    assert check(replace(second, answer=""), answer) == (True, True)
