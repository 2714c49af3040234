"""The training objectives as a table, from their config classes."""

from __future__ import annotations

from dpace_cli.config import OBJECTIVES
from dpace_cli.tables.table import Column, Table


def objectives_table() -> Table:
    """Name, loss of position k, fields with their defaults, and source of every objective."""
    rows = []
    for objective in OBJECTIVES:
        settings = {n: f for n, f in objective.model_fields.items() if n != "name"}
        texts = [f"{name} {f.default}" if not f.is_required() else name for name, f in settings.items()]
        needs = "yes" if objective.needs_target else "no"
        rows.append(
            (objective.model_fields["name"].default, objective.formula, "; ".join(texts), needs, objective.source)
        )
    columns = (
        Column("Objective", heading=True), Column("loss of position k", heading=True),
        Column("fields and defaults", heading=True), Column("target's logits", heading=True),
        Column("source", heading=True),
    )  # fmt: skip
    notes = ("q: drafter's probability of the target's token; p: the target's distribution; y: the target's token.",)
    return Table("objectives", "Training objectives", columns, tuple(rows), notes)
