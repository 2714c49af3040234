"""A conversation that is answered anew, turn by turn, each turn from the regenerated history."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from dpace_cli.config import RegenConfig
from dpace_cli.engines.base import Completion, Message, Request

Row = dict[str, Any]


@dataclass
class Conversation:
    """One row of the input on its way to an answered one.

    Every answer in it is the target's own. So a conversation ends early at an answer that calls a tool
    otherwise than the source's answer did: the tool's reply that follows belongs to another call.

    Attributes:
        history: the messages so far, regenerated answers included.
        turns: for each answer, the token ids that the target saw and wrote.
        truncated: an answer was cut off by the token limit.
        retried: the row failed in an earlier run.
        error: why there is no usable answer.
        dropped: it is left out by a rule, so that trying again would not help.
    """

    row: Row
    options: RegenConfig
    retried: bool = False
    history: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    truncated: bool = False
    error: str | None = None
    dropped: bool = False
    tokens: int = 0
    _next: int = 0
    _over: bool = False

    def __post_init__(self) -> None:
        self._advance()
        if self._over:
            self.error = "there is no user turn to answer"

    @property
    def id(self) -> str:
        return self.row["id"]

    @property
    def over(self) -> bool:
        """Nothing is left to ask."""
        return self._over

    def request(self) -> Request:
        """The next answer that is wanted."""
        seed = hashlib.sha256(f"{self.options.seed}\0{self.id}\0{len(self.turns)}".encode()).digest()
        return Request(
            self.id, list(self.history), self.row.get("tools") or None, int.from_bytes(seed[:4]) >> 1, self.retried
        )

    def take(self, completion: Completion) -> None:
        """Put an answer into the history and move on to the next turn."""
        self.tokens += completion.tokens
        if completion.error is not None:
            self.error, self._over = completion.error, True
            return
        cut = completion.finish_reason == "length"
        self.truncated |= cut
        if cut and self.options.truncated == "drop":
            self._end()
            if not self.turns:
                self.error, self.dropped = f"the answer was cut off at {self.options.max_new_tokens} tokens", True
            return
        keep_ids = completion.reasoning is None or self.options.keep_reasoning
        self.turns.append(
            {
                "prompt_ids": completion.prompt_ids if keep_ids else None,
                "answer_ids": completion.answer_ids if keep_ids else None,
                "finish_reason": completion.finish_reason,
                "tokens": completion.tokens,
            }
        )
        answer: Message = {"role": "assistant", "content": completion.text}
        if completion.reasoning is not None and self.options.keep_reasoning:
            answer["reasoning_content"] = completion.reasoning
        source = self._source(self._next)
        calls = completion.tool_calls
        wanted = source.get("tool_calls") if source and source["role"] == "assistant" else None
        if calls:
            answer["tool_calls"] = wanted if _same_calls(calls, wanted) else calls
        self.history.append(answer)
        while (message := self._source(self._next)) and message["role"] == "assistant":
            self._next += 1
        replies = (message := self._source(self._next)) is not None and message["role"] == "tool"
        if not self.options.multi_turn or ((replies or calls) and not (replies and _same_calls(calls, wanted))):
            self._end()
            return
        self._advance()

    def result(self) -> Row:
        """The row for training: id, conversations and tools, nothing else."""
        row = {"id": self.id, "conversations": self.history}
        return {**row, "tools": self.row["tools"]} if self.row.get("tools") else row

    def _source(self, index: int) -> Message | None:
        messages = self.row["conversations"]
        return messages[index] if index < len(messages) else None

    def _advance(self) -> None:
        """Copy the source's messages up to the next answer that is wanted."""
        while (message := self._source(self._next)) is not None:
            if message["role"] == "assistant":
                if self.history and self.history[-1]["role"] in ("user", "tool"):
                    return
            else:
                self.history.append(message)
            self._next += 1
        if not self.history or self.history[-1]["role"] not in ("user", "tool"):
            self._end()

    def _end(self) -> None:
        """Nothing more is asked; what stands after the last answer goes."""
        self._over = True
        while self.history and self.history[-1]["role"] != "assistant":
            self.history.pop()


def _same_calls(calls: list[dict[str, Any]] | None, wanted: list[dict[str, Any]] | None) -> bool:
    return bool(calls) and bool(wanted) and [_call(call) for call in calls] == [_call(call) for call in wanted]


def _call(call: dict[str, Any]) -> tuple[Any, Any]:
    """Name and arguments of a call; arguments are compared as values, however they were written."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    return function.get("name"), arguments
