"""The doctor's findings and estimate on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpace_cli.checks import Check
from dpace_cli.console import clock
from dpace_cli.doctor.environment import size
from dpace_cli.estimate import Estimate

_STYLES = {"ok": "green", "warning": "bold yellow", "error": "bold red"}


def show(
    checks: Sequence[Check], launch: Mapping[str, Mapping[str, str]], estimate: Estimate | None, out: Console
) -> None:
    """Print findings one to a line, then the launch lines, the estimate, and how many findings need something.

    Lines are never cut or wrapped, so that a path or a command can be copied.
    """
    names = max(len(check.name) for check in checks)
    for check in checks:
        _line(out, (f"{check.level:<8}", _STYLES[check.level]), f"{check.name:<{names + 2}}", check.message)
        if check.hint:
            _line(out, " " * (names + 10), ("do: ", "bold"), check.hint)
    for path, lines in launch.items():
        _line(out, f"\n{path} is used by")
        for reader, line in lines.items():
            _line(out, (f"  {reader:<10}", "bold"), line)
    if estimate is not None:
        _estimate(estimate, out)
    counts = {level: sum(check.level == level for check in checks) for level in _STYLES}
    _line(out, f"\n{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok")


def _line(out: Console, *parts: str | tuple[str, str]) -> None:
    out.print(Text.assemble(*parts), soft_wrap=True)


def _estimate(found: Estimate, out: Console) -> None:
    rows = found.rows
    count = f"{rows.count:,} rows" if rows.count else "rows"
    _line(out, f"\nestimate for {count} of {rows.tokens:.0f} tokens, {rows.anchors:.0f} places for an anchor")
    _line(out, f"  ({rows.source})")
    parameters = ", ".join(f"{name} {_count(value)}" for name, value in found.parameters.items())
    _line(out, f"parameters: {parameters}; hidden states: {size(found.state_bytes_per_token)} a token")
    out.print(_parts("memory of a process", found.memory, found.memory_bytes))
    if found.disk:
        out.print(_parts("disk of the run", found.disk, found.disk_bytes))
    if found.rates is not None:
        out.print(_times(found))
        rates = f"{found.rates.head / 1e9:,.0f} and {found.rates.drafter / 1e9:,.0f} Gflop/s"
        _line(out, f"measured: {rates} ({found.rates.how})")
    table = Table("twice the", "memory", "step time", "hidden states", title="growth", title_justify="left")
    for line in found.growth:
        table.add_row(line.doubled, *(f"x {value:.2f}" for value in (line.memory, line.step_time, line.states)))
    out.print(table)


def _parts(title: str, parts: Mapping[str, int], total: int) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        table.add_row(name, Text(size(value), justify="right"))
    table.add_row("total", Text(size(total), justify="right", style="bold"))
    return table


def _times(found: Estimate) -> Table:
    """The matrix products alone; a step takes longer by what is not a product."""
    table = Table(title="least time", title_justify="left", show_header=False)
    for name, seconds in found.floor_s.items():
        table.add_row(f"{name}, a step", _seconds(seconds))
    step = sum(found.floor_s.values())
    table.add_row("a step", _seconds(step))
    if found.capture_s is not None and "capture" not in found.floor_s:
        table.add_row("capture of all states, once", _seconds(found.capture_s))
    if found.steps is not None:
        table.add_row(f"{found.steps:,} steps", _seconds(found.steps * step))
        if found.arms > 1:
            table.add_row(f"{found.arms} trainings", _seconds(found.arms * found.steps * step))
    return table


def _seconds(value: float) -> Text:
    text = f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:.1f} s" if value < 60 else clock(value)
    return Text(text, justify="right")


def _count(value: int) -> str:
    return f"{value / 1e9:.2f} G" if value >= 1e9 else f"{value / 1e6:.2f} M"
