"""Tables as files: Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable

from dpace_cli.stats import Estimate
from dpace_cli.tables.table import Table


def markdown(table: Table, level: int = 3) -> str:
    """GitHub's table syntax, with the title as a heading and the notes below."""
    texts, bold = table.texts(), set(table.best)
    header = [_md(column.full_name) for column in table.columns]
    rule = [":--" if column.heading else "--:" for column in table.columns]
    rows = [
        [f"**{_md(text)}**" if (row, column) in bold else _md(text) for column, text in enumerate(line)]
        for row, line in enumerate(texts)
    ]
    lines = [f"{'#' * level} {_md(table.title)}", ""]
    lines += ["| " + " | ".join(line) + " |" for line in (header, rule, *rows)]
    for note in table.notes:
        lines += ["", _md(note)]
    return "\n".join(lines) + "\n"


def _md(text: str) -> str:
    return re.sub(r"([\\|*_<>`])", r"\\\1", text).replace("\n", " ")


def csv_text(table: Table) -> str:
    """Full precision; a figure with an interval takes three columns: value, low, high."""
    spread = [any(isinstance(row[i], Estimate) for row in table.rows) for i in range(len(table.columns))]
    header: list[str] = []
    for column, wide in zip(table.columns, spread):
        header += [column.full_name, *([f"{column.full_name} low", f"{column.full_name} high"] if wide else [])]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for row in table.rows:
        line: list[object] = []
        for cell, wide in zip(row, spread):
            if isinstance(cell, Estimate):
                line += [cell.value, cell.low, cell.high]
            else:
                line += [cell, *([None, None] if wide else [])]
        writer.writerow(["" if value is None else value for value in line])
    return buffer.getvalue()


_TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "—": "---", "×": r"$\times$",
    "±": r"$\pm$", "†": r"$^\dagger$", "Δ": r"$\Delta$", "<": r"$<$", ">": r"$>$", "|": r"$|$",
}  # fmt: skip


def tex(text: str) -> str:
    """Text as LaTeX writes it; tau by its letter."""
    escaped = "".join(_TEX.get(letter, letter) for letter in text)
    return re.sub(r"\btau\b", r"$\\tau$", escaped)


def latex(table: Table) -> str:
    """A `table` float in booktabs style."""
    bold, texts = set(table.best), table.texts()
    order = [*table.headings, *(index for _, group in table.groups() for index in group)]
    top, rules, at = [""] * len(table.headings), [], len(table.headings) + 1
    for name, group in table.groups():
        top.append(rf"\multicolumn{{{len(group)}}}{{c}}{{{tex(name)}}}" if name else "")
        if name:
            rules.append(rf"\cmidrule(lr){{{at}-{at + len(group) - 1}}}")
        at += len(group)
    lines = [
        r"% needs \usepackage{booktabs}",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex(table.title)}}}",
        rf"\label{{tab:{table.name}}}",
        r"\begin{tabular}{" + "".join("l" if table.columns[i].heading else "r" for i in order) + "}",
        r"\toprule",
    ]
    if rules:
        lines += [" & ".join(top) + r" \\", " ".join(rules)]
    lines += [" & ".join(tex(table.columns[i].name) for i in order) + r" \\", r"\midrule"]
    for row, line in enumerate(texts):
        cells = [rf"\textbf{{{tex(line[i])}}}" if (row, i) in bold else tex(line[i]) for i in order]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    lines += [rf"\par\smallskip{{\footnotesize {tex(note)}}}" for note in table.notes]
    return "\n".join([*lines, r"\end{table}", ""])


def html_table(table: Table) -> str:
    """A table that a screen reader can walk: caption, scoped headings in both directions."""
    order = [*table.headings, *(index for _, group in table.groups() for index in group)]
    bold, texts = set(table.best), table.texts()
    grouped = any(name for name, _ in table.groups())
    head = ""
    if grouped:
        tall = ' rowspan="2"'
        cells = [f'<th scope="col"{tall}>{_h(table.columns[i].name)}</th>' for i in table.headings]
        cells += [
            f'<th scope="colgroup" colspan="{len(group)}" class="group">{_h(name)}</th>'
            if name
            else "".join(f'<th scope="col"{tall} class="number">{_h(table.columns[i].name)}</th>' for i in group)
            for name, group in table.groups()
        ]
        second = [f'<th scope="col" class="number">{_h(table.columns[i].name)}</th>'
                  for name, group in table.groups() if name for i in group]  # fmt: skip
        head = _row(cells) + _row(second)
    else:
        head = _row(
            f'<th scope="col"{"" if table.columns[i].heading else " class=number"}>{_h(table.columns[i].name)}</th>'
            for i in order
        )
    body = ""
    for row, line in enumerate(texts):
        cells = []
        for i in order:
            text = f"<strong>{_h(line[i])}</strong>" if (row, i) in bold else _h(line[i])
            cells.append(f'<th scope="row">{text}</th>' if table.columns[i].heading else f"<td>{text}</td>")
        body += _row(cells)
    label = f"cap-{table.name}"
    below = "".join(f'<p class="note">{_h(note)}</p>' for note in table.notes)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{label}">'
        f'<table><caption id="{label}"><span>{_h(table.title)}</span></caption>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div>{below}\n"
    )


def _row(cells: Iterable[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _h(text: str) -> str:
    return html.escape(text)
