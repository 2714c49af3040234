"""All stages for all arms, one after the other; each skips what it has already done.

Arms differ in their objective (or another swept field) and share everything else: target, data, initial
weights, anchor draws and data order. The hashes that the trainings recorded prove it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpace_cli import bench, console, prep, regen, report, train, weights
from dpace_cli.config import Arm, Config
from dpace_cli.data.benchmarks import DATA_DIR_VARIABLE
from dpace_cli.data.training import training_file
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import RunFolder, file_sha256, read_json, write_json


@dataclass(frozen=True)
class RunResult:
    """What `dpace run` reports.

    Attributes:
        run: the run folder.
        arms: for each arm its measured figures by data set, and the difference to the first arm.
        paired: for each hash (initial weights, data order, anchors), whether all arms of a seed that
            should share it do.
        report: the files that the report wrote.
    """

    run: str
    arms: list[dict[str, Any]]
    paired: dict[str, bool]
    report: dict[str, str]


def run(config: Config, folder: RunFolder) -> tuple[RunResult, report.ReportResult]:
    """Do what is left of prep, regen, train, bench, weights and report.

    Returns:
        The run in short, and its report with every table.
    Raises:
        UsageError: an arm trains online, which needs servers that are started by hand.
        DpaceError: what a stage raises; the same command goes on from there.
    """
    arms = config.expand_arms()
    if any(arm.config.train.engine == "specforge" and arm.config.train.specforge.mode == "online" for arm in arms):
        raise UsageError(
            "dpace run cannot train online: capture servers have to be started first",
            "`dpace train --engine specforge train.specforge.mode=online` plans and starts it; then bench and report",
        )
    steps: list[tuple[str, Callable[[], Any]]] = [
        (f"prep ({config.prep.source})", lambda: _prep(config, folder)),
        (f"regen ({config.regen.engine})", lambda: regen.run(config, folder)),
        *((f"train {arm.folder}", lambda arm=arm: _train(arm, folder)) for arm in arms),
        ("bench", lambda: _bench(config, arms, folder)),
        ("weights", lambda: _weights(config, arms, folder)),
        ("report", lambda: report.run(config, [folder.root], folder / "report")),
    ]
    results: dict[str, Any] = {}
    for number, (label, do) in enumerate(steps, start=1):
        console.note(f"[{number}/{len(steps)}] {label}")
        results[label] = do()
    trained = {arm.folder: results[f"train {arm.folder}"] for arm in arms}
    reported = results["report"]
    result = RunResult(
        run=str(folder), arms=reported.arms, paired=_paired(arms, trained), report=reported.files
    )  # fmt: skip
    write_json(folder / "report" / "run.json", result)
    return result, reported


def _prep(config: Config, folder: RunFolder) -> Any:
    """Prep once: its output stays as long as its section, its input files and what it was compared with do."""
    manifest = folder / "prep" / "manifest.json"
    output = Path(config.prep.output) if config.prep.output else folder.prompts
    if manifest.exists() and output.exists():
        saved = read_json(manifest)
        inputs = {path: file_sha256(Path(path)) for path in config.prep.inputs if Path(path).is_file()}
        same = saved["config"] == config.prep.model_dump(mode="json")
        prompts = config.bench.data_dir or os.environ.get(DATA_DIR_VARIABLE)
        comparable = prompts and any(Path(prompts, f"{name}.jsonl").exists() for name in saved["unchecked"])
        if same and not comparable and all(saved["inputs"].get(path) == digest for path, digest in inputs.items()):
            console.note(f"done before: {output}")
            return saved
    return prep.run(config, folder)


def _train(arm: Arm, folder: RunFolder) -> train.TrainResult:
    result = train.run(arm.config, folder, arm=arm.folder)
    # Losses of unlike objectives are on unlike scales, and would be compared where they stand side by side.
    learned = f"simulated tau {result.simulated_tau:.2f}" if result.simulated_tau else f"loss {result.loss:.4g}"
    console.note(f"{arm.folder}: {result.steps} steps, {learned}, {console.clock(result.seconds)}")
    return result


def _bench(config: Config, arms: list[Arm], folder: RunFolder) -> Any:
    found = folder.checkpoints(config.bench.checkpoints, [arm.folder for arm in arms])
    return bench.run(config, found, folder / "bench")


def _weights(config: Config, arms: list[Arm], folder: RunFolder) -> Any:
    """Position weights of each arm's drafter on the first seed."""
    first = [arm.folder for arm in arms if arm.seed == arms[0].seed]
    paths = [ref.path for ref in folder.checkpoints(config.bench.checkpoints, first)]
    return weights.run(config, paths, data=training_file(config, folder), output=folder / "weights")


def _paired(arms: list[Arm], trained: dict[str, train.TrainResult]) -> dict[str, bool]:
    """Check by the recorded hashes that arms differ in nothing but what is swept.

    Raises:
        RunError: arms that should share their draws do not.
    """
    shared: dict[tuple, dict[str, set[str]]] = {}
    for arm in arms:
        swept = arm.config.train
        like = (arm.seed, swept.num_draft_layers, swept.batch_size, swept.num_anchors)
        for name, digest in trained[arm.folder].hashes.items():
            shared.setdefault(like, {}).setdefault(name, set()).add(digest)
    paired = {name: all(len(group[name]) == 1 for group in shared.values()) for name in next(iter(shared.values()))}
    if not all(paired.values()):
        raise RunError(
            f"the arms do not share {', '.join(name for name, same in paired.items() if not same)}",
            "an arm was trained on other data or by another version; delete its folder under train and run again",
        )
    return paired
