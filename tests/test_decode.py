"""Decoding around dflash_generate: what is counted, where it ends, and whose distribution comes out."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import dflash.model
import numpy as np
import pytest
import torch
from bench_models import BLOCK, TableDrafter, TableTarget, greedy, new_drafter, script, trained_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from dpace_cli.config import TargetConfig
from dpace_cli.engines.measure_base import request_seed
from dpace_cli.modeling.decode import Sampling, compare_greedy, decode, device_clock, greedy_batch
from dpace_cli.modeling.target import Target, load_target

PROMPT = [11, 57, 93, 140, 7]


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)))


@pytest.fixture(scope="module")
def answer(target) -> list[int]:
    """The target's own greedy answer to PROMPT, worked out without DFlash."""
    return greedy(target, PROMPT, 40)


def spare(target: Target, answer: list[int]) -> int:
    """A token that the target does not say."""
    return next(token for token in range(200) if token not in answer)


def run(drafter, target, count, stops=(), block_size=BLOCK, **more):
    return decode(
        drafter, target.model, PROMPT, max_new_tokens=count, stop_token_ids=list(stops), block_size=block_size, **more
    )


def test_block_size_one_is_the_targets_own_greedy_decoding(target, answer):
    decoded = run(new_drafter(target), target, 40, block_size=1)
    assert decoded.output_ids == answer
    assert decoded.acceptance_lengths == [1] * 39
    assert decoded.tokens == 40 and decoded.finish_reason == "length"


@pytest.mark.parametrize("block_size", [2, 3, 6, 16])
def test_a_drafter_that_is_never_right_has_tau_exactly_one(target, answer, block_size):
    drafter = script(new_drafter(target), {}, target.config.vocab_size, spare(target, answer))
    decoded = run(drafter, target, 40, block_size=block_size)
    assert decoded.acceptance_lengths == [1] * 39
    assert decoded.acceptance == 1.0
    assert decoded.output_ids == answer


def oracle(target, answer):
    said = {len(PROMPT) + index: token for index, token in enumerate(answer)}
    return script(new_drafter(target), said, target.config.vocab_size, spare(target, answer))


@pytest.mark.parametrize("block_size", [2, 5, 6])
def test_an_oracle_drafter_has_the_block_size_but_where_the_end_cuts(target, answer, block_size):
    decoded = run(oracle(target, answer), target, 40, block_size=block_size)
    *whole, last = decoded.acceptance_lengths
    assert set(whole) == {block_size}
    assert 1 <= last <= block_size and sum(decoded.acceptance_lengths) == 39
    assert decoded.output_ids == answer


def test_an_end_token_inside_a_block_ends_the_answer_there(target, answer):
    stop = next(index for index in range(8, 40) if answer.index(answer[index]) == index and (index - 1) % BLOCK == 2)
    decoded = run(oracle(target, answer), target, 40, [answer[stop]])
    assert decoded.output_ids == answer[: stop + 1]
    assert decoded.finish_reason == "stop"
    assert decoded.acceptance_lengths[:-1] == [BLOCK] * ((stop - 1) // BLOCK)
    assert decoded.acceptance_lengths[-1] == 3


def test_of_several_end_tokens_the_first_that_is_said_counts(target, answer):
    first_seen = sorted({answer.index(token) for token in answer})
    early, late = first_seen[2], first_seen[-1]
    for stops in ([answer[late], answer[early]], [answer[early], answer[late]]):
        for drafter in (oracle(target, answer), script(new_drafter(target), {}, target.config.vocab_size, 0)):
            decoded = run(drafter, target, 40, stops)
            assert decoded.output_ids == answer[: early + 1] and decoded.finish_reason == "stop"


def test_answers_made_together_end_each_at_the_first_end_token_that_it_says(target, answer):
    prompts = [PROMPT, [*PROMPT, 7, 9], [5, 90], [200, *PROMPT, 61, 62, 63]]
    alone = [greedy(target, prompt, 40) for prompt in prompts]
    stops = [alone[0][8], alone[1][5], alone[3][11]]
    expected = [greedy(target, prompt, 40, stops) for prompt in prompts]
    assert len({ended[-1] for ended in expected if len(ended) < 40}) > 1
    for order in (stops, stops[::-1]):
        assert greedy_batch(target.model, prompts, 40, order) == expected
    assert greedy_batch(target.model, prompts, 40, []) == alone


def test_a_prompt_that_ends_at_once_takes_no_step(target, answer):
    for block_size in (1, BLOCK):
        decoded = run(new_drafter(target), target, 40, [answer[0]], block_size=block_size)
        assert decoded.output_ids == answer[:1] and decoded.tokens == 1
        assert decoded.acceptance_lengths == [] and decoded.acceptance is None and decoded.rounds is None
        assert decoded.finish_reason == "stop" and decoded.time_per_output_token >= 0


def test_one_new_token_takes_no_step_and_none_is_refused(target):
    assert run(new_drafter(target), target, 1).tokens == 1
    with pytest.raises(ValueError, match="at least one new token"):
        run(new_drafter(target), target, 0)


@settings(max_examples=25, deadline=None)
@given(
    right=st.lists(st.booleans(), min_size=40, max_size=40),
    block_size=st.integers(2, 9),
    count=st.integers(1, 40),
    stop=st.one_of(st.none(), st.integers(0, 39)),
)
def test_counts_follow_which_drafts_are_right(target, answer, right, block_size, count, stop):
    said = {len(PROMPT) + i: token for i, (token, ok) in enumerate(zip(answer, right)) if ok}
    drafter = script(new_drafter(target), said, target.config.vocab_size, spare(target, answer))
    stops = [] if stop is None else [answer[stop]]
    decoded = run(drafter, target, count, stops, block_size=block_size)

    end = min(count, answer.index(answer[stop]) + 1 if stop is not None else count)
    expected, at = [], 0
    while at < end - 1:
        accepted = 0
        while accepted < block_size - 1 and at + accepted + 1 < 40 and right[at + accepted + 1]:
            accepted += 1
        expected.append(min(accepted + 1, end - 1 - at))
        at += expected[-1]
    assert decoded.acceptance_lengths == expected
    assert decoded.output_ids == answer[:end]
    assert decoded.finish_reason == ("stop" if answer[end - 1] in stops else "length")


def test_a_drafter_with_mistakes_leaves_the_greedy_output_as_it_is(target):
    prompts = [[3 + i, 90, 14 + i, 200] for i in range(4)]
    answers = [greedy(target, prompt, 30) for prompt in prompts]
    drafter = trained_drafter(target, prompts, answers)
    lengths = []
    for prompt, own in zip(prompts, answers):
        decoded = decode(drafter, target.model, prompt, max_new_tokens=30, stop_token_ids=[])
        assert decoded.output_ids == own
        lengths += decoded.acceptance_lengths
    assert len(set(lengths)) > 2, "the drafter should be right now and then"


def test_a_request_is_drawn_from_its_own_seed(target):
    drafter = new_drafter(target)
    seeds = [request_seed(0, "a", 0), request_seed(0, "b", 0), request_seed(0, "a", 1), request_seed(1, "a", 0)]
    assert len(set(seeds)) == 4
    warm = Sampling(temperature=1.0)
    first = [run(drafter, target, 12, seed=seed, sampling=warm) for seed in seeds]
    again = [run(drafter, target, 12, seed=seed, sampling=warm) for seed in reversed(seeds)][::-1]
    assert [d.output_ids for d in first] == [d.output_ids for d in again]
    assert [d.acceptance_lengths for d in first] == [d.acceptance_lengths for d in again]
    assert len({tuple(d.output_ids) for d in first}) > 1


def test_times_are_dflashs_own(target):
    def told(*_: Any, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(
            output_ids=torch.tensor([[*PROMPT, 1, 2, 3, 4]]), num_input_tokens=len(PROMPT), num_output_tokens=4,
            time_to_first_token=0.5, time_per_output_token=0.25, acceptance_lengths=[3],
        )  # fmt: skip

    decoded = run(new_drafter(target), target, 4, generate=told)
    assert (decoded.prefill_s, decoded.decode_s, decoded.time_per_output_token) == (0.5, 1.0, 0.25)


def test_the_clock_goes_with_the_time():
    with device_clock(torch.device("cpu")):
        begun, before = dflash.model._cuda_time(), time.perf_counter()
        time.sleep(0.02)
        assert 0.02 <= dflash.model._cuda_time() - begun <= time.perf_counter() - before + 0.001


def test_the_clock_is_dflashs_own_again_afterwards():
    original = dflash.model._cuda_time
    with pytest.raises(RuntimeError, match="inside"), device_clock(torch.device("cpu")):
        assert dflash.model._cuda_time() <= dflash.model._cuda_time()
        raise RuntimeError("inside")
    assert dflash.model._cuda_time is original


# --- whose distribution -----------------------------------------------------------------------------------

CHAIN = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.5, 0.5], [1.0, -1.0, 0.7]])
DRAFT = torch.tensor([[0.0, 1.2, -0.5], [1.0, 0.2, 0.1], [0.3, 0.0, 1.0]])
ANSWERS = 40


def filtered(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities that a token is drawn with: the best `top_k`, then the fewest that reach `top_p`."""
    p = np.exp(logits / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += p[token]
        if mass >= top_p:
            break
    p[[t for t in range(len(p)) if t not in kept]] = 0
    return p / p.sum()


def p_value(sampling: Sampling) -> float:
    """Chi-squared test of which token follows which in long answers against the chain's own probabilities.

    In a Markov chain each token is drawn from its predecessor's row, whatever came before.
    """
    target, drafter = TableTarget(CHAIN), TableDrafter(DRAFT)
    rows = [filtered(row.numpy().astype(float), sampling.temperature, sampling.top_p, sampling.top_k) for row in CHAIN]
    observed = np.zeros((3, 3))
    for seed in range(ANSWERS):
        decoded = decode(
            drafter, target, [0], max_new_tokens=60, stop_token_ids=[], sampling=sampling, block_size=4, seed=seed
        )
        for before, after in itertools.pairwise([0, *decoded.output_ids]):
            observed[before, after] += 1
    expected = np.array(rows) * observed.sum(axis=1, keepdims=True)
    if observed[expected == 0].any():
        return 0.0
    possible = expected > 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    return float(chi2.sf(statistic, df=possible.sum() - (expected.sum(axis=1) > 0).sum()))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.6), Sampling(1.0, top_p=0.75), Sampling(1.3, top_k=2)],
    ids=["t1", "t0.6", "top-p", "top-k"],
)
def test_the_output_distribution_is_the_targets(sampling):
    assert p_value(sampling) > 1e-3


def test_top_p_holds_among_the_tokens_that_top_k_leaves():
    assert filtered(CHAIN[0].numpy().astype(float), 1.3, 0.6, 2).tolist() == [1, 0, 0]  # with either alone two are left
    for seed in range(5):
        decoded = decode(
            TableDrafter(DRAFT), TableTarget(CHAIN), [0], max_new_tokens=30, stop_token_ids=[], block_size=4, seed=seed,
            sampling=Sampling(1.3, top_p=0.6, top_k=2),
        )  # fmt: skip
        assert decoded.output_ids == [0] * 30


def test_the_first_token_is_drawn_too():
    target, drafter = TableTarget(CHAIN), TableDrafter(DRAFT)
    drawn = [
        decode(drafter, target, [0], max_new_tokens=1, stop_token_ids=[], sampling=Sampling(1.0), seed=seed).output_ids[
            0
        ]
        for seed in range(600)
    ]
    expected = filtered(CHAIN[0].numpy().astype(float), 1.0, 1.0, 0) * len(drawn)
    statistic = ((np.bincount(drawn, minlength=3) - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, df=2) > 1e-3


def always_accept(tokens, target_probs, draft_probs, _indices=None):
    return tokens.shape[1], dflash.model._sample_probs(target_probs[:, -1])[0]


def keep_the_draft_in_the_residual(tokens, target_probs, draft_probs, _indices=None):
    p = target_probs[:, :-1].gather(-1, tokens[..., None])[..., 0]
    q = draft_probs.gather(-1, tokens[..., None])[..., 0]
    accepted = int((torch.rand_like(q) * q < p).int().cumprod(-1).sum())
    return accepted, dflash.model._sample_probs(target_probs[:, accepted])[0]


def accept_with_the_targets_probability(tokens, target_probs, draft_probs, _indices=None):
    p = target_probs[:, :-1].gather(-1, tokens[..., None])[..., 0]
    accepted = int((torch.rand_like(p) < p).int().cumprod(-1).sum())
    if accepted == tokens.shape[1]:
        return accepted, dflash.model._sample_probs(target_probs[:, -1])[0]
    residual = (target_probs[0, accepted] - draft_probs[0, accepted]).clamp_min(0)
    return accepted, dflash.model._sample_probs((residual / residual.sum())[None])[0]


@pytest.mark.parametrize("rule", [always_accept, keep_the_draft_in_the_residual, accept_with_the_targets_probability])
def test_a_wrong_rejection_rule_would_be_seen(monkeypatch, rule):
    monkeypatch.setattr(dflash.model, "_rejection_sample", rule)
    assert p_value(Sampling(1.0)) < 1e-6


# --- the target's own output? -----------------------------------------------------------------------------


def test_equal_outputs_have_no_difference(target, answer):
    assert compare_greedy(target.model, PROMPT, answer, list(answer)) is None


def test_a_difference_where_the_target_was_sure_is_no_near_tie(target, answer):
    with torch.no_grad():
        best = target.model(torch.tensor([[*PROMPT, *answer[:9]]])).logits[0, -1].topk(2)
    other = [*answer[:9], int(best.indices[1]), *answer[10:]]
    found = compare_greedy(target.model, PROMPT, answer, other)
    assert found.position == 9 and not found.near_tie
    assert found.logit_gap == pytest.approx(float(best.values[0] - best.values[1]), rel=1e-3)


def test_a_difference_that_rounding_decides_is_a_near_tie():
    table = torch.tensor([[5.0, 5.0 - 1e-5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    found = compare_greedy(TableTarget(table), [2], [0, 0, 0], [0, 1, 0])
    assert found.position == 1 and found.near_tie and 0 < found.logit_gap < 1e-4
    third = compare_greedy(TableTarget(table), [2], [0, 0, 0], [0, 2, 0])
    assert not third.near_tie, "the best two are tied, but neither is what was drafted"


@pytest.mark.parametrize(
    ("dtype", "gap", "near_tie"),
    [(torch.float32, 2e-5, True), (torch.float32, 5e-4, False), (torch.bfloat16, 0.03, True),
     (torch.bfloat16, 0.125, False)],
)  # fmt: skip
def test_how_small_a_gap_rounding_may_decide(dtype, gap, near_tie):
    """In float32 1e-4 of the largest logit; in bfloat16 eight units, 0.0625."""
    table = torch.tensor([[8.0, 8.0 * (1 - gap), 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=dtype)
    found = compare_greedy(TableTarget(table), [2], [0, 0], [0, 1])
    assert (found.position, found.near_tie) == (1, near_tie)


def test_going_on_after_the_end_is_broken(target, answer):
    found = compare_greedy(target.model, PROMPT, answer[:5], answer[:7])
    assert found.position == 5 and not found.near_tie and found.logit_gap is None


def test_of_two_end_tokens_in_one_block_the_first_ends_the_answer(target, answer):
    early = next(i for i in range(1, 38) if answer[i + 1] not in answer[: i + 1] and answer[i] not in answer[:i])
    stops = [answer[early], answer[early + 1]]
    for order in (stops, stops[::-1]):
        decoded = run(oracle(target, answer), target, 40, order, block_size=early + 3)
        assert decoded.output_ids == answer[: early + 1] and decoded.acceptance_lengths == [early]
