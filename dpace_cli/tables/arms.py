"""From records to arms that can be compared: who ran what, on which prompts, against which reference.

A section holds the arms of one target, engine, temperature and number of requests in flight; only within a
section are figures comparable. Its figures are made of the prompts that every one of its arms finished.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dpace_cli.results import BenchRecord
from dpace_cli.stats import MEASURES, Bootstrap, Estimate, Request, Sample, compare, estimate

DATA_SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca")
"""The paper's order of columns."""

_RATE = re.compile(r"-lr([\d.]+(?:e[+-]?\d+)?)(?=-|$)")
_DEPTH = re.compile(r"-l\d+(?=-|$)")


@dataclass(frozen=True)
class Arm:
    """One kind of drafter: an objective and its factors, over its training seeds.

    Attributes:
        name: label, with the run's name before it where two runs share a label.
        records: data set to training seed to the record of the last step.
        steps: optimizer step to data set to training seed to record, where steps are known.
    """

    name: str
    objective: dict[str, Any]
    layers: int
    block_size: int
    records: dict[str, dict[int, BenchRecord]] = field(default_factory=dict, repr=False)
    steps: dict[int, dict[str, dict[int, BenchRecord]]] = field(default_factory=dict, repr=False)

    @property
    def objective_name(self) -> str:
        return self.objective.get("name", self.name)

    @property
    def learning_rate(self) -> float | None:
        """Where it is one of the factors that the label names."""
        match = _RATE.search(self.name)
        return float(match[1]) if match else None

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for own in self.records.values() for seed in own}))

    @property
    def factors(self) -> tuple[Any, ...]:
        """What two arms must share to differ in their objective alone."""
        return self.layers, self.block_size, self.learning_rate

    def all_records(self) -> list[BenchRecord]:
        return [record for own in self.records.values() for record in own.values()]


class Section:
    """Comparable arms, the reference first.

    Args:
        target, engine, temperature, concurrency: what all arms share.
        arms: in the order of the tables.
        reference: name of an arm or of an objective; None: the first arm.
    """

    def __init__(
        self, key: tuple[str, str, float, int], arms: Sequence[Arm], reference: str | None, bootstrap: Bootstrap
    ) -> None:
        self.target, self.engine, self.temperature, self.concurrency = key
        self.bootstrap = bootstrap
        self.base = _base(arms, reference)
        self.arms = sorted(arms, key=lambda arm: arm is not self.base)
        self._known: dict[Any, Any] = {}

    @property
    def title(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        if self.engine != "local":
            parts.append(self.engine)
        if self.concurrency > 1:
            parts.append(f"{self.concurrency} requests in flight")
        return ", ".join(parts)

    @property
    def slug(self) -> str:
        """For file names: t0, t1-sglang-c8."""
        engine = "" if self.engine == "local" else f"-{self.engine}"
        return f"t{self.temperature:g}{engine}{f'-c{self.concurrency}' if self.concurrency > 1 else ''}"

    def name_of(self, arm: Arm, depth_beside: bool = False) -> str:
        """What an arm is called; without its depth where that is said beside it, or tells nothing."""
        short = {other.name: _DEPTH.sub("", other.name) for other in self.arms}
        unique = len(set(short.values())) == len(short)
        return short[arm.name] if depth_beside or unique else arm.name

    @cached_property
    def data_sets(self) -> list[str]:
        return sort_data_sets({name for arm in self.arms for name in arm.records})

    def reference_of(self, arm: Arm) -> Arm | None:
        """The arm that `arm` is compared with: the reference's objective at the same depth, block size and rate.

        The reference itself where there is no such arm; None for an arm that is its own reference, and where
        the section has no arm of the reference's name.
        """
        if self.base is None:
            return None
        alike = [other for other in self.arms if other.objective == self.base.objective]
        match = next((other for other in alike if other.factors == arm.factors), self.base)
        return None if match is arm or arm is self.base else match

    def prompts(self, data_set: str) -> list[str]:
        """Prompts that every arm on this data set finished, with every seed, in the data set's order."""
        return self._once(("prompts", data_set), lambda: common_prompts(
            record for arm in self.arms for record in arm.records.get(data_set, {}).values()))  # fmt: skip

    def finished(self, arm: Arm, data_set: str) -> tuple[int, int]:
        """Prompts that all seeds of an arm finished, and prompts that any arm was given."""
        asked = {p.id for other in self.arms for r in other.records.get(data_set, {}).values() for p in r.prompts}
        return len(common_prompts(arm.records.get(data_set, {}).values())), len(asked)

    def incomplete(self, arm: Arm, data_set: str | None = None) -> bool:
        """Did the arm leave a prompt unfinished that it or another arm was given?"""
        own = [data_set] if data_set else list(arm.records)
        return any(done < asked for done, asked in (self.finished(arm, name) for name in own))

    def figures(self, arm: Arm, data_set: str | None) -> dict[str, Estimate]:
        """SR and both taus on one data set, or their means over all of them (None).

        Empty where the arm lacks the data set, or one of those to average.
        """
        return self._once(("figures", arm.name, data_set), lambda: self._figures(arm, data_set))

    def _figures(self, arm: Arm, data_set: str | None) -> dict[str, Estimate]:
        samples = self._samples(arm, data_set)
        found = estimate(samples, self.bootstrap) if samples else {}
        own = arm.records.get(data_set, {}).values() if data_set else []
        if "tau_pooled" not in found and own and all(record.counters for record in own):
            values = [record.tau_pooled or 0.0 for record in own]  # a server's own count: a total, and no interval
            found["tau_pooled"] = Estimate(sum(values) / len(values), by_seed=tuple(values))
        return found

    def difference(self, arm: Arm, data_set: str | None) -> dict[str, Estimate]:
        """Arm minus its reference (`compare`), on one data set or over those that both have (None)."""
        return self._once(("difference", arm.name, data_set), lambda: self._difference(arm, data_set))

    def _difference(self, arm: Arm, data_set: str | None) -> dict[str, Estimate]:
        reference = self.reference_of(arm)
        if reference is None:
            return {}
        ours, theirs = self._samples(arm, data_set), self._samples(reference, data_set)
        return compare(ours, theirs, self.bootstrap) if ours and theirs else {}

    def _samples(self, arm: Arm, data_set: str | None) -> list[Sample]:
        names = [data_set] if data_set else self.data_sets
        if any(name not in arm.records or not self.prompts(name) for name in names):
            return []
        return [self._once(("sample", arm.name, n), lambda n=n: sample(arm.records[n], self.prompts(n))) for n in names]

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def sample(records: dict[int, BenchRecord], prompts: Sequence[str]) -> Sample:
    """The raw values of an arm's seeds on one data set."""
    return Sample.collect({seed: requests_of(record) for seed, record in sorted(records.items())}, prompts)


def requests_of(record: BenchRecord) -> list[Request]:
    """What each finished request of a record gives to the figures."""
    timed = record.engine != "simulate"
    return [
        Request(
            prompt=p.id,
            acceptance=p.draft.acceptance,
            steps=p.draft.rounds,
            draft_s=p.draft.time_per_output_token if timed else None,
            baseline_s=p.baseline.time_per_output_token if timed and p.baseline is not None else None,
        )
        for p in record.finished
    ]


def common_prompts(records: Iterable[BenchRecord]) -> list[str]:
    """Prompts whose every turn is finished in every record, in the order of the first."""
    common: list[str] | None = None
    for record in records:
        failed = {p.id for p in record.prompts if not p.finished}
        whole = {p.id for p in record.prompts} - failed
        if common is None:
            common = list(dict.fromkeys(p.id for p in sorted(record.prompts, key=lambda p: p.index)))
        common = [prompt for prompt in common if prompt in whole]
    return common or []


def sort_data_sets(names: Iterable[str]) -> list[str]:
    """The paper's data sets in its order, then the others by name."""
    return sorted(names, key=lambda n: (DATA_SETS.index(n) if n in DATA_SETS else len(DATA_SETS), n))


# --- grouping ---------------------------------------------------------------------------------------------


def sections(
    records: Sequence[tuple[Path, BenchRecord]], reference: str | None, order: Sequence[str], bootstrap: Bootstrap
) -> list[Section]:
    """Sort records into sections and arms.

    Args:
        records: each with its file; of two of the same drafter, data set and settings the later one counts.
        reference: name of the arm or objective to compare with.
        order: labels of arms in the order wanted; others follow as they come.
    Raises:
        LookupError: no arm has the reference's name.
    """
    names = _names(records)
    grouped: dict[tuple, dict[str, Arm]] = {}
    for (_, record), name in sorted(zip(records, names), key=lambda pair: pair[0][1].started):
        key = (record.target, record.engine, record.temperature, record.concurrency)
        arm = grouped.setdefault(key, {}).setdefault(
            name, Arm(name, record.objective, record.num_draft_layers, record.block_size)
        )
        arm.steps.setdefault(record.step or 0, {}).setdefault(record.dataset, {})[record.seed] = record
    for arms in grouped.values():
        for arm in arms.values():
            for step in sorted(arm.steps):  # the last step of each seed and data set counts
                for data_set, own in arm.steps[step].items():
                    arm.records.setdefault(data_set, {}).update(own)
    rank = {label: place for place, label in enumerate(order)}
    every = [name for arms in grouped.values() for name in arms]
    if reference is not None and not any(_is(arm, reference) for arms in grouped.values() for arm in arms.values()):
        raise LookupError(", ".join(dict.fromkeys(every)))
    made = []
    for key in sorted(grouped, key=lambda k: (k[0], k[1] != "local", k[1], k[2], k[3])):
        arms = sorted(grouped[key].values(), key=lambda a: (rank.get(a.name, len(rank)), every.index(a.name)))
        made.append(Section(key, arms, reference, bootstrap))
    return made


def _base(arms: Sequence[Arm], reference: str | None) -> Arm | None:
    if reference is None:
        return arms[0]
    exact = [arm for arm in arms if arm.name == reference]
    return next(iter(exact or [arm for arm in arms if _is(arm, reference)]), None)


def _is(arm: Arm, reference: str) -> bool:
    return reference in (arm.name, arm.name.rpartition("/")[2], arm.objective_name)


def _names(records: Sequence[tuple[Path, BenchRecord]]) -> list[str]:
    """Arm names, made distinct where one label stands for several drafters.

    The run's name goes before it where two runs have an arm of one label but other weights, the block size
    behind it where one drafter was measured with several.
    """
    hashes: dict[tuple, set[str]] = {}
    for _, record in records:
        hashes.setdefault((record.arm, record.seed, record.step, record.target), set()).add(record.checkpoint_sha256)
    clash = any(len(own) > 1 for own in hashes.values())
    names = [f"{_run_name(path)}/{record.arm}" if clash else record.arm for path, record in records]
    sizes: dict[str, set[int]] = {}
    for name, (_, record) in zip(names, records):
        sizes.setdefault(name, set()).add(record.block_size)
    return [
        f"{name}-k{record.block_size}" if len(sizes[name]) > 1 else name for name, (_, record) in zip(names, records)
    ]


def _run_name(path: Path) -> str:
    """`runs/NAME/bench/ARM/FILE` is of run NAME; elsewhere the folder of the file names it."""
    parents = path.absolute().parents
    return next((folder.parent.name for folder in parents if folder.name == "bench"), parents[0].name)


# --- what a reader should know before comparing ------------------------------------------------------------

_SETTINGS = {
    "data_sha256": "prompts", "template_options": "template options", "max_new_tokens": "maximum answer length",
    "top_p": "top-p", "top_k": "top-k", "target_sha256": "target files", "dtype": "number type",
    "device": "device", "bench_seed": "sampling seed", "step": "numbers of training steps",
}  # fmt: skip


def cautions(section: Section) -> list[str]:
    """Differences between arms that make their figures less comparable, or less complete."""
    found = []
    for data_set in section.data_sets:
        own = [(arm, record) for arm in section.arms for record in arm.records.get(data_set, {}).values()]
        for setting, words in _SETTINGS.items():
            values: dict[str, list[str]] = {}
            for arm, record in own:
                value = getattr(record, setting)
                if setting != "step" or value is not None:  # of a drafter from elsewhere it is not known
                    values.setdefault(repr(value), []).append(arm.name)
            if len(values) > 1:
                sides = "; ".join(
                    f"{', '.join(dict.fromkeys(arms))}: {_brief(value)}" for value, arms in values.items()
                )
                found.append(f"{data_set}: the arms were measured with different {words} ({sides}).")
        counts = {arm.name: section.finished(arm, data_set) for arm in section.arms if data_set in arm.records}
        short = [f"{name} finished {done} of {asked}" for name, (done, asked) in counts.items() if done < asked]
        if short:
            common = len(section.prompts(data_set))
            found.append(
                f"{data_set}: {', '.join(short)} prompts; all arms are compared on the {common} that all finished."
            )
    missing: dict[str, list[str]] = {}
    for arm in section.arms:
        without = [name for name in section.data_sets if name not in arm.records]
        if without:
            missing.setdefault(", ".join(without), []).append(arm.name)
    found += [f"{', '.join(arms)}: not measured on {names}, so without an average." for names, arms in missing.items()]
    return found + _other_seeds(section)


def _other_seeds(section: Section) -> list[str]:
    """Arms that are means over other training seeds than their reference, data set by data set."""
    apart: dict[str, list[str]] = {}
    for arm in section.arms:
        reference = section.reference_of(arm)
        for data_set in arm.records if reference else ():
            ours, theirs = sorted(arm.records[data_set]), sorted(reference.records.get(data_set, {}))
            if theirs and ours != theirs:
                words = f"{arm.name} with training seeds {ours}, {reference.name} with {theirs}"
                apart.setdefault(words, []).append(data_set)
    return [
        f"{', '.join(names)}: {words}; their difference mixes in what the seeds differ by."
        for words, names in apart.items()
    ]


def _brief(value: str) -> str:
    value = value.strip("'")
    return f"{value[:12]}…" if re.fullmatch(r"[0-9a-f]{40,}", value) else value


# --- what `dpace run --json` says of each arm ---------------------------------------------------------------


def arms_summary(sections: Sequence[Section], files: dict[int, str]) -> list[dict[str, Any]]:
    """For each arm its figures by data set, and its difference to its reference.

    Args:
        files: id() of a record to its path.
    Returns:
        One object an arm, in the order of the tables: `arm`, `seeds`, `layers`, `block_size`, `datasets` (name to
        `dataset`, `temperature`, `prompts`, `sr`, `tau`, `tau_pooled`, `lossless`, `result`, and `delta_tau`,
        `delta_sr`), `reference`, and `delta_tau`, `delta_sr` over all data sets of the first section that has
        the arm. A difference has `value`, `low` and `high`. The key of a data set names the section
        (`gsm8k-t1`) where there are several sections.
    """
    made: dict[str, dict[str, Any]] = {}
    for section in sections:
        for arm in section.arms:
            reference = section.reference_of(arm)
            only = section.data_sets[0] if len(section.data_sets) == 1 else None
            entry = made.setdefault(arm.name, {
                "arm": arm.name, "seeds": list(arm.seeds), "layers": arm.layers, "block_size": arm.block_size,
                "reference": reference.name if reference else None, "datasets": {},
                **_deltas(section.difference(arm, only)),
            })  # fmt: skip
            for name in (d for d in section.data_sets if d in arm.records):
                key = name if len(sections) == 1 else f"{name}-{section.slug}"
                entry["datasets"][key] = _bench_fields(section, arm, name, files)
    return list(made.values())


def _bench_fields(section: Section, arm: Arm, data_set: str, files: dict[int, str]) -> dict[str, Any]:
    figures, own = section.figures(arm, data_set), arm.records[data_set]
    checked = [p.lossless for record in own.values() for p in record.finished if p.lossless is not None]
    values = {name: figures[name].value if name in figures else None for name in MEASURES}
    bounds = {name: [found.low, found.high] for name, found in figures.items()}
    return {
        "dataset": data_set, "temperature": section.temperature, "prompts": len(section.prompts(data_set)),
        **values, "intervals": bounds, "lossless": sum(checked) / len(checked) if checked else None,
        "result": [files.get(id(record), "") for record in own.values()], **_deltas(section.difference(arm, data_set)),
    }  # fmt: skip


def _deltas(found: dict[str, Estimate]) -> dict[str, Any]:
    return {
        name: {"value": found[name].value, "low": found[name].low, "high": found[name].high} if name in found else None
        for name in ("delta_tau", "delta_sr")
    }
