"""Rows out of files as the world has them: read by content, never by name, and every row accounted for.

A file may be a JSON array, JSONL, or objects one after the other; plain, gzip or zstd; with a byte-order mark,
blank lines, bad UTF-8, rows that are not JSON, or an end in the middle of a row. Memory is bounded by the
largest row.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson
import zstandard

from dpace_cli.errors import UsageError

CHUNK_BYTES = 1 << 20
MAX_ROW_BYTES = 32 << 20
"""A longer row is refused: holding it would break the memory bound."""
_LOOK_LINES = 50
_SHOWN_BYTES = 1000
"""What is shown of a row that is too large."""

_SKIP = re.compile(rb"[\s,]*")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["\[\]{}]', re.DOTALL)
_BETWEEN = re.compile(rb'[^"\[\]{}]*')
_STRING_BODY = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_TEXT = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"(?=\s*(?:[,\]]|\Z))')
_GARBAGE = re.compile(rb"[^,\[\]{}\n]*")
# orjson is several times as fast as json but stricter, so what it refuses gets a second hearing: NaN, control
# characters, halves of characters. (NaN is no JSON, but pandas writes it into columns that nobody here reads.)
_lenient = json.JSONDecoder(strict=False, parse_constant=lambda _name: None)


class RawRow(NamedTuple):
    """One row of a source.

    Attributes:
        value: what was parsed; None where `reason` is set.
        reason: why it could not be parsed ("invalid_json", "too_deep", "row_too_large"), or None.
        data: the row's bytes as they stood in the file, decompressed.
        place: "line", "byte" or "row".
        number: line number from 1, byte offset from 0 (decompressed), or row number from 1.
        source: the file or data set.
        lenient: the strict parser refused it, the lenient one did not.
    """

    value: Any
    reason: str | None
    data: bytes
    place: str
    number: int
    source: str
    lenient: bool = False

    def exact(self) -> Any:
        """The value with integers of any size; orjson makes those beyond 64 bits floats."""
        return _parse_leniently(self.data) if self.data else self.value

    def bad_utf8(self) -> bool:
        """True where the row's bytes are no UTF-8."""
        if not self.lenient and self.reason is None:
            return False
        try:
            self.data.decode()
        except UnicodeDecodeError:
            return True
        return False


class SourceFile:
    """One input file.

    Attributes (complete once `rows` is exhausted):
        oddities: name to count of what was unusual about the file.
        cut_at: byte offset (decompressed) where the file breaks off inside a row or array, or None.
        layout: "array", "lines" or "values".
        sha256: of the file's bytes, made while they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.oddities: Counter[str] = Counter()
        self.cut_at: int | None = None
        self.layout = ""
        self.sha256 = ""
        self.position = 0
        self._broken = False

    def rows(self) -> Iterator[RawRow]:
        """Yield every row, parsed or with the reason why not.

        Raises:
            UsageError: the file cannot be opened, or is text of another encoding.
        """
        try:
            with open(self.path, "rb") as raw, _Hashed(raw, self) as hashed:
                stream = _decompressed(hashed)
                head = self._read(stream, CHUNK_BYTES)
                if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UsageError(f"{self.path} is UTF-16 text", f"convert it: iconv -f UTF-16 -t UTF-8 {self.path}")
                start = 0
                if head.startswith(codecs.BOM_UTF8):
                    self.oddities["byte_order_mark"] += 1
                    head, start = head[3:], 3
                while not head.strip() and (more := self._read(stream, CHUNK_BYTES)):
                    head, start = more, start + len(head)
                if head.strip():
                    self.layout = _layout(head)
                    read = self._lines if self.layout == "lines" else self._values
                    yield from read(stream, head, start)
                else:
                    self.oddities["empty_file"] += 1
                    self.cut_at = start if self._broken else None
                self.sha256 = hashed.hexdigest()
        except OSError as error:
            raise UsageError(f"cannot read {self.path}: {error.strerror or error}") from None

    def _read(self, stream: IO[bytes], size: int) -> bytes:
        """Up to `size` bytes; a compressed file that is damaged ends where the damage is."""
        if not isinstance(stream, gzip.GzipFile | zstandard.ZstdDecompressionReader):
            return stream.read(size)
        pieces: list[bytes] = []
        while size > 0 and not self._broken:
            try:
                piece = stream.read1(size)  # what read() has unpacked before it finds damage, it keeps
            except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError):
                self.oddities["damaged_compression"] += 1
                self._broken = True
                break
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    # --- JSONL ---

    def _lines(self, stream: IO[bytes], head: bytes, start: int) -> Iterator[RawRow]:
        number, offset, held, skipping, name = 1, start, head, False, str(self.path)
        while True:
            *lines, held = held.split(b"\n")
            for line in lines:
                if skipping:
                    skipping = False
                elif line and not line.isspace():
                    yield _row(line, "line", number, name)
                else:
                    self.oddities["blank_lines"] += 1
                number += 1
                offset += len(line) + 1
            if len(held) > MAX_ROW_BYTES and not skipping:
                yield RawRow(None, "row_too_large", held[:_SHOWN_BYTES], "line", number, name)
                skipping = True
            if skipping:
                offset += len(held)
                held = b""
            more = self._read(stream, max(CHUNK_BYTES, len(held)))
            if not more:
                break
            held += more
        if held and not held.isspace() and not skipping:
            row = _row(held, "line", number, name)
            if row.reason == "invalid_json":
                self.cut_at = offset  # a last line that is no JSON and has no end: the file was cut
            else:
                yield row
        if self._broken and self.cut_at is None:
            self.cut_at = offset

    # --- a JSON array, or values one after the other ---

    def _values(self, stream: IO[bytes], head: bytes, start: int) -> Iterator[RawRow]:
        window = _Window(head, start, lambda size: self._read(stream, size))
        name, inside = str(self.path), False
        glues: list[_Glue] = []
        keys: list[str] | None = None
        last_end = 0
        while True:
            window.skip(_SKIP)
            if window.exhausted:
                if window.grow():
                    last_end = 0
                    continue
                break
            first = window.data[window.position]
            if (first == 0x5D) if inside else (first == 0x5B):  # ] or [
                inside = not inside
                window.position += 1
                continue
            begin = window.position
            if last_end and not glues and keys:
                glues = _glues(window.data, last_end, begin, keys)
            data, value, following = _glued(window.data, begin, glues)
            if data:
                yield RawRow(value, None, data, "byte", window.offset(begin), name)
                window.position, last_end = following, begin + len(data)
                continue
            if glues and len(window.data) - begin < CHUNK_BYTES and window.grow():
                last_end = 0  # a look at more of it is cheaper than a look into it
                continue
            end = _row_end(window.data, begin)
            if (end is None or end == len(window.data)) and len(window.data) - begin < MAX_ROW_BYTES and window.grow():
                last_end = 0
                continue
            row = None if end is None else _row(window.data[begin:end], "byte", window.offset(begin), name)
            if row is None or row.reason == "invalid_json":
                following = _next_row(window.data, begin, end, keys)
                if following is not None:
                    end = following
                    row = RawRow(None, "invalid_json", window.data[begin:end], "byte", window.offset(begin), name)
                elif row is None and window.at_end:
                    self.cut_at = window.offset(begin)
                    return
                elif row is None:
                    start, offset = window.data[begin : begin + _SHOWN_BYTES], window.offset(begin)
                    if not window.skip_value():
                        self.cut_at = offset
                        return
                    row, end = RawRow(None, "row_too_large", start, "byte", offset, name), window.position
            elif isinstance(row.value, dict):
                keys, last_end = list(row.value), end
            yield row
            window.position = end
        if inside or self._broken:
            self.cut_at = window.offset(window.position)


class _Window:
    """The part of a stream that is held in memory, and where in it we are."""

    def __init__(self, data: bytes, start: int, read: Callable[[int], bytes]) -> None:
        self.data, self.position, self.at_end = data, 0, False
        self._start, self._read = start, read

    @property
    def exhausted(self) -> bool:
        return self.position == len(self.data)

    def offset(self, position: int) -> int:
        return self._start + position

    def skip(self, pattern: re.Pattern[bytes]) -> None:
        self.position = pattern.match(self.data, self.position).end()

    def skip_value(self) -> bool:
        """Pass over the value that begins here without holding it; False where it does not end."""
        depth, in_string = 0, False
        while True:
            self.skip(_STRING_BODY if in_string else _BETWEEN)
            mark = self.data[self.position : self.position + 1]
            if mark in (b"", b"\\"):  # an escape that goes on in what is read next
                if not self.grow():
                    return False
                continue
            self.position += 1
            if mark == b'"':
                in_string = not in_string
            else:
                depth += 1 if mark in (b"[", b"{") else -1
            if depth <= 0 and not in_string:
                return True

    def grow(self) -> bool:
        """Let go of what lies behind us and read on; False at the end. A long row doubles what is held."""
        more = b"" if self.at_end else self._read(max(CHUNK_BYTES, len(self.data) - self.position))
        if not more:
            self.at_end = True
            return False
        self._start += self.position
        self.data, self.position = self.data[self.position :] + more, 0
        return True


class _Hashed:
    """A binary file whose bytes are hashed in another thread as they are read (hashlib lets go of the GIL)."""

    def __init__(self, raw: IO[bytes], owner: SourceFile) -> None:
        self._raw, self._owner = raw, owner
        self._digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future | None = None

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def read(self, size: int = -1) -> bytes:
        data = self._raw.read(size)
        if self._pending is not None:
            self._pending.result()  # one piece in flight, so that memory stays bounded
        self._pending = self._pool.submit(self._digest.update, data)
        self._owner.position += len(data)
        return data

    def peek(self, size: int) -> bytes:
        start = self._raw.read(size)
        self._raw.seek(0)
        return start

    def hexdigest(self) -> str:
        while self.read(CHUNK_BYTES):  # what a damaged archive left unread
            pass
        self._pending.result()
        return self._digest.hexdigest()


def _decompressed(hashed: _Hashed) -> Any:
    magic = hashed.peek(4)
    if magic.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=hashed, mode="rb")
    if magic == zstandard.FRAME_HEADER:
        return zstandard.ZstdDecompressor().stream_reader(hashed, read_across_frames=True)
    return hashed


def _layout(head: bytes) -> str:
    """How a file that begins with `head` is laid out."""
    text = head.lstrip()
    first, _, rest = text.partition(b"\n")
    # JSONL is what has a value a line, even where the first row is a list or damaged. (The last line may go on.)
    lines = [line for line in rest.split(b"\n")[:_LOOK_LINES] if line.strip()][: rest.count(b"\n")]
    whole = sum(line.lstrip()[:1] in (b"{", b"[") and _parses(line) for line in lines)
    if first.strip() != b"[" and whole > len(lines) / 3:
        return "lines"
    if text.startswith(b"["):
        return "array"
    end = _row_end(text, 0)
    if end is not None and end <= len(first) and first[end:].lstrip()[:1] in (b"{", b",") and _parses(text[:end]):
        return "values"  # more than one in the first line, or a comma behind it, or the line ends of old Macs
    if first.strip() != b"{" and (not rest or _parses(first)):
        return "lines"
    if end is None:
        return "values" if first.rstrip().endswith((b"{", b",", b"[")) else "lines"
    return "values" if end > len(first) and _parses(text[:end]) else "lines"


def _parses(data: bytes) -> bool:
    return _row(data, "byte", 0, "").reason is None


def _row(data: bytes, place: str, number: int, source: str) -> RawRow:
    """Parse a row, or find out why that cannot be done."""
    try:
        return RawRow(orjson.loads(data), None, data, place, number, source)
    except ValueError:
        pass
    try:
        return RawRow(_parse_leniently(data), None, data, place, number, source, True)
    except RecursionError:
        reason = "too_deep"
    except ValueError:
        reason = "invalid_json"
    return RawRow(None, reason, data, place, number, source)


def _parse_leniently(data: bytes) -> Any:
    return _lenient.decode(data.decode(errors="surrogateescape"))


def _row_end(data: bytes, start: int) -> int | None:
    """End of the value that starts at `start`, whatever is wrong inside it; None: it does not end in `data`."""
    if data[start] not in b"[{":
        text = _TEXT.match(data, start)
        return text.end() if text else _GARBAGE.match(data, start + 1).end()
    depth = 0
    for token in _TOKEN.finditer(data, start):
        mark = token.group()
        if mark in (b"[", b"{"):
            depth += 1
        elif mark in (b"]", b"}"):
            depth -= 1
        elif mark == b'"':
            return None  # a string without an end
        if depth <= 0:
            return token.end()
    return None


class _Glue(NamedTuple):
    """End of one row, what lies between, and the next row up to its first key; how much the first two are."""

    data: bytes
    tail: int
    between: int


def _glues(data: bytes, end: int, start: int, keys: list[str]) -> list[_Glue]:
    """What lies between two neighbours, by which most rows are found without looking into them.

    First with all the brackets of the row's end, since a longer piece is found faster, then with the last one
    alone, for rows that end otherwise; nothing where the second row begins with another key.
    """
    opening = re.compile(rb"\{\s*" + re.escape(orjson.dumps(keys[0])) + rb"\s*:").match(data, start)
    if opening is None or not _SKIP.fullmatch(data, end, start):  # a row of another kind lies between
        return []
    last = data[max(0, end - 100) : end]
    tails = (len(last) - len(last.rstrip(b"]} \t\r\n")), 1)
    return [_Glue(data[end - tail : opening.end()], tail, start - end) for tail in tails]


def _glued(data: bytes, begin: int, glues: list[_Glue]) -> tuple[bytes, Any, int]:
    """The row that begins at `begin`, what it holds, and where the next one begins; b"" where none is found so.

    A wrong find is harmless: no proper part of an object is an object. Glue that is out of date is thrown away.
    """
    for glue, tail, between in glues:
        found = data.find(glue, begin)
        if found >= 0:
            row = data[begin : found + tail]
            try:
                value = orjson.loads(row)
            except ValueError:
                continue
            if tail == 1 and glues[0].data not in data:
                glues.clear()
            return row, value, found + tail + between
    return b"", None, begin


def _next_row(data: bytes, start: int, end: int | None, keys: list[str] | None) -> int | None:
    """Start of the next row that is built like `keys`, where a damaged one has swallowed it."""
    if not keys:
        return None
    opening = re.compile(rb"\{\s*" + re.escape(orjson.dumps(keys[0])) + rb"\s*:")
    for found in opening.finditer(data, start + 1, len(data) if end is None else end):
        after = _row_end(data, found.start())
        if after is None:
            continue
        row = _row(data[found.start() : after], "byte", 0, "")
        if row.reason is None and list(row.value) == keys:
            return found.start()
    return None
