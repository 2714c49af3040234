"""Tables and bars in a terminal of any width, with or without colour and Unicode.

Where a table is wider than the terminal, it is split into panels that repeat the row headings. A group of
columns (SR and tau of one data set) stays together; a group that does not fit by itself first loses its
optional columns, which every file format keeps.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dpace_cli.tables.table import Table

_WIDEST_HEADING, _NARROWEST_HEADING = 48, 14

_GAP = "  "
_ASCII = str.maketrans({"–": "-", "—": "-", "×": "x", "±": "+/-", "†": "*", "Δ": "d", "…": "...", "·": "-", "─": "-"})


def plain(text: str, ascii_only: bool) -> str:
    """Text without letters that an ASCII terminal cannot show."""
    return text.translate(_ASCII).encode("ascii", "replace").decode() if ascii_only else text


@dataclass(frozen=True)
class TerminalTable:
    """A Table that rich can print."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = options.ascii_only
        grid = _Grid(self.table, ascii_only, options.max_width)
        yield Text(plain(self.table.title, ascii_only), style="bold")
        for panel in grid.panels:
            yield Text()
            yield from grid.lines(panel)
        notes = list(self.table.notes)
        if grid.dropped:
            notes.append(f"No room here for {', '.join(grid.dropped)}: see the files, or a wider terminal.")
        if notes:
            yield Text()
        for note in notes:
            yield Text(plain(note, ascii_only), style="dim")


class _Grid:
    """A table's cells as text, and which columns go side by side."""

    def __init__(self, table: Table, ascii_only: bool, width: int) -> None:
        self.table = table
        self.ascii_only = ascii_only
        self.names = [plain(column.name, ascii_only) for column in table.columns]
        self.cells = [[plain(text, ascii_only) for text in line] for line in table.texts()]
        self.widths = [max(cell_len(text) for text in [name, *(line[i] for line in self.cells)])
                       for i, name in enumerate(self.names)]  # fmt: skip
        # Row headings are wrapped where that saves a panel, and no further.
        tried = []
        for cap in range(_WIDEST_HEADING, _NARROWEST_HEADING - 1, -1):
            self._cap_headings(cap)
            panels, dropped = self._arrange(width)
            too_wide = self._width(table.headings) > width
            tried.append(((too_wide, len(panels), len(dropped), -cap), panels, dropped))
        score, self.panels, self.dropped = min(tried, key=lambda attempt: attempt[0])
        self._cap_headings(-score[-1])

    def _cap_headings(self, cap: int) -> None:
        self.cap = cap
        for index in self.table.headings:
            texts = [self.names[index], *(line[index] for line in self.cells)]
            self.widths[index] = max(cell_len(part) for text in texts for part in self._wrap(text))

    def _wrap(self, text: str) -> list[str]:
        return textwrap.wrap(text, self.cap, break_on_hyphens=" " not in text) or [""]

    def _arrange(self, width: int) -> tuple[list[list[int]], list[str]]:
        """Fill panels from the left with whole groups."""
        room = width - self._width(self.table.headings) - len(_GAP)
        panels: list[list[int]] = []
        dropped: list[str] = []
        for _, group in self.table.groups():
            fitting = group
            if self._group_width(group) > room:
                fitting = [i for i in group if not self.table.columns[i].optional] or group
                dropped += [self.table.columns[i].full_name for i in group if i not in fitting]
            joined = [*panels[-1], *fitting] if panels else []
            if joined and self._panel_width(joined) <= room:
                panels[-1] = joined
            else:
                panels.append(fitting)
        for panel in list(panels):  # what may be left out gets no panel of its own
            if len(panels) > 1 and all(self.table.columns[i].optional for i in panel):
                panels.remove(panel)
                dropped += [self.table.columns[i].full_name for i in panel]
        return panels or [[]], dropped

    def _width(self, columns: Sequence[int]) -> int:
        return sum(self.widths[i] for i in columns) + len(_GAP) * max(len(columns) - 1, 0)

    def _group_width(self, group: Sequence[int]) -> int:
        """A group is as wide as its columns or as its heading."""
        return max(self._width(group), cell_len(self.table.columns[group[0]].group))

    def _panel_width(self, columns: Sequence[int]) -> int:
        groups = self._runs(columns)
        return sum(map(self._group_width, groups)) + len(_GAP) * (len(groups) - 1)

    def _runs(self, columns: Sequence[int]) -> list[list[int]]:
        """The shown columns of each group."""
        return [own for _, group in self.table.groups() if (own := [i for i in group if i in columns])]

    def lines(self, columns: Sequence[int]) -> list[Text]:
        """Heading, rule and rows of one panel."""
        table, runs = self.table, self._runs(columns)
        headings = table.headings
        pad = {run[0]: self._group_width(run) - self._width(run) for run in runs}  # room for a long group heading
        made: list[Text] = []
        if any(table.columns[i].group for i in columns):
            line = Text(" " * self._width(headings))
            for run in runs:
                line.append(_GAP)
                line.append(plain(table.columns[run[0]].group, self.ascii_only).center(self._group_width(run)), "bold")
            made.append(line)
        made += self._line(
            [self._wrap(self.names[i]) for i in headings], [(i, self.names[i]) for i in columns], pad, "bold"
        )
        rule = "-" if self.ascii_only else "─"
        spans = [self._width([i]) for i in headings] + [self._group_width(run) for run in runs]
        made.append(Text(_GAP.join(rule * span for span in spans), style="dim"))
        above: list[str] = []
        for row, cells in enumerate(self.cells):
            names = [cells[i] for i in headings]
            # What a row shares with the one above is not said twice.
            same = next((n for n, pair in enumerate(zip(names, above)) if pair[0] != pair[1]), 0) if above else 0
            shown = [[""] if n < same else self._wrap(name) for n, name in enumerate(names)]
            made += self._line(shown, [(i, cells[i]) for i in columns], pad, "", row)
            above = names
        return made

    def _line(
        self, headings: Sequence[Sequence[str]], cells: Sequence[tuple[int, str]], pad: dict[int, int],
        style: str, row: int = -1,
    ) -> list[Text]:  # fmt: skip
        """A row, as tall as its tallest heading."""
        best = set(self.table.best)
        lines = []
        for level in range(max(map(len, headings), default=1)):
            parts = [
                (own[level] if level < len(own) else "").ljust(self.widths[index])
                for index, own in zip(self.table.headings, headings)
            ]
            line = Text(_GAP.join(parts), style=style)
            if level == 0:
                for index, text in cells:
                    emphasis = "bold" if (row, index) in best else ""
                    line.append(_GAP + " " * (pad.get(index, 0) + self.widths[index] - cell_len(text)))
                    line.append(text, emphasis)
            line.rstrip()
            lines.append(line)
        return lines


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, one a row, each with texts before it and a mark for another value.

    Attributes:
        title: a line above.
        names: headings of the texts.
        texts: for each row, what stands before its bar.
        values: length of each bar, 0 or above; None draws none.
        marks: where a mark stands in each row (a value to compare with).
        legend: what bar and mark mean.
    """

    title: str
    names: Sequence[str]
    texts: Sequence[Sequence[str]]
    values: Sequence[float | None]
    marks: Sequence[float | None] = ()
    legend: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        ascii_only = options.ascii_only
        widths = [max(cell_len(text) for text in column) for column in zip(self.names, *self.texts)]
        room = max(10, min(60, options.max_width - sum(widths) - 2 * len(widths)))
        top = max([value for value in [*self.values, *self.marks] if value is not None], default=0) or 1
        yield Text(plain(self.title, ascii_only), style="bold")
        yield Text(_GAP.join(name.rjust(width) for name, width in zip(self.names, widths)), style="bold")
        for row, (texts, value) in enumerate(zip(self.texts, self.values)):
            line = Text(_GAP.join(plain(text, ascii_only).rjust(width) for text, width in zip(texts, widths)) + _GAP)
            mark = self.marks[row] if self.marks else None
            line.append_text(_bar(value, mark, top, room, ascii_only))
            line.rstrip()
            yield line
        if self.legend:
            yield Text(plain(self.legend, ascii_only), style="dim")


def _bar(value: float | None, mark: float | None, top: float, room: int, ascii_only: bool) -> Text:
    """A bar in eighths of a cell, with a mark laid over it."""
    eighths = round((value or 0) / top * room * 8)
    full, part = divmod(eighths, 8)
    cells = ["#"] * round(eighths / 8) if ascii_only else ["█"] * full + ([" ▏▎▍▌▋▊▉"[part]] if part else [])
    line = Text("".join(cells), style="cyan")
    if mark is None:
        return line
    at = min(round(mark / top * room), room - 1)
    cells += [" "] * (at + 1 - len(cells))
    sign = "|" if ascii_only else "│"
    line = Text("".join(cells[:at]), style="cyan")
    line.append(sign, style="bold yellow")
    line.append("".join(cells[at + 1 :]), style="cyan")
    return line
