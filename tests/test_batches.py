"""Rows, order, anchors and blocks of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpace_cli.data.batches import TrainingRow, collate, draw_anchors, epoch_batches, split_validation


def row(mask: str, row_id: str = "r") -> TrainingRow:
    return TrainingRow.make(row_id, list(range(10, 10 + len(mask))), [int(c) for c in mask])


masks = st.lists(st.text("01", min_size=1, max_size=30), min_size=1, max_size=5)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(1, 20), st.integers(0, 5))
def test_an_epoch_visits_every_row_once(lengths, batch_rows, epoch):
    batches = epoch_batches(lengths, batch_rows, seed=3, epoch=epoch)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) <= batch_rows for batch in batches)
    assert len(batches) == -(-len(lengths) // batch_rows)


def test_epochs_and_seeds_differ_and_repeat():
    lengths = list(range(200))
    first = epoch_batches(lengths, 4, seed=0, epoch=0)
    assert first == epoch_batches(lengths, 4, seed=0, epoch=0)
    assert first != epoch_batches(lengths, 4, seed=0, epoch=1)
    assert first != epoch_batches(lengths, 4, seed=1, epoch=0)


def test_a_step_mixes_lengths_and_holds_its_rows_by_length():
    lengths = [(7 * i) % 100 + 1 for i in range(512)]
    batches = epoch_batches(lengths, 8, seed=0, epoch=0)
    assert all([lengths[i] for i in b] == sorted(lengths[i] for i in b) for b in batches)
    means = [np.mean([lengths[i] for i in b]) for b in batches]
    assert np.std(means) < 1.5 * np.std(lengths) / 8**0.5  # that of rows drawn at random


@given(st.text("01", min_size=1, max_size=60), st.integers(1, 20), st.integers(0, 3))
def test_anchors_are_distinct_candidates(mask, count, epoch):
    one = row(mask)
    anchors = draw_anchors(one, 0, count, seed=1, epoch=epoch)
    candidates = [i for i in range(len(mask) - 1) if mask[i] == mask[i + 1] == "1"]
    assert len(anchors) == min(count, len(candidates))
    assert set(anchors.tolist()) <= set(candidates) and sorted(set(anchors.tolist())) == anchors.tolist()


def test_anchors_are_uniform_over_candidates():
    one = row("0" * 5 + "1" * 21)
    counts = np.zeros(30)
    for epoch in range(4000):
        counts[draw_anchors(one, 0, 5, seed=0, epoch=epoch)] += 1
    hit = counts[5:25]
    assert counts.sum() == hit.sum() == 20000
    assert ((hit - 1000) ** 2 / 1000).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 0.001


@settings(max_examples=200)
@given(masks, st.integers(2, 9), st.integers(1, 6))
def test_blocks_match_a_loop_over_rows_blocks_and_positions(masks, block_size, count):
    rows = [row(mask, f"r{i}") for i, mask in enumerate(masks)]
    drawn = [draw_anchors(r, i, count, seed=0, epoch=0) for i, r in enumerate(rows)]
    blocks = collate(rows, drawn, block_size)
    assert blocks.keep.sum() == sum(len(own) for own in drawn)
    for b, (one, own) in enumerate(zip(rows, drawn)):
        assert blocks.input_ids[b, : len(one.input_ids)].tolist() == one.input_ids
        for n in range(blocks.anchors.shape[1]):
            kept = n < len(own)
            assert bool(blocks.keep[b, n]) == kept
            for k in range(block_size):
                at = int(own[n]) + k if kept else -1
                inside = kept and k > 0 and at < len(one.input_ids) and one.loss_mask[at] == 1
                assert bool(blocks.supervised[b, n, k]) == inside
                if inside or (kept and k == 0):
                    assert int(blocks.targets[b, n, k]) == one.input_ids[at]


def test_validation_rows_do_not_depend_on_the_order():
    rows = [row("0111", f"row-{i}") for i in range(100)]
    kept, held = split_validation(rows, 8)
    again, held_again = split_validation(rows[::-1], 8)
    assert {r.id for r in held} == {r.id for r in held_again} and len(held) == 8
    assert {r.id for r in kept} | {r.id for r in held} == {r.id for r in rows}
    assert {r.id for r in kept} == {r.id for r in again}


@pytest.mark.parametrize("count", [1, 5, 9])
def test_few_rows_are_not_held_out(count):
    kept, held = split_validation([row("0111", str(i)) for i in range(count)], 64)
    assert (len(kept), len(held)) == (count, 0)
