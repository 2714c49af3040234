"""The training objectives, as pure functions on small per-block tensors.

An objective never sees logits. It names the quantities it needs as its parameters, `dpace_cli.head` makes
them for all blocks of a micro-batch, and the gradient flows back through those that are differentiable.
Definitions and sources: docs/objectives.md.

Shapes: n blocks, K positions in a block. Position 0, the anchor, is never predicted and is left out
everywhere here, so a block is a row of K - 1. y is the target's token at a position.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpace_cli import config
from dpace_cli.errors import RunError, UsageError

QUANTITIES = {
    "supervised": "bool: the position counts",
    "logq": "log q(y), the drafter's log-probability of y; differentiable",
    "hit": "bool: no token is more probable than y for the drafter",
    "rank": "int: how many tokens are more probable than y for the drafter",
    "logp": "log p(y), the target's own log-probability of y",
    "soft_logp": "sum_v p(v) log p(v), minus the target's entropy",
    "soft_logq": "sum_v p(v) log q(v), minus the cross-entropy of target and drafter; differentiable",
    "log_overlap": "log sum_v min(p(v), q(v)); differentiable",
}
"""What an objective can ask for by name. Each is [n, K - 1], float32 in nats unless said, 0 where not supervised."""

DIFFERENTIABLE = ("logq", "soft_logq", "log_overlap")
FROM_TARGET = ("logp", "soft_logp", "soft_logq", "log_overlap")


class Terms(NamedTuple):
    """What an objective makes of its quantities.

    Attributes:
        weights: [n, K - 1] float32, detached, zero where not supervised.
        loss: [n, K - 1] contribution of each position to the numerator, weights included.
    """

    weights: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Objective:
    """An objective ready for use.

    Attributes:
        label: name in error messages.
        needs: quantities that it reads.
        terms: function of those, by keyword.
    """

    label: str
    needs: frozenset[str]
    terms: Callable[..., Terms] = field(repr=False)


_TERMS: dict[type, Callable[..., Terms]] = {}


def _objective(config_class: type) -> Callable[[Callable[..., Terms]], Callable[..., Terms]]:
    """Make a function the terms of a config class. Its first parameter is the config, the rest are quantities."""

    def register(function: Callable[..., Terms]) -> Callable[..., Terms]:
        _TERMS[config_class] = function
        return function

    return register


def make_objective(chosen: Any) -> Objective:
    """The objective of a config section `train.objective`.

    Raises:
        UsageError: a custom function is missing or asks for what there is not.
    """
    if isinstance(chosen, config.Custom):
        return _custom(chosen)
    function = _TERMS[type(chosen)]
    needs = frozenset(list(inspect.signature(function).parameters)[1:])
    return Objective(chosen.name, needs, lambda **quantities: function(chosen, **quantities))


# --- weights: [n, K - 1] in, [n, K - 1] float32 out, detached, zero where not supervised -----------------


def smoothed(logq: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """c = (1 - alpha) q + alpha (arXiv 2605.18810, eq. 7), in float32; 1, a no-op in products, where not supervised."""
    confidence = (1 - alpha) * logq.detach().float().exp() + alpha
    return torch.where(supervised, confidence, 1.0)


def dpace_weights(logq: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """Weight each position by the accepted length that it can still unlock (arXiv 2605.18810, eq. 8).

    w_k = sum over j >= k of c_1 ... c_j, the derivative of the smooth expected accepted length with
    respect to log c_k.

    Args:
        logq: log-probability that stands for the confidence, in nats.
        supervised: bool.
        alpha: smoothing, between 0 and 1.
    """
    survival = smoothed(logq, supervised, alpha).cumprod(-1) * supervised
    return survival.flip(-1).cumsum(-1).flip(-1) * supervised


def cumulative_weights(logq: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """w_k = c_1 ... c_k: how likely it is that position k is reached and right (appendix B.3)."""
    return smoothed(logq, supervised, alpha).cumprod(-1) * supervised


def continuation_weights(logq: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """w_k = 1 + sum over j > k of c_{k+1} ... c_j: what follows once position k is right (appendix B.3).

    Built from the right, without a division by the cumulative confidence, which may underflow.
    """
    confidence, counted = smoothed(logq, supervised, alpha), supervised.float()
    weights = torch.empty_like(confidence)
    following = torch.zeros_like(confidence[:, 0])
    for k in range(confidence.shape[-1] - 1, -1, -1):
        weights[:, k] = 1 + following
        following = confidence[:, k] * (counted[:, k] + following)
    return weights * supervised


def decay_weights(supervised: Tensor, gamma: float | None) -> Tensor:
    """w_k = exp(-(k - 1) / gamma) for k = 1 .. K - 1 (arXiv 2602.06036, eq. 4); 1 without gamma."""
    if gamma is None:
        return supervised.float()
    distance = torch.arange(supervised.shape[-1], device=supervised.device, dtype=torch.float32)
    return torch.exp(-distance / gamma) * supervised


def until_first_miss(hit: Tensor, supervised: Tensor) -> Tensor:
    """w_k = 1 up to and including the first supervised position that is no hit, then 0 (GRIFFIN; arXiv 2607.01893)."""
    missed = (supervised & ~hit).long()
    return ((missed.cumsum(-1) - missed == 0) & supervised).float()


def survival(logq: Tensor, supervised: Tensor) -> Tensor:
    """q_1 ... q_k: the chance that position k is accepted; zero where not supervised. Differentiable.

    Its sum over k is the expected accepted length S of the block (arXiv 2605.18810, eq. 5).
    """
    return torch.where(supervised, logq, 0.0).cumsum(-1).exp() * supervised


# --- objectives ------------------------------------------------------------------------------------------


@_objective(config.Dpace)
def _dpace(chosen: config.Dpace, supervised: Tensor, logq: Tensor) -> Terms:
    weights = dpace_weights(logq, supervised, chosen.alpha)
    return Terms(weights, weights * -logq)


@_objective(config.DpaceCumulative)
def _cumulative(chosen: config.DpaceCumulative, supervised: Tensor, logq: Tensor) -> Terms:
    weights = cumulative_weights(logq, supervised, chosen.alpha)
    return Terms(weights, weights * -logq)


@_objective(config.DpaceContinuation)
def _continuation(chosen: config.DpaceContinuation, supervised: Tensor, logq: Tensor) -> Terms:
    weights = continuation_weights(logq, supervised, chosen.alpha)
    return Terms(weights, weights * -logq)


@_objective(config.DpaceTargetProbability)
def _target_probability(chosen: config.DpaceTargetProbability, supervised: Tensor, logq: Tensor, logp: Tensor) -> Terms:
    weights = dpace_weights(logp, supervised, chosen.alpha)
    return Terms(weights, weights * -logq)


@_objective(config.Dpakl)
def _dpakl(chosen: config.Dpakl, supervised: Tensor, soft_logp: Tensor, soft_logq: Tensor) -> Terms:
    weights = dpace_weights(soft_logq, supervised, chosen.alpha)
    return Terms(weights, weights * (soft_logp - soft_logq))


@_objective(config.Dflash)
def _dflash(chosen: config.Dflash, supervised: Tensor, logq: Tensor) -> Terms:
    weights = decay_weights(supervised, _gamma(chosen, supervised))
    return Terms(weights, weights * -logq)


@_objective(config.Lk)
def _lk(chosen: config.Lk, supervised: Tensor, log_overlap: Tensor) -> Terms:
    weights = decay_weights(supervised, _gamma(chosen, supervised))
    return Terms(weights, weights * -log_overlap)


@_objective(config.TopkPrefix)
def _topk_prefix(chosen: config.TopkPrefix, supervised: Tensor, logq: Tensor, rank: Tensor) -> Terms:
    weights = until_first_miss(rank < chosen.top_k, supervised)
    return Terms(weights, weights * -logq)


@_objective(config.AcceptUntilFail)
def _accept_until_fail(chosen: config.AcceptUntilFail, supervised: Tensor, logq: Tensor, hit: Tensor) -> Terms:
    weights = until_first_miss(hit, supervised)
    return Terms(weights, weights * -logq)


@_objective(config.AcceptRate)
def _accept_rate(chosen: config.AcceptRate, supervised: Tensor, logq: Tensor) -> Terms:
    # The loss is -S itself. Its weights are what the gradient amounts to: D-PACE's without smoothing.
    return Terms(dpace_weights(logq, supervised, 0.0), -survival(logq, supervised))


def _gamma(chosen: config.Dflash | config.Lk, supervised: Tensor) -> float | None:
    return config.decay_length(chosen.gamma, supervised.shape[-1] + 1)


# --- a function of the user's own ------------------------------------------------------------------------


def _custom(chosen: config.Custom) -> Objective:
    where = f"train.objective.function {chosen.function}"
    function = _load_function(chosen.function, where)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UsageError(f"{where} is not a Python function with named parameters") from None
    unknown = sorted(chosen.params.keys() & QUANTITIES.keys()) or sorted(
        name
        for name, parameter in parameters.items()
        if name not in QUANTITIES
        and name not in chosen.params
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )
    if unknown:
        raise UsageError(
            f"{where} takes {', '.join(unknown)}, which is neither a quantity nor in train.objective.params",
            f"quantities are {', '.join(QUANTITIES)}; give the others in train.objective.params",
        )
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    spare = [] if takes_any else sorted(set(chosen.params) - set(parameters))
    if spare:
        raise UsageError(f"{where} takes no {', '.join(spare)} (train.objective.params)")
    needs = frozenset(parameters) & QUANTITIES.keys()
    from_target = sorted(needs & set(FROM_TARGET))
    if from_target and not chosen.needs_target_logits:
        raise UsageError(
            f"{where} takes {', '.join(from_target)}, which come from the target's distribution",
            "set train.objective.needs_target_logits=true",
        )
    if not needs & set(DIFFERENTIABLE):
        raise UsageError(
            f"{where} takes nothing that the drafter can learn from", f"it needs one of {', '.join(DIFFERENTIABLE)}"
        )

    def terms(**quantities: Tensor) -> Terms:
        asked = {name: value for name, value in quantities.items() if name in needs}
        try:
            returned = function(**asked, **chosen.params)
        except Exception as error:
            raise RunError(f"{where} failed: {type(error).__name__}: {error}") from error
        return _checked(returned, quantities, where)

    return Objective(chosen.function, needs | {"supervised"}, terms)


def source_hash(chosen: Any) -> str | None:
    """Hash of the source of a user's own function, so that an edit is noticed; None for dpace's own objectives."""
    if not isinstance(chosen, config.Custom):
        return None
    function = _load_function(chosen.function, f"train.objective.function {chosen.function}")
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # made at run time, or not in Python
        return None


def _load_function(path: str, where: str) -> Callable[..., Any]:
    module_name, _, function_name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a module beside the config; console scripts do not look there
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{where}: there is no module {error.name}", "run from the folder that holds it") from None
    except AttributeError:
        raise UsageError(f"{where}: module {module_name} has no {function_name}") from None
    except Exception as error:
        raise UsageError(f"{where}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise UsageError(f"{where} is a {type(function).__name__}, not a function")
    return function


def _checked(returned: Any, quantities: dict[str, Tensor], where: str) -> Terms:
    """Terms from `loss` or `(weights, loss)`; the effective weights where none are returned."""
    weights, loss = returned if isinstance(returned, tuple) and len(returned) == 2 else (None, returned)
    supervised = quantities["supervised"]
    for name, value in (("loss", loss), ("weights", weights)):
        if value is None and name == "weights":
            continue
        if not isinstance(value, Tensor) or value.shape != supervised.shape:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"{where} returned {name} of shape {shape}; it must be {tuple(supervised.shape)}: blocks x (K - 1)",
                "return the loss of each position, or the pair (weights, loss); do not sum them",
            )
    leaves = [quantities[name] for name in DIFFERENTIABLE if name in quantities]
    if any(leaf.requires_grad for leaf in leaves) and not loss.requires_grad:
        raise UsageError(f"{where} returned a loss that does not depend on {' or '.join(DIFFERENTIABLE)}")
    loss = torch.where(supervised, loss, 0.0)
    if weights is None:
        weights = torch.zeros_like(supervised, dtype=torch.float32)
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss.sum(), leaves, retain_graph=True, allow_unused=True)
            weights = -sum(slope for slope in slopes if slope is not None)
    return Terms(weights.detach().float() * supervised, loss)
