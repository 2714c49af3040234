"""A table before anyone has drawn it: numbers in full precision, and how each column is to be written."""

from __future__ import annotations

from dataclasses import dataclass

from dpace_cli.stats import Estimate

Cell = str | int | float | Estimate | None

MISSING = "–"
"""What stands where there is no figure."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: its heading. group: heading over it and its neighbours of the same group.
        format: how a number is written, as in `format()`.
        heading: does it name the row?
        interval: write the bounds behind the figure?
        optional: may be left out where there is no room (and nowhere else).
    """

    name: str
    group: str = ""
    format: str = ".2f"
    heading: bool = False
    interval: bool = False
    optional: bool = False

    @property
    def full_name(self) -> str:
        """Heading that stands alone: group and name."""
        return f"{self.group} {self.name}".strip()

    def text(self, cell: Cell) -> str:
        """A cell as people read it."""
        if cell is None:
            return MISSING
        if isinstance(cell, str):
            return cell
        if not isinstance(cell, Estimate):
            return format(cell, self.format)
        value = format(cell.value, self.format)
        if self.interval and cell.low is not None and cell.high is not None:
            value += f" [{format(cell.low, self.format)}, {format(cell.high, self.format)}]"
        return value


@dataclass(frozen=True)
class Table:
    """Rows and columns with a title.

    Attributes:
        name: stem of its file names.
        title: what it shows, in a line.
        rows: one cell a column.
        notes: what a reader has to know to read it.
        best: (row, column) of the figures that stand out.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    best: tuple[tuple[int, int], ...] = ()

    def texts(self) -> list[list[str]]:
        """Every cell as text."""
        return [[column.text(cell) for column, cell in zip(self.columns, row)] for row in self.rows]

    def groups(self) -> list[tuple[str, list[int]]]:
        """Runs of neighbouring columns under one group heading, row headings left out."""
        runs: list[tuple[str, list[int]]] = []
        for index, column in enumerate(self.columns):
            if column.heading:
                continue
            if runs and column.group and runs[-1][0] == column.group:
                runs[-1][1].append(index)
            else:
                runs.append((column.group, [index]))
        return runs

    @property
    def headings(self) -> list[int]:
        """Columns that name the row."""
        return [index for index, column in enumerate(self.columns) if column.heading]


def value_of(cell: Cell) -> float | None:
    """The number in a cell."""
    if isinstance(cell, Estimate):
        return cell.value
    return None if cell is None or isinstance(cell, str) else float(cell)


def best_cells(table: Table, columns: list[int], rows: list[int] | None = None) -> tuple[tuple[int, int], ...]:
    """The largest figure of each of some columns, ties included, where at least two rows have one.

    Figures that are written alike are alike: 2.934 does not stand out beside 2.931.
    """
    found = []
    for column in columns:
        written = {
            row: float(format(value, table.columns[column].format))
            for row in (range(len(table.rows)) if rows is None else rows)
            if (value := value_of(table.rows[row][column])) is not None
        }
        if len(written) > 1:
            found += [(row, column) for row, value in written.items() if value == max(written.values())]
    return tuple(found)
