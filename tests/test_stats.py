"""Statistics against closed forms, brute force, scipy on raw values and DFlash's own summary."""

from __future__ import annotations

import re
import statistics
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from dflash.benchmark import _print_decode_summary
from hypothesis import given, settings
from hypothesis import strategies as st
from report_setup import decoded, prompt, record
from scipy import stats as scipy_stats

from dpace_cli.stats import (
    QUANTILES,
    Bootstrap,
    Estimate,
    Request,
    Sample,
    acceptance_by_position,
    compare,
    correlate,
    estimate,
    histogram,
    position_summary,
    spearman,
)
from dpace_cli.tables.arms import requests_of

FEW = Bootstrap(resamples=499)

lengths_of_answers = st.lists(st.lists(st.integers(1, 8), max_size=12), min_size=2, max_size=8)


def sample(values: dict[str, list[Request]] | list[Request], seeds: dict[int, list[Request]] | None = None) -> Sample:
    requests = seeds or {0: list(values)}
    prompts = list(dict.fromkeys(r.prompt for own in requests.values() for r in own))
    return Sample.collect(requests, prompts)


def request(name: str, lengths: list[int], draft_s: float = 1.0, baseline_s: float | None = 2.0) -> Request:
    return Request(name, statistics.fmean(lengths) if lengths else None, len(lengths) or None, draft_s, baseline_s)


# --- the figures ------------------------------------------------------------------------------------------


@given(lengths_of_answers, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_figures_are_what_dflash_prints_for_the_same_responses(answers, rng):
    prompts = [
        prompt(i, lengths, rng.uniform(0.5, 2) * (1 + sum(lengths)), rng.uniform(1, 4) * (1 + sum(lengths)))
        for i, lengths in enumerate(answers)
    ]
    responses = [
        {
            1: SimpleNamespace(time_per_output_token=p.baseline.decode_s / p.baseline.tokens, acceptance_lengths=[]),
            8: SimpleNamespace(
                time_per_output_token=p.draft.decode_s / p.draft.tokens, acceptance_lengths=p.draft.acceptance_lengths
            ),
        }
        for p in prompts
    ]
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *parts: printed.append(" ".join(map(str, parts))))
        _print_decode_summary(responses, 8)
    text = "\n".join(printed)
    one = record(prompts)
    found = estimate([sample(requests_of(one))], Bootstrap(resamples=100))
    said = {name: float(value) for name, value in re.findall(r"^(.*?): ([\d.]+)$", text, re.MULTILINE)}
    assert found["sr"].value == pytest.approx(said["Decoding speedup"], abs=0.0051)
    if any(answers):
        assert found["tau"].value == pytest.approx(said["Average Acceptance length"], abs=0.0051)
        assert found["tau_pooled"].value == pytest.approx(statistics.fmean(chain.from_iterable(answers)))
        shares = [float(share) for share in re.findall(r"'([\d.]+)%'", text)]
        own = histogram(chain.from_iterable(answers), 8)
        assert [round(100 * share, 1) for share in own] == pytest.approx(shares, abs=0.051)
    else:
        assert "tau" not in found
        assert histogram([], 8) == []


def test_seeds_are_averaged_after_each_seed_has_its_own_figure():
    first = [request("a", [2, 2], 1.0, 2.0), request("b", [4], 1.0, 4.0)]  # SR 3, tau 3
    second = [request("a", [6], 4.0, 4.0), request("b", [4, 6], 2.0, 2.0)]  # SR 1, tau 5.5
    found = estimate([sample([], {0: first, 7: second})], FEW)
    assert found["sr"].value == pytest.approx(2.0)
    assert found["tau"].value == pytest.approx(4.25)
    assert found["tau"].by_seed == pytest.approx((3.0, 5.5))
    assert found["tau"].spread == pytest.approx(2.5 / 2**0.5)


def test_interval_of_several_seeds_is_of_their_mean():
    noise = np.random.default_rng(9).normal(0, 1, 20)
    seeds = {seed: [Request(str(i), 5 + sign * n, 1, None, None) for i, n in enumerate(noise)]
             for seed, sign in ((0, 1), (1, -1))}  # fmt: skip
    # Each prompt's mean over seeds is 5, so other prompts would change nothing, whatever one seed alone says.
    found = estimate([sample([], seeds)], FEW)["tau"]
    assert (found.low, found.high) == pytest.approx((5, 5))
    assert found.spread > 0


def test_no_sr_without_a_baseline_and_no_tau_without_steps():
    assert set(estimate([sample([request("a", [3], baseline_s=None), request("b", [3], baseline_s=None)])], FEW)) == {
        "tau", "tau_pooled",
    }  # fmt: skip
    assert set(estimate([sample([request("a", []), request("b", [])])], FEW)) == {"sr"}


# --- intervals --------------------------------------------------------------------------------------------


def test_interval_is_scipys_paired_bca_on_the_raw_values():
    rng = np.random.default_rng(1)
    base, draft = rng.gamma(8, 1, 25), rng.gamma(4, 1, 25)
    own = sample([request(str(i), [2], d, b) for i, (b, d) in enumerate(zip(base, draft))])
    found = estimate([own], Bootstrap(resamples=2000, seed=5))["sr"]

    def ratio(b, d, axis=-1):
        return b.mean(axis) / d.mean(axis)

    oracle = scipy_stats.bootstrap(
        (base, draft), ratio, paired=True, vectorized=True, n_resamples=2000, method="BCa", rng=np.random.default_rng(5)
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high))
    assert found.method == "BCa"
    assert found.low < found.value < found.high


def test_difference_is_paired_prompt_by_prompt():
    rng = np.random.default_rng(2)
    hard = rng.gamma(3, 2, 40) + 1
    arm = sample([Request(str(i), h + 0.5 + 0.01 * rng.normal(), 5, None, None) for i, h in enumerate(hard)])
    reference = sample([Request(str(i), h, 5, None, None) for i, h in enumerate(hard)])
    delta = compare([arm], [reference], FEW)["delta_tau"]
    alone = estimate([arm], FEW)["tau"]
    assert delta.excludes(0)
    assert delta.high - delta.low < 0.05 * (alone.high - alone.low)


def test_difference_and_relative_difference_have_the_closed_form():
    arm = sample([request("a", [6], 1, 3), request("b", [3], 1, 3)])
    reference = sample([request("a", [4], 1, 2), request("b", [2], 1, 2)])
    found = compare([arm], [reference], FEW)
    assert found["delta_tau"].value == pytest.approx(1.5)
    assert found["relative_tau"].value == pytest.approx(0.5)
    assert found["delta_sr"].value == pytest.approx(1.0)
    assert found["relative_sr"].value == pytest.approx(0.5)


def test_difference_of_each_seed_is_kept_where_both_arms_have_the_seeds():
    arm = sample([], {0: [request("a", [4]), request("b", [4])], 1: [request("a", [5]), request("b", [5])]})
    reference = sample([], {0: [request("a", [3]), request("b", [3])], 1: [request("a", [2]), request("b", [2])]})
    assert compare([arm], [reference], FEW)["delta_tau"].by_seed == pytest.approx((1.0, 3.0))
    other = Sample((*reference.prompts,), (0, 2), reference.above, reference.below)
    assert compare([arm], [other], FEW)["delta_tau"].by_seed == ()


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_interval_over_seeds_is_students_t(confidence):
    values = (0.52, 0.61, 0.44)
    found = Estimate(sum(values) / 3, 0.5, 0.55, 12, "BCa", values).over_seeds(confidence)
    expected = scipy_stats.ttest_1samp(values, 0).confidence_interval(confidence)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.value, found.method, found.prompts) == (pytest.approx(sum(values) / 3), "t", 12)
    assert Estimate(0.5, 0.4, 0.6, 12, "BCa", (0.5,)).over_seeds(confidence) is None


def test_other_prompts_cannot_be_compared():
    with pytest.raises(ValueError, match="same prompts"):
        compare([sample([request("a", [2])])], [sample([request("b", [2])])], FEW)


def test_turns_of_a_conversation_are_resampled_together():
    rng = np.random.default_rng(3)
    lengths = [[int(n)] for n in rng.integers(1, 9, 20)]
    once = estimate([sample([request(str(i), own) for i, own in enumerate(lengths)])], FEW)["tau"]
    four_turns = estimate([sample([request(str(i), own) for i, own in enumerate(lengths) for _ in range(4)])], FEW)[
        "tau"
    ]
    # Four equal turns tell nothing new; turn by turn they would halve the interval.
    assert (four_turns.low, four_turns.high) == pytest.approx((once.low, once.high))
    assert four_turns.prompts == 20


def test_one_prompt_gives_no_interval():
    found = estimate([sample([request("a", [2, 5])])], FEW)["tau"]
    assert (found.low, found.high, found.method) == (None, None, None)
    assert found.value == 3.5
    assert not found.excludes(0)


def test_where_all_resamples_agree_the_percentile_interval_says_so():
    found = estimate([sample([request(str(i), [3]) for i in range(5)])], FEW)["tau"]
    assert (found.low, found.value, found.high, found.method) == (3.0, 3.0, 3.0, "percentile")


def test_a_degenerate_figure_does_not_spoil_the_others():
    rng = np.random.default_rng(4)
    found = estimate([sample([request(str(i), [3], d, 2.0) for i, d in enumerate(rng.gamma(4, 1, 12))])], FEW)
    assert found["tau"].method == "percentile"
    assert found["sr"].method == "BCa"
    assert found["sr"].low < found["sr"].high


def test_intervals_cover_as_often_as_they_say():
    rng = np.random.default_rng(6)
    options, truth, trials = Bootstrap(0.9, 400), 9.0, 120
    found = [
        estimate([sample([Request(str(i), m, 1, None, None) for i, m in enumerate(rng.gamma(9, 1, 50))])], options)[
            "tau"
        ]
        for _ in range(trials)
    ]
    assert 0.83 < sum(not one.excludes(truth) for one in found) / trials < 0.97


def test_average_resamples_each_data_set_by_itself():
    rng = np.random.default_rng(7)
    sets = [sample([Request(str(i), v, 1, None, None) for i, v in enumerate(rng.normal(m, 1, 60) + 9)]) for m in (0, 5)]
    found = estimate(sets, Bootstrap(resamples=4000))["tau"]
    values = [own.above[1, 0] for own in sets]
    assert found.value == pytest.approx(np.mean([v.mean() for v in values]))
    error = np.sqrt(sum(v.var() / len(v) for v in values)) / len(values)
    # The two data sets differ by 5; resampled in one pot, the interval would be more than twice as wide.
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)


def test_same_seed_gives_the_same_interval():
    own = sample([request(str(i), [1 + i % 7]) for i in range(9)])
    assert estimate([own], FEW) == estimate([own], FEW)
    assert estimate([own], Bootstrap(resamples=499, seed=1)) != estimate([own], FEW)


# --- acceptance by position -------------------------------------------------------------------------------


@given(lengths_of_answers)
@settings(max_examples=60, deadline=None)
def test_acceptance_by_position_is_the_records_and_the_brute_force_count(answers):
    found = acceptance_by_position(answers, 8)
    hits, trials = [0] * 9, [0] * 9
    for lengths in answers:
        for index, length in enumerate(lengths):
            for k in range(1, 8):
                if k < length:
                    hits[k], trials[k] = hits[k] + 1, trials[k] + 1
                elif k == length and index + 1 < len(lengths):
                    trials[k] += 1
    assert [(rate.hits, rate.trials) for rate in found] == list(zip(hits, trials))[1:8]
    one = record([prompt(i, lengths) for i, lengths in enumerate(answers)])
    assert [rate.value for rate in found] == one.acceptance_by_position()


def test_a_drafter_that_is_always_or_never_right():
    assert [rate.value for rate in acceptance_by_position([[8, 8, 8, 3]], 8)] == [1.0] * 7
    assert [rate.value for rate in acceptance_by_position([[1] * 9], 8)] == [0.0] + [None] * 6
    assert decoded([1] * 9, 1.0).acceptance == 1.0


# --- position weights -------------------------------------------------------------------------------------

blocks = st.integers(1, 12).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4), min_size=n, max_size=n),
        st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=n, max_size=n),
        st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=n, max_size=n),
    )
)


@given(blocks)
@settings(max_examples=60, deadline=None)
def test_position_summary_is_the_brute_force_count(drawn):
    q, right, supervised = (np.array(part) for part in drawn)
    weights = np.where(supervised, q * 2, 0.0)
    found = position_summary(weights, q, right, supervised, gamma=3.0)
    decays = [np.exp(-k / 3.0) for k in range(4)]
    decay_total = sum(decays[k] for row in supervised for k in range(4) if row[k])
    for k, position in enumerate(found):
        here = [i for i in range(len(q)) if supervised[i, k]]
        whole = [i for i in here if all(supervised[i, : k + 1])]
        lucky = [i for i in whole if all(right[i, :k])]
        assert (position.k, position.blocks, position.whole, position.prefixes) == (
            k + 1,
            len(here),
            len(whole),
            len(lucky),
        )
        assert position.weight == pytest.approx(mean([weights[i, k] for i in here]))
        assert position.confidence == pytest.approx(mean([q[i, k] for i in here]))
        assert position.accuracy == pytest.approx(mean([right[i, k] for i in here]))
        assert position.accuracy_after_prefix == pytest.approx(mean([right[i, k] for i in lucky]))
        assert position.accepted == pytest.approx(mean([all(right[i, : k + 1]) for i in whole]))
        if here:
            assert position.share == pytest.approx(sum(weights[i, k] for i in here) / weights.sum())
            assert position.decay_share == pytest.approx(decays[k] * len(here) / decay_total)
            assert position.quantiles == pytest.approx([float(np.quantile(weights[here, k], at)) for at in QUANTILES])
        assert position.decay == pytest.approx(decays[k])


def mean(values):
    return sum(values) / len(values) if values else None


def test_masked_tails_are_no_failures():
    right = np.array([[True, True, False, False], [True, False, True, True]])
    supervised = np.array([[True, True, False, False], [True, True, True, True]])
    found = position_summary(supervised * 1.0, right * 0.5, right & supervised, supervised, None)
    assert [p.accuracy for p in found] == [1.0, 0.5, 1.0, 1.0]
    assert [p.accuracy_after_prefix for p in found] == [1.0, 0.5, None, None]
    assert [p.accepted for p in found] == [1.0, 0.5, 0.0, 0.0]
    assert [p.blocks for p in found] == [2, 2, 1, 1]
    assert [p.decay for p in found] == [1.0] * 4


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(-3, 3), st.integers(0, 3)), min_size=3, max_size=30).filter(
        lambda rows: len({x for x, _, c in rows if c}) > 1 and len({y for _, y, c in rows if c}) > 1
    )
)
@settings(max_examples=80, deadline=None)
def test_spearman_with_counts_is_scipys_on_repeated_pairs(rows):
    x, y, counts = (np.array(column) for column in zip(*rows))
    oracle = scipy_stats.spearmanr(np.repeat(x, counts), np.repeat(y, counts)).statistic
    assert spearman(x, y, counts) == pytest.approx(oracle)
    assert spearman(x, y, np.stack([counts, counts])) == pytest.approx([oracle, oracle])


def test_correlation_is_over_whole_blocks_and_ranks_them_by_accepted_length():
    rng = np.random.default_rng(8)
    right = rng.random((60, 5)) < 0.7
    supervised = np.ones_like(right)
    supervised[50:, 3:] = False
    confidence = np.where(right, 0.9, 0.2)
    found = correlate(confidence, right, supervised, np.repeat(np.arange(12), 5), FEW)
    assert (found.blocks, found.rows) == (50, 10)
    lengths = [next((k for k in range(5) if not row[k]), 5) for row in right[:50]]
    surrogate = [sum(np.prod(row[: k + 1]) for k in range(5)) for row in confidence[:50]]
    assert found.surrogate.value == pytest.approx(scipy_stats.spearmanr(lengths, surrogate).statistic)
    plain = scipy_stats.spearmanr(lengths, confidence[:50].sum(1)).statistic
    assert found.confidence_sum.value == pytest.approx(plain)
    assert found.difference.value == pytest.approx(found.surrogate.value - plain)
    assert found.surrogate.low <= found.surrogate.value <= found.surrogate.high


def test_no_correlation_of_too_few_or_all_equal_blocks():
    ones = np.ones((5, 3), bool)
    assert correlate(ones * 0.5, ones, ones, np.arange(5), FEW) is None
    assert correlate(ones[:2] * 0.5, ones[:2], ones[:2], np.arange(2), FEW) is None
