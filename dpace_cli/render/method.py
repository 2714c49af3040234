"""The plot that explains the method: how D-PACE weighs a block, for drafters of known confidence."""

from __future__ import annotations

import torch

from dpace_cli.config import decay_length
from dpace_cli.objectives import decay_weights, dpace_weights
from dpace_cli.render.plots import Look, Plot, lines
from dpace_cli.tables.positions import decay_name

CONFIDENCES = (0.1, 0.5, 0.8, 0.95)


def confidence_plot(alpha: float, block_size: int) -> Plot:
    """Share of a block's weight at each position, for confidences that are the same at all of them, and by decay.

    Args:
        alpha: smoothing of D-PACE.
        block_size: K; positions 1 to K - 1 have a weight. The decay has DFlash's length for it.
    """
    supervised = torch.ones(1, block_size - 1, dtype=torch.bool)
    gamma = decay_length("auto", block_size)
    decay = f"fixed decay, {decay_name(gamma)}"
    weights = {decay: decay_weights(supervised, gamma)}
    for q in CONFIDENCES:
        weights[f"D-PACE, q = {q:g}"] = dpace_weights(torch.full(supervised.shape, q).log(), supervised, alpha)
    positions = list(range(1, block_size))
    series = {name: (positions, (100 * row / row.sum()).flatten().tolist()) for name, row in weights.items()}
    title = f"Where a loss puts its weight, alpha {alpha:g}, blocks of {block_size}"
    means = "; ".join(
        f"{name}: {sum(k * share for k, share in zip(positions, shares)) / 100:.1f}"
        for name, (_, shares) in series.items()
    )
    return lines(
        "weights-by-confidence", title, f"{title}. Mean position of the weight: {means}.", "position k in the block",
        "share of the block's weight, %", series, Look(tuple(series)),
    )  # fmt: skip
