"""Each data source's field mapping, and the named rules that make its rows conversations.

To add a source, write one function from a parsed row to a Draft and give it a line in `ADAPTERS`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

REPAIRS = {
    "made_id": "a row without an id gets one from its content",
    "joined_text_parts": "content in parts ({type: text, text}) becomes one string",
    "stringified_content": "a number as content becomes text",
    "trimmed_whitespace": "white space around a turn is cut off",
    "dropped_empty_turn": "a turn without content and tool calls is left out",
    "dropped_leading_assistant": "turns of the assistant before the first user turn are left out",
    "merged_turns": "two turns of one role in a row become one",
    "model_role": "a role that is a model's name becomes assistant",
    "tool_turns": "function_call becomes the assistant's tool_calls, observation and function become tool",
    "replaced_surrogates": "halves of characters, which UTF-8 cannot express, become U+FFFD",
    "renamed_duplicate_id": "a repeated id gets a number behind it",
}

REJECTIONS = {
    "invalid_json": "the row is not JSON",
    "too_deep": "the row is nested too deeply to parse",
    "row_too_large": "the row is longer than 32 MiB",
    "not_an_object": "the row is no JSON object",
    "no_conversation": "the field that holds the turns is missing, or is no list",
    "bad_turn": "a turn is no object with a role",
    "bad_content": "a turn's content is neither text nor parts of text",
    "bad_tools": "tools or tool_calls are not lists of objects",
    "unknown_role": "a role that is no user, assistant, system or tool",
    "empty_conversation": "nothing is left of the conversation",
    "no_user_turn": "there is no user turn",
    "misplaced_system": "a system turn behind the first turn",
    "not_alternating": "two turns of one role in a row, with merged_turns turned off",
    "starts_with_assistant": "the first turn is the assistant's, with dropped_leading_assistant turned off",
    "empty_turn": "a turn without content, with dropped_empty_turn turned off",
    "tools_not_supported": "tool turns, which the target's chat template does not show",
    "refused_by_template": "the target's chat template refuses the conversation",
    "too_long": "more than prep.max_tokens tokens",
    "prompt_too_long": "more than prep.max_prompt_tokens tokens before the last answer",
    "duplicate_prompt": "the prompts are those of an earlier row",
    "near_duplicate_prompt": "the prompts are nearly those of an earlier row",
    "contaminated": "a prompt is in a benchmark data set",
    "over_max_rows": "not among the prep.max_rows rows that the hash of the id chose; not written to the rejects",
}

ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_call": "function_call",
}  # fmt: skip
MODEL_NAMES = {"chatgpt", "bing", "bard", "bot", "claude", "gemini", "llama", "gpt-4", "gpt4", "gpt-3.5", "palm"}


class Rejected(Exception):
    """A row cannot be used; `args[0]` is a key of REJECTIONS."""


@dataclass(slots=True)
class Draft:
    """A row of a source in the common form, its turns not yet looked at."""

    id: Any
    turns: Any
    tools: Any = None


@dataclass(slots=True)
class Row:
    """A conversation that can be used."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    repairs: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """SpecForge's row format: id, conversations and, where there are any, tools; nothing else."""
        row: dict[str, Any] = {"id": self.id, "conversations": self.messages}
        if self.tools:
            row["tools"] = self.tools
        return row


def _conversations(row: Mapping[str, Any]) -> Draft:
    """ShareGPT and SpecForge: `conversations` or `messages`, turns with from/value or role/content."""
    turns = row.get("conversations")
    if turns is None:
        turns = row.get("messages")
    return Draft(row.get("id"), turns, row.get("tools"))


def _alpaca(row: Mapping[str, Any]) -> Draft:
    """Alpaca: `instruction`, an optional `input`, `output`."""
    if "instruction" not in row:
        return Draft(row.get("id"), None)
    prompt = row["instruction"]
    if row.get("input"):
        prompt = f"{prompt}\n\n{row['input']}"
    return Draft(
        row.get("id"),
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": row.get("output")}],
    )


ADAPTERS: dict[str, Callable[[Mapping[str, Any]], Draft]] = {
    "sharegpt": _conversations,
    "jsonl": _conversations,
    "zlab": _conversations,
    "ultrachat": _conversations,
    "perfectblend": _conversations,
    "alpaca": _alpaca,
}


class Cleaner:
    """Turns drafts into rows by the named rules."""

    def __init__(self, source: str, disabled: Container[str] = ()) -> None:
        self.adapt = ADAPTERS[source]
        self.disabled = disabled
        self.model_roles: Counter[str] = Counter()

    def row(self, value: Any) -> Row:
        """Make a row of a parsed one.

        Raises:
            Rejected: it cannot be repaired by the rules that are on.
        """
        if not isinstance(value, dict):
            raise Rejected("not_an_object")
        draft = self.adapt(value)
        if not isinstance(draft.turns, list):
            raise Rejected("no_conversation")
        repairs: list[str] = []
        messages: list[dict[str, Any]] = []
        for turn in draft.turns:
            message = self._message(turn, repairs)
            if message is None:
                continue
            role = message["role"]
            if role == "assistant" and (not messages or messages[-1]["role"] == "system"):
                self._repair("dropped_leading_assistant", "starts_with_assistant", repairs)
                continue
            if role == "system" and messages and messages[-1]["role"] != "system":
                raise Rejected("misplaced_system")
            if messages and messages[-1]["role"] == role and role != "tool":
                self._repair("merged_turns", "not_alternating", repairs)
                _merge(messages[-1], message)
                continue
            messages.append(message)
        if not messages:
            raise Rejected("empty_conversation")
        if not any(message["role"] == "user" for message in messages):
            raise Rejected("no_user_turn")
        tools = _tools(draft.tools)
        key = draft.id
        if isinstance(key, int) and not isinstance(key, bool):
            key = str(key)
        if not isinstance(key, str) or not key:
            key = ""
        return Row(key, messages, tools, repairs)

    def _message(self, turn: Any, repairs: list[str]) -> dict[str, Any] | None:
        if not isinstance(turn, dict):
            raise Rejected("bad_turn")
        name = turn.get("from")
        if name is None:
            name = turn.get("role")
        if not isinstance(name, str):
            raise Rejected("bad_turn")
        role = ROLES.get(name)
        if role is None:
            role = self._other_role(name, repairs)
        content = turn.get("value")
        if content is None:
            content = turn.get("content")
        if role == "function_call":
            return self._call(content, repairs)
        if role == "tool" and name != "tool":
            self._repair("tool_turns", "unknown_role", repairs)
        if not isinstance(content, str):
            content = self._text(content, repairs)
        trimmed = content.strip()
        if len(trimmed) != len(content) and "trimmed_whitespace" not in self.disabled:
            repairs.append("trimmed_whitespace")
            content = trimmed
        message = {"role": role, "content": content}
        for extra in ("reasoning_content", "tool_calls"):
            if turn.get(extra):
                message[extra] = turn[extra]
        if len(message) > 2:
            _check_extras(message)
        elif not trimmed and role != "tool":
            self._repair("dropped_empty_turn", "empty_turn", repairs)
            return None
        return message

    def _other_role(self, name: str, repairs: list[str]) -> str:
        known = ROLES.get(name.strip().lower())
        if known is not None:
            return known
        if name.strip().lower() in MODEL_NAMES:
            self._repair("model_role", "unknown_role", repairs)
            self.model_roles[name] += 1
            return "assistant"
        raise Rejected("unknown_role")

    def _text(self, content: Any, repairs: list[str]) -> str:
        if content is None:
            return ""
        if isinstance(content, int | float) and not isinstance(content, bool):
            self._repair("stringified_content", "bad_content", repairs)
            return str(content)
        if isinstance(content, dict):
            content = [content]
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            if all(isinstance(text, str) for text in texts):
                self._repair("joined_text_parts", "bad_content", repairs)
                return "".join(texts)
        raise Rejected("bad_content")

    def _call(self, content: Any, repairs: list[str]) -> dict[str, Any]:
        self._repair("tool_turns", "unknown_role", repairs)
        if isinstance(content, str):
            try:
                content = json.loads(content)
            except (ValueError, RecursionError):
                raise Rejected("bad_tools") from None
        calls = content if isinstance(content, list) else [content]
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            raise Rejected("bad_tools")
        functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function} for function in functions],
        }

    def _repair(self, rule: str, otherwise: str, repairs: list[str]) -> None:
        if rule in self.disabled:
            raise Rejected(otherwise)
        repairs.append(rule)


def _merge(first: dict[str, Any], second: Mapping[str, Any]) -> None:
    """Put the second of two turns of one role behind the first."""
    for key in ("content", "reasoning_content"):
        if second.get(key):
            first[key] = f"{first[key]}\n\n{second[key]}" if first.get(key) else second[key]
    if second.get("tool_calls"):
        first["tool_calls"] = [*first.get("tool_calls", []), *second["tool_calls"]]


def _check_extras(message: dict[str, Any]) -> None:
    if not isinstance(message.get("reasoning_content", ""), str):
        raise Rejected("bad_content")
    calls = message.get("tool_calls", [])
    if isinstance(calls, str):
        try:
            calls = message["tool_calls"] = json.loads(calls)
        except (ValueError, RecursionError):
            raise Rejected("bad_tools") from None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Rejected("bad_tools")


def _tools(tools: Any) -> list[Any] | None:
    if not tools:
        return None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise Rejected("bad_tools") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("bad_tools")
    return tools
