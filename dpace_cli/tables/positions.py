"""Position weights of checkpoints: the record that `dpace weights` writes, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpace_cli.errors import UsageError
from dpace_cli.records import read_json
from dpace_cli.stats import QUANTILES, Correlation, Estimate, Position
from dpace_cli.tables.table import Column, Table


@dataclass(frozen=True)
class CheckpointWeights:
    """What was seen at the positions of one drafter's blocks.

    Attributes:
        checkpoint: its folder. arm, seed, step: as its folder's name has them.
        block_size: K. gamma: decay length of the fixed weights beside; None: uniform.
        alpha: smoothing of the weights.
        blocks: blocks that were drafted.
        positions: for k from 1 to K - 1.
        correlation: with the accepted length; None where not asked for, or not defined.
    """

    checkpoint: str
    arm: str
    seed: int
    step: int | None
    block_size: int
    gamma: float | None
    alpha: float
    blocks: int
    positions: list[Position]
    correlation: Correlation | None = None

    @property
    def name(self) -> str:
        """Arm, seed and step, as far as they are known."""
        return f"{self.series}, step {self.step}" if self.step is not None else self.arm

    @property
    def series(self) -> str:
        """What checkpoints of one training share."""
        return f"{self.arm}-seed{self.seed}" if self.step is not None else self.arm


def load_weights(path: Path) -> list[CheckpointWeights]:
    """Read the file that `dpace weights` wrote.

    Raises:
        UsageError: it is not such a file.
    """
    saved = read_json(path)
    try:
        return [_checkpoint(row) for row in saved["checkpoints"]]
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a file of position weights: {error}", "`dpace weights` writes one") from None


def _checkpoint(row: dict[str, Any]) -> CheckpointWeights:
    positions = [Position(**{**p, "quantiles": p["quantiles"] and tuple(p["quantiles"])}) for p in row["positions"]]
    correlation = row.get("correlation")
    if correlation is not None:
        estimates = {k: Estimate(**{**v, "by_seed": ()}) for k, v in correlation.items() if isinstance(v, dict)}
        correlation = Correlation(**{**correlation, **estimates})
    return CheckpointWeights(**{**row, "positions": positions, "correlation": correlation})


def trajectories(found: Iterable[CheckpointWeights]) -> dict[str, list[CheckpointWeights]]:
    """Trainings of which several steps are there, in the order of the steps."""
    series: dict[str, list[CheckpointWeights]] = {}
    for one in found:
        if one.step is not None:
            series.setdefault(one.series, []).append(one)
    return {name: sorted(own, key=lambda c: c.step or 0) for name, own in series.items() if len(own) > 1}


def last_of_each(found: Sequence[CheckpointWeights]) -> list[CheckpointWeights]:
    """The last step of each training."""
    last: dict[str, CheckpointWeights] = {}
    for one in sorted(found, key=lambda c: c.step or 0):
        last[one.series] = one
    return [one for one in found if last[one.series] is one]


def decay_name(gamma: float | None) -> str:
    """The fixed weights, in words."""
    return "uniform" if gamma is None else f"gamma {gamma:g}"


def position_table(one: CheckpointWeights) -> Table:
    """Weight, confidence and accuracy by position."""
    low, high = f"{QUANTILES[0]:.0%}", f"{QUANTILES[-1]:.0%}"
    columns = (
        Column("k", heading=True, format="d"), Column("mean", group="weight", format=".3f"),
        Column(low, group="weight", format=".3f", optional=True),
        Column("median", group="weight", format=".3f", optional=True),
        Column(high, group="weight", format=".3f", optional=True), Column("share", group="weight", format=".1%"),
        Column("share", group="fixed decay", format=".1%"), Column("confidence", format=".3f"),
        Column("token", group="right", format=".1%"), Column("after prefix", group="right", format=".1%"),
        Column("first k", group="right", format=".1%"), Column("blocks", format=",d"),
    )  # fmt: skip
    rows = tuple(
        (p.k, p.weight, *_spread(p), p.share, p.decay_share, p.confidence, p.accuracy, p.accuracy_after_prefix,
         p.accepted, p.blocks)
        for p in one.positions
    )  # fmt: skip
    notes = (
        f"Position weights of D-PACE with alpha {one.alpha:g}, not the model's parameters; fixed decay: "
        f"{decay_name(one.gamma)}.",
        "right: the drafter's best token is the target's; after prefix: where all earlier ones are right; "
        "first k: share of blocks whose first k tokens are all right.",
        "Over supervised positions alone: a tail behind the answer's end counts neither way.",
    )
    stem = "-".join(filter(None, ["weights", one.series, None if one.step is None else f"step{one.step}"]))
    return Table(stem, f"Position weights of {one.name}", columns, rows, notes)


def _spread(position: Position) -> tuple[float | None, ...]:
    """Lowest, middle and highest of the quantiles."""
    found = position.quantiles
    return (found[0], found[len(found) // 2], found[-1]) if found else (None, None, None)


def dynamics_table(name: str, steps: Sequence[CheckpointWeights]) -> Table:
    """Share of all weight by position (rows) and training step (columns)."""
    count = max(len(one.positions) for one in steps)
    columns = (Column("k", heading=True, format="d"), *(Column(str(c.step), group="step", format=".1%") for c in steps))
    rows = tuple(
        (k + 1, *(c.positions[k].share if k < len(c.positions) else None for c in steps)) for k in range(count)
    )
    return Table(f"dynamics-{name}", f"Share of all position weight over training, {name}", columns, rows)


def correlation_table(found: Sequence[CheckpointWeights]) -> Table | None:
    """How well the surrogate ranks blocks by their accepted length."""
    rows = tuple(
        (c.name, c.correlation.blocks, c.correlation.surrogate, c.correlation.confidence_sum, c.correlation.difference)
        for c in found
        if c.correlation is not None
    )
    if not rows:
        return None
    columns = (
        Column("Checkpoint", heading=True), Column("blocks", format=",d", optional=True),
        Column("surrogate", interval=True), Column("sum of confidences", interval=True),
        Column("difference", format="+.2f", interval=True),
    )  # fmt: skip
    notes = (
        "Spearman's rank correlation, per block, of the accepted length with S = sum over k of q_1 ... q_k, and with "
        "the plain sum of q_k; blocks that are supervised to their end; rows are resampled for the intervals.",
    )
    return Table("correlation", "Rank correlation with the accepted length", columns, rows, notes)
