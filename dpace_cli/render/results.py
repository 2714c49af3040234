"""What a stage reports, on a terminal. A result that draws itself does; any other is shown field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from dpace_cli.render.terminal import TerminalTable, plain
from dpace_cli.stats import Estimate
from dpace_cli.tables.table import MISSING, Cell, Column, Table


def show_result(result: Any, console: Console) -> None:
    """Print a stage's result: a table, something that rich can draw, or a record."""
    if isinstance(result, Table):
        console.print(TerminalTable(result))
    elif hasattr(result, "__rich_console__"):
        console.print(result)
    elif is_dataclass(result):
        _show_record(result, console)
    else:
        console.print(result)


def _show_record(result: Any, console: Console) -> None:
    values = {f.name: getattr(result, f.name) for f in fields(result)}
    lists = {name: value for name, value in values.items() if _is_rows(value)}
    # What the rows of a list say is not said twice.
    told = {name for rows in lists.values() for name in _row(rows[0])}
    plain_values = {n: v for n, v in values.items() if n not in lists and n not in told and v not in (None, [], {}, "")}
    width = max((len(_words(name)) for name in plain_values), default=0)
    for name, value in plain_values.items():
        line = Text(f"{_words(name):<{width}}  ", style="dim")
        line.append(plain(_text(value), console.options.ascii_only), style="not dim")
        console.print(line, soft_wrap=True)
    for name, rows in lists.items():
        console.print()
        console.print(TerminalTable(rows_table(_words(name), rows)))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(is_dataclass(v) or isinstance(v, dict) for v in value)


def rows_table(title: str, rows: Sequence[Any]) -> Table:
    """A table of records or mappings: one column a field that some row fills and that fits into a cell."""
    made = [_row(row) for row in rows]
    names = [name for name in dict.fromkeys(n for row in made for n in row) if any(row.get(name) for row in made)]
    columns = []
    for name in names:
        cells = [row.get(name) for row in made]
        words = any(isinstance(cell, str) for cell in cells)
        columns.append(Column(_words(name), format=_format(cells), heading=words, interval=True))
    headings_first = sorted(range(len(names)), key=lambda i: not columns[i].heading)
    return Table(
        "rows", title, tuple(columns[i] for i in headings_first),
        tuple(tuple(row.get(names[i]) for i in headings_first) for row in made),
    )  # fmt: skip


def _row(row: Any) -> dict[str, Cell]:
    values = row if isinstance(row, Mapping) else {f.name: getattr(row, f.name) for f in fields(row)}
    return {name: cell for name, value in values.items() if (cell := _cell(value)) is not ...}


def _cell(value: Any) -> Any:
    """The value as a cell; ... where it does not fit into one."""
    if isinstance(value, Mapping) and {"value", "low", "high"} <= set(value):
        return Estimate(value["value"], value["low"], value["high"])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and all(isinstance(v, int | str) for v in value):
        return ", ".join(map(str, value))
    if isinstance(value, Path):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | Estimate) else ...


def _format(cells: Sequence[Cell]) -> str:
    numbers = [cell for cell in cells if cell is not None and not isinstance(cell, str)]
    return ",d" if numbers and all(isinstance(n, int) for n in numbers) else ".2f"


def _words(name: str) -> str:
    return name.replace("_", " ").replace("tokens per s", "tokens/s")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(item)}" for key, item in value.items()) or MISSING
    if isinstance(value, list | tuple):
        return ", ".join(_text(item) for item in value)
    return str(value)
