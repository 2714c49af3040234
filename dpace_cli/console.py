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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from dpace_cli.errors import Interrupted

err = Console(stderr=True, highlight=False)
out = Console(highlight=False)

PLAIN_INTERVAL_S = 15.0
"""Seconds between two plain progress lines where there is no terminal."""

_IMPORT_WAIT_S = 0.02


def note(message: str) -> None:
    """One plain line about what is going on."""
    err.print(Text(message), soft_wrap=True)


def warn(message: str) -> None:
    """One line about something that the user may want to change."""
    err.print(Text.assemble(("warning: ", "bold yellow"), message), soft_wrap=True)


def show_error(message: str, hint: str = "") -> None:
    """An error with what to do about it, in the form that the docs show."""
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    if hint:
        err.print(Text.assemble(("hint:  ", "bold"), hint), soft_wrap=True)


class Meter:
    """Counts finished units of a stage and shows rate and estimate.

    Args:
        together: units that are worked on at once, so that the first of them says nothing about the rate yet.
    """

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0, together: float = 0) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self.first = done
        self._settled = done + (together if total is None else min(together, total - done))
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
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[detail]}"),
                console=err,
                transient=True,
            )
            self._task = self._bar.add_task(label, total=total, completed=done, rate="", left="", detail="")
            self._bar.start()

    @property
    def rate(self) -> float:
        """Units a second since this process began, rows of an earlier one left out."""
        return (self.done - self.first) / max(time.monotonic() - self.start, 1e-9)

    def update(self, done: float, detail: str = "") -> None:
        """Set the number of finished units."""
        self.done, self.detail = done, detail
        if self._bar is not None:
            self._bar.update(self._task, completed=done, rate=self._shown_rate(), left=self._left(), detail=detail)
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            note(self._line())

    def advance(self, by: float = 1, detail: str = "") -> None:
        self.update(self.done + by, detail)

    def _shown_rate(self) -> str:
        return f"{self.rate:,.1f} {self.unit}/s" if self.done > self.first and self.done >= self._settled else ""

    def _left(self) -> str:
        if self.total is None or not self._shown_rate():
            return ""
        return f"{clock((self.total - self.done) / self.rate)} left"

    def _line(self) -> str:
        of_total = f"/{self.total:,.0f}" if self.total is not None else ""
        parts = (f"{self.done:,.0f}{of_total} {self.unit}", self._shown_rate(), self._left(), self.detail)
        return f"{self.label}: {', '.join(filter(None, parts))}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def meter(label: str, total: float | None, unit: str, done: float = 0, together: float = 0) -> Iterator[Meter]:
    """Show progress for the length of a block."""
    shown = Meter(label, total, unit, done, together)
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

    A signal that comes in the middle of an import waits for its end. The second signal ends the process at once.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)
        raise_it(signum, frame)

    def raise_it(signum: int, frame: FrameType | None) -> None:
        if not _importing(frame):
            raise Interrupted(signum)
        # Compiled modules swallow what is raised in an import of theirs, and a module stays behind half imported.
        signal.signal(signal.SIGALRM, lambda _, later: raise_it(signum, later))
        signal.setitimer(signal.ITIMER_REAL, _IMPORT_WAIT_S)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    previous[signal.SIGALRM] = signal.getsignal(signal.SIGALRM)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


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
