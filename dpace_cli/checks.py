"""A finding about a setup: what was looked at, how it stands, what it means and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]

_ORDER: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Check:
    """One line of `dpace doctor`.

    Attributes:
        name: what was looked at, such as "mask token".
        level: "warning" where a run would go on, but not as one would expect; "error" where it would fail, or
            its result would be wrong.
        message: what is so, and what it means.
        hint: what to do about it.
    """

    name: str
    level: Level
    message: str
    hint: str = ""


def ok(name: str, message: str) -> Check:
    """A finding that needs nothing."""
    return Check(name, "ok", message)


def warning(name: str, message: str, hint: str = "") -> Check:
    """A finding that a run survives, but not as one would expect."""
    return Check(name, "warning", message, hint)


def error(name: str, message: str, hint: str = "") -> Check:
    """A finding with which a run fails, or its result is wrong."""
    return Check(name, "error", message, hint)


def worst(checks: Iterable[Check]) -> Level:
    """The highest level among findings; "ok" where there is none."""
    return max((check.level for check in checks), key=_ORDER.index, default="ok")
