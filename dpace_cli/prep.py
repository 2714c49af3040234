"""dpace prep: conversations of any source to SpecForge's row format."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import platform
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import orjson

from dpace_cli import __version__
from dpace_cli.config import Config, PrepConfig, TargetConfig
from dpace_cli.console import Meter, meter, note, warn
from dpace_cli.data.adapters import (
    HUB_IDS,
    REJECTIONS,
    REPAIRS,
    UNCONDITIONAL,
    Cleaner,
    Rejected,
    Row,
    without_surrogates,
)
from dpace_cli.data.hub import HubSource, ParquetSource, is_parquet, looks_like_hub_id
from dpace_cli.data.jsonl import encode_line
from dpace_cli.data.output import RowOutput, Smallest
from dpace_cli.data.overlap import BenchmarkPrompts, PromptIndex, load_benchmarks
from dpace_cli.data.reading import RawRow, SourceFile
from dpace_cli.data.statistics import Preview, StatsResult, plot, summarize, view
from dpace_cli.errors import DpaceError, UsageError
from dpace_cli.records import RunFolder, to_json, write_json, writing

DEMO_ROWS = 2048
"""Rows of the embedded generator where prep.max_rows is not set."""


@dataclass(frozen=True)
class PrepResult:
    """What `dpace prep` did. Every whole row is kept or rejected: read == kept + sum(rejected.values()).

    Attributes:
        read: whole rows of the input.
        kept: rows in `output` and `val_output` together.
        val: how many of them were set apart for validation, in `val_output`.
        rejected: reason to count.
        repaired: rule to the number of kept rows that it changed.
        partial: an input was cut off inside a row or array; `cuts` has file and byte offset.
        oddities: what was unusual about the input files, with counts.
        benchmarks: data sets that the prompts were compared with, and the number of their prompts.
        unchecked: data sets that they could not be compared with.
        rejects: the rows that were left out, with reasons; those over prep.max_rows are only counted.
    """

    read: int
    kept: int
    rejected: dict[str, int]
    repaired: dict[str, int]
    partial: bool
    cuts: list[dict[str, Any]]
    oddities: dict[str, int]
    val: int
    benchmarks: dict[str, int]
    unchecked: list[str]
    output: Path
    rejects: Path
    val_output: Path | None
    manifest: Path


def run(config: Config, folder: RunFolder) -> PrepResult:
    """Convert the configured source; the outputs appear whole or not at all.

    Raises:
        UsageError: an input is missing or cannot be read, or a rule's name is unknown.
        RunError: an output cannot be written.
    """
    prep = config.prep
    _check_rules(prep.disable)
    sources = _sources(prep)
    files = _Files.of(prep, folder)
    files.spare(sources)
    with ExitStack() as stack:
        rejects = stack.enter_context(writing(files.rejects, "wb"))
        output = RowOutput(stack.enter_context(writing(files.output, "w+b")), files.output)
        val = RowOutput(stack.enter_context(writing(files.val, "w+b")), files.val) if files.val else None
        work = stack.enter_context(_Work(config, rejects, output, val))
        total = sum(path.stat().st_size for path in (getattr(s, "path", None) for s in sources) if path) / 1e6
        shown = stack.enter_context(meter("prep", total or None, "MB" if total else "rows"))
        for source in sources:
            work.take(source, shown, bool(total))
        kept, repaired = work.finish()
    result = PrepResult(
        read=work.read,
        kept=kept,
        rejected=dict(sorted(work.rejected.items())),
        repaired=dict(sorted(repaired.items())),
        partial=any(source.cut_at is not None for source in sources),
        cuts=[{"file": str(s.path), "byte": s.cut_at} for s in sources if s.cut_at is not None],
        oddities=dict(sum((source.oddities for source in sources), Counter())),
        val=val.count if val else 0,
        benchmarks=work.benchmarks.found if work.benchmarks else {},
        unchecked=work.benchmarks.missing if work.benchmarks else [],
        output=files.output,
        rejects=files.rejects,
        val_output=files.val,
        manifest=files.manifest,
    )
    inputs = {str(getattr(s, "path", getattr(s, "name", prep.source))): s.sha256 for s in sources}
    versions = {"dpace": __version__, "python": platform.python_version(), "orjson": orjson.__version__}
    write_json(files.manifest, {"config": prep, "inputs": inputs, "versions": versions, **to_json(result)})
    _say(result, work, sources)
    return result


def _say(result: PrepResult, work: _Work, sources: list[Any]) -> None:
    """What a person should know about it and would not see in the counts."""
    for role, count in work.cleaner.model_roles.items():
        note(f'role "{role}" is a model\'s name and was taken for the assistant ({count} turns)')
    for source in sources:
        for oddity, count in source.oddities.items():
            note(f"{source.path}: {oddity.replace('_', ' ')} ({count})")
    for cut in result.cuts:
        warn(f"{cut['file']} breaks off at byte {cut['byte']}, inside a row or array; every whole row before was read")
    for output in work.outputs:
        if output.reordered:
            note(f"{output.path}: rows with tools or reasoning stand first, where SpecForge's loader looks for columns")
    if result.unchecked:
        done = f"only against {', '.join(result.benchmarks)}" if result.benchmarks else "not done"
        note(
            f"decontamination: {done}; no prompts of {', '.join(result.unchecked)} here "
            "(bench.data_dir or DPACE_DATA_DIR names a folder with them)"
        )


def stats(path: Path, target: TargetConfig | None = None, output: Path | None = None) -> StatsResult:
    """What is in a file of rows, in tokens as well where the target's tokenizer is there.

    Args:
        output: file for a plot (PNG, PDF, SVG).
    Raises:
        UsageError: the file is missing, or is not one of rows, or the plot's name ends otherwise.
    """
    if output is not None and output.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{output} names no kind of picture", "end it in .png, .pdf or .svg")
    tokenizer = None
    if target is not None:
        from dpace_cli.modeling.target import load_tokenizer

        try:
            tokenizer = load_tokenizer(target)
        except DpaceError as error:
            warn(f"no lengths in tokens: {error.message}")
    result = summarize(path, tokenizer, target.template_options() if target else {}, target.path if target else "")
    if output is None:
        return result
    plot(result, output)
    return replace(result, plot=str(output))


def preview(path: Path, target: TargetConfig, row: int = 0) -> Preview:
    """A row as the target sees it, with what is supervised.

    Raises:
        UsageError: the file, the row (counted from 0) or the target is not there.
        TemplateError: the target's chat template refuses the row.
    """
    from dpace_cli.modeling.target import load_tokenizer

    return view(path, row, load_tokenizer(target), target.template_options(), target.path)


class _Work:
    """One pass over the sources: what is done with each row, and what has been seen so far."""

    def __init__(self, config: Config, rejects: IO[bytes], output: RowOutput, val: RowOutput | None) -> None:
        self.prep, self.target = config.prep, config.target
        self.read = 0
        self.rejected: Counter[str] = Counter()
        self.cleaner = Cleaner(self.prep.source, self.prep.disable)
        self.benchmarks: BenchmarkPrompts | None = None
        # The embedded generator holds the prompts of its own benchmarks back, by a hash of the prompt.
        if self.prep.decontaminate and "contaminated" not in self.prep.disable and self.prep.source != "demo":
            # Of alpaca, the hub has the training set alone, in which the benchmark's prompts are.
            without = ("alpaca",) if self.prep.source == "alpaca" else ()
            self.benchmarks = load_benchmarks(config.bench.data_dir, without)
        self._compared = self.benchmarks is not None and bool(self.benchmarks.found)
        self.outputs = [output, *([val] if val else [])]
        self._rejects, self._output, self._val = rejects, output, val
        self._disabled = frozenset(self.prep.disable)
        self._index = PromptIndex(self.prep.dedup) if self.prep.dedup != "none" else None
        self._ids: set[str] = set()
        self._tokenizer: Any = None
        self._takes_tools: bool | None = None
        self._chosen = Smallest(self.prep.max_rows, output.path.parent) if self.prep.max_rows else None
        self._repaired: Counter[str] = Counter()
        self._turns = 1 if self.prep.first_turn else self.prep.max_turns
        self._limited = bool(self.prep.max_tokens or self.prep.max_prompt_tokens)

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, *_: object) -> None:
        if self._chosen is not None:
            self._chosen.close()
        for output in self.outputs:
            output.close()

    def take(self, source: Any, shown: Meter, by_bytes: bool) -> None:
        """Work through the rows of one source."""
        before = shown.done
        for raw in source.rows():
            self.read += 1
            try:
                self._row(raw)
            except Rejected as rejection:
                self._reject(raw, rejection.reason)
            except RecursionError:
                self._reject(raw, "too_deep")
            except OverflowError:
                self._reject(raw, "bad_number")
            if not self.read % 256:
                shown.update(before + source.position / 1e6 if by_bytes else self.read)
        if by_bytes:
            shown.update(before + source.position / 1e6)

    def finish(self) -> tuple[int, Counter[str]]:
        """Write what was held back; the number of kept rows, and of those that each rule changed."""
        if self._chosen is not None:
            for line, (plain, key, repairs) in self._chosen.rows():
                self._write(line, plain, key, repairs)
        kept = sum(output.finish() for output in self.outputs)
        return kept, self._repaired

    def _row(self, raw: RawRow) -> None:
        if raw.reason is not None:
            raise Rejected(raw.reason)
        row = self.cleaner.row(raw.value)
        if self.cleaner.saw_numbers and raw.data:
            row = self.cleaner.row(raw.exact())
        if self._turns:
            row.messages = _first_turns(row.messages, self._turns)
        if self._compared and self.benchmarks.match(row.prompts):
            raise Rejected("contaminated")
        if not row.plain and row.has_tools:
            self._check_tools()
        # The id that the row came with decides where it goes, so that no other row has a say in that.
        key = self._name(row) if not row.id or row.id in self._ids or not row.id.isascii() else row.id
        if self._index is not None and (reason := self._index.seen(row.prompts)) and reason not in self._disabled:
            raise Rejected(reason)
        rank = 0
        if self._chosen is not None:
            rank = _hash("rows", self.prep.seed, row.id)
            if not self._chosen.takes(rank):
                raise Rejected("over_max_rows")
        if self._limited:
            self._check_length(row)
        line = self._encode(row, raw)
        if self._index is not None:
            self._index.add()
        self._ids.add(row.id)
        if self._chosen is None:
            self._write(line, row.plain, key, row.repairs)
        elif self._chosen.add(rank, line, (row.plain, key, frozenset(row.repairs))):
            self.rejected["over_max_rows"] += 1  # an earlier row makes way

    def _write(self, line: bytes, plain: bool, key: str, repairs: Collection[str]) -> None:
        if repairs:
            self._repaired.update(repairs)
        apart = self._val is not None and _hash("val", key) < self.prep.val * 2**64
        (self._val if apart else self._output).write(line, plain)

    def _name(self, row: Row) -> str:
        """Give the row an id of its own; returns the id that it came with, or that its content gives it."""
        if not row.id:
            if "made_id" in self._disabled:
                raise Rejected("no_id")
            content = json.dumps(row.to_json()).encode()
            row.id = f"{self.prep.source}-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
            row.repairs.add("made_id")
        if not row.id.isascii():
            row.id = without_surrogates(row.id)  # before it is compared, so that it stays the only one
        key = row.id
        if key in self._ids:
            if "renamed_duplicate_id" in self._disabled:
                raise Rejected("duplicate_id")
            numbers = itertools.count(2)
            row.id = next(name for number in numbers if (name := f"{key}-{number}") not in self._ids)
            row.repairs.add("renamed_duplicate_id")
        return key

    def _encode(self, row: Row, raw: RawRow) -> bytes:
        try:
            if not raw.lenient or not raw.bad_utf8():
                return encode_line(row.to_json())
            rule, reason = "replaced_bad_utf8", "bad_utf8"
        except UnicodeEncodeError:
            rule, reason = "replaced_surrogates", "lone_surrogate"
        if rule in self._disabled:
            raise Rejected(reason)
        row.repairs.add(rule)
        row.messages, row.tools = without_surrogates(row.messages), without_surrogates(row.tools)
        return encode_line(row.to_json())

    def _reject(self, raw: RawRow, reason: str) -> None:
        self.rejected[reason] += 1
        if reason == "over_max_rows":
            return
        place = {"source": self.prep.source, "file": raw.source, raw.place: raw.number}
        line = {"reason": reason, **place, "row": raw.value}
        if isinstance(raw.value, dict) and "reason" in raw.value and "row" in raw.value:
            line = {**raw.value, "reason": reason}  # fed back in: it keeps the place where it first stood
        elif raw.reason is not None or raw.bad_utf8():
            line["row"] = raw.data.decode(errors="replace")
        try:
            encoded = encode_line(line)
        except (UnicodeEncodeError, RecursionError, OverflowError):
            # As text: halves of characters stay in it as escapes, and it may be as deep as it likes.
            text = raw.data.decode(errors="replace") or json.dumps(without_surrogates(raw.value))
            encoded = encode_line(without_surrogates({"reason": reason, **place, "row": text}))
        self._rejects.write(encoded)

    # --- what needs the target's tokenizer ---

    def _load_tokenizer(self) -> Any:
        if self._tokenizer is None:
            from dpace_cli.modeling.target import load_tokenizer

            self._tokenizer = load_tokenizer(self.target)
        return self._tokenizer

    def _check_tools(self) -> None:
        if "tools_not_supported" in self._disabled:
            return
        if self._takes_tools is None:
            from dpace_cli.data.tokens import takes_tools

            try:
                self._takes_tools = takes_tools(self._load_tokenizer(), self.target.template_options())
            except DpaceError as error:
                warn(f"rows with tools are rejected: nobody knows if the target takes any ({error.message})")
                self._takes_tools = False
        if not self._takes_tools:
            raise Rejected("tools_not_supported")

    def _check_length(self, row: Row) -> None:
        from dpace_cli.data.tokens import TemplateError, generation_prompt, rendered

        tokenizer, options = self._load_tokenizer(), self.target.template_options()
        try:
            if limit := self.prep.max_prompt_tokens:
                last = max((i for i, m in enumerate(row.messages) if m["role"] == "user"), default=-1)
                prompt = generation_prompt(tokenizer, row.messages[: last + 1], options, row.tools)
                if len(prompt) > limit and "prompt_too_long" not in self._disabled:
                    raise Rejected("prompt_too_long")
            if limit := self.prep.max_tokens:
                ids = rendered(tokenizer, row.messages, options, row.tools)
                if len(ids) > limit and "too_long" not in self._disabled:
                    raise Rejected("too_long")
        except TemplateError:
            if "refused_by_template" not in self._disabled:
                raise Rejected("refused_by_template") from None


@dataclass(frozen=True)
class _Files:
    """Where the outputs go: into the run, or beside an output file that was named."""

    output: Path
    rejects: Path
    manifest: Path
    val: Path | None

    @classmethod
    def of(cls, prep: PrepConfig, folder: RunFolder) -> _Files:
        output = Path(prep.output).expanduser() if prep.output else folder.prompts
        prefix = f"{output.stem}." if prep.output else ""
        val = output.with_name(f"{prefix}val.jsonl") if prep.val else None
        names = (output.with_name(f"{prefix}{name}") for name in ("rejects.jsonl", "manifest.json"))
        return cls(output, *names, val)

    def spare(self, sources: list[Any]) -> None:
        """Raise UsageError where an input would be replaced by an output."""
        inputs = {path.resolve() for source in sources if (path := getattr(source, "path", None))}
        for path in filter(None, (self.output, self.rejects, self.manifest, self.val)):
            if path.resolve() in inputs:
                raise UsageError(f"{path} is an input, and would be replaced by an output", "pass --output OTHER.jsonl")


@dataclass
class _Demo:
    """The embedded generator; with the attributes of a `SourceFile`."""

    count: int
    seed: int
    oddities: Counter[str] = field(default_factory=Counter)
    cut_at: int | None = None
    sha256: str = ""
    position: int = 0

    def rows(self) -> Iterator[RawRow]:
        from dpace_cli.demo.prompts import samples

        for number, sample in enumerate(samples(None, self.count, self.seed, "train"), start=1):
            turns = [{"from": "human", "value": sample.prompt}, {"from": "gpt", "value": sample.answer}]
            yield RawRow({"id": sample.id, "conversations": turns}, None, b"", "row", number, "demo")


def _sources(prep: PrepConfig) -> list[Any]:
    if prep.source == "demo":
        return [_Demo(prep.max_rows or DEMO_ROWS, prep.seed)]
    if not prep.inputs:
        if prep.source not in HUB_IDS:
            raise UsageError("no input is given", f"dpace prep {prep.source} FILE")
        name, split = HUB_IDS[prep.source]
        return [HubSource(name, split if prep.split == "train" else prep.split)]
    sources: list[Any] = []
    for name in prep.inputs:
        path = Path(name).expanduser()
        if not path.exists() and looks_like_hub_id(name):
            sources.append(HubSource(name, prep.split))
            continue
        if not path.exists():
            raise UsageError(f"{name} does not exist", "give a file, a folder, or a hub id such as owner/name")
        paths = [path]
        if path.is_dir():
            paths = _data_files(path)
            if not paths:
                raise UsageError(f"{name} is a folder without data files")
        sources += (ParquetSource(p) if is_parquet(p) else SourceFile(p) for p in paths)
    return sources


def _data_files(folder: Path) -> list[Path]:
    """Files of a folder, read-me and the like left out where others have the name of data."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
    named = [p for p in files if p.suffix.lower() in (".json", ".jsonl", ".ndjson", ".gz", ".zst", ".parquet")]
    return named or files


def _check_rules(names: list[str]) -> None:
    known = [*REPAIRS, *REJECTIONS]
    for name in names:
        if name in UNCONDITIONAL:
            raise UsageError(f"prep.disable: {name} cannot be turned off", f"it says that {REJECTIONS[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "docs/data.md lists the rules"
            raise UsageError(f"prep.disable: there is no rule {name}", hint)


def _first_turns(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The conversation through the answer to the user turn of that number."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[count]] if len(users) > count else messages


def _hash(*parts: Any) -> int:
    """64 bits that depend on the parts alone."""
    text = "\0".join(map(str, parts)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
