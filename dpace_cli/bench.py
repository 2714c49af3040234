"""Measure drafters: acceptance length and speed-up, on any data sets, at any temperatures.

One record file for each drafter, data set and temperature; what is done is skipped, and what was begun is
resumed prompt by prompt. How an engine measures is said in `dpace_cli/engines/measure_*.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dpace_cli import console
from dpace_cli.config import Config
from dpace_cli.data.benchmarks import dataset_name, load_prompts
from dpace_cli.engines.measure_base import Done, block_size_of, target_name
from dpace_cli.errors import UsageError
from dpace_cli.records import CheckpointRef, RunFolder, only_one, read_json
from dpace_cli.render.terminal import TerminalTable
from dpace_cli.results import BenchRecord
from dpace_cli.tables.catalog import SR_NOTE, TAU_NOTE
from dpace_cli.tables.table import MISSING, Column, Table


@dataclass(frozen=True)
class Measured:
    """The figures of one record, and where it is.

    `prompts` counts conversations and `requests` their turns; `near_ties`, `broken` and `errors` are requests.
    """

    arm: str
    seed: int
    step: int | None
    dataset: str
    temperature: float
    concurrency: int
    prompts: int
    requests: int
    sr: float | None
    tau: float | None
    tau_pooled: float | None
    lossless: float | None
    near_ties: int
    broken: int
    errors: int
    result: Path


@dataclass(frozen=True)
class BenchResult:
    """What a call measured. `results` holds every record; the other fields are those of the first."""

    dataset: str
    temperature: float
    prompts: int
    sr: float | None
    tau: float | None
    tau_pooled: float | None
    lossless: float | None
    result: Path
    results: list[Measured]

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        yield TerminalTable(_table(self.results))
        folder = os.path.commonpath([line.result.parent for line in self.results])
        records = f"{len(self.results)} record{'' if len(self.results) == 1 else 's'}"
        yield Text(f"\n{records} in {folder}; `dpace report` compares them", style="dim")


def _table(lines: Sequence[Measured]) -> Table:
    """The figures of a call; what is the same everywhere, or nowhere, has no column."""

    def varies(name: str) -> bool:
        return len({getattr(line, name) for line in lines}) > 1

    headings = [("Data set", "dataset"), ("Temperature", "temperature"), ("In flight", "concurrency"), ("Arm", "arm"),
                ("Seed", "seed"), ("Step", "step")]  # fmt: skip
    headings = [(words, name) for words, name in headings if name in ("dataset", "temperature", "arm") or varies(name)]
    columns = [("prompts", "prompts", "d"), ("SR", "sr", ".2f"), ("tau", "tau", ".2f"), ("lossless", "lossless", ".1%"),
               ("pooled tau", "tau_pooled", ".2f")]  # fmt: skip
    columns = [column for column in columns if any(getattr(line, column[1]) is not None for line in lines)]
    counts = [("near-ties", "near_ties", "d"), ("broken", "broken", "d"), ("errors", "errors", "d")]
    columns += [column for column in counts if any(getattr(line, column[1]) for line in lines)]

    def text(value: float | str | None) -> str:
        return value if isinstance(value, str) else MISSING if value is None else f"{value:g}"

    return Table(
        "bench", "Measured",
        (*(Column(words, heading=True) for words, _ in headings),
         *(Column(words, format=form, optional=name == "tau_pooled") for words, name, form in columns)),
        tuple((*(text(getattr(line, name)) for _, name in headings), *(getattr(line, name) for _, name, _ in columns))
              for line in lines),
        (SR_NOTE, TAU_NOTE) if any(line.sr is not None for line in lines) else (TAU_NOTE,),
    )  # fmt: skip


def run(config: Config, checkpoints: Sequence[CheckpointRef], folder: RunFolder | Path) -> BenchResult:
    """Measure checkpoints on the config's data sets at its temperatures.

    Args:
        config: its `target` and `bench` sections are used.
        checkpoints: drafters of one target.
        folder: a run, or a folder for the records.
    Raises:
        UsageError: nothing to measure, an input that is missing or does not fit, or another bench at work here.
        RunError: no prompt of a data set could be answered.
    """
    if not checkpoints:
        raise UsageError("there is no checkpoint to measure", "train one, or pass --checkpoint")
    bench = config.bench
    names = Counter(dataset_name(name) for name in bench.datasets)
    twice = [name for name, count in names.items() if count > 1]
    same = [place for place, count in Counter((c.folder, c.step) for c in checkpoints).items() if count > 1]
    if same:
        raise UsageError(f"two checkpoints are both {same[0][0]}, step {same[0][1]}", "name one of them alone")
    if twice or not names:
        raise UsageError(f"bench.datasets names {twice[0]} twice" if twice else "bench.datasets is empty")
    sets = [load_prompts(name, bench.data_dir, bench.num_prompts, bench.seed) for name in bench.datasets]
    root = folder / "bench" if isinstance(folder, RunFolder) else Path(folder)
    with only_one(root / "lock"):  # two at once would take each other's time, and each other's half-done records
        engine = _engine(config, checkpoints, root)
        done: Done = []
        for prompts, temperature in itertools.product(sets, bench.temperatures):
            done += engine.measure(prompts, temperature)
    return _result(done)


@dataclass(frozen=True)
class LaunchCommands:
    """How to start the servers that `--engine sglang` and `--engine vllm` measure, with and without speculation."""

    checkpoint: str
    sglang: str
    sglang_baseline: str
    vllm: str
    vllm_baseline: str


@dataclass(frozen=True)
class LaunchPlan:
    """The launch commands of some checkpoints; on a terminal, lines to copy."""

    commands: list[LaunchCommands]

    def __rich_console__(self, console: Console, _options: ConsoleOptions) -> RenderResult:
        for each in self.commands:
            for name, words in (
                ("sglang", "SGLang, with this drafter"), ("sglang_baseline", "SGLang, without (--baseline-url)"),
                ("vllm", "vLLM, with this drafter"), ("vllm_baseline", "vLLM, without (--baseline-url)"),
            ):  # fmt: skip
                # Printed here and not yielded, because what is yielded is cut to the terminal's width.
                console.print(Text(f"# {each.checkpoint}: {words}"), soft_wrap=True)
                console.print(Text(getattr(each, name)), soft_wrap=True)
        return iter(())


def launch_commands(config: Config, checkpoints: Sequence[CheckpointRef]) -> LaunchPlan:
    """The exact commands for each checkpoint; nothing is started.

    SGLang's `--speculative-num-draft-tokens` counts the anchor of a block, vLLM's `num_speculative_tokens`
    does not.

    Raises:
        UsageError: a checkpoint's config cannot be read.
    """
    location = target_name(config)
    options = ["--revision", config.target.revision] if config.target.revision else []
    options += ["--dtype", config.target.dtype] if config.target.dtype != "auto" else []
    options += ["--trust-remote-code"] if config.target.trust_remote_code else []
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", location, *options]
    vllm = ["vllm", "serve", location, *options]
    found = []
    for ref in checkpoints:
        block = block_size_of(read_json(ref.path / "config.json"), config.bench.block_size)
        speculation = {"method": "dflash", "model": str(ref.path), "num_speculative_tokens": block - 1}
        found.append(LaunchCommands(
            checkpoint=str(ref.path),
            sglang=shlex.join([*sglang, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path",
                               str(ref.path), "--speculative-num-draft-tokens", str(block), "--port", "30000"]),
            sglang_baseline=shlex.join([*sglang, "--port", "30001"]),
            vllm=shlex.join([*vllm, "--speculative-config", json.dumps(speculation), "--port", "8000"]),
            vllm_baseline=shlex.join([*vllm, "--port", "8001"]),
        ))  # fmt: skip
    return LaunchPlan(found)


def _engine(config: Config, checkpoints: Sequence[CheckpointRef], root: Path) -> Any:
    """The engine that measures; its module is loaded when it is used, for servers need no torch."""
    match config.bench.engine:
        case "local":
            from dpace_cli.engines.measure_local import LocalBench as Engine
        case "simulate":
            from dpace_cli.engines.measure_simulate import SimulateBench as Engine
        case "sglang" | "vllm":
            from dpace_cli.engines.measure_servers import ServerBench as Engine
    return Engine(config, checkpoints, root)


def _result(done: Done) -> BenchResult:
    results = [_figures(path, record) for path, record in done]
    for line in results:
        if line.broken:
            console.warn(
                f"{line.arm}, {line.dataset}: {line.broken} of {line.requests} outputs differ from the target's own "
                f"where the target was sure ({line.result})"
            )
        if line.errors:
            console.warn(
                f"{line.arm}, {line.dataset}: {line.errors} of {line.requests} requests failed ({line.result})"
            )
    first = results[0]
    return BenchResult(
        first.dataset, first.temperature, first.prompts, first.sr, first.tau, first.tau_pooled, first.lossless,
        first.result, results,
    )  # fmt: skip


def _figures(path: Path, record: BenchRecord) -> Measured:
    return Measured(
        arm=record.arm,
        seed=record.seed,
        step=record.step,
        dataset=record.dataset,
        temperature=record.temperature,
        concurrency=record.concurrency,
        prompts=len({prompt.id for prompt in record.prompts}),
        requests=len(record.prompts),
        sr=record.sr,
        tau=record.tau,
        tau_pooled=record.tau_pooled,
        lossless=record.lossless,
        near_ties=record.near_ties,
        broken=record.broken,
        errors=len(record.prompts) - len(record.finished),
        result=path,
    )
