"""Rows out of files as the world has them: read by content, never by name, and every row accounted for.

A file may be a JSON array, JSONL, or objects one after the other; gzip or zstd; with a byte-order mark, blank
lines, bad UTF-8, rows that are not JSON, or an end in the middle of a row. Memory is bounded by the largest row.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from dpace_cli.errors import UsageError

CHUNK_BYTES = 1 << 20
MAX_ROW_CHARS = 32 << 20
"""A longer row is refused: holding it would break the memory bound."""

_SKIP = re.compile(r"[\s,]*")
_GARBAGE = re.compile(r"[^,\[\]{]*.[^,\[\]{]*", re.DOTALL)
_BALANCE = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]|"', re.DOTALL)
# NaN and Infinity are no JSON, but pandas writes them into columns that nobody here reads.
_scan = json.JSONDecoder(strict=False, parse_constant=lambda _name: None).scan_once


@dataclass(slots=True)
class RawRow:
    """One row of a source file.

    Attributes:
        value: what was parsed; None where `reason` is set.
        reason: why it could not be parsed ("invalid_json", "too_deep", "row_too_large"), or None.
        text: the row as it stood in the file (bytes that are not UTF-8 as surrogates).
        place: "line" or "byte".
        number: line number from 1, or byte offset from 0.
    """

    value: Any
    reason: str | None
    text: str
    place: str
    number: int


class SourceFile:
    """One input file.

    Attributes (complete once `rows` is exhausted):
        oddities: name to count of what was unusual about the file.
        cut_at: byte offset at which the file breaks off in the middle of a row or array, or None.
        layout: "array", "lines" or "values".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.oddities: Counter[str] = Counter()
        self.cut_at: int | None = None
        self.layout = ""
        self._raw: IO[bytes] | None = None
        self._broken = False

    @property
    def position(self) -> int:
        """Bytes of the file (compressed, where it is) that have been read."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else 0

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, parsed or with the reason why not.

        Raises:
            UsageError: the file cannot be opened, or is text of another encoding.
        """
        try:
            with open(self.path, "rb") as raw:
                self._raw = raw
                stream = self._decompressed(raw)
                head = self._read(stream)
                if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UsageError(f"{self.path} is UTF-16 text", f"convert it: iconv -f UTF-16 -t UTF-8 {self.path}")
                start = 0
                if head.startswith(codecs.BOM_UTF8):
                    self.oddities["byte_order_mark"] += 1
                    head, start = head[3:], 3
                if not head.strip():
                    while (more := self._read(stream)) and not head.strip():
                        head += more
                if not head.strip():
                    self.oddities["empty_file"] += 1
                    return
                self.layout = _layout(head)
                read = self._lines if self.layout == "lines" else self._values
                yield from read(stream, head, start)
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _decompressed(self, raw: IO[bytes]) -> IO[bytes]:
        magic = raw.read(4)
        raw.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            return gzip.GzipFile(fileobj=raw)
        if magic == zstandard.FRAME_HEADER:
            return zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return raw

    def _read(self, stream: IO[bytes], size: int = CHUNK_BYTES) -> bytes:
        """Up to `size` bytes; a compressed file that is damaged ends where the damage is."""
        if self._broken:
            return b""
        try:
            return stream.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError):
            self.oddities["damaged_compression"] += 1
            self._broken = True
            return b""

    # --- JSONL ---

    def _lines(self, stream: IO[bytes], head: bytes, start: int) -> Iterator[RawRow]:
        number, offset, held, skipping = 1, start, head, False
        while True:
            *lines, held = held.split(b"\n")
            for line in lines:
                if skipping:
                    skipping = False
                elif line.strip():
                    yield self._line(line, number)
                else:
                    self.oddities["blank_lines"] += 1
                number += 1
                offset += len(line) + 1
            if len(held) > MAX_ROW_CHARS and not skipping:
                yield RawRow(None, "row_too_large", "", "line", number)
                skipping = True
            if skipping:
                offset += len(held)
                held = b""
            more = self._read(stream, max(CHUNK_BYTES, len(held)))
            if not more:
                break
            held += more
        if held.strip() and not skipping:
            row = self._line(held, number)
            if row.reason == "invalid_json":
                self.cut_at = offset  # a last line without its end: the file was cut
            else:
                yield row
        if self._broken and self.cut_at is None:
            self.cut_at = offset

    def _line(self, line: bytes, number: int) -> RawRow:
        try:
            text = line.decode()
        except UnicodeDecodeError:
            self.oddities["bad_utf8_rows"] += 1
            text = line.decode(errors="surrogateescape")
        text = text.strip()
        try:
            value, end = _scan(text, 0)
        except RecursionError:
            return RawRow(None, "too_deep", text, "line", number)
        except (ValueError, StopIteration):
            return RawRow(None, "invalid_json", text, "line", number)
        if end != len(text):
            return RawRow(None, "invalid_json", text, "line", number)
        return RawRow(value, None, text, "line", number)

    # --- a JSON array, or values one after the other ---

    def _values(self, stream: IO[bytes], head: bytes, start: int) -> Iterator[RawRow]:
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        buffer, position, offset = decoder.decode(head), 0, start
        inside = at_end = False
        keys: list[str] | None = None  # of the last good row, to find the next one behind a damaged one
        size = CHUNK_BYTES

        def grow() -> None:
            nonlocal buffer, position, at_end, size
            chunk = self._read(stream, size)
            at_end = not chunk
            buffer = buffer[position:] + decoder.decode(chunk, final=at_end)
            position = 0

        while True:
            skipped = _SKIP.match(buffer, position).end()
            offset += _bytes(buffer[position:skipped])
            position = skipped
            if position == len(buffer):
                if at_end:
                    break
                grow()
                continue
            if buffer[position] in "[]" and inside == (buffer[position] == "]"):
                inside = not inside
                position += 1
                offset += 1
                continue
            value, reason = None, None
            try:
                value, end = _scan(buffer, position)
                if end == len(buffer) and not at_end:
                    grow()
                    continue
            except (ValueError, StopIteration, RecursionError) as error:
                reason = "too_deep" if isinstance(error, RecursionError) else "invalid_json"
                end = _row_end(buffer, position)
                if end is None and not at_end and len(buffer) - position < MAX_ROW_CHARS:
                    size = max(CHUNK_BYTES, len(buffer) - position)
                    grow()
                    continue
                if end is None:
                    end = _next_row(buffer, position, keys)
                if end is None and at_end:
                    self.cut_at = offset
                    return
                if end is None:
                    end, reason = len(buffer), "row_too_large"
            size = CHUNK_BYTES
            text = buffer[position:end]
            if not text.isascii() and _has_bad_bytes(text):
                self.oddities["bad_utf8_rows"] += 1
            if reason is None and isinstance(value, dict):
                keys = list(value)
            yield RawRow(value, reason, text, "byte", offset)
            offset += _bytes(text)
            position = end
        if inside or self._broken:
            self.cut_at = offset


def _layout(head: bytes) -> str:
    """How a file that begins with `head` is laid out."""
    text = head.decode(errors="surrogateescape").lstrip()
    if text.startswith("["):
        return "array"
    first, newline, _ = text.partition("\n")
    try:
        _, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        if newline:
            return "lines"
        return "lines"
    return "values" if newline and end > len(first) else "lines"


def _row_end(buffer: str, start: int) -> int | None:
    """End of the bracketed value that starts at `start`, whatever is wrong inside it; None: not in the buffer."""
    if buffer[start] not in "[{":
        return _GARBAGE.match(buffer, start).end()
    depth = 0
    for token in _BALANCE.finditer(buffer, start):
        mark = token.group()
        if mark in "[{":
            depth += 1
        elif mark in "]}":
            depth -= 1
            if depth == 0:
                return token.end()
        elif mark == '"':
            return None  # a string that does not end here
    return None


def _next_row(buffer: str, start: int, keys: list[str] | None) -> int | None:
    """Start of the next row that is built like `keys`, behind one whose brackets do not close."""
    if not keys:
        return None
    opening = re.compile(r"\{\s*" + re.escape(json.dumps(keys[0])) + r"\s*:")
    for found in opening.finditer(buffer, start + 1):
        try:
            value, _ = _scan(buffer, found.start())
        except (ValueError, StopIteration, RecursionError):
            continue
        if list(value) == keys:
            return found.start()
    return None


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogateescape"))


def _has_bad_bytes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def open_text(path: Path) -> io.TextIOWrapper:
    """Text of a file that may be compressed; for small files such as benchmark prompts."""
    raw = open(path, "rb")  # noqa: SIM115 - closed by the caller
    return io.TextIOWrapper(SourceFile(path)._decompressed(raw), encoding="utf-8")
