"""Tables and plots in every form: nothing wider than its terminal, nothing lost in a file, no theme forgotten."""

from __future__ import annotations

import csv
import io
import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_setup import drawn
from rich.cells import cell_len
from rich.console import Console

from dpace_cli.render import plots, show_result
from dpace_cli.render.export import csv_text, html_table, latex, markdown
from dpace_cli.render.figures import look_of, section_figures
from dpace_cli.render.page import KeyFigure, Page, Part
from dpace_cli.render.terminal import Bars, TerminalTable
from dpace_cli.stats import Bootstrap, Estimate
from dpace_cli.tables import catalog, objectives_table
from dpace_cli.tables.arms import sections
from dpace_cli.tables.published import published
from dpace_cli.tables.table import Column, Table

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca")


@pytest.fixture(scope="module")
def section():
    from pathlib import Path

    records = [
        drawn(
            f"{name}-l{layers}", rate, 6, dataset=data_set, objective={"name": name}, num_draft_layers=layers, seed=seed
        )
        for name, rate in (("dflash", 0.5), ("dpace", 0.8), ("dpace-cumulative-confidence-only", 0.6))
        for layers in (3, 5)
        for data_set in SETS
        for seed in (0, 1)
    ]
    (made,) = sections([(Path("x/y.json"), one) for one in records], "dflash", [], Bootstrap(resamples=100))
    return made


@pytest.fixture(scope="module")
def tables(section):
    made = [
        catalog.speed(section), catalog.figures(section), catalog.differences(section), catalog.lossless(section),
        catalog.ablation(section), catalog.acceptance_histogram(section), catalog.acceptance_positions(section),
        published(), objectives_table(),
    ]  # fmt: skip
    assert all(made)
    return made


def printed(item, width=80, encoding="utf-8", **options) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width, **options).print(item)
    file.flush()
    return raw.getvalue().decode(encoding)


# --- terminal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_table_is_wider_than_the_terminal(tables, width):
    for table in tables:
        text = printed(TerminalTable(table), width)
        assert max(cell_len(line) for line in text.splitlines()) <= width, table.name
        assert table.title.split(",")[0].split()[0] in text


@pytest.mark.parametrize("width", [80, 200])
def test_every_figure_is_shown_but_for_optional_columns(tables, width):
    for table in tables:
        text = " ".join(printed(TerminalTable(table), width).split())
        for row in table.texts():
            for column, cell in zip(table.columns, row):
                if not column.heading and not column.optional:
                    assert cell in text, (table.name, column.full_name)


def test_at_200_columns_the_main_table_is_one_panel(section):
    text = printed(TerminalTable(catalog.speed(section)), 200)
    (line,) = [line for line in text.splitlines() if "gsm8k" in line and "Prompts" not in line]
    assert all(name in line for name in (*SETS, "average"))


def test_a_group_of_columns_stays_together(section):
    for line in printed(TerminalTable(catalog.speed(section)), 80).splitlines():
        if line.rstrip().endswith("tau"):
            assert line.count("SR") == line.count("tau")


def test_what_was_left_out_is_said(section):
    text = " ".join(printed(TerminalTable(catalog.differences(section)), 60).split())
    assert "No room here for" in text
    assert "tau in %" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_plain_terminals_get_plain_letters(tables, encoding):
    for table in tables:
        assert printed(TerminalTable(table), 80, encoding).isascii()


def test_without_colour_there_is_no_escape_code(tables, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(_bars(), force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", text)
    assert "\x1b" not in printed(TerminalTable(tables[0]))


def _bars() -> Bars:
    return Bars(
        "Title",
        ("k", "share"),
        [("1", "50.0%"), ("2", "–"), ("3", "25.0%")],
        [0.5, None, 0.25],
        [0.25, 0.5, 0.4],
        "legend",
    )


def test_bars_are_as_long_as_their_values_and_carry_the_mark():
    lines = printed(_bars()).splitlines()
    assert lines[2].count("█") + lines[2].count("│") == 60
    assert lines[2].index("│") < lines[3].index("│")
    assert "█" not in lines[3]
    assert 29 <= lines[4].count("█") <= 30
    assert max(map(cell_len, lines)) <= 80
    ascii_lines = printed(_bars(), encoding="ascii").splitlines()
    assert ascii_lines[2].count("#") + ascii_lines[2].count("|") == 60
    assert "|" in ascii_lines[3]


def test_bars_of_nothing_and_of_zero():
    assert "█" not in printed(Bars("t", ("k",), [("1",)], [None]))
    assert "█" not in printed(Bars("t", ("k",), [("1",)], [0.0]))


@dataclass(frozen=True)
class _Row:
    dataset: str
    tau: float
    errors: int


@dataclass(frozen=True)
class _Result:
    dataset: str
    tau: float
    tokens_per_s: float
    rejected: dict[str, int]
    empty: list[str]
    results: list[_Row]


def test_a_record_is_shown_field_by_field_and_its_rows_as_a_table():
    console = Console(file=io.StringIO(), width=80)
    show_result(
        _Result("gsm8k", 3.0, 1234.5, {"no answer": 2}, [], [_Row("gsm8k", 3.0, 0), _Row("mbpp", 4.25, 1)]), console
    )
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["tokens/s", "1,234"]
    assert "no answer: 2" in lines[1]
    assert "empty" not in console.file.getvalue()
    assert lines[-2].split() == ["gsm8k", "3.00", "0"]
    assert lines[-1].split() == ["mbpp", "4.25", "1"]


# --- files ------------------------------------------------------------------------------------------------


def test_csv_keeps_every_digit_and_both_bounds(section):
    table = catalog.figures(section)
    rows = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert len(rows) == len(table.rows)
    tau = table.rows[0][4]
    assert (float(rows[0]["tau"]), float(rows[0]["tau low"]), float(rows[0]["tau high"])) == (
        tau.value,
        tau.low,
        tau.high,
    )
    assert rows[-1]["steps a prompt"] == ""


def test_latex_rows_have_the_columns_of_their_tabular(tables):
    for table in tables:
        text = latex(table)
        columns = len(re.search(r"begin\{tabular\}\{([lr]+)\}", text)[1])
        body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) >= len(table.rows) + 1
        for line in rows:
            spanned = sum(int(n) - 1 for n in re.findall(r"\\multicolumn\{(\d+)\}", line))
            assert len(re.findall(r"(?<!\\)&", line)) + 1 + spanned == columns, line
        assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
        assert not re.search(r"(?<!\\)[%_#]", text.split("\n", 1)[1])
        assert r"\usepackage{booktabs}" in text
        assert text.isascii()


def test_latex_rules_lie_under_their_group(section):
    text = latex(catalog.speed(section))
    assert r"\cmidrule(lr){3-4} \cmidrule(lr){5-6}" in text
    assert r"\cmidrule(lr){15-16}" in text
    assert text.count(r"\textbf{") >= 14


def test_markdown_rows_have_one_cell_a_column(tables):
    for table in tables:
        lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
        assert len(lines) == len(table.rows) + 2
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(table.columns) + 1}


@given(st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_cell_in_every_form(text):
    table = Table("t", "A title", (Column("a", heading=True), Column("b")), ((text, 1.5), ("x", None)), (text,))
    assert next(iter(csv.reader(io.StringIO(csv_text(table), newline=""))), None) == ["a", "b"]
    if not set(text) & set("\n\r"):
        assert list(csv.reader(io.StringIO(csv_text(table), newline="")))[1] == [text, "1.5"]
    page = _Walker(html_table(table))
    assert page.counts["td"] == 2
    assert page.counts["tr"] == 3
    for form in (markdown, latex):
        assert "1.50" in form(table)
    assert "1.50" in printed(TerminalTable(table))


class _Walker(HTMLParser):
    """Counts elements, collects ids and attributes, and notices what is not closed."""

    VOID = ("meta", "br", "link", "input", "img", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def attributes(self, name: str) -> list[str]:
        return [own[name] for _, own in self.elements if name in own]


def test_html_tables_say_what_their_headings_head(section):
    page = _Walker(html_table(catalog.speed(section)))
    scopes = [own.get("scope") for tag, own in page.elements if tag == "th"]
    assert None not in scopes
    assert scopes.count("colgroup") == 7
    assert scopes.count("col") == 2 + 14
    assert scopes.count("row") == 2 * 6
    assert page.counts["caption"] == 1
    (scroll,) = [own for tag, own in page.elements if tag == "div"]
    assert scroll["tabindex"] == "0"
    assert scroll["aria-labelledby"] in page.attributes("id")


# --- plots and page ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(section):
    figures = section_figures(section, look_of([section]))
    dynamics = plots.dynamics("dyn", "Dynamics", "alt", [1, 2], np.array([[0.5, 0.5], [0.25, np.nan]]))
    part = Part("Temperature 0", "Lead & more.", [catalog.speed(section), *figures])
    made = Page(
        "A <title>", "Summary.", [KeyFigure("tau", "4.50", ["[4, 5]"])], ["Careful."], [part], {"Device": "cpu"}
    )
    return made.html(), [figure.plot for figure in figures] + [dynamics]


def test_page_is_well_formed_and_ids_are_unique(page):
    text, _ = page
    found = _Walker(text)
    ids = found.attributes("id")
    assert len(ids) == len(set(ids))
    for link in [own["href"] for tag, own in found.elements if tag == "a"]:
        assert link.startswith("#")
        assert link[1:] in ids
    for label in found.attributes("aria-labelledby"):
        assert label in ids
    levels = [int(tag[1]) for tag, _ in found.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert "A &lt;title&gt;" in text


def test_page_needs_no_other_file(page):
    text, _ = page
    found = _Walker(text)
    assert not [own for tag, own in found.elements if tag in ("link", "img", "iframe")]
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)
    assert not re.search(r"url\((?!#)", text)
    assert "@import" not in text


def test_page_has_both_themes_and_print(page):
    text, _ = page
    style = text[text.index("<style>") : text.index("</style>")]
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    light, dark = style.split("prefers-color-scheme: dark")
    for name in used:
        assert f"{name}:" in light
        assert f"{name}:" in dark


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_have_the_contrast_of_wcag_on_their_page(page):
    text, _ = page
    roots = re.findall(r":root \{ (?:color-scheme: light dark; )?((?:--[\w-]+: #\w{6}; )+)", text)
    assert len(roots) == 2
    for root in roots:
        colours = dict(re.findall(r"(--[\w-]+): (#\w{6});", root))
        ground = _luminance(colours["--page"])
        for name, colour in colours.items():
            least = 4.5 if name in ("--ink", "--muted", "--link") else 3.0 if name.startswith("--arm") else 0
            high, low = sorted((ground, _luminance(colour)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= least, name


def test_plots_take_their_colours_from_the_page_and_say_what_they_show(page):
    _, drawn_plots = page
    assert len(drawn_plots) >= 5
    for plot in drawn_plots:
        svg = plot.svg()
        root = ElementTree.fromstring(svg)
        assert root.get("role") == "img"
        assert root[0].tag.endswith("title")
        assert root[0].text == plot.alt
        style = " ".join(re.findall(r'style="([^"]*)"', svg))
        assert "var(--ink)" in style
        raw = set(re.findall(r"#[0-9a-f]{6}", style))
        assert not raw, plot.name
        assert "Date" not in svg
        assert svg == plot.svg()


def test_an_arm_has_one_colour_and_marker_and_no_two_arms_share_both():
    arms = tuple(f"arm{i}" for i in range(15))
    look = plots.Look(arms)
    assert look.colour("arm0") == plots.LIGHT[0]
    assert len({(look.colour(arm), look.marker(arm)) for arm in arms}) == 15
    assert plots.LIGHT[0] not in [look.colour(arm) for arm in arms[1:]]


def test_png_is_a_png(page):
    _, drawn_plots = page
    for plot in drawn_plots:
        buffer = io.BytesIO()
        plot.png(buffer)
        data = buffer.getvalue()
        assert data.startswith(b"\x89PNG")
        width = int.from_bytes(data[16:20], "big")
        assert 800 < width < 2400


def test_dots_leave_out_what_was_not_measured():
    look = plots.Look(("a", "b"))
    values = {"a": [Estimate(1.0), None], "b": [None, Estimate(2.0, 1.5, 2.5, 5, "BCa")]}
    svg = plots.dots("d", "t", "alt", "axis", ["one", "two"], values, look).svg()
    assert "nan" not in svg
