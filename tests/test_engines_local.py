"""The local engine: what it generates is what Transformers' own generation gives, however rows are batched."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from conftest import make_tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dpace_cli.config import Config
from dpace_cli.engines.base import Completion, Request, split_reasoning, split_tool_calls
from dpace_cli.engines.local import LocalEngine, draw, penalised
from dpace_cli.modeling import cpu


def engine(target: Path, **regen: object) -> LocalEngine:
    return LocalEngine(Config.model_validate({"target": {"path": str(target)}, "regen": regen}))


def requests(count: int, seed: int = 0) -> list[Request]:
    """Prompts of very unequal length."""
    draws = random.Random(seed)
    texts = ["".join(draws.choice("abcdef ghij") for _ in range(draws.randrange(1, 60))) for _ in range(count)]
    return [Request(f"r{i}", [{"role": "user", "content": text}], None, 100 + i) for i, text in enumerate(texts)]


def answers(completions: list[Completion]) -> dict[str, list[int] | None]:
    assert len({c.id for c in completions}) == len(completions)
    return {c.id: c.answer_ids for c in completions}


@pytest.fixture(scope="module")
def plain(tiny_target: Path):
    """The target as Transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


def generated_alone(model, target: Path, request: Request, **options: object) -> list[int]:
    """Transformers' own generation for one prompt, in a batch of one."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tokenizer.apply_chat_template(
        request.messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    return model.generate(prompt, do_sample=False, **options)[0, prompt.shape[1] :].tolist()


def test_greedy_answers_are_those_of_generate_for_each_prompt_alone(tiny_target: Path, plain) -> None:
    asked = requests(5)
    alone = {r.id: generated_alone(plain, tiny_target, r, max_new_tokens=70) for r in asked}
    for batch_size in (1, 2, 8):
        local = engine(tiny_target, max_new_tokens=70, batch_size=batch_size)
        assert answers(list(local.complete(asked))) == alone


def test_the_repetition_penalty_is_that_of_generate(tiny_target: Path, plain) -> None:
    asked = requests(4, seed=1)
    made = answers(list(engine(tiny_target, max_new_tokens=30, repetition_penalty=1.3).complete(asked)))
    for request in asked:
        alone = generated_alone(plain, tiny_target, request, max_new_tokens=30, repetition_penalty=1.3)
        assert made[request.id] == alone


def test_a_sampled_answer_depends_on_the_rows_seed_and_on_nothing_else(tiny_target: Path) -> None:
    asked = requests(12)
    one = engine(tiny_target, max_new_tokens=24, temperature=1.0, top_p=0.95, batch_size=12)
    expected = answers(list(one.complete(asked)))
    shuffled = asked.copy()
    random.Random(5).shuffle(shuffled)
    other = engine(tiny_target, max_new_tokens=24, temperature=1.0, top_p=0.95, batch_size=5)
    assert answers(list(other.complete(shuffled))) == expected
    reseeded = [Request(r.id, r.messages, None, r.seed + 1) for r in asked]
    assert answers(list(other.complete(reseeded))) != expected


def test_a_completion_holds_prompt_answer_and_why_it_ended(tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    seen = set()
    for completion in engine(tiny_target, max_new_tokens=60, temperature=1.5).complete(requests(24)):
        prompt, ids = completion.prompt_ids, completion.answer_ids
        assert tokenizer.decode(prompt).endswith("<|im_start|>assistant\n")
        assert completion.tokens == len(ids) <= 60
        assert (ids[-1] == tokenizer.eos_token_id) == (completion.finish_reason == "stop")
        assert tokenizer.eos_token_id not in ids[:-1]
        assert completion.text == tokenizer.decode(ids, skip_special_tokens=True)
        seen.add(completion.finish_reason)
    assert seen == {"stop", "length"}


def test_a_prompt_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path, max_position_embeddings=64)
    asked = [Request(f"{n}", [{"role": "user", "content": "x" * n}]) for n in (100, 5, 20)]
    done = {c.id: c for c in engine(target, max_new_tokens=40).complete(asked)}
    assert done["100"].permanent
    assert "64" in done["100"].error
    assert done["5"].error is done["20"].error is None
    for completion in (done["5"], done["20"]):  # no answer leaves the positions that the target knows
        assert len(completion.prompt_ids) + completion.tokens <= 64


def test_reading_stops_at_none_and_goes_on_after_the_answers(tiny_target: Path) -> None:
    log: list[str] = []
    asked = requests(3)

    def source():
        yield asked[0]
        yield asked[1]
        yield None
        log.append("asked again")
        yield asked[2]

    for completion in engine(tiny_target, max_new_tokens=2).complete(source()):
        log.append(completion.id)
    assert sorted(log[:2]) == ["r0", "r1"]
    assert log[2:] == ["asked again", "r2"]


# --- the parts -------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.3, 2.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_draws_follow_the_distribution_of_transformers_samplers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(seed)) * 3
    samplers = [TemperatureLogitsWarper(temperature)]
    samplers += [TopKLogitsWarper(top_k)] if top_k else []
    samplers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = LogitsProcessorList(samplers)(torch.zeros(1, 1, dtype=torch.long), logits).softmax(-1)[0]
    uniform = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    drawn = draw(logits.expand(4000, -1), uniform, temperature, top_k, top_p)
    shares = torch.bincount(drawn, minlength=12) / 4000
    torch.testing.assert_close(shares, expected, atol=6e-4, rtol=0)


def test_a_draw_never_gives_a_token_without_probability() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]]).expand(3, -1)
    edges = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert draw(logits, edges, 1.0, 0, 1.0).tolist() == [1, 2, 2]


def test_penalised_logits_are_those_of_transformers() -> None:
    logits = torch.randn(2, 9)
    ids = torch.tensor([[1, 3, 3], [0, 8, 2]])
    seen = torch.zeros(2, 9, dtype=torch.bool).scatter(1, ids, True)
    torch.testing.assert_close(penalised(logits, seen, 1.7), RepetitionPenaltyLogitsProcessor(1.7)(ids, logits))


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_grouped_attention_is_attention_with_repeated_heads(key_heads: int) -> None:
    query = torch.randn(3, 6, 1, 8)
    room = torch.randn(2, 3, key_heads, 20, 8)
    key, value = room[0, ..., :11, :], room[1, ..., :11, :]  # views into a larger buffer, as the cache gives them
    mask = torch.rand(3, 1, 1, 11) > 0.3
    mask[..., -1] = True
    mine, _ = cpu.grouped_attention(torch.nn.Module(), query, key, value, mask)
    repeated = [states.repeat_interleave(6 // key_heads, dim=1) for states in (key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=mask)
    torch.testing.assert_close(mine, expected.transpose(1, 2))


def test_a_cache_with_room_holds_what_transformers_own_holds() -> None:
    mine, theirs = cpu.make_cache(_llama_config()), DynamicCache(config=_llama_config())
    draws = torch.Generator().manual_seed(0)
    for step in [5, *[1] * 150]:
        rows = 4 if mine.get_seq_length() <= 40 else 2
        states = torch.randn(2, rows, 2, step, 8, generator=draws)
        for cache in (mine, theirs):
            cache.update(states[0], states[1], 0)
        if mine.get_seq_length() == 41:
            for cache in (mine, theirs):
                cache.batch_select_indices(torch.tensor([0, 2]))
        assert torch.equal(mine.layers[0].keys, theirs.layers[0].keys)
        assert torch.equal(mine.layers[0].values, theirs.layers[0].values)


@pytest.mark.parametrize(
    ("text", "opened", "content", "reasoning"),
    [
        ("plain", False, "plain", None),
        ("<think>\nwhy\n</think>\n\nanswer", False, "answer", "why"),
        ("why\n</think>\n\nanswer", True, "answer", "why"),
        ("<think>\n\n</think>\n\nanswer", False, "answer", None),
        ("<think>\nnever finished", False, "", "never finished"),
        ("never finished", True, "", "never finished"),
        ("a < b <think> c", False, "a < b <think> c", None),
    ],
)
def test_reasoning_is_told_from_the_answer(text: str, opened: bool, content: str, reasoning: str | None) -> None:
    assert split_reasoning(text, opened) == (content, reasoning)


def test_tool_calls_are_told_from_the_answer() -> None:
    text = 'I look.\n<tool_call>\n{"name": "find", "arguments": {"city": "Bonn", "n": {"k": 1}}}\n</tool_call>'
    content, calls = split_tool_calls(text)
    assert content == "I look."
    assert calls == [{"type": "function", "function": {"name": "find", "arguments": {"city": "Bonn", "n": {"k": 1}}}}]
    for broken in ("<tool_call>\n{not json}\n</tool_call>", '<tool_call>{"name": "x"}</tool_call>', "none"):
        assert split_tool_calls(broken) == (broken, None)


@pytest.mark.parametrize("thinking", [True, False, None])
def test_the_template_opens_the_reasoning_where_thinking_is_on(tmp_path: Path, thinking: bool | None) -> None:
    target = make_tiny_target(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is not defined or enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
    )
    tokenizer.save_pretrained(target)
    options = {"target": {"path": str(target), "enable_thinking": thinking}, "regen": {"max_new_tokens": 6}}
    completion = next(LocalEngine(Config.model_validate(options)).complete(requests(1)))
    prompt = tokenizer.decode(completion.prompt_ids)
    said = tokenizer.decode(completion.answer_ids, skip_special_tokens=True)
    if thinking is False:
        assert prompt.endswith("assistant\n")
        assert (completion.text, completion.reasoning) == (said, None)
    else:  # nothing closed the reasoning, so that all of it is reasoning
        assert prompt.endswith("assistant\n<think>\n")
        assert (completion.text, completion.reasoning) == ("", said.strip("\n") or None)


def test_marks_of_reasoning_are_found_where_they_are_special_tokens(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path)
    local = engine(target, max_new_tokens=4)
    local.target.tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|im_start|>"]})
    tokenizer = local.target.tokenizer
    ids = tokenizer("<think>\nso\n</think>\n\nyes<|im_start|>", add_special_tokens=False)["input_ids"]
    row = type("Row", (), {"request": requests(1)[0], "prompt_ids": [1], "answer_ids": ids})()
    completion = local._completion(row)
    assert (completion.text, completion.reasoning) == ("yes", "so")


def _llama_config():
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
def test_speeding_up_a_model_changes_no_output_but_for_rounding(dtype: torch.dtype, tolerance: float) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    settings_ = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}  # fmt: skip
    model = Qwen2ForCausalLM(Qwen2Config(**settings_)).to(dtype).eval()  # its query, key and value layers have a bias
    ids = torch.randint(0, 100, (3, 9))
    with torch.inference_mode():
        before = model(ids).logits
        cpu.speed_up(model)
        cache = cpu.make_cache(model.config)
        steps = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(9)]
    torch.testing.assert_close(torch.cat(steps, 1), before, atol=tolerance, rtol=tolerance)
