"""Rows as the target sees them: token ids, and which of them are supervised.

Supervised is what the target would generate after the same prompt: the answer's tokens (reasoning and tool
calls included) and the end-of-turn token. All of it is derived from the tokenizer's own chat template: the
rendering through an answer is compared with the generation prompt of the history before it, and what kind of
template it is, is found out by rendering marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from dpace_cli.errors import RunError

Message = Mapping[str, Any]

_MARK, _OTHER_MARK = "Xq7content", "Xq7reasoning"
_OPEN_TAG = re.compile(r"<(\w+)>\s*$")
_PROBES = ("text", " text", "\ntext", "\n\n text", "  ", "\ud55c", "1")


class TemplateError(RunError):
    """The target's chat template refuses a conversation, or gives nothing that can be trained on."""


@dataclass(frozen=True)
class Encoded:
    """One training sequence.

    Attributes:
        input_ids: [L] token ids.
        loss_mask: [L] 1 where the target would have generated the token, else 0.
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
    template = _Template(tokenizer, options, tools)
    return template.ids(template.prompt(_for_template(messages)))


def rendered(
    tokenizer: Any,
    messages: Sequence[Message],
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Ids of a whole conversation as the chat template shows it.

    Raises:
        TemplateError: the chat template refuses the conversation.
    """
    template = _Template(tokenizer, options, tools)
    return template.ids(template.render(_for_template(messages)))


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
        where the template rewrites earlier turns (takes reasoning out of the history, say), so that each
        answer is trained in the context that it would have had. Empty for a row without an answer.
    Raises:
        TemplateError: the chat template refuses the conversation, or leaves nothing or everything supervised.
    """
    messages = _for_template(row["conversations"])
    template = _Template(tokenizer, options, row.get("tools") or None)
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            turns.append(template.turn(messages[: index + 1], turns[-1] if turns else None))
    return _finish(_join(turns), max_length, f"the chat template of {_name(tokenizer)}")


def encode_stored(turns: Iterable[Mapping[str, Any]], max_length: int | None = None) -> list[Encoded]:
    """As `encode_row`, from the ids that the target itself saw and generated.

    Args:
        turns: `{"prompt_ids", "answer_ids", ...}` of each answer, in order, as regen stores them.
    """
    stored = [_Turn(list(turn["prompt_ids"]), list(turn["answer_ids"])) for turn in turns if turn["answer_ids"]]
    return _finish(_join(stored), max_length, "the stored answers")


def takes_tools(tokenizer: Any, options: Mapping[str, Any]) -> bool:
    """True where the chat template shows a tool, a call of it and what it gave back."""
    function = {
        "name": "Xq7tool",
        "description": "Xq7",
        "parameters": {"type": "object", "properties": {"Xq7key": {"type": "string"}}},
    }
    call = {"id": "Xq7callid", "type": "function", "function": {"name": "Xq7tool", "arguments": {"Xq7key": "Xq7arg"}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "Xq7tool", "tool_call_id": "Xq7callid", "content": "Xq7result"},
        {"role": "assistant", "content": "b"},
    ]
    try:
        text = _Template(tokenizer, options, [{"type": "function", "function": function}]).render(messages)
    except TemplateError:
        return False
    return all(mark in text for mark in ("Xq7tool", "Xq7arg", "Xq7result"))


# --- one answer ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Turn:
    """An answer in its context.

    Attributes:
        context: ids before the answer: the generation prompt and what the template puts behind it unasked.
        answer: ids that the target would generate.
        text: what both were made from, if their ids can be continued with those of further text.
    """

    context: list[int]
    answer: list[int]
    text: str | None = None


@dataclass(frozen=True)
class _Kind:
    """What a chat template does, found out by rendering marks.

    Attributes:
        header: what precedes an answer beyond the generation prompt, where the template knows none.
        empty_reasoning: how the template shows, behind the generation prompt, that there is no reasoning.
        end: text of the end-of-turn token, with anything that the template puts between it and the content.
        suffix: everything behind the content.
        end_id: the end-of-turn token; None: the tokenizer has none.
        special: ids of special tokens.
        splits: text behind the end-of-turn token is tokenized as if it stood alone.
    """

    header: str
    empty_reasoning: str
    end: str
    suffix: str
    end_id: int | None
    special: frozenset[int]
    splits: bool


_kinds: WeakKeyDictionary[Any, dict[str, _Kind]] = WeakKeyDictionary()


class _Template:
    """A tokenizer's chat template with its options."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any], tools: Sequence[Any] | None = None) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)
        self._tools = list(tools) if tools else None
        key = json.dumps([tokenizer.chat_template, self._options], sort_keys=True, default=str)
        known = _kinds.setdefault(tokenizer, {})
        if key not in known:
            known[key] = _Template._probe(self)
        self.kind = known[key]

    def render(self, messages: Sequence[Message], *, prompt: bool = False, tools: bool = True) -> str:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools if tools else None,
                tokenize=False,
                add_generation_prompt=prompt,
                **self._options,
            )
        except Exception as error:  # templates are programs: they raise what they like
            raise TemplateError(
                f"the chat template of {_name(self._tokenizer)} refuses a conversation: "
                f"{' '.join(str(error).split())[:200]}",
                "`dpace prep` with max_tokens set leaves such rows out",
            ) from error

    def prompt(self, messages: Sequence[Message]) -> str:
        """Text that the target sees before it answers."""
        return self.render(messages, prompt=True) + self.kind.header

    def ids(self, text: str) -> list[int]:
        return self.ids_of(text)[0]

    def ids_of(self, *texts: str) -> list[list[int]]:
        return self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    def turn(self, messages: Sequence[Message], before: _Turn | None) -> _Turn:
        """The last message as an answer to those before it; `before` is the answer before it."""
        kind = self.kind
        context, full, message = self.prompt(messages[:-1]), self.render(messages), messages[-1]
        if full.startswith(context):
            answer = full[len(context) :]
            if (
                kind.empty_reasoning
                and not message.get("reasoning_content")
                and answer.startswith(kind.empty_reasoning)
            ):
                context += kind.empty_reasoning
                answer = answer[len(kind.empty_reasoning) :]
        else:
            shown = self._shown(messages, full)
            context, answer = _as_generated(context, shown, message.get("reasoning_content"))
        whole = answer.endswith(kind.suffix)
        if whole:
            answer = answer[: len(answer) - len(kind.suffix)] + kind.end
        return self._encode(context, answer, before, whole)

    def _encode(self, context: str, answer: str, before: _Turn | None, whole: bool) -> _Turn:
        start: list[int] = []
        own = context
        if before is not None and before.text is not None and context.startswith(before.text):
            start, own = before.context + before.answer, context[len(before.text) :]
        # Behind an end-of-turn token the text is tokenized afresh, so no more than this need be done twice.
        cut = own.rfind(self.kind.end) + len(self.kind.end) if self.kind.splits and self.kind.end in own else 0
        head, tail, joined = self.ids_of(own[:cut], own[cut:], own[cut:] + answer)
        # Where the text as a whole would be cut across the border, the target still saw the context by itself; but
        # once the answer is history, it sees the whole.
        fits = joined[: len(tail)] == tail
        answer_ids = joined[len(tail) :] if fits else self.ids(answer)
        ended = self._through_end(answer_ids, whole)
        text = context + answer if self.kind.splits and fits and ended == answer_ids else None
        return _Turn(start + head + tail, ended, text)

    def _through_end(self, ids: list[int], whole: bool) -> list[int]:
        """`ids` through the first end-of-turn token: there the target stops, whatever the text goes on with."""
        end = self.kind.end_id
        if whole and end is not None:
            return ids[: ids.index(end) + 1] if end in ids else [*ids, end]
        last = next((i for i in reversed(range(len(ids))) if ids[i] in self.kind.special), None)
        if last is not None and not self._tokenizer.decode(ids[last + 1 :]).strip():
            return ids[: last + 1]  # this answer ends otherwise than the template's others
        return ids if end is None else [*ids, end]

    def _shown(self, messages: Sequence[Message], full: str) -> str:
        """The last message as the template shows it, without its header."""
        message = messages[-1]
        marked = {key: value for key, value in message.items() if key not in ("reasoning_content", "tool_calls")}
        text = self.render([*messages[:-1], {**marked, "content": _MARK}])
        start = text.rfind(_MARK)
        return full[start:] if start >= 0 and full[:start] == text[:start] else message["content"] + self.kind.suffix

    def _probe(self) -> _Kind:
        question = {"role": "user", "content": "a"}
        plain = self.render([question], tools=False)
        prompt = self.render([question], prompt=True, tools=False)
        full = self.render([question, {"role": "assistant", "content": _MARK}], tools=False)
        before, mark, suffix = full.rpartition(_MARK)
        if not mark:
            raise TemplateError(f"the chat template of {_name(self._tokenizer)} does not show the assistant's answers")
        lead = before[len(prompt) :] if before.startswith(prompt) else ""
        header = lead if prompt == plain and lead.strip() else ""
        thought = {"role": "assistant", "content": _MARK, "reasoning_content": _OTHER_MARK}
        shows = _OTHER_MARK in self.render([question, thought], tools=False)[len(prompt) :]
        special = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        special |= {self._tokenizer.eos_token_id} - {None}
        ids = self.ids(suffix)
        place = next((i for i, token in enumerate(ids) if token in special), None)
        if place is not None:
            end_id, end = ids[place], suffix[: _text_length(self, suffix, ids[: place + 1])]
        else:
            end_id, end = self._tokenizer.eos_token_id, ""  # no end is shown: the target's own one is
        splits = bool(end) and all(
            self.ids(before + _MARK + end + text) == self.ids(before + _MARK + end) + self.ids(text) for text in _PROBES
        )
        return _Kind(header, lead if shows and not header else "", end, suffix, end_id, frozenset(special), splits)


def _text_length(template: _Template, text: str, ids: list[int]) -> int:
    """Length of the shortest start of `text` that has these ids."""
    return next((n for n in range(1, len(text) + 1) if template.ids(text[:n]) == ids), len(text))


def _as_generated(context: str, shown: str, reasoning: str | None) -> tuple[str, str]:
    """Context and answer where the template shows the answer otherwise than it was generated.

    The generation prompt may have opened a block of reasoning that the template takes out again: the target
    fills and closes it before it answers. An answer that came without reasoning gets an empty block, which is
    context.
    """
    opened = _OPEN_TAG.search(context)
    if opened is None:
        return context, shown
    close = f"\n</{opened[1]}>\n\n"
    return (context, reasoning + close + shown) if reasoning else (context + close.removeprefix("\n"), shown)


# --- rows ------------------------------------------------------------------------------------------------


def _join(turns: Iterable[_Turn]) -> list[Encoded]:
    """Sequences of the turns, one continuing the other where its context holds the other unchanged."""
    sequences: list[Encoded] = []
    for turn in turns:
        mask = [0] * len(turn.context)
        if sequences and turn.context[: len(sequences[-1].input_ids)] == sequences[-1].input_ids:
            earlier = sequences.pop()
            mask[: len(earlier.loss_mask)] = earlier.loss_mask
        sequences.append(Encoded(turn.context + turn.answer, mask + [1] * len(turn.answer)))
    return sequences


def _finish(sequences: list[Encoded], max_length: int | None, source: str) -> list[Encoded]:
    """Check and cut the sequences."""
    finished = []
    for sequence in sequences:
        supervised = sum(sequence.loss_mask)
        if not 0 < supervised < len(sequence.loss_mask):
            raise TemplateError(
                f"{supervised} of {len(sequence.loss_mask)} tokens are supervised with {source}",
                "a prompt has to stand before an answer; `dpace prep preview` shows a row",
            )
        cut = Encoded(sequence.input_ids[:max_length], sequence.loss_mask[:max_length])
        if any(cut.loss_mask):
            finished.append(cut)
    return finished


def _for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages without empty fields, and with the arguments of tool calls as objects, as templates expect."""
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in plain:
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return plain


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except ValueError:
        return call


def _name(tokenizer: Any) -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
