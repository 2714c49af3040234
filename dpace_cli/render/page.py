"""One HTML file that needs nothing else: no network, no script to be read, both themes, print.

The plots are SVG in the page and take their colours from its style sheet, so they follow the theme. Headings
are in order, tables have captions and scoped headings, wide ones scroll by keyboard, and every plot has a text
and a table that say the same.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

from dpace_cli.render.export import html_table
from dpace_cli.render.figures import Figure
from dpace_cli.render.plots import slug
from dpace_cli.render.style import STYLE
from dpace_cli.tables.table import Table


@dataclass(frozen=True)
class KeyFigure:
    """One number that a reader should leave with.

    Attributes:
        label: what it is. value: the figure. details: interval, comparison; a line each.
    """

    label: str
    value: str
    details: Sequence[str]


@dataclass(frozen=True)
class Part:
    """A section of the page.

    Attributes:
        title: its heading.
        lead: a sentence or two below it.
        items: tables and figures in order.
    """

    title: str
    lead: str = ""
    items: Sequence[Table | Figure] = field(default_factory=tuple)


@dataclass(frozen=True)
class Page:
    """What the report says.

    Attributes:
        title, summary: heading and opening sentence.
        keys: figures at the top.
        cautions: what a reader should know before comparing.
        parts: the body.
        facts: name to value, for the foot.
    """

    title: str
    summary: str
    keys: Sequence[KeyFigure]
    cautions: Sequence[str]
    parts: Sequence[Part]
    facts: dict[str, str]

    def html(self) -> str:
        """The whole document."""
        shown = {item.name for part in self.parts for item in part.items if isinstance(item, Table)}
        contents = "".join(
            f'<li><a href="#{slug(part.title).lower()}">{_h(part.title)}</a></li>' for part in self.parts
        )
        body = "".join(_part(part, shown) for part in self.parts)
        facts = "".join(f"<div><dt>{_h(name)}</dt><dd>{_h(value)}</dd></div>" for name, value in self.facts.items())
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{_h(self.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
            '<a class="skip" href="#main">Skip to the results</a>\n'
            f'<header><p class="brand">dpace report</p><h1>{_h(self.title)}</h1>'
            f'<p class="summary">{_h(self.summary)}</p></header>\n'
            f'<nav aria-label="Contents"><ul>{contents}</ul></nav>\n<main id="main" tabindex="-1">\n'
            f"{self._keys()}{self._cautions()}{body}"
            f"</main>\n<footer><h2>How this was measured</h2><dl>{facts}</dl></footer>\n"
            f"<script>{_PRINT}</script>\n</body>\n</html>\n"
        )

    def _keys(self) -> str:
        cards = "".join(
            f'<li><span class="label">{_h(key.label)}</span> <span class="value">{_h(key.value)}</span> '
            + "".join(f'<span class="detail">{_h(line)}</span> ' for line in key.details)
            + "</li>"
            for key in self.keys
        )
        return f'<ul class="keys" aria-label="Main figures">{cards}</ul>\n' if cards else ""

    def _cautions(self) -> str:
        if not self.cautions:
            return ""
        items = "".join(f"<li>{_h(text)}</li>" for text in self.cautions)
        return (
            '<aside class="cautions" aria-labelledby="cautions"><h2 id="cautions">Before comparing</h2>'
            f"<ul>{items}</ul></aside>\n"
        )


def _part(part: Part, shown: set[str]) -> str:
    lead = f"<p>{_h(part.lead)}</p>" if part.lead else ""
    items = "".join(_figure(item, shown) if isinstance(item, Figure) else html_table(item) for item in part.items)
    anchor = slug(part.title).lower()
    return f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{_h(part.title)}</h2>{lead}{items}</section>\n'


def _figure(figure: Figure, shown: set[str]) -> str:
    """A plot with its caption, and its numbers to unfold; where the page has them already, a link there."""
    plot, table = figure.plot, figure.table
    if table.name in shown:
        data = f'<p class="note"><a href="#cap-{table.name}">The same in numbers</a></p>'
    else:
        shown.add(table.name)
        data = f"<details><summary>The same in numbers</summary>{html_table(table)}</details>"
    return f"<figure><figcaption>{_h(plot.title)}</figcaption>{plot.svg()}{data}</figure>\n"


def _h(text: str) -> str:
    return html.escape(text)


# What is folded away on the screen is printed.
_PRINT = "addEventListener('beforeprint',()=>document.querySelectorAll('details').forEach(d=>d.open=true));"
