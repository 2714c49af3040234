"""Figures from the paper, from a data file of the package; none of them was measured here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dpace_cli.tables.table import Column, Table


@dataclass(frozen=True)
class Published:
    """Figures from the paper, each labelled as published and never as measured here."""

    source: str
    url: str
    figures: list[dict[str, Any]]


def published_figures() -> Published:
    """What the package's data file holds."""
    text = resources.files("dpace_cli").joinpath("data", "published.json").read_text("utf-8")
    return Published(**json.loads(text))


def published() -> Table:
    """The published figures as a table of their own."""
    data = published_figures()
    columns = (
        Column("What", heading=True), Column("Target", heading=True), Column("Setting", heading=True),
        Column("compared with", heading=True), Column("its figure"), Column("D-PACE"),
    )  # fmt: skip
    rows = []
    for figure in data.figures:
        reference = figure.get("reference")
        rows.append((
            figure["what"], figure.get("target", ""), figure.get("setting", ""), figure.get("compared_with", ""),
            None if reference is None else format(reference, figure["format"]),
            format(figure["dpace"], figure["format"]),
        ))  # fmt: skip
    notes = (f"Source: {data.source}, {data.url}",)
    return Table("published", "Published figures (not measured here)", columns, tuple(rows), notes)
