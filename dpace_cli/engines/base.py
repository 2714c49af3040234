"""What a generation engine is: requests in, completions out, in any order.

An engine is added by one file here, named in `make_engine`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dpace_cli.config import Config

Message = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """One answer that is wanted.

    Attributes:
        id: comes back in the completion.
        messages: the history, the last message being what the target answers.
        tools: tool definitions for the chat template, or None.
        seed: decides the draws where temperature is above 0.
        retried: it failed in an earlier run, so that its failing again tells nothing about the engine.
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    seed: int = 0
    retried: bool = False


@dataclass(frozen=True)
class Completion:
    """The target's answer to one request, or why there is none.

    Attributes:
        text: the answer without reasoning and without the end-of-turn token.
        reasoning: what the target thought first; None where it did not.
        prompt_ids: token ids that the target saw; None where a server does not tell.
        answer_ids: token ids that it generated, end-of-turn included; None where a server does not tell.
        finish_reason: "stop", "length" or "tool_calls".
        tokens: how many tokens were generated.
        tool_calls: parsed calls, in OpenAI's form.
        error: why there is no answer; None where there is one.
        permanent: the error comes back however often it is tried.
    """

    id: str
    text: str = ""
    reasoning: str | None = None
    prompt_ids: list[int] | None = None
    answer_ids: list[int] | None = None
    finish_reason: str = ""
    tokens: int = 0
    tool_calls: list[dict[str, Any]] | None = None
    error: str | None = None
    permanent: bool = False


class Engine(Protocol):
    """Answers requests with one target and one set of sampling options."""

    name: str
    fingerprint: str | None
    """Of the tokenizer that `prompt_ids` and `answer_ids` belong to; None where there are none."""
    group_rows: int | None
    """Rows that are answered together, so that their grouping may move a rounding; None: each for itself."""

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Answer every request, in any order.

        `requests` is read as there is room. None in it means that nothing is ready now, but an answer that is
        on its way may bring more: it is how the second turn of a conversation follows its first.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """What the manifest says about it: device and dtype, or servers and the model they serve."""
        ...

    def close(self) -> None:
        """Stop what runs in the background."""
        ...


def make_engine(config: Config) -> Engine:
    """The engine that `regen.engine` names; its imports are paid only when it is used."""
    if config.regen.engine == "http":
        from dpace_cli.engines.http import HttpEngine

        return HttpEngine(config)
    from dpace_cli.engines.local import LocalEngine

    return LocalEngine(config)


_CALL = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_THINK = re.compile(r"^\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


def split_reasoning(text: str, opened: bool) -> tuple[str, str | None]:
    """Content and reasoning of a generated text.

    Args:
        opened: the prompt ends inside the reasoning, so that a text without an end of it is reasoning all through.
    """
    if match := _THINK.match(text):
        return text[match.end() :], match[1].strip("\n") or None
    stripped = text.lstrip()
    if opened or stripped.startswith("<think>"):
        return "", stripped.removeprefix("<think>").strip("\n") or None
    return text, None


def split_tool_calls(text: str) -> tuple[str, list[dict[str, Any]] | None]:
    """Content and calls of a generated text, where calls are written as in Qwen's and Hermes' templates."""
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
        calls = [{"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls]
    except (ValueError, KeyError, TypeError):
        return text, None
    return (_CALL.sub("", text).rstrip(), calls) if calls else (text, None)
