"""The numbers of a comparison, from raw values: SR, tau, their intervals, and what happens at each position.

Shapes: D data sets, S seeds of an arm, P prompts (a conversation is one prompt, whatever its turns),
R resamples, n blocks, K positions in a block (0 is the anchor), M measures.

How intervals are made. SR and both taus are quotients of two sums over prompts, so each prompt is kept as its
share of either sum. An arm's figure is the mean over its seeds. Prompts are what is resampled, with
replacement, all turns of a conversation and all seeds and arms together: both arms of a comparison see the
same resample, and what makes one prompt harder than another cancels in their difference. An average over data
sets resamples each of them by itself. Method: bias-corrected and accelerated (BCa, Efron 1987), from scipy; where
that is not defined, because all resamples agree or all lie on one side of the figure, the percentile method, by
name. That interval says how the figure would move with other prompts. How it moves with the seed of training is
another question, with an interval of its own: a handful of seeds is too few to resample, so it is Student's t
over the seeds' own figures (`Estimate.over_seeds`), which with three seeds is wide, as it should be.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

MEASURES = ("sr", "tau", "tau_pooled")

_BATCH_VALUES = 4_000_000
"""Values that one batch of resamples may hold at once (32 MB)."""


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made: coverage, number of resamples, seed of the resampling."""

    confidence: float = 0.95
    resamples: int = 9999
    seed: int = 0


@dataclass(frozen=True)
class Estimate:
    """A figure with what is known about its error.

    Attributes:
        value: the figure.
        low, high: bounds of its interval; None where there is none (one prompt, or nothing to resample).
        prompts: prompts that it is made of.
        method: BCa | percentile | t; None without an interval.
        by_seed: the figure of each training seed.
    """

    value: float
    low: float | None = None
    high: float | None = None
    prompts: int = 0
    method: str | None = None
    by_seed: tuple[float, ...] = ()

    @property
    def spread(self) -> float | None:
        """Standard deviation over training seeds; None with fewer than two."""
        return float(np.std(self.by_seed, ddof=1)) if len(self.by_seed) > 1 else None

    def over_seeds(self, confidence: float) -> Estimate | None:
        """The mean over training seeds with Student's t interval; None with fewer than two."""
        if len(self.by_seed) < 2:
            return None
        from scipy import stats  # slow to import, and most commands make no interval

        mean = float(np.mean(self.by_seed))
        half = float(stats.t.ppf((1 + confidence) / 2, len(self.by_seed) - 1)) * self.spread / len(self.by_seed) ** 0.5
        return Estimate(mean, mean - half, mean + half, self.prompts, "t", self.by_seed)

    def excludes(self, value: float) -> bool:
        """Does the interval leave `value` out? False without an interval."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


@dataclass(frozen=True)
class Request:
    """What one finished request gives to the figures.

    Attributes:
        prompt: id of the prompt or conversation.
        acceptance: mean acceptance length; None where no step was verified or none is known.
        steps: verify steps; None where their number is not known.
        draft_s, baseline_s: seconds per output token; None where not timed.
    """

    prompt: str
    acceptance: float | None
    steps: int | None
    draft_s: float | None
    baseline_s: float | None


@dataclass(frozen=True)
class Sample:
    """One arm on one data set, as the sums that its figures are quotients of.

    Attributes:
        prompts: ids, in the order of the last axis.
        seeds: training seeds, in the order of the axis before.
        above, below: [M, S, P] numerators and denominators of SR, tau and pooled tau.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    above: np.ndarray = field(repr=False)
    below: np.ndarray = field(repr=False)

    @classmethod
    def collect(cls, requests: dict[int, Iterable[Request]], prompts: Sequence[str]) -> Sample:
        """Sum requests up by prompt.

        Args:
            requests: training seed to the requests of its drafter; those of other prompts are left out.
            prompts: ids of the prompts that count.
        """
        place = {prompt: index for index, prompt in enumerate(prompts)}
        above = np.zeros((len(MEASURES), len(requests), len(prompts)))
        below = np.zeros_like(above)
        for row, own in enumerate(requests.values()):
            for request in own:
                column = place.get(request.prompt)
                if column is None:
                    continue
                for measure, (numerator, denominator) in enumerate(_shares(request)):
                    above[measure, row, column] += numerator
                    below[measure, row, column] += denominator
        return cls(tuple(prompts), tuple(requests), above, below)

    def figures(self, index: np.ndarray | None = None) -> np.ndarray:
        """Figures of each seed, over all prompts or over resamples of them.

        Args:
            index: [..., P] which prompts.
        Returns:
            [M, S, ...]; NaN where nothing was measured.
        """
        if index is None:
            index = np.arange(len(self.prompts))
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.above[:, :, index].sum(-1) / self.below[:, :, index].sum(-1)


def _shares(request: Request) -> tuple[tuple[float, float], ...]:
    """A request's part of numerator and denominator of each measure, in the order of MEASURES."""
    timed = request.draft_s is not None and request.baseline_s is not None
    known = request.acceptance is not None
    steps = request.steps if known and request.steps else 0
    return (
        (request.baseline_s, request.draft_s) if timed else (0.0, 0.0),
        (request.acceptance, 1.0) if known else (0.0, 0.0),
        (request.acceptance * steps, steps) if steps else (0.0, 0.0),
    )


def estimate(samples: Sequence[Sample], bootstrap: Bootstrap) -> dict[str, Estimate]:
    """SR, tau and pooled tau of an arm; over several data sets, the mean of their figures.

    Returns:
        Measure to figure; what was not measured on every data set is left out.
    """

    def statistic(index: Sequence[np.ndarray]) -> np.ndarray:
        return _mean_over_data_sets(samples, index).mean(1)

    by_seed = _mean_over_data_sets(samples, None)
    return _estimates(MEASURES, by_seed.mean(1), by_seed, statistic, samples, bootstrap)


def compare(arm: Sequence[Sample], reference: Sequence[Sample], bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Differences between two arms on the same prompts of the same data sets.

    Returns:
        `delta_sr`, `delta_tau`, `delta_tau_pooled` (arm minus reference) and `relative_sr`, ... (the same as
        a share of the reference). Where both arms have the same seeds, `by_seed` holds the difference of each.
    Raises:
        ValueError: the samples are not of the same prompts.
    """
    if [s.prompts for s in arm] != [s.prompts for s in reference]:
        raise ValueError("the two arms are not on the same prompts")

    def differences(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
        return np.concatenate([ours - theirs, ours / theirs - 1])

    def statistic(index: Sequence[np.ndarray]) -> np.ndarray:
        return differences(_mean_over_data_sets(arm, index).mean(1), _mean_over_data_sets(reference, index).mean(1))

    names = [f"{kind}_{measure}" for kind in ("delta", "relative") for measure in MEASURES]
    ours, theirs = _mean_over_data_sets(arm, None), _mean_over_data_sets(reference, None)
    paired = [s.seeds for s in arm] == [s.seeds for s in reference]
    by_seed = differences(ours, theirs) if paired else np.empty((len(names), 0))
    return _estimates(names, differences(ours.mean(1), theirs.mean(1)), by_seed, statistic, arm, bootstrap)


def _mean_over_data_sets(samples: Sequence[Sample], index: Sequence[np.ndarray] | None) -> np.ndarray:
    """[M, S, ...] from one index for each data set, or over all prompts; S is 1 where the seeds are not the same."""
    figures = [sample.figures(own) for sample, own in zip(samples, index or [None] * len(samples))]
    if len({sample.seeds for sample in samples}) > 1:
        figures = [own.mean(1, keepdims=True) for own in figures]
    return np.mean(figures, axis=0)


def _estimates(
    names: Sequence[str],
    values: np.ndarray,
    by_seed: np.ndarray,
    statistic: Callable[[Sequence[np.ndarray]], np.ndarray],
    samples: Sequence[Sample],
    bootstrap: Bootstrap,
) -> dict[str, Estimate]:
    """Put intervals around the values that there are."""
    there = np.flatnonzero(np.isfinite(values))
    if not len(there):
        return {}
    sizes = [len(sample.prompts) for sample in samples]
    cost = sum(len(MEASURES) * 2 * len(sample.seeds) * size for sample, size in zip(samples, sizes))
    bounds = intervals(lambda index: statistic(index)[there], sizes, bootstrap, cost)
    return {
        names[row]: Estimate(
            float(values[row]), low, high, sum(sizes), method, tuple(by_seed[row].tolist())
        )
        for row, (low, high, method) in zip(there, bounds or [(None, None, None)] * len(there))
    }  # fmt: skip


def intervals(
    statistic: Callable[[Sequence[np.ndarray]], np.ndarray], sizes: Sequence[int], bootstrap: Bootstrap, cost: int = 1
) -> list[tuple[float, float, str]] | None:
    """Bootstrap intervals of one or several figures from the same resamples.

    Args:
        statistic: from indices [..., size] for each of `sizes`, figures [M, ...].
        sizes: number of units of each independent group; those of a group are resampled together.
        cost: values that the statistic holds for one resample, for the size of a batch.
    Returns:
        Low, high and method of each figure; None where a group has fewer than two units.
    """
    from scipy import stats  # slow to import, and most commands make no interval

    if not sizes or min(sizes) < 2:
        return None
    options = {
        "n_resamples": bootstrap.resamples,
        "batch": max(1, _BATCH_VALUES // max(cost, 1)),
        "vectorized": True,
        "confidence_level": bootstrap.confidence,
    }

    def of_indices(*index: np.ndarray, axis: int = -1) -> np.ndarray:
        return statistic([own.astype(np.intp) for own in index])

    units = [np.arange(size) for size in sizes]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        result = stats.bootstrap(units, of_indices, method="BCa", rng=np.random.default_rng(bootstrap.seed), **options)
        percentile = stats.bootstrap(
            units, of_indices, method="percentile", bootstrap_result=result, **{**options, "n_resamples": 0}
        )
    found = []
    for low, high, plain_low, plain_high in zip(
        *np.atleast_1d(*result.confidence_interval), *np.atleast_1d(*percentile.confidence_interval)
    ):
        exact = np.isfinite(low) and np.isfinite(high)
        found.append((float(low), float(high), "BCa") if exact else (float(plain_low), float(plain_high), "percentile"))
    return found


# --- acceptance --------------------------------------------------------------------------------------------


def histogram(lengths: Iterable[int], block_size: int) -> list[float]:
    """Share of verify steps that produced 0, 1, ... K tokens; empty without steps."""
    counts = Counter(lengths)
    total = counts.total()
    return [counts[length] / total for length in range(block_size + 1)] if total else []


@dataclass(frozen=True)
class Rate:
    """How often something happened, of how many times that it could have."""

    hits: int
    trials: int

    @property
    def value(self) -> float | None:
        return self.hits / self.trials if self.trials else None


def acceptance_by_position(answers: Iterable[Sequence[int]], block_size: int) -> list[Rate]:
    """For positions 1 to K-1: drafts accepted, of those whose earlier positions all were.

    The last step of an answer is cut by its end. What it produced was accepted; what would have followed was
    never judged, and is no failure.

    Args:
        answers: the acceptance lengths of each answer's steps, bonus token included.
    """
    hits, trials = np.zeros(block_size + 1, int), np.zeros(block_size + 1, int)
    for lengths in answers:
        for index, length in enumerate(lengths):
            hits[1:length] += 1
            last = index == len(lengths) - 1
            trials[1 : length if last else length + 1] += 1
    return [Rate(int(hits[k]), int(trials[k])) for k in range(1, block_size)]


# --- position weights --------------------------------------------------------------------------------------

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Position:
    """What was seen at one position of a block, over held-out blocks.

    Attributes:
        k: position in the block, from 1.
        weight: mean D-PACE weight. share: its part of all weight.
        quantiles: of the weight, at QUANTILES.
        confidence: drafter's mean probability of the target's token.
        accuracy: share of blocks whose token here is right, whatever came before.
        accuracy_after_prefix: the same, among blocks whose earlier tokens are all right.
        accepted: share of blocks whose first k tokens are all right.
        decay: weight of the fixed decay. decay_share: its part of all such weight.
        blocks: blocks supervised here. prefixes: of them, with a right prefix. whole: supervised up to here.
    """

    k: int
    weight: float | None
    share: float | None
    quantiles: tuple[float, ...] | None
    confidence: float | None
    accuracy: float | None
    accuracy_after_prefix: float | None
    accepted: float | None
    decay: float
    decay_share: float | None
    blocks: int
    prefixes: int
    whole: int


def position_summary(
    weights: np.ndarray, confidence: np.ndarray, right: np.ndarray, supervised: np.ndarray, gamma: float | None
) -> list[Position]:
    """Summarise blocks position by position, over supervised positions alone.

    A tail that the answer's end masks is neither a failure nor a trial.

    Args:
        weights: [n, K-1] position weights, 0 where not supervised.
        confidence: [n, K-1] drafter's probability of the target's token.
        right: [n, K-1] bool: is the drafter's best token the target's?
        supervised: [n, K-1] bool.
        gamma: decay length of the fixed weights in positions; None: uniform.
    """
    count = supervised.shape[1]
    decay = np.exp(-np.arange(count) / gamma) if gamma is not None else np.ones(count)
    judged = np.logical_and.accumulate(supervised, axis=1)
    prefix_right = np.logical_and.accumulate(judged & right, axis=1)
    before = np.concatenate([np.ones((len(right), 1), bool), prefix_right[:, :-1]], axis=1) & judged
    weight_sum = weights.sum(dtype=np.float64)
    decay_sum = (decay * supervised).sum()
    found = []
    for column in range(count):
        here = supervised[:, column]
        own = weights[here, column].astype(np.float64)
        found.append(Position(
            k=column + 1,
            weight=_mean(own),
            share=float(own.sum() / weight_sum) if weight_sum > 0 else None,
            quantiles=tuple(np.quantile(own, QUANTILES).tolist()) if len(own) else None,
            confidence=_mean(confidence[here, column]),
            accuracy=_mean(right[here, column]),
            accuracy_after_prefix=_mean(right[before[:, column], column]),
            accepted=_mean(prefix_right[judged[:, column], column]),
            decay=float(decay[column]),
            decay_share=float(decay[column] * here.sum() / decay_sum) if decay_sum > 0 else None,
            blocks=int(here.sum()),
            prefixes=int(before[:, column].sum()),
            whole=int(judged[:, column].sum()),
        ))  # fmt: skip
    return found


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values, dtype=np.float64)) if len(values) else None


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation of a block's accepted length with two predictions of it.

    Attributes:
        surrogate: with S, the sum over k of (q_1 ... q_k).
        confidence_sum: with the plain sum of the confidences q_k.
        difference: the first minus the second.
        blocks, rows: what it is made of. Rows are resampled for the intervals: blocks of one row are no
            independent draws.
    """

    surrogate: Estimate
    confidence_sum: Estimate
    difference: Estimate
    blocks: int
    rows: int


def correlate(
    confidence: np.ndarray, right: np.ndarray, supervised: np.ndarray, rows: np.ndarray, bootstrap: Bootstrap
) -> Correlation | None:
    """Correlation over the blocks that are supervised to their end, so that all lengths have the same range.

    Args:
        confidence: [n, K-1] drafter's probability of the target's token, unsmoothed.
        right: [n, K-1] bool. supervised: [n, K-1] bool.
        rows: [n] which row a block is from.
    Returns:
        None where fewer than three blocks are whole, or all have one accepted length.
    """
    whole = supervised.all(axis=1)
    confidence, right = confidence[whole].astype(np.float64), right[whole]
    lengths = np.logical_and.accumulate(right, axis=1).sum(1)
    if len(lengths) < 3 or len(np.unique(lengths)) < 2:
        return None
    predictions = [np.cumprod(confidence, axis=1).sum(1), confidence.sum(1)]
    names, row = np.unique(rows[whole], return_inverse=True)

    def statistic(index: Sequence[np.ndarray]) -> np.ndarray:
        times_drawn = (index[0][..., None] == np.arange(len(names))).sum(-2)
        first, second = (spearman(lengths, p, times_drawn[..., row]) for p in predictions)
        return np.stack([first, second, first - second])

    values = statistic([np.arange(len(names))])
    bounds = intervals(statistic, [len(names)], bootstrap, 8 * len(lengths) + len(names) ** 2)
    made = [
        Estimate(float(value), low, high, len(names), method)
        for value, (low, high, method) in zip(values, bounds or [(None, None, None)] * 3)
    ]
    return Correlation(*made, blocks=len(lengths), rows=len(names))


def spearman(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Spearman's correlation of [n] pairs, each taken as often as `counts` [..., n] says."""
    ranks = [_midranks(values, counts) for values in (x, y)]
    total = counts.sum(-1, keepdims=True)
    first, second = (r - (counts * r).sum(-1, keepdims=True) / total for r in ranks)
    covariance = (counts * first * second).sum(-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt((counts * first**2).sum(-1) * (counts * second**2).sum(-1))


def _midranks(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """[..., n] ranks with ties at their middle, of values that each occur `counts` times."""
    order = np.argsort(values, kind="stable")
    starts = np.flatnonzero(np.diff(values[order], prepend=-np.inf))
    ties = np.add.reduceat(counts[..., order], starts, axis=-1)
    middle = np.cumsum(ties, axis=-1) - ties + (ties + 1) / 2
    group = np.empty(len(values), int)
    group[order] = np.cumsum(np.isin(np.arange(len(values)), starts)) - 1
    return middle[..., group]
