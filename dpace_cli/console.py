"""What a person sees: notes, progress, errors. All of it on standard error.

Standard output is for results alone, so that `--json` can be piped. When standard error is not a
terminal, progress is a plain line now and then.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from dpace_cli.errors import DpaceError, Interrupted

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)

PLAIN_INTERVAL_S = 15.0
"""Seconds between two plain progress lines where there is no terminal."""


def note(message: str) -> None:
    """One plain line about what is going on."""
    err.print(Text(message), soft_wrap=True)


def warn(message: str) -> None:
    """One line about something that the user may want to change."""
    err.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def show_error(error: DpaceError) -> None:
    """An error with its hint, in the form that the docs show."""
    err.print(Text.assemble(("error: ", "bold red"), error.message), soft_wrap=True)
    if error.hint:
        err.print(Text.assemble(("hint:  ", "bold"), error.hint), soft_wrap=True)


class Meter:
    """Counts finished units of a stage and shows rate and estimate."""

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.first = done
        self.detail = ""
        self.start = time.monotonic()
        self._last_line = self.start
        self._bar: Progress | None = None
        if err.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn() if total is not None else TextColumn("{task.completed:,.0f}"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}"),
                console=err,
                transient=True,
            )
            self._task = self._bar.add_task(label, total=total, completed=done, rate="", detail="")
            self._bar.start()

    @property
    def rate(self) -> float:
        """Units a second since this process began, rows of an earlier one left out."""
        return (self.done - self.first) / max(time.monotonic() - self.start, 1e-9)

    def update(self, done: float, detail: str = "") -> None:
        """Set the number of finished units."""
        self.done, self.detail = done, detail
        rate = f"{self.rate:,.1f} {self.unit}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=rate, detail=detail)
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            note(self._line(rate))

    def advance(self, by: float = 1, detail: str = "") -> None:
        self.update(self.done + by, detail)

    def _line(self, rate: str) -> str:
        of_total = f"/{self.total:,.0f}" if self.total is not None else ""
        left = ""
        if self.total is not None and self.rate > 0:
            left = f", {clock((self.total - self.done) / self.rate)} left"
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.label}: {self.done:,.0f}{of_total} {self.unit}, {rate}{left}{detail}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def meter(label: str, total: float | None, unit: str, done: float = 0) -> Iterator[Meter]:
    """Show progress for the length of a block."""
    shown = Meter(label, total, unit, done)
    try:
        yield shown
    finally:
        shown.close()


def clock(seconds: float) -> str:
    """A duration as people write it: 8 s, 3 min 20 s, 2 h 05 min."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


@contextmanager
def stoppable() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into Interrupted, so that a stage can save and clean up.

    The second signal ends the process at once.
    """

    def stop(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise Interrupted(signum)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def deferred_stop() -> Iterator[Callable[[], int]]:
    """Within `stoppable`, put a stop off to a moment of the caller's choice.

    Yields a function that returns the signal that came in, or 0. The second signal ends the process at once.
    """
    received = [0]

    def remember(signum: int, _frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        received[0] = signum

    previous = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received[0]
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
