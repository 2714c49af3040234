"""Tables, plots, one HTML page and a model card from the records of measurements. No model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import read_json, write_json, writing
from dpace_cli.render.card import model_card
from dpace_cli.render.export import csv_text, latex, markdown
from dpace_cli.render.figures import Figure, look_of, section_figures, weight_figures
from dpace_cli.render.page import KeyFigure, Page, Part
from dpace_cli.render.terminal import TerminalTable, plain
from dpace_cli.results import BenchRecord, load_records
from dpace_cli.stats import Bootstrap, Estimate
from dpace_cli.tables import catalog
from dpace_cli.tables.arms import Arm, Section, arms_summary, cautions, sections
from dpace_cli.tables.positions import CheckpointWeights, correlation_table, load_weights
from dpace_cli.tables.published import published
from dpace_cli.tables.table import Table

FORMATS = ("md", "html", "json", "csv", "tex", "png", "card")

MODEL_CARD = "model-card.md"

ONLY_IN_FILES = ("figures-", "acceptance-", "positions-", "weights-", "dynamics-")
"""Tables that a terminal is spared, by the beginning of their names."""


@dataclass(frozen=True)
class ReportResult:
    """What `dpace report` reports.

    Attributes:
        output: folder of the files.
        reference: arm that the others are compared with.
        arms: for each arm its figures by data set and its difference to the reference (`arms_summary`).
        cautions: what makes the figures less comparable or less complete.
        files: what was written, by file name.
        card_arm, card_checkpoint: whose model card it is.
        tables: every table.
    """

    output: str
    reference: str
    arms: list[dict[str, Any]]
    cautions: list[str]
    files: dict[str, str]
    card_arm: str
    card_checkpoint: str
    tables: list[Table]

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> RenderResult:
        for table in self.tables:
            if not table.name.startswith(ONLY_IN_FILES):
                yield TerminalTable(table)
                yield Text()
        for caution in self.cautions:
            yield Text.assemble(("caution: ", "yellow"), plain(caution, options.ascii_only))
        if self.files:
            yield Text(
                f"{len(self.files)} files in {self.output}: {', '.join(_main_files(self.files))}, ...", style="dim"
            )


def _main_files(files: dict[str, str]) -> list[str]:
    return [name for name in ("report.html", "report.md", "report.json", MODEL_CARD) if name in files]


def run(
    config: Config, inputs: Sequence[Path], output: Path, formats: Collection[str] = FORMATS
) -> ReportResult:  # fmt: skip
    """Compare arms and write the report.

    Args:
        config: its `report` section, and the order of its arms.
        inputs: record files, bench folders or run folders.
        output: folder for the files.
        formats: which of FORMATS to write.
    Raises:
        UsageError: an input holds no record, or no arm has the reference's name.
        RunError: the folder cannot be written.
    """
    records = load_records(inputs)
    settings = config.report
    bootstrap = Bootstrap(settings.confidence, settings.bootstrap_samples)
    order = list(dict.fromkeys(arm.label for arm in config.expand_arms()))
    try:
        found = sections(records, settings.reference, order, bootstrap)
    except LookupError as error:
        raise UsageError(f"no arm is called {settings.reference} (report.reference)", f"the arms are {error}") from None
    warned = list(dict.fromkeys(text for section in found for text in cautions(section)))
    for text in warned:
        console.warn(text)
    weights = _weights_of(inputs)
    report = _Report(config, found, weights, warned)
    files = report.write(output, formats)
    best = report.best
    return ReportResult(
        output=str(output),
        reference=report.reference,
        arms=arms_summary(found, {id(record): str(path) for path, record in records}),
        cautions=warned,
        files=files,
        card_arm=best.name,
        card_checkpoint=best.all_records()[0].checkpoint,
        tables=report.tables,
    )


def push_to_hub(result: ReportResult, repo_id: str) -> str:
    """Upload the model card, and the checkpoint that it describes, in one commit.

    Returns:
        Address of the commit.
    Raises:
        RunError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    if MODEL_CARD not in result.files:
        raise UsageError("there is no model card to upload", "write the report with its `card` format")
    operations = [CommitOperationAdd("README.md", result.files[MODEL_CARD])]
    for name in ("config.json", "model.safetensors"):
        path = Path(result.card_checkpoint) / name
        if path.is_file():
            operations.append(CommitOperationAdd(name, str(path)))
    if len(operations) == 1:
        console.warn(f"{result.card_checkpoint} is not here; the model card alone is uploaded")
    api = HfApi()
    try:
        api.create_repo(repo_id, exist_ok=True)
        commit = api.create_commit(repo_id, operations, commit_message="Drafter and its measured results")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise RunError(
            f"cannot upload to {repo_id}: {' '.join(str(error).split())[:300]}",
            "`hf auth login` stores a token; it needs the right to write",
        ) from None
    console.note(f"uploaded: {commit.commit_url}")
    return commit.commit_url


def _weights_of(inputs: Sequence[Path]) -> list[CheckpointWeights]:
    """Position weights that lie beside the records of run folders."""
    found: dict[tuple[str, float], CheckpointWeights] = {}
    for path in inputs:
        root = path if (path / "weights").is_dir() else path.parent
        for file in sorted((root / "weights").glob("*.json")):
            for one in load_weights(file):
                found[one.checkpoint, one.alpha] = one
    return list(found.values())


class _Report:
    """The tables, plots and words of a report, made once for all forms."""

    def __init__(
        self, config: Config, found: Sequence[Section], weights: Sequence[CheckpointWeights], warned: list[str]
    ) -> None:
        self.config, self.sections, self.weights, self.cautions = config, found, weights, warned
        look = look_of(found)
        self.parts = [*(_part(section, section_figures(section, look)) for section in found)]
        if (served := catalog.concurrency(found)) is not None:
            self.parts.append(Part("Servers", items=[served]))
        if weights:
            ranked = correlation_table(weights)
            self.parts.append(Part(
                "Position weights",
                "Where in the block the D-PACE weight lies. These are weights of the training loss, not the "
                "model's parameters.",
                [*weight_figures(weights), *([ranked] if ranked else [])],
            ))  # fmt: skip
        if config.report.paper:
            lead = "From the paper, for other targets, data and machines; none of it was measured here."
            self.parts.append(Part("Published figures", lead, [published()]))

    @property
    def tables(self) -> list[Table]:
        """Every table once."""
        found = [item.table if isinstance(item, Figure) else item for part in self.parts for item in part.items]
        return list({table.name: table for table in found}.values())

    @property
    def figures(self) -> list[Figure]:
        return [item for part in self.parts for item in part.items if isinstance(item, Figure)]

    @property
    def first(self) -> Section:
        return self.sections[0]

    @property
    def reference(self) -> str:
        return self.first.base.name if self.first.base else ""

    @property
    def best(self) -> Arm:
        """The arm to write a card for: the largest tau of those that are no reference, else the only one."""
        section = self.first
        others = [arm for arm in section.arms if section.reference_of(arm) is not None] or list(section.arms)
        return max(others, key=lambda arm: f.value if (f := _headline(section, arm).get("tau")) else 0.0)

    # --- files -------------------------------------------------------------------------------------------

    def write(self, output: Path, formats: Collection[str]) -> dict[str, str]:
        """Write each file whole; what an earlier report wrote and this one does not is removed."""
        earlier = read_json(output / "report.json").get("files", []) if (output / "report.json").exists() else []
        written: list[str] = []
        for name, content in self._contents(formats):
            with writing(output / name, "wb" if isinstance(content, Figure) else "w") as file:
                if isinstance(content, Figure):
                    content.plot.png(file)
                else:
                    file.write(content)
            written.append(name)
        if "json" in formats:
            written.append("report.json")
            write_json(output / "report.json", {"files": written, **self._json()})
        for name in set(earlier) - set(written):
            if Path(name).name == name:
                (output / name).unlink(missing_ok=True)
        return {name: str(output / name) for name in written}

    def _contents(self, formats: Collection[str]) -> Iterator[tuple[str, str | Figure]]:
        if "png" in formats:
            yield from ((f"{figure.plot.name}.png", figure) for figure in self.figures)
        for table in self.tables:
            if "csv" in formats:
                yield f"{table.name}.csv", csv_text(table)
            if "tex" in formats:
                yield f"{table.name}.tex", latex(table)
        if "card" in formats:
            name = f"{Path(self.best.all_records()[0].target).name}-{self.best.name}".replace("/", "-")
            yield MODEL_CARD, str(model_card(self.sections, self.best, f"{name}-drafter"))
        if "md" in formats:
            yield "report.md", self._markdown("png" in formats)
        if "html" in formats:
            yield "report.html", self._page().html()

    def _json(self) -> dict[str, Any]:
        return {
            "version": 1, "title": self._title, "summary": self._summary, "reference": self.reference,
            "arms": arms_summary(self.sections, {}), "cautions": self.cautions, "tables": self.tables,
            "facts": self._facts,
        }  # fmt: skip

    def _markdown(self, plots: bool) -> str:
        text = [f"# {self._title}", self._summary]
        text += ["\n".join(f"- {k.label}: **{k.value}** {'; '.join(k.details)}" for k in self._keys())]
        if self.cautions:
            text += ["## Before comparing", "\n".join(f"- {caution}" for caution in self.cautions)]
        shown: set[str] = set()
        for part in self.parts:
            text += [f"## {part.title}", *([part.lead] if part.lead else [])]
            for item in part.items:
                table = item.table if isinstance(item, Figure) else item
                if isinstance(item, Figure) and plots:
                    text.append(f"![{item.plot.alt}]({item.plot.name}.png)")
                if table.name not in shown:
                    shown.add(table.name)
                    text.append(markdown(table).rstrip())
        text += ["## How this was measured", "\n".join(f"- {name}: {value}" for name, value in self._facts.items())]
        return "\n\n".join(filter(None, text)) + "\n"

    def _page(self) -> Page:
        return Page(self._title, self._summary, self._keys(), self.cautions, self.parts, self._facts)

    # --- words -------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"Drafters for {Path(self.first.target).name}"

    @property
    def _summary(self) -> str:
        arms = list(dict.fromkeys(section.name_of(arm) for section in self.sections for arm in section.arms))
        sets = list(dict.fromkeys(name for section in self.sections for name in section.data_sets))
        heat = sorted({section.temperature for section in self.sections})
        words = f"{_count(len(arms), 'arm')} on {_count(len(sets), 'data set')}, " + _plural(
            len(heat), "temperature", " and ".join(f"{t:g}" for t in heat)
        )
        if len(arms) > 1:
            words += f"; compared with {self.reference}"
        return f"{words}."

    def _keys(self) -> list[KeyFigure]:
        """What to remember: the best arm's tau, SR and differences on the first section."""
        section, arm = self.first, self.best
        only = None if section.figures(arm, None) else next((d for d in section.data_sets if d in arm.records), None)
        where = f"{only or f'average of {len(section.data_sets)} data sets'}, {section.title}"
        interval = f"{100 * section.bootstrap.confidence:g}% interval"
        reference = section.reference_of(arm)
        ours, theirs = _headline(section, arm), _headline(section, reference) if reference else {}
        delta = _headline_difference(section, arm)
        name, keys = section.name_of(arm), []
        for measure, label in (("tau", "tokens a verify step (tau)"), ("sr", "times as fast as the target (SR)")):
            if measure not in ours:
                continue
            details = [where, f"{interval} {_bounds(ours[measure])}" if _bounds(ours[measure]) else ""]
            if measure in theirs:
                details.append(f"{section.name_of(reference)}: {theirs[measure].value:.2f} {_bounds(theirs[measure])}")
            if f"delta_{measure}" in delta:
                change, share = delta[f"delta_{measure}"], delta[f"relative_{measure}"]
                details.append(f"difference: {change.value:+.2f} {_bounds(change, '+.2f')}, {share.value:+.0%}")
            keys.append(KeyFigure(f"{name}: {label}", f"{ours[measure].value:.2f}", [d for d in details if d]))
        checked = [p.lossless for r in arm.all_records() for p in r.finished if p.lossless is not None]
        if checked:
            ties = sum(record.near_ties for record in arm.all_records())
            details = [f"of {_count(len(checked), 'request')}, temperature 0"]
            if sum(checked) < len(checked):
                details.append(f"{ties} of {len(checked) - sum(checked)} others are near-ties decided by rounding")
            equal = f"{sum(checked) / len(checked):.1%}"
            keys.append(KeyFigure(f"{name}: output equal to the target's own", equal, details))
        return keys

    @property
    def _facts(self) -> dict[str, str]:
        records = [record for section in self.sections for arm in section.arms for record in arm.all_records()]

        def every(values: Iterator[str]) -> str:
            return "; ".join(sorted(set(filter(None, values))))

        facts = {
            "Target": every(r.target for r in records),
            "Engine": every(r.engine for r in records),
            "Device": every(f"{r.device} {r.dtype}".strip() for r in records),
            "Versions": every(", ".join(f"{k} {v}" for k, v in sorted(r.versions.items())) for r in records),
            "Longest answer": every(f"{r.max_new_tokens} tokens" for r in records),
            "Template options": every(str(r.template_options or "none") for r in records),
            "Data sets": "; ".join(_data_sets(records)),
            "Training seeds": every(str(r.seed) for r in records),
            "Intervals": f"{100 * self.config.report.confidence:g}%, BCa bootstrap over prompts with "
            f"{self.config.report.bootstrap_samples:,} resamples; percentile where BCa is not defined",
            "Measured": every(r.started[:10] for r in records),
        }
        return {name: value for name, value in facts.items() if value}


def _part(section: Section, figures: Sequence[Figure]) -> Part:
    rest = [
        catalog.differences(section), catalog.ablation(section), *catalog.by_factor(section), catalog.lossless(section),
        catalog.figures(section),
    ]  # fmt: skip
    above = [table for table in (catalog.overview(section), catalog.speed(section)) if table is not None]
    items = [*above, *figures, *(table for table in rest if table is not None)]
    return Part(section.title[0].upper() + section.title[1:], f"Target {Path(section.target).name}.", items)


def _headline(section: Section, arm: Arm) -> dict[str, Estimate]:
    """Figures over all data sets, or on the only one, or on the first that the arm has."""
    average = section.figures(arm, None)
    return average or section.figures(arm, next((d for d in section.data_sets if d in arm.records), None))


def _headline_difference(section: Section, arm: Arm) -> dict[str, Estimate]:
    average = section.difference(arm, None)
    return average or section.difference(arm, next((d for d in section.data_sets if d in arm.records), None))


def _bounds(found: Estimate, form: str = ".2f") -> str:
    return "" if found.low is None else f"[{format(found.low, form)}, {format(found.high, form)}]"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _plural(number: int, what: str, values: str) -> str:
    return f"{what}{'' if number == 1 else 's'} {values}"


def _data_sets(records: Sequence[BenchRecord]) -> list[str]:
    counts: dict[str, set[str]] = {}
    for record in records:
        counts.setdefault(record.dataset, set()).update(prompt.id for prompt in record.prompts)
    return [f"{name} ({_count(len(ids), 'prompt')})" for name, ids in counts.items()]
