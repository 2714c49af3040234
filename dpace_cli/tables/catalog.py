"""One function a table. Each takes a section (or several) and gives a Table, or None where it would be empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from dpace_cli.results import BenchRecord
from dpace_cli.stats import Estimate, Rate, acceptance_by_position, histogram
from dpace_cli.tables.arms import Arm, Section
from dpace_cli.tables.table import Cell, Column, Table, best_cells, value_of

SR_NOTE = "SR: mean time per output token of the target alone over that with the drafter (DFlash's definition)."
TAU_NOTE = "tau: mean over requests of each request's mean acceptance length, bonus token included."
POOLED_NOTE = "pooled tau: mean over all verify steps of all requests, as vLLM and SGLang count."

DPACE_FAMILY = (
    "dpace", "dpace-cumulative-confidence-only", "dpace-continuation-value-only", "dpace-target-probability",
)  # fmt: skip


def _percent(section: Section) -> str:
    return f"{100 * section.bootstrap.confidence:g}%"


def _interval_note(section: Section) -> str:
    return (
        f"In brackets: {_percent(section)} bootstrap interval over prompts "
        f"(BCa, {section.bootstrap.resamples:,} resamples; all turns of a conversation together)."
    )


# --- what an arm is worth ------------------------------------------------------------------------------------


def overview(section: Section) -> Table | None:
    """A row for each arm: tau, SR and what sets them apart from the reference, over all data sets."""
    only = section.data_sets[0] if len(section.data_sets) == 1 else None
    if len(section.arms) < 2 or not any(section.figures(arm, only) for arm in section.arms):
        return None
    confidence = section.bootstrap.confidence
    seeded = any(len(arm.seeds) > 1 for arm in section.arms)
    timed = any("sr" in section.figures(arm, only) for arm in section.arms)
    columns = [Column("Arm", heading=True)]
    columns += [Column("seeds", format="d")] if seeded else []
    for measure in ("tau", "SR") if timed else ("tau",):
        columns.append(Column("mean" if seeded or only is None else "value", group=measure, interval=True))
        columns.append(Column("difference", group=measure, format="+.2f", interval=True))
        if seeded and measure == "tau":
            columns.append(Column("over seeds", group=measure, format="+.2f", interval=True))
    rows: list[tuple[Cell, ...]] = []
    clear: list[tuple[int, int]] = []
    for arm in section.arms:
        found, delta = section.figures(arm, only), section.difference(arm, only)
        row: list[Cell] = [_marked(section, arm), *([len(arm.seeds)] if seeded else [])]
        for measure in ("tau", "sr") if timed else ("tau",):
            change = delta.get(f"delta_{measure}")
            cells = [found.get(measure), change]
            if seeded and measure == "tau":
                cells.append(change.over_seeds(confidence) if change is not None else None)
            for place, cell in enumerate(cells[1:], start=len(row) + 1):
                if cell is not None and cell.excludes(0):
                    clear.append((len(rows), place))
            row += cells
        rows.append(tuple(row))
    over = f"On {only}" if only else f"Averages over {len(section.data_sets)} data sets"
    notes = [f"{over}; difference: to {_references(section)}.", _interval_note(section)]
    if seeded:
        notes.append(
            f"over seeds: the mean of the seeds' own differences with its {_percent(section)} interval by Student's t: "
            "how it moves with other seeds of training, where the interval before it says how with other prompts."
        )
    notes += ["In bold: the interval excludes zero.", SR_NOTE if timed else "SR: not measured.", TAU_NOTE]
    notes.append(_prompt_note(section))
    notes += _method_note(section, [cell for row in rows for cell in row])
    return Table(
        f"arms-{section.slug}", f"Arms, {section.title}", tuple(columns), tuple(rows), tuple(notes), tuple(clear)
    )


def _references(section: Section) -> str:
    """What the arms are compared with, in words."""
    names = {section.name_of(reference) for arm in section.arms if (reference := section.reference_of(arm))}
    return names.pop() if len(names) == 1 else "the reference of the same depth, block size and learning rate"


# --- the paper's shape --------------------------------------------------------------------------------------


def speed(section: Section) -> Table:
    """SR and tau: rows objective by depth, columns data sets, the average last, the best in bold."""
    arms = sorted(section.arms, key=lambda arm: arm.layers)
    return _by_data_set(
        section,
        f"speed-{section.slug}",
        f"Speed-up (SR) and acceptance length (tau), {section.title}",
        [Column("Layers", heading=True, format="d"), Column("Objective", heading=True)],
        [((arm.layers, _marked(section, arm, depth_beside=True)), arm) for arm in arms],
        within=lambda arm: arm.layers,
    )


def by_factor(section: Section) -> list[Table]:
    """A table for each factor in which arms differ and in nothing else: what the objective takes, and the sizes."""
    taken: list[tuple[str, str, Callable[[Arm], Any]]] = [
        (key.replace("_", "-"), key.replace("_", "-"), lambda arm, key=key: arm.objective.get(key, ...))
        for key in ("alpha", "gamma", "reduction", "top_k")
    ]
    factors: list[tuple[str, str, Callable[[Arm], Any]]] = [
        *taken,
        ("block-size", "block size", lambda arm: arm.block_size),
        ("learning-rate", "learning rate", lambda arm: ... if arm.learning_rate is None else arm.learning_rate),
    ]
    tables = []
    for name, words, value in factors:
        groups: dict[Any, list[Arm]] = {}
        for arm in section.arms:
            if value(arm) is ...:
                continue
            rest = tuple(repr(other(arm)) for label, _, other in factors if label != name)
            groups.setdefault((arm.objective_name, arm.layers, *rest), []).append(arm)
        series = [own for own in groups.values() if len({repr(value(arm)) for arm in own}) > 1]
        if not series:
            continue
        rows = [
            ((arm.objective_name, arm.layers, _factor_text(value(arm))), arm)
            for own in series
            for arm in sorted(own, key=lambda arm: (isinstance(value(arm), str), value(arm) or 0))
        ]
        headings = [Column("Objective", heading=True), Column("Layers", heading=True, format="d")]
        headings.append(Column(words.capitalize(), heading=True))
        title = f"SR and tau by {words}, {section.title}"
        kin = {arm.name: place for place, own in enumerate(series) for arm in own}
        table = _by_data_set(
            section, f"{name}-{section.slug}", title, headings, rows, lambda arm, kin=kin: kin[arm.name]
        )
        tables.append(table)
    return tables


def ablation(section: Section) -> Table | None:
    """The parts of D-PACE against the whole, where at least one part was trained."""
    parts = [arm for arm in section.arms if arm.objective_name in DPACE_FAMILY[1:]]
    alphas = [arm.objective.get("alpha") for arm in parts]
    wholes = [arm for arm in section.arms if arm.objective_name == "dpace" and arm.objective.get("alpha") in alphas]
    if not parts or len(parts) + len(wholes) < 2:
        return None
    arms = [*wholes, *parts]
    arms.sort(key=lambda arm: (arm.layers, DPACE_FAMILY.index(arm.objective_name)))
    return _by_data_set(
        section,
        f"ablation-{section.slug}",
        f"Ablation: the parts of the D-PACE weight, {section.title}",
        [Column("Layers", heading=True, format="d"), Column("Weight", heading=True)],
        [((arm.layers, _marked(section, arm, depth_beside=True)), arm) for arm in arms],
        within=lambda arm: arm.layers,
    )


def _by_data_set(
    section: Section, name: str, title: str, headings: Sequence[Column],
    rows: Sequence[tuple[Sequence[Cell], Arm]], within: Callable[[Arm], Any],
) -> Table:  # fmt: skip
    """SR and tau of arms by data set; the best of each column among the arms that share `within` is marked."""
    measures = [
        m for m in ("sr", "tau") if any(m in section.figures(arm, d) for _, arm in rows for d in section.data_sets)
    ]
    # A data set that only one of the rows was measured on compares nothing.
    enough = min(2, len(rows))
    names: list[str | None] = [d for d in section.data_sets if sum(d in arm.records for _, arm in rows) >= enough]
    if len(names) > 1 and names == section.data_sets:
        names.append(None)
    columns = [*headings]
    for data_set in names:
        columns += [Column({"sr": "SR"}.get(m, m), group=data_set or "average") for m in measures]
    cells = [
        (*heads, *(section.figures(arm, data_set).get(m) for data_set in names for m in measures))
        for heads, arm in rows
    ]
    notes = [SR_NOTE if "sr" in measures else "SR: not measured.", TAU_NOTE, _prompt_note(section)]
    if any(len(arm.seeds) > 1 for _, arm in rows):
        notes.append("Figures are means over training seeds.")
    if any(section.incomplete(arm) for _, arm in rows):
        notes.append("† left prompts unfinished; see the cautions.")
    table = Table(name, title, tuple(columns), tuple(cells), tuple(notes))
    best: list[tuple[int, int]] = []
    for kin in dict.fromkeys(within(arm) for _, arm in rows):
        own = [row for row, (_, arm) in enumerate(rows) if within(arm) == kin]
        best += best_cells(table, list(range(len(headings), len(columns))), own)
    return Table(name, title, table.columns, table.rows, table.notes, tuple(best))


def _prompt_note(section: Section) -> str:
    counts = ", ".join(f"{name} {len(section.prompts(name))}" for name in section.data_sets)
    return f"Prompts that every arm finished: {counts}."


def _marked(section: Section, arm: Arm, depth_beside: bool = False) -> str:
    return section.name_of(arm, depth_beside) + (" †" if section.incomplete(arm) else "")


def _factor_text(value: Any) -> str:
    return "uniform" if value is None else value if isinstance(value, str) else f"{value:g}"


# --- figures with their errors -----------------------------------------------------------------------------


def figures(section: Section) -> Table:
    """Every figure of every arm and data set with its interval."""
    columns = [
        Column("Arm", heading=True), Column("Data set", heading=True), Column("prompts", format="d"),
        Column("SR", interval=True), Column("tau", interval=True), Column("pooled tau", interval=True),
        Column("steps a prompt", format=".1f", optional=True),
    ]  # fmt: skip
    seeds = any(len(arm.seeds) > 1 for arm in section.arms)
    if seeds:
        columns += [Column("seeds", format="d", optional=True), Column("SD of tau over seeds", optional=True)]
    rows: list[tuple[Cell, ...]] = []
    for arm in section.arms:
        for data_set in [*(d for d in section.data_sets if d in arm.records), None]:
            found = section.figures(arm, data_set)
            if not found or (data_set is None and len(section.data_sets) < 2):
                continue
            tau = found.get("tau")
            row: list[Cell] = [
                _marked(section, arm), data_set or "average",
                len(section.prompts(data_set)) if data_set else sum(len(section.prompts(d)) for d in section.data_sets),
                found.get("sr"), tau, found.get("tau_pooled"), _steps(section, arm, data_set) if data_set else None,
            ]  # fmt: skip
            if seeds:
                row += [len(arm.seeds), tau.spread if tau else None]
            rows.append(tuple(row))
    notes = [_interval_note(section), SR_NOTE, TAU_NOTE, POOLED_NOTE]
    notes.append("steps a prompt: verify steps that the answer took, which no machine changes.")
    notes += _method_note(section, [cell for row in rows for cell in row])
    return Table(
        f"figures-{section.slug}", f"Figures with intervals, {section.title}", tuple(columns), tuple(rows), tuple(notes)
    )


def _steps(section: Section, arm: Arm, data_set: str) -> float | None:
    """Verify steps for a prompt, all its turns, mean over prompts and seeds."""
    wanted = set(section.prompts(data_set))
    own = [[p.draft.rounds for p in record.finished if p.id in wanted] for record in arm.records[data_set].values()]
    if not wanted or any(rounds is None for steps in own for rounds in steps):
        return None
    return sum(map(sum, own)) / len(own) / len(wanted)


def differences(section: Section) -> Table | None:
    """Each arm against its reference, on the prompts that both finished, with intervals on the differences."""
    columns = [
        Column("Arm", heading=True),
        Column("Data set", heading=True),
        Column("prompts", format="d", optional=True),
    ]
    for measure in ("tau", "SR"):
        columns += [
            Column("reference", group=measure, optional=True), Column("arm", group=measure),
            Column("difference", group=measure, format="+.2f", interval=True),
            Column("in %", group=measure, format="+.1%", optional=True),
        ]  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    clear: list[tuple[int, int]] = []
    for arm in section.arms:
        reference = section.reference_of(arm)
        for data_set in [*section.data_sets, *([None] if len(section.data_sets) > 1 else [])]:
            found = section.difference(arm, data_set) if reference else {}
            if not found:
                continue
            names = [data_set] if data_set else section.data_sets
            row: list[Cell] = [
                _marked(section, arm),
                data_set or "average",
                sum(len(section.prompts(n)) for n in names),
            ]
            for measure in ("tau", "sr"):
                delta = found.get(f"delta_{measure}")
                if delta is not None and delta.excludes(0):
                    clear.append((len(rows), len(row) + 2))
                row += [
                    section.figures(reference, data_set).get(measure), section.figures(arm, data_set).get(measure),
                    delta, value_of(found.get(f"relative_{measure}")),
                ]  # fmt: skip
            rows.append(tuple(row))
    if not rows:
        return None
    against = {arm.name: ref.name for arm in section.arms if (ref := section.reference_of(arm))}
    title = f"against {_references(section)}"
    notes = [
        _interval_note(section),
        "Both arms see the same resampled prompts. In bold: the interval excludes zero.",
        _prompt_note(section),
    ]
    if len(set(against.values())) > 1:
        notes.append("References: " + "; ".join(f"{arm}: {reference}" for arm, reference in against.items()) + ".")
    spread = [(arm, section.difference(arm, name)) for arm in section.arms for name in section.data_sets]
    spread = [(arm, d["delta_tau"]) for arm, d in spread if "delta_tau" in d and d["delta_tau"].spread is not None]
    if spread:
        texts = [f"{arm.name} {' '.join(format(v, '+.2f') for v in d.by_seed)}" for arm, d in spread]
        notes.append("Differences of tau seed by seed: " + "; ".join(texts) + ".")
    notes += _method_note(section, [cell for row in rows for cell in row])
    return Table(
        f"differences-{section.slug}", f"Differences {title}, {section.title}", tuple(columns), tuple(rows),
        tuple(notes), tuple(clear),
    )  # fmt: skip


def _method_note(section: Section, cells: Sequence[Cell]) -> list[str]:
    """What has to be said of intervals that are not BCa, or are not there."""
    made = [cell for cell in cells if isinstance(cell, Estimate)]
    notes = []
    if any(cell.method == "percentile" for cell in made):
        notes.append("Where all resamples agree, BCa is not defined, and the interval is the percentile one.")
    if any(cell.prompts == 1 for cell in made):
        notes.append("One prompt gives no interval.")
    if any(1 < cell.prompts < 10 for cell in made):
        notes.append("Intervals from fewer than ten prompts are rough.")
    return notes


# --- lossless, acceptance, trajectories ----------------------------------------------------------------------


def lossless(section: Section) -> Table | None:
    """Is the output the target's own? Near-ties decided by rounding are counted apart from real differences."""
    columns = [
        Column("Arm", heading=True), Column("Data set", heading=True), Column("checked", format="d"),
        Column("equal", format="d"), Column("near-tie", format="d"), Column("different", format="d"),
        Column("share equal", format=".1%"),
    ]  # fmt: skip
    rows = []
    for arm in section.arms:
        for data_set in (d for d in section.data_sets if d in arm.records):
            own = list(arm.records[data_set].values())
            checked = [p for record in own for p in record.finished if p.lossless is not None]
            if checked:
                equal, ties, broken = (
                    sum(p.lossless for p in checked),
                    sum(r.near_ties for r in own),
                    sum(r.broken for r in own),
                )
                rows.append((section.name_of(arm), data_set, len(checked), equal, ties, broken, equal / len(checked)))
    if not rows:
        return None
    notes = (
        "Requests whose output equals the target's own greedy output, token for token, over all seeds.",
        "near-tie: the outputs part where the target's two best logits are so close that rounding decides.",
    )
    return Table(f"lossless-{section.slug}", f"Lossless decoding, {section.title}", tuple(columns), tuple(rows), notes)


def acceptance_histogram(section: Section) -> Table | None:
    """Share of verify steps by the number of tokens that they produced, all data sets together."""
    made = histograms(section)
    if not made:
        return None
    longest = max(map(len, made.values()))
    rows = [
        (length, *(own[length] if length < len(own) else None for own in made.values())) for length in range(1, longest)
    ]
    columns = (Column("Tokens a step", heading=True, format="d"), *(Column(name, format=".1%") for name in made))
    notes = ("Over all verify steps of all data sets and seeds; bonus token included.",)
    return Table(f"acceptance-{section.slug}", f"Acceptance lengths, {section.title}", columns, tuple(rows), notes)


def acceptance_positions(section: Section) -> Table | None:
    """Share of drafts accepted at each position, among those whose earlier positions all were."""
    made = position_rates(section)
    if not made:
        return None
    rows = [
        (k + 1, *(own[k].value if k < len(own) else None for own in made.values()))
        for k in range(max(map(len, made.values())))
    ]
    columns = (Column("Position", heading=True, format="d"), *(Column(name, format=".1%") for name in made))
    notes = (
        "Given that all earlier positions were accepted; all data sets and seeds.",
        "The last step of an answer is cut by its end, which counts as no failure.",
    )
    return Table(f"positions-{section.slug}", f"Acceptance by position, {section.title}", columns, tuple(rows), notes)


def histograms(section: Section) -> dict[str, list[float]]:
    """Arm to its acceptance histogram."""
    made = {
        section.name_of(arm): histogram(chain.from_iterable(answers(section, arm)), arm.block_size)
        for arm in section.arms
    }
    return {name: own for name, own in made.items() if own}


def position_rates(section: Section) -> dict[str, list[Rate]]:
    """Arm to its acceptance by position."""
    made = {section.name_of(arm): acceptance_by_position(answers(section, arm), arm.block_size) for arm in section.arms}
    return {name: own for name, own in made.items() if any(rate.trials for rate in own)}


def answers(section: Section, arm: Arm) -> list[list[int]]:
    """Acceptance lengths of each answer to the prompts that every arm finished."""
    found = []
    for data_set, own in arm.records.items():
        wanted = set(section.prompts(data_set))
        found += [p.draft.acceptance_lengths for record in own.values() for p in record.finished if p.id in wanted]
    return found


def trajectory(section: Section) -> Table | None:
    """Figures by training step, where an arm was measured at several."""
    arms = [arm for arm in section.arms if len(arm.steps) > 1]
    if not arms:
        return None
    measures = [
        m for m in ("sr", "tau") if any(m in section.figures(arm, d) for arm in arms for d in section.data_sets)
    ]
    columns = [Column("Arm", heading=True), Column("Step", heading=True, format="d")]
    columns += [Column({"sr": "SR"}.get(m, m), group=d) for d in section.data_sets for m in measures]
    rows: list[tuple[Cell, ...]] = []
    for arm in arms:
        for step in sorted(arm.steps):
            figures = [at_step(arm, step, d, m) for d in section.data_sets for m in measures]
            rows.append((section.name_of(arm), step, *figures))
    title = f"SR and tau over training, {section.title}"
    notes = ("On all prompts finished at that step, mean over seeds.",)
    return Table(f"trajectory-{section.slug}", title, tuple(columns), tuple(rows), notes)


def at_step(arm: Arm, step: int, data_set: str, measure: str) -> float | None:
    """Mean over seeds of a figure of the records at a training step."""
    return _mean([getattr(record, measure) for record in arm.steps[step].get(data_set, {}).values()])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def concurrency(sections: Sequence[Section]) -> Table | None:
    """Servers under load: throughput and SR by the number of requests in flight."""
    served = [section for section in sections if section.engine in ("sglang", "vllm")]
    rows = []
    for section in served:
        for arm in section.arms:
            for data_set in (d for d in section.data_sets if d in arm.records):
                own: list[BenchRecord] = list(arm.records[data_set].values())
                rates = [record.throughput for record in own]
                rows.append((
                    section.name_of(arm), data_set, f"{section.temperature:g}", section.concurrency,
                    _mean([rate.get("baseline") for rate in rates]), _mean([rate.get("draft") for rate in rates]),
                    section.figures(arm, data_set).get("sr"), section.figures(arm, data_set).get("tau_pooled"),
                ))  # fmt: skip
    if not rows:
        return None
    columns = (
        Column("Arm", heading=True), Column("Data set", heading=True), Column("Temperature", heading=True),
        Column("In flight", heading=True, format="d"), Column("target alone", group="tokens a second", format=",.0f"),
        Column("with drafter", group="tokens a second", format=",.0f"), Column("SR"), Column("pooled tau"),
    )  # fmt: skip
    return Table("concurrency", "Servers by requests in flight", columns, tuple(rows))
