"""Chat templates of the public kinds, written for the tests, and a byte-level tokenizer for each.

`answer_text` says for each kind what the target generates, written by hand from the kind's rules: it is the
oracle of the token tests and shares nothing with `dpace_cli.data.tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Message = Mapping[str, Any]

CHATML_WITH_SYSTEM = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a helpful machine.<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# As SmolLM2-135M-Instruct has it (Apache-2.0).
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (m.content | trim) }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

# Reasoning is shown behind the last user turn alone, there as an empty block where there is none; the
# generation prompt holds that empty block when thinking is off.
QWEN3 = """\
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') }}
{%- else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}<tool_call>
{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}
</tool_call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# The generation prompt opens the reasoning; the history never shows any.
OPEN_THINK = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|Assistant|><think>
{% endif %}"""

# The answer is set off by a space, and there is no generation prompt: its header is the end of the user's turn.
INSTRUCT = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

# No generation prompt although answers have a header.
NO_PROMPT = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""

# The end of a turn is not shown at all.
NO_END = """\
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""


@dataclass(frozen=True)
class Kind:
    """A template, the tokens that it needs, its options, and what the target generates under it."""

    name: str
    template: str
    specials: tuple[str, ...]
    end: str
    answer_text: Callable[[Message], str]
    options: Mapping[str, Any] | None = None
    prompt: Callable[[str], str] = lambda text: text
    systems: bool = True
    tools: bool = False
    reasoning: bool = False
    bos: str | None = None
    pieces: str = "lines"


def _plain(message: Message) -> str:
    return message["content"]


def _stripped(message: Message) -> str:
    return message["content"].strip()


def _calls(message: Message) -> str:
    text = ""
    for number, call in enumerate(message.get("tool_calls", [])):
        function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        text += ("\n" if message["content"] or number else "") + f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
    return text


def _thought(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    block = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return block + message["content"] + _calls(message)


def _unthinking(message: Message) -> str:
    return message["content"] + _calls(message)


def _opened(message: Message) -> str:
    reasoning = message.get("reasoning_content")
    return (f"{reasoning}\n</think>\n\n" if reasoning else "") + message["content"]


_IM = ("<|im_start|>", "<|im_end|>")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("chatml", CHATML_WITH_SYSTEM, _IM, "<|im_end|>", _plain),
        Kind("smollm2", SMOLLM2, _IM, "<|im_end|>", _plain, pieces="words"),
        Kind("llama3", LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"), "<|eot_id|>",
             _stripped, bos="<|bos|>"),
        Kind("llama3-words", LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>"),
             "<|eot_id|>", _stripped, bos="<|bos|>", pieces="words"),
        Kind("gemma", GEMMA, ("<start_of_turn>", "<end_of_turn>", "<bos>"), "<end_of_turn>", _stripped, systems=False,
             bos="<bos>"),
        Kind("qwen3-thinking", QWEN3, _IM, "<|im_end|>", _thought, {}, tools=True, reasoning=True),
        Kind("qwen3-no-thinking", QWEN3, _IM, "<|im_end|>", _unthinking, {"enable_thinking": False}, tools=True),
        Kind("open-think", OPEN_THINK, ("<|User|>", "<|Assistant|>", "<bos>", "<eos>"), "<eos>", _opened,
             reasoning=True, bos="<bos>"),
        Kind("instruct", INSTRUCT, ("<s>", "</s>"), "</s>", lambda message: " " + message["content"], systems=False,
             bos="<s>"),
        Kind("no-prompt", NO_PROMPT, _IM, "<|im_end|>", _plain, prompt=lambda text: text + "<|im_start|>assistant\n"),
        Kind("no-end", NO_END, ("<eos>",), "<eos>", _plain),
    )
}  # fmt: skip


PIECES = {
    # As GPT-2 cuts: the last of several line ends goes by itself where a word follows, so that a header that ends in
    # two of them is tokenized otherwise once the answer stands behind it.
    "words": r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    # As Llama 3 and Qwen cut: line ends stay together.
    "lines": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few merges, so that a text cut in two is not always tokenized in two."""
    kind = KINDS[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES[kind.pieces]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    text = ["assistant\n\nuser system think hello world yes no\n\n\n the answer is number"] * 5
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=kind.end, bos_token=kind.bos, chat_template=kind.template,
        additional_special_tokens=[token for token in kind.specials if token not in (kind.end, kind.bos)],
        clean_up_tokenization_spaces=False, name_or_path=f"template {name}",
    )  # fmt: skip


def oracle(kind: Kind, row: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(ids before, ids of the answer) of each answer: the rendered generation prompt, then what is generated.

    Built from Transformers' own rendering of the history and the kind's hand-written answer.
    """
    tokenizer = tokenizer_of(kind.name)
    messages: Sequence[Message] = row["conversations"]
    expected = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        text = kind.prompt(
            tokenizer.apply_chat_template(
                list(messages[:index]), tools=row.get("tools"), tokenize=False, add_generation_prompt=True,
                **(kind.options or {}),
            )
        )  # fmt: skip
        if not message.get("reasoning_content"):
            if kind.name == "qwen3-thinking":
                text += "<think>\n\n</think>\n\n"
            elif kind.name == "open-think":
                text += "</think>\n\n"
        answer = kind.answer_text(message) + kind.end
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        joined = tokenizer(text + answer, add_special_tokens=False)["input_ids"]
        if joined[: len(before)] == before:
            expected.append((before, joined[len(before) :]))
        else:
            expected.append((before, tokenizer(answer, add_special_tokens=False)["input_ids"]))
    return expected
