"""How prep's rows get into a file: in an order that other loaders can read, and the best of many."""

from __future__ import annotations

import heapq
import shutil
import tempfile
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

_WRITE_BYTES = 1 << 20


class RowOutput:
    """One output file, in which rows with tools or reasoning stand first.

    SpecForge reads rows with `datasets`, which takes the columns from the first 10 MB of a file and fails at a
    column that appears later.

    Args:
        file: open for writing and reading.
        path: what it will be called; temporary files are made in its folder.
    Attributes:
        count: rows so far.
        reordered: such rows were brought before others.
    """

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self.path, self.count, self.reordered = path, 0, False
        self._file = file
        self._special: IO[bytes] | None = None
        self._held: list[bytes] = []
        self._size = 0
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future | None = None

    def write(self, line: bytes, plain: bool) -> None:
        """Take one line; `plain` is false for a row with other fields than every row has."""
        self.count += 1
        if not plain:
            if self._special is None:
                self._special = tempfile.TemporaryFile(dir=self.path.parent)  # noqa: SIM115 - closed by close()
            self._special.write(line)
            return
        self._held.append(line)
        self._size += len(line)
        if self._size >= _WRITE_BYTES:
            self._flush()

    def finish(self) -> int:
        """Bring the rows into their order; the number of rows."""
        self._flush()
        self._pending.result()
        if self._special is not None:
            self.reordered = self._file.tell() > 0
            self._file.seek(0)
            shutil.copyfileobj(self._file, self._special)
            self._file.seek(0)
            self._special.seek(0)
            shutil.copyfileobj(self._special, self._file)
        return self.count

    def close(self) -> None:
        """Let go of thread and temporary file; closing twice is harmless."""
        self._pool.shutdown()
        if self._special is not None:
            self._special.close()

    def _flush(self) -> None:
        """Hand what is held to another thread: the system copies it while the next rows are made."""
        if self._pending is not None:
            self._pending.result()  # one piece in flight; here a full disk shows
        self._pending = self._pool.submit(self._file.write, b"".join(self._held))
        self._held.clear()
        self._size = 0


class Smallest:
    """The rows with the smallest ranks, in the order of the source.

    Lines wait in a file: of those that come in, few are pushed out again (about count * ln(rows / count)).
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count = count
        self._worst: list[int] = []  # negative ranks: a heap whose first element is the largest rank
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by close()
        self._ranks, self._sizes = array("Q"), array("Q")
        self._notes: list[Any] = []

    def takes(self, rank: int) -> bool:
        """True where a row of this rank would be among the chosen so far."""
        return len(self._worst) < self.count or rank < -self._worst[0]

    def add(self, rank: int, line: bytes, note: Any) -> bool:
        """Take a row up, with anything that is to come back with it; True where another one is pushed out."""
        self._file.write(line)
        self._ranks.append(rank)
        self._sizes.append(len(line))
        self._notes.append(note)
        if len(self._worst) < self.count:
            heapq.heappush(self._worst, -rank)
            return False
        heapq.heappushpop(self._worst, -rank)
        return True

    def rows(self) -> Iterator[tuple[bytes, Any]]:
        """Yield line and note of every chosen row."""
        self._file.seek(0)
        limit = -self._worst[0] if self._worst else -1
        for rank, size, note in zip(self._ranks, self._sizes, self._notes):
            line = self._file.read(size)
            if rank <= limit:
                yield line, note

    def close(self) -> None:
        """Let go of the temporary file."""
        self._file.close()
