"""Each data source's field mapping, and the named rules that make its rows conversations.

To add a source, write one function from a parsed row to a Draft and give it a line in `ADAPTERS`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

REPAIRS = {
    "made_id": "a row without an id gets one made from its content",
    "renamed_duplicate_id": "a repeated id gets a number behind it",
    "joined_text_parts": "content in parts ({type: text, text: ...}) becomes one string",
    "stringified_content": "a number as content becomes text",
    "trimmed_whitespace": "white space around a turn is cut off",
    "dropped_empty_turn": "a turn without content and tool calls is left out",
    "dropped_leading_assistant": "turns of the assistant before the first user turn are left out",
    "merged_turns": "two turns of one role in a row become one",
    "model_role": "a role that is a model's name becomes assistant",
    "tool_turns": "function_call becomes the assistant's tool_calls; function and observation become tool",
    "replaced_surrogates": "halves of characters, which UTF-8 cannot express, become U+FFFD",
    "replaced_bad_utf8": "bytes that are no UTF-8 become U+FFFD",
}
"""Every repair. One that is turned off leaves the row as it is where that can be used, and else rejects it."""

REJECTIONS = {
    "invalid_json": "the row is not JSON",
    "too_deep": "the row is nested too deeply to be parsed",
    "row_too_large": "the row is longer than 32 MiB",
    "not_an_object": "the row is no JSON object",
    "no_conversation": "the field that holds the turns is missing, or is no list",
    "bad_turn": "a turn is no object with a role",
    "bad_content": "a turn's content or reasoning is neither text nor parts of text",
    "bad_tools": "tools or tool calls are no list of objects, or a function_call is not JSON",
    "bad_number": "tools or tool calls hold an integer at which other readers of JSON fail",
    "empty_conversation": "there is no turn with content",
    "no_id": "there is no id, with made_id turned off",
    "duplicate_id": "an earlier row has this id, with renamed_duplicate_id turned off",
    "lone_surrogate": "a string holds half a character, with replaced_surrogates turned off",
    "bad_utf8": "the row is no UTF-8, with replaced_bad_utf8 turned off",
    "over_max_rows": "the hash of its id was not among the prep.max_rows smallest; not written to the rejects",
    "no_user_turn": "there is no user turn",
    "no_answer": "the assistant says nothing (a row of the source jsonl may be a prompt alone)",
    "unknown_role": "a role that is not of a user, an assistant, a system or a tool",
    "misplaced_system": "a system turn behind the first turn",
    "misplaced_tool": "a tool turn that does not follow a tool call",
    "not_alternating": "two turns of one role in a row, with merged_turns turned off",
    "starts_with_assistant": "the assistant speaks first, with dropped_leading_assistant turned off",
    "empty_turn": "a turn without content, with dropped_empty_turn turned off",
    "tools_not_supported": "tools, which the target's chat template does not show",
    "refused_by_template": "the target's chat template refuses the conversation",
    "too_long": "more than prep.max_tokens tokens",
    "prompt_too_long": "more than prep.max_prompt_tokens tokens up to the last user turn",
    "duplicate_prompt": "the user's turns are those of an earlier row",
    "near_duplicate_prompt": "the user's turns are nearly those of an earlier row",
    "contaminated": "a user turn holds a benchmark prompt",
}
"""Every reason to leave a row out."""

UNCONDITIONAL = frozenset(list(REJECTIONS)[: list(REJECTIONS).index("no_user_turn")])
"""Reasons that cannot be turned off: nothing would be left that could be written."""

ROLES = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "function_call",
}  # fmt: skip
_MODEL_NAME = re.compile(
    r"(chatgpt|gpt|openai|bing|bard|bot|chatbot|copilot|claude|gemini|gemma|palm|llama|alpaca|vicuna|mistral|mixtral"
    r"|qwen|deepseek|grok|ai)([-_ .]?v?\d[\w.-]*)?"
)
_NEXT = {"": "user", "system": "user", "user": "assistant", "assistant": "user"}
_SURROGATE = re.compile("[\ud800-\udfff]")


class Rejected(Exception):
    """A row cannot be used; `reason` is a key of REJECTIONS."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Draft(NamedTuple):
    """A row of a source in the common form, its turns not yet looked at."""

    id: Any
    turns: Any
    tools: Any = None


@dataclass(slots=True)
class Row:
    """A conversation that can be used.

    Attributes:
        id: empty where the source had none.
        repairs: names of the rules that changed it.
        plain: it has no other fields than every row has: no tools, tool calls or reasoning.
        prompts: the user's turns.
    """

    id: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    repairs: set[str]
    plain: bool

    def to_json(self) -> dict[str, Any]:
        """SpecForge's row format: id, conversations and, where there are any, tools; nothing else."""
        row: dict[str, Any] = {"id": self.id, "conversations": self.messages}
        if self.tools:
            row["tools"] = self.tools
        return row

    @property
    def has_tools(self) -> bool:
        """True where the target's chat template has to know tools to show this row."""
        return not self.plain and (
            bool(self.tools) or any(m["role"] == "tool" or "tool_calls" in m for m in self.messages)
        )

    @property
    def prompts(self) -> list[str]:
        """The user's turns."""
        return [message["content"] for message in self.messages if message["role"] == "user"]


# --- sources ---------------------------------------------------------------------------------------------


def conversations(row: Mapping[str, Any]) -> Draft:
    """ShareGPT, SpecForge, Open-PerfectBlend, z-lab: `conversations` or `messages`; from/value or role/content."""
    turns = row.get("conversations")
    if turns is None:
        turns = row.get("messages")
    return Draft(_id(row), turns, row.get("tools"))


def ultrachat(row: Mapping[str, Any]) -> Draft:
    """UltraChat 200k has `messages`; the original has `data`, the texts of user and assistant in turn."""
    texts = row.get("data")
    if not isinstance(texts, list):
        return conversations(row)
    roles = ("user", "assistant")
    return Draft(_id(row), [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)])


def alpaca(row: Mapping[str, Any]) -> Draft:
    """Alpaca: `instruction`, an optional `input`, `output`."""
    if row.get("instruction") is None:
        return Draft(_id(row), None)
    prompt = row["instruction"]
    if row.get("input") and isinstance(prompt, str) and isinstance(row["input"], str):
        prompt = f"{prompt}\n\n{row['input']}"
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": row.get("output")}]
    return Draft(_id(row), turns)


def jsonl(row: Mapping[str, Any]) -> Draft:
    """`conversations` or `messages`; also a line of a rejects file, whose `row` has been mended."""
    if "reason" not in row or "row" not in row:
        return conversations(row)
    inner = row["row"]
    if isinstance(inner, str):
        try:
            inner = json.loads(inner)
        except (ValueError, RecursionError):
            raise Rejected("invalid_json") from None
    if not isinstance(inner, dict):
        raise Rejected("not_an_object")
    layout = row.get("source")
    adapt = ADAPTERS.get(layout, conversations) if isinstance(layout, str) else conversations
    return conversations(inner) if adapt is jsonl else adapt(inner)


ADAPTERS: dict[str, Callable[[Mapping[str, Any]], Draft]] = {
    "sharegpt": conversations,
    "zlab": conversations,
    "ultrachat": ultrachat,
    "perfectblend": conversations,
    "alpaca": alpaca,
    "jsonl": jsonl,
    "demo": conversations,
}

HUB_IDS = {
    "sharegpt": ("Aeala/ShareGPT_Vicuna_unfiltered", "train"),
    "zlab": ("z-lab/qwen3-4b-instruct-100k", "train"),
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", "train_sft"),
    "perfectblend": ("mlabonne/open-perfectblend", "train"),
    "alpaca": ("tatsu-lab/alpaca", "train"),
}
"""Hub data set and split of a source, for a command that names no input."""


def _id(row: Mapping[str, Any]) -> Any:
    for key in ("id", "prompt_id", "conversation_id", "uuid"):
        found = row.get(key)
        if found is not None:
            return found
    return None


# --- rules -----------------------------------------------------------------------------------------------


class Cleaner:
    """Makes rows of parsed values by the named rules.

    Attributes:
        model_roles: each role that was taken for the assistant's because it is a model's name, and how often.
        saw_numbers: the last row holds values other than text, which orjson may have rounded.
    """

    def __init__(self, source: str, disabled: Collection[str] = ()) -> None:
        self.adapt = ADAPTERS[source]
        self.disabled = frozenset(disabled)
        self.model_roles: Counter[str] = Counter()
        self.saw_numbers = False
        self._trim = "trimmed_whitespace" not in self.disabled
        # SpecForge's loader passes over rows without an answer; prompts to be answered by regen come as jsonl.
        self._needs_answer = source != "jsonl" and "no_answer" not in self.disabled

    def row(self, value: Any) -> Row:
        """The row that a parsed value holds.

        Raises:
            Rejected: the rules that are on cannot make it usable.
        """
        self.saw_numbers = False
        if not isinstance(value, dict):
            raise Rejected("not_an_object")
        key, turns, tools = self.adapt(value)
        if not isinstance(turns, list):
            raise Rejected("no_conversation")
        repairs: set[str] = set()
        messages: list[dict[str, Any]] = []
        last, began_late, plain = "", False, True
        for turn in turns:
            try:
                role, content = ROLES[turn["from"]], turn["value"]
            except (KeyError, TypeError):
                role, content = self._fields(turn, repairs)
            if (
                role == _NEXT.get(last) and content.__class__ is str and content and content.strip() is content
                and len(turn) == 2
            ):  # fmt: skip
                messages.append({"role": role, "content": content})  # most turns need nothing done
                last = role
                continue
            if role == "function_call":
                role, content, turn = "assistant", "", self._call(content, repairs)
            elif content.__class__ is not str:
                content = self._text(content, repairs)
            trimmed = content.strip()
            if trimmed is not content and self._trim:
                repairs.add("trimmed_whitespace")
                content = trimmed
            message = {"role": role, "content": content}
            extras = len(turn) > 2 and self._extras(turn, message)
            plain = plain and not extras and role != "tool"
            if (
                not trimmed and not extras and role != "tool"
                and self._repair("dropped_empty_turn", "empty_turn", repairs)
            ):  # fmt: skip
                continue
            if role == "tool":
                self._tool_turn(turn, messages, repairs)
            elif role == "system" and messages and last != "system":
                self._reject("misplaced_system")
            elif (
                role == "assistant" and last in ("", "system") and all(m["role"] == "system" for m in messages)
                and self._repair("dropped_leading_assistant", "starts_with_assistant", repairs)
            ):  # fmt: skip
                began_late = True
                continue
            elif role == last and self._repair("merged_turns", "not_alternating", repairs):
                _merge(messages[-1], message)
                continue
            messages.append(message)
            last = role
        if not messages and not began_late:
            raise Rejected("empty_conversation")
        if (not messages or messages[0]["role"] != "user") and not any(m["role"] == "user" for m in messages):
            self._reject("no_user_turn")
            if not messages:
                raise Rejected("empty_conversation")
        if self._needs_answer and last != "assistant" and not any(m["role"] == "assistant" for m in messages):
            raise Rejected("no_answer")
        if tools:
            self.saw_numbers = True
            tools = _objects(tools)
        return Row(
            key if key.__class__ is str else self._key(key), messages, tools or None, repairs, plain and not tools
        )

    def _fields(self, turn: Any, repairs: set[str]) -> tuple[str, Any]:
        """Role and content of a turn in any of the known forms."""
        if not isinstance(turn, dict):
            raise Rejected("bad_turn")
        name = turn.get("from")
        if name is None:
            name = turn.get("role")
        if not isinstance(name, str) or not name:
            raise Rejected("bad_turn")
        content = turn.get("value")
        if content is None:
            content = turn.get("content")
        plain = name.strip().lower()
        role = ROLES.get(plain)
        if role is None:
            role = name
            if _MODEL_NAME.fullmatch(plain) is None:
                self._reject("unknown_role")
            elif self._repair("model_role", "unknown_role", repairs):
                role = "assistant"
                self.model_roles[name] += 1
        return role, content

    def _text(self, content: Any, repairs: set[str]) -> str:
        if content is None:
            return ""
        if isinstance(content, int | float) and not isinstance(content, bool):
            self.saw_numbers = True
            if "stringified_content" in self.disabled:
                raise Rejected("bad_content")
            repairs.add("stringified_content")
            return str(content)
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if not all(isinstance(text, str) for text in texts) or "joined_text_parts" in self.disabled:
            raise Rejected("bad_content")
        repairs.add("joined_text_parts")
        return "".join(texts)

    def _extras(self, turn: Mapping[str, Any], message: dict[str, Any]) -> bool:
        """Take over the reasoning and the tool calls of a turn."""
        reasoning, calls = turn.get("reasoning_content"), turn.get("tool_calls")
        if reasoning:
            if not isinstance(reasoning, str):
                raise Rejected("bad_content")
            message["reasoning_content"] = reasoning
        if calls:
            self.saw_numbers = True
            message["tool_calls"] = _objects(calls)
        return len(message) > 2

    def _call(self, content: Any, repairs: set[str]) -> dict[str, Any]:
        """A turn with the tool calls of a `function_call` turn, whose content is {name, arguments} or a list."""
        if not self._repair("tool_turns", "unknown_role", repairs):
            raise Rejected("bad_tools")
        calls = _objects([content] if isinstance(content, dict) else content)
        if not calls or not all(isinstance(call.get("name"), str) for call in calls):
            raise Rejected("bad_tools")
        functions = [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
        return {"from": "", "value": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}

    def _tool_turn(self, turn: Mapping[str, Any], messages: list[dict[str, Any]], repairs: set[str]) -> None:
        name = turn.get("from") if turn.get("from") is not None else turn.get("role")
        if name != "tool":
            self._repair("tool_turns", "unknown_role", repairs)
        if not messages or (messages[-1]["role"] != "tool" and "tool_calls" not in messages[-1]):
            self._reject("misplaced_tool")

    def _key(self, key: Any) -> str:
        if isinstance(key, int | float) and not isinstance(key, bool):
            self.saw_numbers = True
            return str(key)
        return ""

    def _repair(self, rule: str, otherwise: str, repairs: set[str]) -> bool:
        """True: repair it. Where the rule is off, the row is rejected, or left as it is if that is off, too."""
        if rule not in self.disabled:
            repairs.add(rule)
            return True
        self._reject(otherwise)
        return False

    def _reject(self, reason: str) -> None:
        if reason not in self.disabled:
            raise Rejected(reason)


def without_surrogates(value: Any) -> Any:
    """A JSON value with U+FFFD for every surrogate in its strings."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(item) for key, item in value.items()}
    return value


def _merge(first: dict[str, Any], second: Mapping[str, Any]) -> None:
    """Put the second of two turns of one role behind the first."""
    for key in ("content", "reasoning_content"):
        if second.get(key):
            first[key] = f"{first[key]}\n\n{second[key]}" if first.get(key) else second[key]
    if second.get("tool_calls"):
        first["tool_calls"] = [*first.get("tool_calls", []), *second["tool_calls"]]


def _objects(value: Any) -> list[dict[str, Any]]:
    """A list of objects, also where it is written as a string of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Rejected("bad_tools") from None
        value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Rejected("bad_tools")
    return value
