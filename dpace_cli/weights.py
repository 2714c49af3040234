"""Position weights: how much each position of a block can still add to the accepted length.

Not the model's parameters. Blocks are drawn at anchors of held-out answers, drafted in one pass, and the
D-PACE weight of each position is worked out from the drafter's confidence in the target's own tokens.

Shapes: B rows, L tokens, N anchors, n blocks, K positions in a block (0 is the anchor), T taps, H width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch import Tensor
from torch.nn import functional as F

from dpace_cli import console
from dpace_cli.config import Config, decay_length
from dpace_cli.data.batches import Blocks, TrainingRow, collate, draw_anchors, split_validation
from dpace_cli.data.training import read_training_rows
from dpace_cli.errors import UsageError
from dpace_cli.modeling.capture import States
from dpace_cli.modeling.checkpoint import load_drafter
from dpace_cli.modeling.drafter_forward import drafter_hidden
from dpace_cli.modeling.identity import check_fits
from dpace_cli.modeling.target import Target, load_target, tokenizer_fingerprint
from dpace_cli.objectives import dpace_weights
from dpace_cli.records import checkpoint_ref, file_sha256, read_json, write_json, writing
from dpace_cli.render.export import csv_text
from dpace_cli.render.figures import weight_figures
from dpace_cli.render.terminal import Bars, TerminalTable
from dpace_cli.stats import Bootstrap, Correlation, Position, correlate, position_summary
from dpace_cli.tables.positions import (
    CheckpointWeights,
    correlation_table,
    decay_name,
    dynamics_table,
    last_of_each,
    load_weights,
    position_table,
    trajectories,
)
from dpace_cli.tables.table import MISSING

GROUP_TOKENS = 4096
"""Tokens of rows that are drafted together, padding included."""


@dataclass(frozen=True)
class WeightsResult:
    """What `dpace weights` reports.

    Attributes:
        checkpoint, blocks, positions, correlation: of the last checkpoint.
        alpha: smoothing of the weights.
        data: the rows' file. rows: how many of its rows were used.
        held_out: did the training leave them out? None where the checkpoint does not tell what it was trained on.
        checkpoints: every checkpoint, in the order given.
        files: what was written, by name.
    """

    checkpoint: str
    alpha: float
    data: str
    rows: int
    held_out: bool | None
    blocks: int
    positions: list[Position]
    correlation: Correlation | None
    checkpoints: list[CheckpointWeights]
    files: dict[str, str]

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        for one in last_of_each(self.checkpoints):
            yield _bars(one)
            yield Text()
        for name, steps in trajectories(self.checkpoints).items():
            yield TerminalTable(dynamics_table(name, steps))
            yield Text()
        table = correlation_table(self.checkpoints)
        if table is not None:
            yield TerminalTable(table)
            yield Text()
        if self.files:
            yield Text(f"{len(self.files)} files in {Path(self.files['json']).parent}", style="dim")


def run(
    config: Config, checkpoints: Sequence[Path], data: Path | None = None, output: Path | None = None
) -> WeightsResult:
    """Work out the position weights of drafters on the same held-out blocks.

    Args:
        config: its `target`, `weights` and `train.max_length` are used.
        checkpoints: DFlash checkpoint folders of one target.
        data: rows with the target's answers. Of the file that the drafter was trained on, the rows that the
            training held out are used. Default: `train.data`.
        output: folder for JSON, CSV and PNG files; None writes nothing.
    Raises:
        UsageError: a checkpoint does not belong to the target, or the data has no row to draft at.
    """
    if data is None:
        if config.train.data is None:
            raise UsageError("dpace weights needs rows with the target's answers", "pass --data FILE")
        data = Path(config.train.data)
    if not checkpoints:
        raise UsageError("dpace weights needs a checkpoint", "pass --checkpoint FOLDER")
    target = load_target(config.target)
    fingerprint, options = tokenizer_fingerprint(target.tokenizer), config.target.template_options()
    rows, _ = read_training_rows(data, target.tokenizer, fingerprint, options, config.train.max_length)
    rows, held_out = _choose_rows(config, rows, data, checkpoints[0])
    states = _SharedStates(target, rows, keep=len(checkpoints) > 1, limit_gb=config.train.cache_limit_gb)
    with console.meter("weights", len(rows) * len(checkpoints), "rows") as meter:
        found = [_checkpoint(config, target, path, rows, states, meter) for path in checkpoints]
    files = write(found, data, len(rows), held_out, output) if output is not None else {}
    last = found[-1]
    return WeightsResult(
        last.checkpoint, config.weights.alpha, str(data), len(rows), held_out, last.blocks, last.positions,
        last.correlation, found, files,
    )  # fmt: skip


def redraw(path: Path, output: Path) -> WeightsResult:
    """The result of an earlier call from its JSON file, and its tables and plots anew; no model is needed.

    Raises:
        UsageError: it is not such a file.
        RunError: the folder cannot be written.
    """
    found, saved = load_weights(path), read_json(path)
    try:
        data, rows, held_out = saved["data"], saved["rows"], saved["held_out"]
    except KeyError as error:
        raise UsageError(f"{path} is not a whole file of position weights: it has no {error}") from None
    files = write(found, Path(data), rows, held_out, output)
    last = found[-1]
    return WeightsResult(
        last.checkpoint, last.alpha, data, rows, held_out, last.blocks, last.positions, last.correlation, found, files
    )


def write(
    found: Sequence[CheckpointWeights], data: Path, rows: int, held_out: bool | None, output: Path
) -> dict[str, str]:  # fmt: skip
    """Write JSON, tables and plots.

    Returns:
        Short name to path.
    Raises:
        RunError: the folder cannot be written.
    """
    stem = "dynamics" if trajectories(found) else "weights"
    files = {"json": output / f"{stem}.json"}
    write_json(files["json"], {"data": str(data), "rows": rows, "held_out": held_out, "checkpoints": found})
    for figure in weight_figures(found):
        name = figure.plot.name
        files[f"{name}.png"] = output / f"{name}.png"
        with writing(files[f"{name}.png"], "wb") as file:
            figure.plot.png(file)
        files[f"{name}.csv"] = output / f"{name}.csv"
        with writing(files[f"{name}.csv"]) as file:
            file.write(csv_text(figure.table))
    return {name: str(path) for name, path in files.items()}


# --- rows -------------------------------------------------------------------------------------------------


def _choose_rows(
    config: Config, rows: list[TrainingRow], data: Path, checkpoint: Path
) -> tuple[list[TrainingRow], bool | None]:  # fmt: skip
    """At most `weights.num_rows` rows by seed, and whether the training left them out, where that is known."""
    manifest = checkpoint.parent / "manifest.json"
    trained = read_json(manifest) if manifest.exists() else {}
    seen = trained.get("data", {}).get("sha256")
    held_out = None if seen is None else True
    if seen == file_sha256(data):
        apart = split_validation(rows, trained["config"]["train"]["val_rows"])[1]
        held_out = bool(apart)
        if apart:
            rows = apart
        else:
            console.warn(f"{checkpoint} was trained on all rows of {data}; train.val_rows would have held some out")
    if not rows:
        raise UsageError(f"{data} has no row to draft at", "a row needs two supervised tokens in a row")
    count = config.weights.num_rows
    if len(rows) > count:
        chosen = np.random.default_rng([config.weights.seed, 3]).choice(len(rows), count, replace=False)
        rows = [rows[i] for i in np.sort(chosen)]
    return rows, held_out


# --- blocks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drafted:
    """Supervised blocks of all rows: [n, K-1] but for `row` [n]."""

    logq: Tensor
    right: Tensor
    supervised: Tensor
    row: Tensor


class _SharedStates:
    """The target's states of the rows, captured once for all drafters that tap the same layers."""

    def __init__(self, target: Target, rows: Sequence[TrainingRow], keep: bool, limit_gb: float) -> None:
        self.target, self.ids, self.keep, self.limit = target, [row.input_ids for row in rows], keep, limit_gb * 1e9
        self._made: dict[tuple[int, ...], States] = {}

    def tapped(self, layer_ids: Sequence[int]) -> States:
        key = tuple(layer_ids)
        if key not in self._made:
            states = States(self.target, self.ids, layer_ids, last=False)
            if self.keep and states.bytes <= self.limit:
                states.keep_in_memory(lambda _tokens: None)
            self._made = {key: states}
        return self._made[key]


def _checkpoint(
    config: Config, target: Target, path: Path, rows: Sequence[TrainingRow], states: _SharedStates, meter: console.Meter
) -> CheckpointWeights:
    """Draft every block with one checkpoint and summarise."""
    drafter = load_drafter(path, target.device, target.model.dtype)
    check_fits(drafter, target, path)
    drafted = _draft(drafter, target, rows, states.tapped(drafter.target_layer_ids), config, meter)
    alpha, block_size = config.weights.alpha, drafter.block_size
    weights = dpace_weights(drafted.logq, drafted.supervised, alpha).numpy()
    confidence, right, supervised = drafted.logq.exp().numpy(), drafted.right.numpy(), drafted.supervised.numpy()
    gamma = decay_length("auto", block_size)
    ranked = None
    if config.weights.correlation:
        bootstrap = Bootstrap(config.report.confidence, min(config.report.bootstrap_samples, 1999), config.weights.seed)
        ranked = correlate(confidence, right, supervised, drafted.row.numpy(), bootstrap)
        if ranked is None:
            console.warn(f"{path}: no correlation; too few blocks are inside an answer to their end, or all are alike")
    ref = checkpoint_ref(path)
    positions = position_summary(weights, confidence, right, supervised, gamma)
    return CheckpointWeights(
        str(path), ref.arm, ref.seed, ref.step, block_size, gamma, alpha, len(weights), positions, ranked
    )  # fmt: skip


@torch.no_grad()
def _draft(
    drafter: Any, target: Target, rows: Sequence[TrainingRow], states: States, config: Config, meter: console.Meter
) -> _Drafted:
    """Draft at anchors of every row; the same anchors for every drafter of a seed.

    Returns:
        Float32 log-probability of the target's tokens, whether each is the drafter's best, on the CPU.
    """
    parts: list[tuple[Tensor, ...]] = []
    for group in _groups(rows):
        own = [rows[i] for i in group]
        anchors = [draw_anchors(rows[i], i, config.weights.num_anchors, config.weights.seed, 0) for i in group]
        blocks = collate(own, anchors, drafter.block_size)
        tapped, _ = states.batch(group)
        hidden = _hidden(drafter, target, blocks, tapped)[blocks.keep.to(target.device)][:, 1:]
        targets = blocks.targets[blocks.keep][:, 1:]
        row = torch.tensor(group)[:, None].expand_as(blocks.keep)[blocks.keep]
        logq, right = _judge(drafter, target, hidden, targets.to(target.device), config.train.head_chunk_tokens)
        parts.append((logq.cpu(), right.cpu(), blocks.supervised[blocks.keep][:, 1:], row))
        meter.advance(len(group))
    logq, right, supervised, row = (torch.cat(part) for part in zip(*parts))
    order = torch.argsort(row, stable=True)
    return _Drafted(logq[order], right[order] & supervised[order], supervised[order], row[order])


def _groups(rows: Sequence[TrainingRow]) -> Iterator[list[int]]:
    """Rows of like length, a bounded number of tokens together."""
    group: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: (-len(rows[i].input_ids), i)):
        if group and (len(group) + 1) * len(rows[group[0]].input_ids) > GROUP_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def _hidden(drafter: Any, target: Target, blocks: Blocks, tapped: Tensor) -> Tensor:
    """[B, N, K, H] the drafter's output at every block."""
    ids = torch.full_like(blocks.targets, drafter.mask_token_id)
    ids[..., 0] = blocks.targets[..., 0]
    settings = getattr(drafter.config, "dflash_config", None) or {}
    scale = float(settings.get("input_embedding_scale", 1.0))
    dtype = next(drafter.parameters()).dtype
    noise = (F.embedding(ids.to(target.device), target.embedding) * scale).to(dtype)
    return drafter_hidden(
        drafter, noise, tapped.to(dtype), blocks.anchors.to(target.device), blocks.keep.to(target.device)
    )


def _judge(drafter: Any, target: Target, hidden: Tensor, targets: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` [n, K-1], and whether it is the drafter's best; a few logits at a time."""
    head = target.model.get_output_embeddings()
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    found = []
    for start in range(0, len(flat), chunk):
        logits = drafter.compute_logits(flat[start : start + chunk].to(head.weight.dtype), head).float()
        own = wanted[start : start + chunk, None]
        found.append((logits.log_softmax(-1).gather(1, own)[:, 0], logits.argmax(-1) == own[:, 0]))
    logq, right = (torch.cat(part).view_as(targets) for part in zip(*found))
    return logq, right


# --- terminal ---------------------------------------------------------------------------------------------


def _bars(one: CheckpointWeights) -> Bars:
    table = position_table(one)

    def text(value: float | None, form: str = ".1%") -> str:
        return MISSING if value is None else format(value, form)

    texts = [
        (str(p.k), text(p.weight, ".2f"), text(p.share), text(p.confidence), text(p.accepted)) for p in one.positions
    ]  # fmt: skip
    return Bars(
        title=f"{table.title} (alpha {one.alpha:g}, {one.blocks:,} blocks)",
        names=("k", "weight", "share", "confidence", "accepted"),
        texts=texts,
        values=[p.share for p in one.positions],
        marks=[p.decay_share for p in one.positions],
        legend=f"bar: share of all position weight; line: the same for the fixed decay ({decay_name(one.gamma)}). "
        "accepted: share of blocks whose first k tokens are all right.",
    )
