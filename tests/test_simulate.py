"""Simulated acceptance against real greedy decoding, and against DFlash's own forward."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from bench_models import BLOCK, dense_logits, new_drafter, trained_drafter

from dpace_cli.config import TargetConfig
from dpace_cli.modeling import simulate as module
from dpace_cli.modeling.decode import decode
from dpace_cli.modeling.simulate import simulate
from dpace_cli.modeling.target import Target, load_target

MAX_NEW = 36


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prompts of unequal length, so that batches are padded."""
    return [[3 + i, 90, 14 + i, 200, *range(20, 20 + 3 * i)] for i in range(5)]


@pytest.fixture(scope="module")
def own(target, prompts):
    """The target's greedy answers: some end by an end token, some by the maximum length."""
    drafter = new_drafter(target)
    free = [decode(drafter, target.model, p, max_new_tokens=MAX_NEW, stop_token_ids=[], block_size=1) for p in prompts]
    stop = free[0].output_ids[22]
    return stop, [
        decode(drafter, target.model, p, max_new_tokens=MAX_NEW, stop_token_ids=[stop], block_size=1) for p in prompts
    ]


@pytest.fixture(scope="module")
def drafter(target, prompts, own):
    return trained_drafter(target, prompts, [answer.output_ids for answer in own[1] if answer.tokens > BLOCK + 1])


@pytest.fixture(scope="module")
def rows(prompts, own):
    return [([*p, *a.output_ids], [0] * len(p) + [1] * a.tokens) for p, a in zip(prompts, own[1])]


@pytest.fixture(scope="module")
def limits(prompts):
    return [len(p) + MAX_NEW for p in prompts]


@pytest.mark.parametrize(
    ("block_size", "every_anchor"), [(2, True), (BLOCK, True), (11, True), (BLOCK, False), (11, False)]
)
def test_its_verify_steps_are_those_of_real_greedy_decoding(
    target, prompts, own, drafter, rows, limits, block_size, every_anchor
):
    stop, answers = own
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    found = simulate(drafter, target, rows, block_size=block_size, limits=limits, every_anchor=every_anchor)
    assert found.anchors == (sum(a.tokens - 1 for a in answers) if every_anchor else found.rounds)
    real = [
        decode(drafter, target.model, p, max_new_tokens=MAX_NEW, stop_token_ids=[stop], block_size=block_size)
        for p in prompts
    ]
    assert [r.output_ids for r in real] == [a.output_ids for a in answers]
    assert [a.steps for a in found.answers] == [r.acceptance_lengths for r in real]
    assert found.rounds == sum(r.rounds or 0 for r in real)
    assert found.tau == pytest.approx(statistics.fmean(r.acceptance for r in real if r.acceptance))
    if block_size == BLOCK:
        assert len({length for r in real for length in r.acceptance_lengths}) > 2


@pytest.mark.parametrize("every_anchor", [True, False])
def test_blocks_near_the_maximum_length_are_as_short_as_dflashs(target, prompts, own, drafter, every_anchor):
    """What a drafter says depends on how many positions it fills, so that cuts at many lengths tell."""
    elsewhere = 0
    for count in range(3, MAX_NEW, 2):
        cut = [([*p, *a.output_ids[:count]], [0] * len(p) + [1] * count) for p, a in zip(prompts, own[1])
               if a.tokens >= count]  # fmt: skip
        limits = [len(ids) for ids, _ in cut]
        found = simulate(drafter, target, cut, block_size=11, limits=limits, every_anchor=every_anchor)
        real = [
            decode(drafter, target.model, ids[: mask.index(1)], max_new_tokens=count, stop_token_ids=[], block_size=11)
            for ids, mask in cut
        ]
        assert [a.steps for a in found.answers] == [r.acceptance_lengths for r in real], count
        far = simulate(drafter, target, cut, block_size=11, every_anchor=every_anchor)
        elsewhere += [a.steps for a in far.answers] != [a.steps for a in found.answers]
    assert elsewhere > 0


def test_the_passes_may_be_cut_anywhere(target, drafter, rows, limits, monkeypatch):
    whole = simulate(drafter, target, rows, block_size=BLOCK, limits=limits)
    monkeypatch.setattr(module, "BLOCK_POSITIONS", 3 * BLOCK)
    monkeypatch.setattr(module, "GROUP_TOKENS", 50)
    told = []
    assert simulate(drafter, target, rows, block_size=BLOCK, limits=limits, progress=told.append) == whole
    assert sum(told) == len(rows) and len(told) > 1


def by_hand(drafter, target, rows):
    """Right drafts at every anchor, one row at a time, by DFlash's own forward with a dense mask."""
    blocks = []
    for ids, mask in rows:
        answer = [i for i, m in enumerate(mask) if m]
        row = torch.tensor([ids])
        with torch.no_grad():
            states = target.model(row, output_hidden_states=True).hidden_states
            hidden = torch.cat([states[i + 1] for i in drafter.target_layer_ids], dim=-1)
            anchors = torch.tensor(answer[:-1])
            drafted = dense_logits(drafter, target, row, hidden, anchors, BLOCK).argmax(-1).tolist()
        for anchor, said in zip(anchors.tolist(), drafted):
            end = next(i for i in range(anchor, len(ids)) if i == len(ids) - 1 or not mask[i + 1])
            truth = ids[anchor + 1 : min(anchor + BLOCK, end + 1)]
            if truth:
                blocks.append(([a == b for a, b in zip(said, truth)], end - anchor))
    return blocks


def test_accuracies_and_mean_are_those_of_dflashs_own_forward(target, drafter, rows):
    found = simulate(drafter, target, rows, block_size=BLOCK)
    blocks = by_hand(drafter, target, rows)
    accepted = [len(list(itertools.takewhile(bool, right))) for right, _ in blocks]
    assert found.anchors == len(blocks)
    assert found.mean_acceptance == pytest.approx(
        statistics.fmean(min(a + 1, left) for a, (_, left) in zip(accepted, blocks))
    )
    for k in range(BLOCK - 1):
        there = [(right, a) for (right, _), a in zip(blocks, accepted) if len(right) > k]
        assert found.accuracy[k] == pytest.approx(statistics.fmean(right[k] for right, _ in there))
        assert found.accepted[k] == pytest.approx(statistics.fmean(a > k for _, a in there))
        tried = [right[k] for right, a in there if a >= k]
        assert found.accuracy_given_prefix[k] == (pytest.approx(statistics.fmean(tried)) if tried else None)


def test_every_answer_of_a_conversation_is_walked_by_itself(target, drafter, rows):
    ids, mask = rows[0]
    later = [*mask[:-12], 0, 0, 0, *mask[-9:]]
    found = simulate(drafter, target, [(ids, later), ([1, 2, 3], [0, 0, 1]), ([4, 5], [0, 0])], block_size=BLOCK)
    first, second, single = found.answers
    assert (first.row, second.row, single.row) == (0, 0, 1)
    assert sum(first.steps) == sum(later) - 9 - 1 and sum(second.steps) == 8
    assert single.steps == [], "an answer of one token comes from the prefill"
    assert found.tau == pytest.approx((statistics.fmean(first.steps) + statistics.fmean(second.steps)) / 2)


def test_thinned_anchors_give_a_mean_and_no_walk(target, drafter, rows):
    found = simulate(drafter, target, rows, block_size=BLOCK, max_anchors=4)
    assert found.anchors == sum(min(4, sum(mask) - 1) for _, mask in rows)
    assert found.tau is None and found.rounds == 0
    assert 1 <= found.mean_acceptance <= BLOCK


def test_given_states_are_used(target, drafter, rows, monkeypatch):
    asked = []

    def states(indices):
        asked.extend(indices)
        return module.padded_states(target, [rows[i][0] for i in indices], drafter.target_layer_ids)

    assert simulate(drafter, target, rows, block_size=BLOCK, states=states) == simulate(
        drafter, target, rows, block_size=BLOCK
    )
    assert sorted(asked) == list(range(len(rows)))


def test_nothing_supervised_gives_nothing(target, drafter):
    found = simulate(drafter, target, [([1, 2, 3], [0, 0, 0])], block_size=BLOCK)
    assert found.tau is None and found.mean_acceptance is None and found.accuracy == [None] * (BLOCK - 1)
