"""Rows as the target sees them: token ids, and which of them are supervised.

Supervised is what the target would generate after the same prompt: the answer's tokens and the end-of-turn
token. All of it is derived from the tokenizer's own chat template: the rendering through an answer is
compared with the generation prompt of the history before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpace_cli.errors import RunError

Message = Mapping[str, Any]

_OPEN_TAG = re.compile(r"<([A-Za-z_]+)>\s*$")


class TemplateError(RunError):
    """The target's chat template refuses a conversation, or gives nothing that can be trained on."""


@dataclass(frozen=True)
class Encoded:
    """One training sequence.

    Attributes:
        input_ids: [L] token ids.
        loss_mask: [L] 1 where the target would have generated the token.
    """

    input_ids: list[int]
    loss_mask: list[int]


def generation_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Ids that the target sees before it answers `messages`.

    Raises:
        TemplateError: the chat template refuses the conversation.
    """
    return _ids(tokenizer, _render(tokenizer, messages, options, tools, prompt=True))


def encode_row(
    tokenizer: Any, row: Mapping[str, Any], options: Mapping[str, Any], max_length: int | None
) -> list[Encoded]:
    """Token ids and loss mask of a conversation.

    Args:
        tokenizer: the target's, with a chat template.
        row: `{"id", "conversations": [{"role", "content", ...}], "tools"?}`.
        options: keyword arguments of the chat template, the same in every stage.
        max_length: longer sequences are cut; one that has nothing supervised left is not returned.
    Returns:
        One sequence where each answer's context holds the earlier answers as they were generated; several
        where the template rewrites earlier turns (reasoning taken out of the history, say), so that each
        answer is trained in the context that it would have had. Empty for a row without an answer.
    Raises:
        TemplateError: the chat template refuses the conversation, or leaves nothing or everything supervised.
    """
    messages = row["conversations"]
    tools = row.get("tools") or None
    turns: list[tuple[list[int], list[int], list[int]]] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            turns.append(_turn(tokenizer, messages[: index + 1], options, tools))
    return _finish(_join(turns), max_length, _name(tokenizer))


def encode_stored(turns: Iterable[Mapping[str, Any]], max_length: int | None = None) -> list[Encoded]:
    """As `encode_row`, from the ids that the target itself saw and generated.

    Args:
        turns: `{"prompt_ids", "answer_ids", ...}` of each answer, in order, as regen stores them.
    """
    stored = [(list(turn["prompt_ids"]), [], list(turn["answer_ids"])) for turn in turns if turn["answer_ids"]]
    return _finish(_join(stored), max_length, "the stored answers")


def _turn(
    tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any], tools: Any
) -> tuple[list[int], list[int], list[int]]:
    """Ids of the last message's generation prompt, of template text before the answer, and of the answer."""
    prompt = _render(tokenizer, messages[:-1], options, tools, prompt=True)
    full = _render(tokenizer, messages, options, tools, prompt=False)
    message = messages[-1]
    prompt_ids = _ids(tokenizer, prompt)
    if full.startswith(prompt):
        rest, lead = full[len(prompt) :], ""
        position = rest.find(message["content"].strip()) if message["content"] else 0
        if position > 0 and not message.get("reasoning_content") and rest[:position].strip():
            filled = [*messages[:-1], {**message, "reasoning_content": "\u2042"}]
            if "\u2042" in _render(tokenizer, filled, options, tools, prompt=False)[len(prompt) :]:
                lead, rest = rest[:position], rest[position:]  # the empty form of the reasoning block
        joined = _ids(tokenizer, prompt + lead + rest)
        if lead:
            lead_ids = _ids(tokenizer, prompt + lead)[len(prompt_ids) :]
        else:
            lead_ids = []
        start = [*prompt_ids, *lead_ids]
        answer = joined[len(start) :] if joined[: len(start)] == start else _ids(tokenizer, rest)
        return prompt_ids, lead_ids, _through_end(tokenizer, answer)
    # The template shows this answer otherwise than it was generated: put it after its prompt by hand.
    reasoning, lead = message.get("reasoning_content") or "", ""
    text = message["content"]
    if tag := _OPEN_TAG.search(prompt):
        close = f"\n</{tag[1]}>\n\n"
        if reasoning:
            text = reasoning + close + text
        else:
            lead = close
    tail = full[full.rfind(message["content"].strip()) + len(message["content"].strip()) :]
    return prompt_ids, _ids(tokenizer, lead), _through_end(tokenizer, _ids(tokenizer, text + tail))


def _through_end(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` up to and including the end-of-turn token: what the template puts behind it is never generated."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {tokenizer.eos_token_id}
    end = len(ids)
    found = None
    while end > 0:
        if ids[end - 1] in special:
            found = end
        elif tokenizer.decode([ids[end - 1]]).strip():
            break
        end -= 1
    if found is not None:
        return ids[:found]
    return ids if tokenizer.eos_token_id is None else [*ids, tokenizer.eos_token_id]


def _join(turns: Iterable[tuple[list[int], list[int], list[int]]]) -> list[Encoded]:
    """Sequences of the turns, one continuing the other where its prompt holds the other unchanged."""
    sequences: list[Encoded] = []
    for prompt, lead, answer in turns:
        before, mask = [*prompt, *lead], [0] * (len(prompt) + len(lead))
        if sequences and before[: len(sequences[-1].input_ids)] == sequences[-1].input_ids:
            earlier = sequences.pop()
            mask[: len(earlier.loss_mask)] = earlier.loss_mask
        sequences.append(Encoded(before + answer, mask + [1] * len(answer)))
    return sequences


def _finish(sequences: list[Encoded], max_length: int | None, name: str) -> list[Encoded]:
    finished = []
    for sequence in sequences:
        supervised = sum(sequence.loss_mask)
        if not 0 < supervised < len(sequence.loss_mask):
            raise TemplateError(
                f"{supervised} of {len(sequence.loss_mask)} tokens are supervised with the chat template of {name}",
                "the template must put a prompt before an answer; `dpace prep preview` shows a row",
            )
        cut = Encoded(sequence.input_ids[:max_length], sequence.loss_mask[:max_length])
        if any(cut.loss_mask):
            finished.append(cut)
    return finished


def _render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any], tools: Any, *, prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(
            [_for_template(message) for message in messages],
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
            **options,
        )
    except Exception as error:  # templates are programs: they raise what they like
        raise TemplateError(
            f"the chat template of {_name(tokenizer)} refuses a conversation: {' '.join(str(error).split())[:200]}",
            "`dpace prep` with max_tokens set rejects such rows",
        ) from error


def _for_template(message: Message) -> dict[str, Any]:
    """A message with the arguments of its tool calls as objects, which is what templates expect."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_parsed_call(call) for call in plain["tool_calls"]]
    return plain


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
