"""JSONL files of our own: a strict reader, and an append-only log that survives being killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonlines
import orjson

from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import write_error

_MOST_LEVELS = 250


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file that a stage wrote, in order; blank lines are passed over.

    Raises:
        UsageError: the file is missing, or a line is not a JSON object; the line is named.
    """
    try:
        with jsonlines.open(path) as reader:
            yield from reader.iter(type=dict, skip_empty=True)
    except jsonlines.InvalidLineError as error:
        what = f"{path}, line {error.lineno}: not a JSON object ({error.line.strip()[:80]!r})"
        raise UsageError(what, "`dpace prep jsonl` reads damaged files") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 ({error})", "`dpace prep jsonl` reads damaged files") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def encode_line(row: dict[str, Any]) -> bytes:
    """One row as a line of UTF-8 JSON, newline included.

    Raises:
        UnicodeEncodeError: a string holds a lone surrogate, which UTF-8 cannot express.
        RecursionError: the row is nested so deeply that other readers might fail at it.
        OverflowError: it holds an integer of hundreds of digits, at which other readers fail.
    """
    try:
        return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # surrogates, integers beyond 64 bits, more than 254 levels
        _check_depth(row)
        line = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        try:
            orjson.loads(line)
        except ValueError as error:
            raise OverflowError(str(error)) from None
        return line


def _check_depth(row: Any) -> None:
    level = [row]
    for _ in range(_MOST_LEVELS):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise RecursionError(f"more than {_MOST_LEVELS} levels")


class RowLog:
    """An append-only JSONL file whose rows have a string `id`, each written once.

    A process that dies in the middle of a line leaves a torn line at the end, which opening cuts off; every
    earlier row is whole, because each `append` hands its line to the system before it returns.

    Attributes:
        ids: the ids that are in the file.

    Raises:
        RunError: the file cannot be opened or written, or a line before the last one is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids: set[str] = set()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise write_error(path, error) from error
        try:
            self._recover()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> RowLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write one row.

        Raises:
            ValueError: a row with this id is in the file already.
        """
        key = row["id"]
        if key in self.ids:
            raise ValueError(f"{self.path} already holds a row with id {key!r}")
        try:
            self._file.write(encode_line(row))
            self._file.flush()
        except OSError as error:
            raise write_error(self.path, error) from error
        self.ids.add(key)

    def close(self) -> None:
        """Flush to the disk and close; closing twice is harmless."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_error(self.path, error) from error
        finally:
            self._file.close()

    def _recover(self) -> None:
        """Collect the ids and cut off what follows the last whole row."""
        self._file.seek(0)
        end = 0
        damaged: int | None = None
        for number, line in enumerate(self._file, start=1):
            if damaged is not None:
                raise RunError(
                    f"{self.path}, line {damaged}: not a row with an id, and other lines follow",
                    "mend or remove that line, then run the same command again",
                )
            key = _id_of(line)
            if key is None:
                damaged = number
                continue
            self.ids.add(key)
            end += len(line)
        if damaged is not None:
            self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def _id_of(line: bytes) -> str | None:
    """The id of a whole line, or None for anything else."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    key = row.get("id") if isinstance(row, dict) else None
    return key if isinstance(key, str) else None
