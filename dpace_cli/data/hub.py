"""Rows of data sets on the hub, and of Parquet files, which is what the hub keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpace_cli.data.reading import RawRow
from dpace_cli.errors import UsageError
from dpace_cli.records import file_sha256

PARQUET_MAGIC = b"PAR1"


class HubSource:
    """A split of a hub data set, streamed; with the attributes of a `SourceFile`."""

    def __init__(self, name: str, split: str) -> None:
        self.name, self.split = name, split
        self.oddities: Counter[str] = Counter()
        self.cut_at: int | None = None
        self.sha256 = ""
        self.position = 0

    def rows(self) -> Iterator[RawRow]:
        """Yield every row.

        Raises:
            UsageError: there is no such data set or split, or the hub cannot be reached.
        """
        import datasets  # slow to import

        try:
            for number, row in enumerate(datasets.load_dataset(self.name, split=self.split, streaming=True), start=1):
                yield RawRow(dict(row), None, b"", "row", number, self.name)
        except GeneratorExit:
            raise
        except Exception as error:  # datasets, huggingface_hub and httpx each raise their own
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"cannot load data set {self.name}, split {self.split}, from the hub: {reason}",
                "check the name, prep.split and the network (HF_ENDPOINT, HF_HUB_OFFLINE), or give a local file",
            ) from None


class ParquetSource:
    """A Parquet file; with the attributes of a `SourceFile`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.oddities: Counter[str] = Counter()
        self.cut_at: int | None = None
        self.sha256 = ""
        self.position = 0

    def rows(self) -> Iterator[RawRow]:
        """Yield every row.

        Raises:
            UsageError: the file is damaged. (The index of a Parquet file is at its end: a cut one holds nothing.)
        """
        import pyarrow as pa
        import pyarrow.parquet

        try:
            with pa.parquet.ParquetFile(self.path) as file:
                number, size = 0, self.path.stat().st_size
                for batch in file.iter_batches(batch_size=256):
                    for row in batch.to_pylist():
                        number += 1
                        yield RawRow(row, None, b"", "row", number, str(self.path))
                    self.position = size * number // max(file.metadata.num_rows, 1)
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"cannot read {self.path} as Parquet: {' '.join(str(error).split())[:200]}") from None
        self.sha256 = file_sha256(self.path)


def is_parquet(path: Path) -> bool:
    """True where the file's first bytes say so."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == PARQUET_MAGIC
    except OSError:
        return False


def looks_like_hub_id(name: str) -> Any:
    """True for owner/name, which no file in sight is called."""
    return (
        name.count("/") == 1
        and not name.startswith((".", "/", "~"))
        and not Path(name).suffix.startswith((".js", ".gz", ".zst", ".parquet"))
    )
