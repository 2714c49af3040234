"""Training rows, their order, and the anchors drawn in them.

Every draw is keyed by the seed and by what it is for, never by what was drawn before. So the state of a
run is its step alone, and neither a resume nor another number of processes changes any draw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TrainingRow:
    """One training sequence.

    Attributes:
        id: id of the row that it was made from.
        input_ids: token ids.
        loss_mask: 1 where the target's answer stands.
        candidates: positions that can be an anchor: supervised, and the next one too.
    """

    id: str
    input_ids: list[int]
    loss_mask: list[int]
    candidates: np.ndarray

    @classmethod
    def make(cls, row_id: str, input_ids: list[int], loss_mask: list[int]) -> TrainingRow:
        mask = np.asarray(loss_mask, dtype=bool)
        return cls(row_id, input_ids, loss_mask, np.flatnonzero(mask[:-1] & mask[1:]))


def split_validation(rows: Sequence[TrainingRow], count: int) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Hold `count` rows out, chosen by a hash of their ids (at most a tenth of all)."""
    count = min(count, len(rows) // 10)
    ranked = sorted(range(len(rows)), key=lambda i: hashlib.sha256(rows[i].id.encode()).digest())
    held_out = set(ranked[:count])
    return [r for i, r in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def epoch_batches(lengths: Sequence[int], batch_rows: int, seed: int, epoch: int) -> list[list[int]]:
    """All rows of an epoch in random order; the last batch may be smaller.

    Which rows share an optimizer step is left to chance: rows of one length are often of one kind, and steps on
    one kind at a time learn more slowly. Inside a step rows stand by length, so that micro-batches hold little
    padding (which no drafter step computes, and which the target's pass keeps low by itself).

    Args:
        lengths: tokens of each row.
        batch_rows: rows in an optimizer step, over all processes.
    """
    order = np.random.default_rng([seed, 1, epoch]).permutation(len(lengths)).tolist()
    batches = [order[start : start + batch_rows] for start in range(0, len(order), batch_rows)]
    return [sorted(batch, key=lambda i: (lengths[i], i)) for batch in batches]


def draw_anchors(row: TrainingRow, index: int, num_anchors: int, seed: int, epoch: int) -> np.ndarray:
    """At most `num_anchors` distinct anchors of a row, ascending, uniform over its candidates."""
    if len(row.candidates) <= num_anchors:
        return row.candidates
    rng = np.random.default_rng([seed, 2, epoch, index])
    return np.sort(rng.choice(row.candidates, num_anchors, replace=False))


@dataclass(frozen=True)
class Blocks:
    """Anchor blocks of a batch. B sequences, L tokens, N blocks, K positions; 0 is the anchor.

    Attributes:
        input_ids: [B, L] int64, padded on the right with 0.
        anchors: [B, N] int64, 0 where not kept.
        keep: [B, N] bool.
        targets: [B, N, K] int64: the sequence's token at each position.
        supervised: [B, N, K] bool: inside the sequence, inside an answer, block kept, not the anchor.
    """

    input_ids: Tensor
    anchors: Tensor
    keep: Tensor
    targets: Tensor
    supervised: Tensor


def collate(rows: Sequence[TrainingRow], anchors: Sequence[np.ndarray], block_size: int) -> Blocks:
    """Lay rows and their anchors out as tensors."""
    length = max(len(row.input_ids) for row in rows)
    width = max((len(own) for own in anchors), default=0)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length + block_size, dtype=torch.bool)  # past the end: not supervised
    at = torch.zeros(len(rows), width, dtype=torch.long)
    keep = torch.zeros(len(rows), width, dtype=torch.bool)
    for place, (row, own) in enumerate(zip(rows, anchors)):
        input_ids[place, : len(row.input_ids)] = torch.tensor(row.input_ids)
        mask[place, : len(row.loss_mask)] = torch.tensor(row.loss_mask, dtype=torch.bool)
        at[place, : len(own)] = torch.from_numpy(own)
        keep[place, : len(own)] = True
    positions = at[..., None] + torch.arange(block_size)
    batch = torch.arange(len(rows))[:, None, None]
    targets = input_ids[batch, positions.clamp(max=length - 1)]
    supervised = mask[batch, positions] & keep[..., None]
    supervised[..., 0] = False
    return Blocks(input_ids, at, keep, targets, supervised)
