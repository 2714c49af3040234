"""Errors that a person is meant to read: what happened, where, and what to do.

Exit codes: 2 for usage and configuration, 1 for a run that failed, 3 for a prep whose input breaks off (every
whole row is written), 128 + signal when stopped.
Anything that is not a DpaceError is a bug, and its traceback is shown.
"""

from __future__ import annotations

import signal


class DpaceError(Exception):
    """A failure with a cause that the user can act on.

    Args:
        message: what is wrong and where (file and line, or config field).
        hint: what to do about it.
    """

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DpaceError):
    """A wrong command, config key, value or input: nothing was started."""

    exit_code = 2


class RunError(DpaceError):
    """A stage was started and could not finish."""


class Interrupted(BaseException):
    """A stage stopped cleanly at a signal.

    No Exception, so that nobody takes it for a failure of his own: libraries catch those of their imports.
    """

    def __init__(self, signum: int) -> None:
        self.message = f"stopped by {signal.Signals(signum).name}"
        self.exit_code = 128 + signum
        super().__init__(self.message)
