"""The weights of every objective, against oracles that share no code with them."""

from __future__ import annotations

import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpace_cli import config
from dpace_cli.errors import RunError, UsageError
from dpace_cli.objectives import (
    FROM_TARGET,
    continuation_weights,
    cumulative_weights,
    decay_weights,
    dpace_weights,
    make_objective,
    survival,
    until_first_miss,
)

ALPHAS = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1))


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """(logq, supervised) of one to three blocks of 2 to 12 positions, certain and hopeless ones included."""
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 11))
    q = st.one_of(st.sampled_from([0.0, -1e4, -103.0]), st.floats(-12, 0))
    logq = draw(st.lists(st.lists(q, min_size=width, max_size=width), min_size=count, max_size=count))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=count, max_size=count))
    supervised = torch.tensor(mask)
    return torch.where(supervised, torch.tensor(logq), 0.0), supervised


def expected_length(log_c: list[Tensor]) -> Tensor:
    """Sum over j of c_1 ... c_j, one factor at a time."""
    total, product = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for one in log_c:
        product = product * one.exp()
        total = total + product
    return total


def derivative_of_expected_length(logq: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """Gradient of the expected accepted length with respect to log c, by automatic differentiation."""
    log_c = ((1 - alpha) * logq.double().exp() + alpha).clamp_min(1e-300).log().requires_grad_()
    total = sum(
        expected_length([log_c[b, k] for k in range(log_c.shape[1]) if supervised[b, k]]) for b in range(len(log_c))
    )
    if not supervised.any():
        return torch.zeros_like(log_c)
    return torch.autograd.grad(total, log_c)[0]


@given(blocks(), ALPHAS)
@settings(deadline=None)
def test_dpace_weights_are_the_gradient_of_the_expected_accepted_length(block: tuple, alpha: float) -> None:
    logq, supervised = block
    expected = derivative_of_expected_length(logq, supervised, alpha).float()
    torch.testing.assert_close(dpace_weights(logq, supervised, alpha), expected, rtol=1e-5, atol=1e-7)


@given(blocks(), ALPHAS)
@settings(deadline=None)
def test_dpace_is_cumulative_confidence_times_continuation_value(block: tuple, alpha: float) -> None:
    product = cumulative_weights(*block, alpha) * continuation_weights(*block, alpha)
    torch.testing.assert_close(dpace_weights(*block, alpha), product, rtol=1e-5, atol=1e-7)


@given(blocks(), ALPHAS)
@settings(deadline=None)
def test_dpace_weights_never_increase_and_are_at_least_alpha_to_the_k(block: tuple, alpha: float) -> None:
    weights, supervised = dpace_weights(*block, alpha), block[1]
    for own, mask in zip(weights, supervised):
        values = own[mask].tolist()
        assert all(later <= earlier for earlier, later in itertools.pairwise(values))
        assert all(value >= alpha**k * (1 - 1e-5) - 1e-12 for k, value in enumerate(values, 1))


@given(blocks(), ALPHAS, st.sampled_from([dpace_weights, cumulative_weights, continuation_weights]))
@settings(deadline=None)
def test_weights_are_zero_where_not_supervised_and_what_stands_there_does_not_matter(
    block: tuple, alpha: float, weigh: object
) -> None:
    logq, supervised = block
    weights = weigh(logq, supervised, alpha)
    assert weights[~supervised].eq(0).all()
    other = torch.where(supervised, logq, torch.tensor(-0.7))
    assert torch.equal(weights, weigh(other, supervised, alpha))


@pytest.mark.parametrize("weigh", [dpace_weights, cumulative_weights, continuation_weights])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("width", [1, 63])
@pytest.mark.parametrize("logq", [0.0, -1e4, -math.inf, -1e-8])
@pytest.mark.parametrize("count", ["all", "one", "none"])
def test_weights_are_finite_at_the_extremes(weigh: object, alpha: float, width: int, logq: float, count: str) -> None:
    supervised = torch.zeros(2, width, dtype=torch.bool)
    if count != "none":
        supervised[:, : 1 if count == "one" else width] = True
    values = torch.where(supervised, torch.tensor(logq), 0.0)
    weights = weigh(values, supervised, alpha)
    assert weights.dtype == torch.float32 and weights.isfinite().all() and (weights >= 0).all()
    if alpha == 1:  # every confidence is one: what counts is how many are left
        left = supervised.long().flip(-1).cumsum(-1).flip(-1) * supervised
        assert torch.equal(weights, supervised.float() if weigh is cumulative_weights else left.float())


@pytest.mark.parametrize("weigh", [dpace_weights, cumulative_weights, continuation_weights])
def test_weights_are_float32_and_detached_whatever_comes_in(weigh: object) -> None:
    logq = torch.full((2, 5), -0.5, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        weights = weigh(logq, torch.ones(2, 5, dtype=torch.bool), 0.3)
    assert weights.dtype == torch.float32 and not weights.requires_grad


@given(blocks(), st.lists(st.booleans(), min_size=33, max_size=33))
@settings(deadline=None)
def test_prefix_masks_end_after_the_first_miss(block: tuple, hits: list[bool]) -> None:
    _, supervised = block
    hit = torch.tensor(hits[: supervised.numel()]).view_as(supervised)
    expected = torch.zeros(supervised.shape)
    for b in range(len(supervised)):
        for k in range(supervised.shape[1]):
            if supervised[b, k]:
                expected[b, k] = 1
                if not hit[b, k]:
                    break
    assert torch.equal(until_first_miss(hit, supervised), expected)


def test_decay_is_exponential_from_the_first_drafted_position() -> None:
    supervised = torch.tensor([[True, True, False, True]])
    expected = torch.tensor([[1.0, math.exp(-1 / 7), 0.0, math.exp(-3 / 7)]])
    torch.testing.assert_close(decay_weights(supervised, 7.0), expected)
    assert torch.equal(decay_weights(supervised, None), supervised.float())


@pytest.mark.parametrize(("block_size", "gamma"), [(8, 4.0), (10, 5.0), (16, 7.0)])
@pytest.mark.parametrize("objective", [config.Dflash(), config.Lk()])
def test_automatic_gamma_is_the_papers(objective: object, block_size: int, gamma: float) -> None:
    supervised = torch.ones(1, block_size - 1, dtype=torch.bool)
    quantity = "log_overlap" if objective.name == "lk" else "logq"
    terms = make_objective(objective).terms(supervised=supervised, **{quantity: torch.zeros(1, block_size - 1)})
    assert terms.weights[0, -1].item() == pytest.approx(math.exp(-(block_size - 2) / gamma))


@given(blocks())
@settings(deadline=None)
def test_accept_rate_has_the_gradient_of_dpace_without_smoothing(block: tuple) -> None:
    logq, supervised = block
    gradients = []
    for objective in (config.AcceptRate(), config.Dpace(alpha=0)):
        leaf = logq.clone().requires_grad_()
        terms = make_objective(objective).terms(supervised=supervised, logq=leaf)
        gradients.append(torch.autograd.grad(terms.loss.sum(), leaf)[0])
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


@given(blocks())
@settings(deadline=None)
def test_accept_rate_is_minus_the_expected_accepted_length(block: tuple) -> None:
    logq, supervised = block
    expected = -sum(
        expected_length([logq[b, k].double() for k in range(logq.shape[1]) if supervised[b, k]])
        for b in range(len(logq))
    )
    terms = make_objective(config.AcceptRate()).terms(supervised=supervised, logq=logq)
    torch.testing.assert_close(terms.loss.sum().double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(survival(logq, supervised).sum().double(), -expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("objective", [kind() for kind in config.OBJECTIVES if kind is not config.Custom])
def test_every_objective_says_rightly_whether_it_needs_the_target(objective: object) -> None:
    needs = make_objective(objective).needs
    assert config.needs_target(objective) == bool(needs & set(FROM_TARGET))
    assert objective.formula and objective.source


def documentation() -> str:
    return (Path(__file__).parent.parent / "docs" / "objectives.md").read_text()


def test_the_weights_in_the_documentation_are_those_of_the_tool() -> None:
    rows = re.findall(r"^\| (`dpace`, alpha 0.5, q = ([\d.]+)|`dflash`, gamma 4) \|(.+)\|$", documentation(), re.M)
    supervised = torch.ones(1, 7, dtype=torch.bool)
    assert len(rows) == 4
    for _, q, figures in rows:
        weights = (
            dpace_weights(torch.full((1, 7), float(q)).log(), supervised, 0.5) if q else decay_weights(supervised, 4)
        )
        assert [f"{value:.2f}" for value in weights[0].tolist()] == [figure.strip() for figure in figures.split("|")]


def test_every_objective_is_documented() -> None:
    for kind in config.OBJECTIVES:
        assert kind is config.Custom or f"| `{kind.model_fields['name'].default}` |" in documentation()


# --- a function of the user's own ------------------------------------------------------------------------


OWN = """
import torch

def squared(logq, supervised, power=2.0):
    return (-logq) ** power

def weighted(logq, supervised, hit, scale):
    weights = scale * hit.float()
    return weights, weights * -logq

def soft(soft_logp, soft_logq, logp, log_overlap):
    return soft_logp - soft_logq - log_overlap + 0 * logp

def summed(logq):
    return -logq.sum()

def constant(logq):
    return torch.zeros_like(logq)

def broken(logq):
    raise KeyError("no such thing")

def blind(supervised):
    return supervised.float()

NUMBER = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_losses_for_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_losses_for_test", raising=False)
    return "own_losses_for_test"


def custom(module: str, name: str, **fields: object) -> config.Custom:
    return config.Custom(function=f"{module}:{name}", **fields)


def test_own_function_gets_the_quantities_that_it_names(own_module: str) -> None:
    logq = torch.tensor([[-1.0, -3.0, 0.0]], requires_grad=True)
    supervised = torch.tensor([[True, True, False]])
    objective = make_objective(custom(own_module, "squared", params={"power": 3.0}))
    terms = objective.terms(supervised=supervised, logq=logq)
    assert terms.loss.tolist() == [[1.0, 27.0, 0.0]]
    # Its weights are what its gradient amounts to: minus the derivative with respect to log q.
    torch.testing.assert_close(terms.weights, torch.tensor([[3.0, 27.0, 0.0]]))


def test_own_function_may_return_its_weights(own_module: str) -> None:
    logq = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    supervised, hit = torch.ones(1, 2, dtype=torch.bool), torch.tensor([[True, False]])
    terms = make_objective(custom(own_module, "weighted", params={"scale": 2.0})).terms(
        supervised=supervised, logq=logq, hit=hit
    )
    assert terms.weights.tolist() == [[2.0, 0.0]] and terms.loss.tolist() == [[2.0, 0.0]]


def test_own_function_that_needs_the_target_must_say_so(own_module: str) -> None:
    assert make_objective(custom(own_module, "soft", needs_target_logits=True)).needs >= {"logp", "log_overlap"}
    with pytest.raises(UsageError, match="soft takes log_overlap, logp, soft_logp, soft_logq"):
        make_objective(custom(own_module, "soft"))


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("absent", {}, "has no absent"),
        ("NUMBER", {}, "is a int, not a function"),
        ("weighted", {}, "takes scale, which is neither a quantity nor in train.objective.params"),
        ("squared", {"params": {"powr": 1}}, "takes no powr"),
        ("squared", {"params": {"logq": 1}}, "takes logq"),
        ("blind", {}, "nothing that the drafter can learn from"),
    ],
)
def test_own_function_that_does_not_fit_is_an_error_that_names_it(
    own_module: str, name: str, fields: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        make_objective(custom(own_module, name, **fields))
    assert f"{own_module}:{name}" in caught.value.message


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("summed", UsageError, r"loss of shape \(\); it must be \(2, 3\)"),
        ("constant", UsageError, "does not depend on logq"),
        ("broken", RunError, "KeyError"),
    ],
)
def test_own_function_that_returns_nonsense_is_an_error_that_names_it(
    own_module: str, name: str, error: type, message: str
) -> None:
    objective = make_objective(custom(own_module, name))
    logq = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(error, match=message) as caught:
        objective.terms(supervised=torch.ones(2, 3, dtype=torch.bool), logq=logq)
    assert f"{own_module}:{name}" in caught.value.message


def test_the_function_in_the_documentation_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(def focal.+?)```", documentation(), re.S)
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    logq = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    objective = make_objective(custom("my_losses", "focal", params={"power": 3}))
    terms = objective.terms(supervised=torch.ones(1, 2, dtype=torch.bool), logq=logq)
    expected = [[(1 - math.exp(-1)) ** 3, (1 - math.exp(-3)) ** 3]]
    torch.testing.assert_close(terms.weights, torch.tensor(expected))


def test_unsmoothed_training_is_cautioned_against() -> None:
    for kind in (config.Dpace, config.DpaceCumulative, config.DpaceContinuation, config.Dpakl):
        assert "alpha is 0" in config.caution(kind(alpha=0)) and not config.caution(kind())
    assert not config.caution(config.Dflash())


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="there is no module no_such_module_anywhere"):
        make_objective(config.Custom(function="no_such_module_anywhere:loss"))
