"""Which plots a comparison gets, each with the table that says the same in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpace_cli.render import plots
from dpace_cli.render.plots import Look, Plot
from dpace_cli.tables import catalog
from dpace_cli.tables.arms import Arm, Section
from dpace_cli.tables.positions import (
    CheckpointWeights,
    decay_name,
    dynamics_table,
    last_of_each,
    position_table,
    trajectories,
)
from dpace_cli.tables.table import Table

ENOUGH_TRIALS = 20
"""Drafts that a share must be made of to be drawn: of fewer, a line shows nothing but chance."""


@dataclass(frozen=True)
class Figure:
    """A plot and its data."""

    plot: Plot
    table: Table


def look_of(sections: Sequence[Section]) -> Look:
    """One colour for each arm, whatever the section; the reference's is grey."""
    names = tuple(dict.fromkeys(section.name_of(arm) for section in sections for arm in section.arms))
    return Look(names if len(names) > 1 else ("", *names))  # an arm alone is no reference


def section_figures(section: Section, look: Look) -> list[Figure]:
    """Every plot that the section's records can fill."""
    return [
        *_measures(section, look),
        *_differences(section, look),
        *_histogram(section, look),
        *_positions(section, look),
        *_trajectories(section, look),
    ]


def _rows(section: Section, arms: Sequence[Arm]) -> list[str | None]:
    average = len(section.data_sets) > 1 and any(section.figures(arm, None) for arm in arms)
    return [*section.data_sets, *([None] if average else [])]


def _measures(section: Section, look: Look) -> list[Figure]:
    found = []
    rows = _rows(section, section.arms)
    for measure, axis, at in (
        ("tau", "tau: tokens a verify step", None),
        ("sr", "SR: times as fast as the target", 1.0),
    ):
        arms = {
            section.name_of(arm): [section.figures(arm, row).get(measure) for row in rows] for arm in section.arms
        }  # fmt: skip
        arms = {name: own for name, own in arms.items() if any(own)}
        if arms:
            title = f"{'Acceptance length (tau)' if measure == 'tau' else 'Speed-up (SR)'}, {section.title}"
            best = {name: own[-1] for name, own in arms.items() if own[-1] is not None}
            words = "; ".join(f"{name} {own.value:.2f}" for name, own in best.items())
            alt = f"{title} by data set, one dot an arm with its interval. {rows[-1] or 'Average'}: {words}."
            names = [row or "average" for row in rows]
            plot = plots.dots(f"{measure}-{section.slug}", title, alt, axis, names, arms, look, at)
            found.append(Figure(plot, catalog.figures(section)))
    return found


def _differences(section: Section, look: Look) -> list[Figure]:
    table = catalog.differences(section)
    if table is None:
        return []
    arms = [arm for arm in section.arms if section.reference_of(arm) is not None]
    rows = _rows(section, arms)
    series = {section.name_of(arm): [section.difference(arm, row).get("delta_tau") for row in rows] for arm in arms}
    series = {name: own for name, own in series.items() if any(own)}
    if not series:
        return []
    title = f"Difference of tau to the reference, {section.title}"
    words = "; ".join(f"{name} {own[-1].value:+.2f}" for name, own in series.items() if own[-1] is not None)
    alt = f"{title}, by data set, with intervals and a line at zero. {rows[-1] or 'Average'}: {words}."
    names = [row or "average" for row in rows]
    plot = plots.dots(f"delta-tau-{section.slug}", title, alt, "difference of tau", names, series, look, 0.0)
    return [Figure(plot, table)]


def _histogram(section: Section, look: Look) -> list[Figure]:
    table, made = catalog.acceptance_histogram(section), catalog.histograms(section)
    if table is None:
        return []
    title = f"Acceptance lengths, {section.title}"
    full = "; ".join(f"{name} {own[1]:.0%} single tokens, {own[-1]:.0%} whole blocks" for name, own in made.items())
    alt = f"{title}: share of verify steps by the tokens that they produced, a panel an arm. {full}."
    return [Figure(plots.histograms(table.name, title, alt, "tokens a verify step", made, look), table)]


def _positions(section: Section, look: Look) -> list[Figure]:
    table, made = catalog.acceptance_positions(section), catalog.position_rates(section)
    if table is None:
        return []
    title = f"Acceptance by position, {section.title}"
    made = {name: own for name, own in made.items() if own[0].trials >= ENOUGH_TRIALS}
    if not made:
        return []
    words = "; ".join(f"{name} {own[0].value:.0%}" for name, own in made.items())
    alt = f"{title}: share accepted given that all earlier positions were, a line an arm. At position 1: {words}."
    series = {
        name: (range(1, len(own) + 1), [rate.value if rate.trials >= ENOUGH_TRIALS else None for rate in own])
        for name, own in made.items()
    }
    y_axis = f"accepted, given that all earlier positions were (where {ENOUGH_TRIALS} drafts or more came so far)"
    plot = plots.lines(table.name, title, alt, "position in the block", y_axis, series, look, percent=True)
    return [Figure(plot, table)]


def _trajectories(section: Section, look: Look) -> list[Figure]:
    table = catalog.trajectory(section)
    if table is None:
        return []
    found = []
    for data_set in section.data_sets:
        for measure, words in (("tau", "tau"), ("sr", "SR")):
            series = {}
            for arm in section.arms:
                points = [(step, catalog.at_step(arm, step, data_set, measure)) for step in sorted(arm.steps)]
                points = [(step, value) for step, value in points if value is not None]
                if len(points) > 1:
                    series[section.name_of(arm)] = ([step for step, _ in points], [value for _, value in points])
            if series:
                title = f"{words} over training, {data_set}, {section.title}"
                ends = "; ".join(f"{name} from {y[0]:.2f} to {y[-1]:.2f}" for name, (_, y) in series.items())
                name = f"trajectory-{measure}-{plots.slug(data_set)}-{section.slug}"
                plot = plots.lines(name, title, f"{title}. {ends}.", "training step", words, series, look)
                found.append(Figure(plot, table))
    return found


def weight_figures(found: Sequence[CheckpointWeights]) -> list[Figure]:
    """A histogram of position weights for the last step of each training, and its dynamics where there are steps."""
    made = []
    for one in last_of_each(found):
        made += _weight_histogram(one)
    for name, steps in trajectories(found).items():
        shares = np.full((len(steps), max(len(c.positions) for c in steps)), np.nan)
        for row, one in enumerate(steps):
            shares[row, : len(one.positions)] = [np.nan if p.share is None else p.share for p in one.positions]
        table = dynamics_table(name, steps)
        middle = [np.nansum(np.arange(1, shares.shape[1] + 1) * row) for row in shares]
        alt = (
            f"Share of all position weight by training step and position, {name}. The mean position of the weight "
            f"goes from {middle[0]:.1f} at step {steps[0].step} to {middle[-1]:.1f} at step {steps[-1].step}."
        )
        made.append(Figure(plots.dynamics(table.name, table.title, alt, [c.step or 0 for c in steps], shares), table))
    return made


def _weight_histogram(one: CheckpointWeights) -> list[Figure]:
    table = position_table(one)
    if all(p.share is None for p in one.positions):
        return []
    first = one.positions[0]
    alt = (
        f"{table.title}: share of all weight by position, with the fixed decay as an outline, and below it confidence "
        f"and the share of blocks whose first k tokens are right. Position 1 has {first.share or 0:.0%} of the weight."
    )

    def column(name: str) -> list[float]:
        values = [getattr(p, name) for p in one.positions]
        return [np.nan if value is None else value for value in values]

    plot = plots.weights(
        table.name, table.title, alt, column("share"), column("decay_share"), column("confidence"),
        column("accepted"), decay_name(one.gamma),
    )  # fmt: skip
    return [Figure(plot, table)]
