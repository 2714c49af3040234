"""The one-pass head against whole logits, float64 and automatic differentiation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dpace_cli import config
from dpace_cli.head import HeadOutput, objective_head

BLOCKS, K, WIDTH, VOCABULARY = 7, 6, 16, 50
BUILT_IN = [kind() for kind in config.OBJECTIVES if kind is not config.Custom]
each_objective = pytest.mark.parametrize("objective", BUILT_IN, ids=lambda objective: objective.name)


class Case:
    """Random blocks, with a target's states of its own, holes in the mask, and one block without any target."""

    def __init__(self, seed: int = 0, blocks: int = BLOCKS, block_size: int = K, spread: float = 1.0) -> None:
        torch.manual_seed(seed)
        shape = (blocks, block_size - 1)
        self.block_size = block_size
        self.head = torch.randn(VOCABULARY, WIDTH) * spread
        self.hidden = torch.randn(*shape, WIDTH, requires_grad=True)
        self.target_hidden = torch.randn(*shape, WIDTH)
        self.supervised = torch.rand(shape) < 0.8
        if blocks > 2:
            self.supervised[1] = False
        # Half of the tokens are likely ones, so that prefixes of hits are not always empty.
        likely = (self.hidden @ self.head.t()).topk(3).indices
        choice = torch.where(torch.rand(shape) < 0.6, torch.randint(2, shape), 2)
        self.y = likely.gather(-1, choice[..., None])[..., 0]
        self.y[torch.rand(shape) < 0.2] = 7

    def run(self, objective: Any, **changes: Any) -> HeadOutput:
        settings: dict[str, Any] = {
            "num_sequences": 3,
            "block_size": self.block_size,
            "chunk_tokens": 8,
            "target_hidden": self.target_hidden,
        }
        return objective_head(self.hidden, self.head, self.y, self.supervised, objective, **{**settings, **changes})

    def gradient(self, output: HeadOutput) -> Tensor:
        return torch.autograd.grad(output.loss_sum, self.hidden)[0]

    def distributions(self, scale: float = 1.0, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities of drafter and target over the vocabulary, in float64."""
        logs = []
        for states in (self.hidden, self.target_hidden):
            logits = states.double() @ self.head.double().t() * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            logs.append(logits.log_softmax(-1))
        return logs[0], logs[1]

    def oracle(self, objective: Any, **head: Any) -> Tensor:
        """The loss by its definition, one block and one position at a time."""
        log_q, log_p = self.distributions(**head)
        total = torch.zeros((), dtype=torch.float64)
        for block in range(len(self.y)):
            places = [k for k in range(self.block_size - 1) if self.supervised[block, k]]
            rows = [(log_q[block, k], log_p[block, k], int(self.y[block, k]), k) for k in places]
            total = total + block_loss(objective, rows, self.block_size)
        return total


def block_loss(objective: Any, rows: list[tuple[Tensor, Tensor, int, int]], block_size: int) -> Tensor:
    name = objective.name
    zero = torch.zeros((), dtype=torch.float64)
    if name == "accept-rate":
        products = itertools.accumulate((log_q[y].exp() for log_q, _, y, _ in rows), lambda a, b: a * b)
        return zero - sum(products, zero)

    def stand_in(log_q: Tensor, log_p: Tensor, y: int) -> Tensor:
        if name == "dpakl":
            return (log_p.exp() * log_q).sum().exp()
        return log_p[y].exp() if name == "dpace-target-probability" else log_q[y].exp()

    alpha = getattr(objective, "alpha", 0.0)
    c = [(1 - alpha) * stand_in(log_q, log_p, y).item() + alpha for log_q, log_p, y, _ in rows]
    total, going = zero, True
    for place, (log_q, log_p, y, k) in enumerate(rows):
        reached = math.prod(c[: place + 1])
        follows = 1 + sum(math.prod(c[place + 1 : end + 1]) for end in range(place + 1, len(c)))
        if name in ("dflash", "lk"):
            gamma = config.decay_length(objective.gamma, block_size)
            weight = math.exp(-k / gamma) if gamma else 1.0
        elif name in ("topk-prefix", "accept-until-fail"):
            weight = float(going)
            best = objective.top_k if name == "topk-prefix" else 1
            going = going and y in log_q.topk(best).indices.tolist()
        else:
            weight = {
                "dpace-cumulative-confidence-only": reached,
                "dpace-continuation-value-only": follows,
            }.get(name, reached * follows)
        if name == "dpakl":
            loss = (log_p.exp() * (log_p - log_q)).sum()
        elif name == "lk":
            loss = -torch.minimum(log_p.exp(), log_q.exp()).sum().log()
        else:
            loss = -log_q[y]
        total = total + weight * loss
    return total


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30))


@each_objective
@pytest.mark.parametrize("chunk_tokens", [1, 8, 1000])
def test_loss_and_gradient_are_those_of_the_definition(objective: Any, chunk_tokens: int) -> None:
    case = Case()
    output = case.run(objective, chunk_tokens=chunk_tokens)
    expected = case.oracle(objective)
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=2e-6)
    assert relative(case.gradient(output), torch.autograd.grad(expected, case.hidden)[0]) < 2e-6


@each_objective
def test_logit_scale_and_softcap_are_those_of_the_definition(objective: Any) -> None:
    case = Case(1)
    output = case.run(objective, logit_scale=0.5, softcap=4.0)
    expected = case.oracle(objective, scale=0.5, softcap=4.0)
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=2e-6)
    assert relative(case.gradient(output), torch.autograd.grad(expected, case.hidden)[0]) < 2e-6


@pytest.mark.parametrize("gamma", ["auto", None, 2.5])
def test_gamma_of_any_form(gamma: Any) -> None:
    case = Case(2)
    output, expected = case.run(config.Dflash(gamma=gamma)), case.oracle(config.Dflash(gamma=gamma))
    assert output.loss_sum.item() == pytest.approx(expected.item(), rel=2e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_topk_prefix_for_every_k_and_until_fail_against_a_loop_over_blocks(top_k: int) -> None:
    for seed in range(5):
        case = Case(seed, blocks=12)
        for objective in (config.TopkPrefix(top_k=top_k), config.AcceptUntilFail()):
            assert case.run(objective).loss_sum.item() == pytest.approx(case.oracle(objective).item(), rel=2e-6)


def test_dpakl_equals_dpace_where_the_target_is_certain() -> None:
    case = Case(3)
    # A head with one extra direction per token makes any one-hot target distribution possible.
    head = torch.cat([case.head, torch.eye(VOCABULARY)], 1)
    hidden = torch.cat([case.hidden.detach(), torch.zeros(BLOCKS, K - 1, VOCABULARY)], -1)
    certain = torch.cat([torch.zeros(BLOCKS, K - 1, WIDTH), 1e3 * torch.eye(VOCABULARY)[case.y]], -1)
    found = []
    for objective in (config.Dpakl(alpha=0.3), config.Dpace(alpha=0.3)):
        leaf = hidden.clone().requires_grad_()
        output = objective_head(
            leaf, head, case.y, case.supervised, objective,
            num_sequences=1, block_size=K, chunk_tokens=16, target_hidden=certain,
        )  # fmt: skip
        found.append((output.loss_sum, torch.autograd.grad(output.loss_sum, leaf)[0]))
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
    assert relative(found[0][1], found[1][1]) < 1e-6


@each_objective
@pytest.mark.parametrize("block_size", [2, 64])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 300.0])
def test_everything_is_finite_for_certain_and_hopeless_drafters(objective: Any, block_size: int, spread: float) -> None:
    alphas = [0.0, 1.0] if "alpha" in type(objective).model_fields else [None]
    for alpha in alphas:
        chosen = objective if alpha is None else objective.model_copy(update={"alpha": alpha})
        case = Case(4, blocks=4, block_size=block_size, spread=spread)
        case.supervised[2] = False
        case.supervised[2, -1] = True  # one supervised position, the last
        output = case.run(chosen)
        assert output.loss_sum.isfinite() and output.divisor.isfinite()
        assert case.gradient(output).isfinite().all()
        assert all(value.isfinite().all() for value in output.metrics.values())


@each_objective
def test_without_a_supervised_position_everything_is_zero(objective: Any) -> None:
    case = Case(5)
    case.supervised[:] = False
    for own in (case, Case(5, blocks=0)):
        output = own.run(objective, num_sequences=0)
        assert output.loss_sum.item() == 0 and output.divisor.item() == 0
        assert own.gradient(output).abs().sum() == 0


@each_objective
def test_what_stands_at_unsupervised_positions_does_not_matter(objective: Any) -> None:
    case = Case(6)
    before = case.run(objective)
    gradient = case.gradient(before)
    with torch.no_grad():
        case.hidden[~case.supervised] = torch.nan
    case.target_hidden[~case.supervised] = torch.nan
    case.y[~case.supervised] = 0
    after = case.run(objective)
    assert torch.equal(after.loss_sum, before.loss_sum) and torch.equal(case.gradient(after), gradient)
    assert gradient[~case.supervised].eq(0).all()


@each_objective
@pytest.mark.parametrize("reduction", ["sequence", "block", "token", "weight"])
def test_sums_do_not_depend_on_how_blocks_are_spread(objective: Any, reduction: str) -> None:
    case = Case(7)
    chosen = objective.model_copy(update={"reduction": reduction})
    whole = case.run(chosen, num_sequences=3)
    whole_gradient = case.gradient(whole)
    loss, divisor, gradients = 0.0, 0.0, []
    for part, sequences in ((slice(0, 2), 1), (slice(2, 2), 0), (slice(2, 7), 2)):  # one without blocks
        own = case.hidden[part].detach().requires_grad_()
        output = objective_head(
            own, case.head, case.y[part], case.supervised[part], chosen, num_sequences=sequences,
            block_size=K, chunk_tokens=8, target_hidden=case.target_hidden[part],
        )  # fmt: skip
        loss, divisor = loss + output.loss_sum.item(), divisor + output.divisor.item()
        gradients.append(torch.autograd.grad(output.loss_sum, own)[0])
    assert loss == pytest.approx(whole.loss_sum.item(), rel=1e-6)
    assert divisor == pytest.approx(whole.divisor.item(), rel=1e-6)
    assert relative(torch.cat(gradients), whole_gradient) < 1e-6


def test_divisors() -> None:
    case = Case(8)
    weights = sum(math.exp(-k / 2.5) for b in range(BLOCKS) for k in range(K - 1) if case.supervised[b, k])
    expected = {
        "sequence": 3,
        "block": int(case.supervised.any(1).sum()),
        "token": int(case.supervised.sum()),
        "weight": weights,
    }
    for reduction, divisor in expected.items():
        output = case.run(config.Dflash(gamma=2.5, reduction=reduction))
        assert output.divisor.item() == pytest.approx(divisor, rel=1e-6)
        assert not output.divisor.requires_grad


def test_metrics_against_a_loop() -> None:
    case = Case(9, blocks=20)
    output = case.run(config.Dpace(alpha=0.4))
    log_q, _ = case.distributions()
    names = ("supervised_count", "weight_sum", "confidence_sum", "correct_sum", "accepted_sum")
    sums = {name: torch.zeros(K - 1, dtype=torch.float64) for name in names}
    expected_accepted = 0.0
    for block in range(20):
        places = [k for k in range(K - 1) if case.supervised[block, k]]
        q = [log_q[block, k, case.y[block, k]].exp().item() for k in places]
        c = [0.6 * value + 0.4 for value in q]
        expected_accepted += sum(math.prod(q[: end + 1]) for end in range(len(q)))
        accepted = True
        for place, k in enumerate(places):
            right = int(log_q[block, k].argmax()) == case.y[block, k]
            accepted = accepted and right
            sums["supervised_count"][k] += 1
            sums["weight_sum"][k] += sum(math.prod(c[: end + 1]) for end in range(place, len(c)))
            sums["confidence_sum"][k] += q[place]
            sums["correct_sum"][k] += right
            sums["accepted_sum"][k] += accepted
    for name, value in sums.items():
        torch.testing.assert_close(output.metrics[name].double(), value, rtol=1e-5, atol=1e-5)
    assert output.metrics["correct"].item() == sums["correct_sum"].sum().item() > 0
    assert output.metrics["supervised"].item() == case.supervised.sum().item()
    assert output.metrics["blocks"].item() == case.supervised.any(1).sum().item()
    assert output.metrics["expected_accepted"].item() == pytest.approx(expected_accepted, rel=1e-5)


@each_objective
def test_under_bf16_the_products_alone_are_rounded(objective: Any) -> None:
    case = Case(10, blocks=40)
    exact = case.run(objective)
    exact_gradient = case.gradient(exact)
    with torch.autocast("cpu", torch.bfloat16):
        output = case.run(objective)
    gradient = case.gradient(output)
    assert output.loss_sum.dtype == gradient.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in output.metrics.values())
    prefix_mask = objective.name in ("topk-prefix", "accept-until-fail")  # a rounded logit can move the first miss
    assert output.loss_sum.item() == pytest.approx(exact.loss_sum.item(), rel=0.1 if prefix_mask else 0.02)
    # min(p, q) has a kink at p = q, where rounding can choose the other side.
    assert prefix_mask or relative(gradient, exact_gradient) < (0.15 if objective.name == "lk" else 0.05)


def test_gradient_of_a_nearly_certain_drafter_keeps_its_digits_under_bf16() -> None:
    """1 - q must be taken before rounding: 1 - 2^-12 is 1 in bfloat16, and the gradient would vanish."""
    head = torch.eye(3, 8)
    hidden = torch.zeros(1, 1, 8)
    hidden[0, 0, 0] = 9.0
    gradients = []
    for enabled in (False, True):
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = objective_head(
                leaf, head, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool),
                config.Dflash(gamma=None), num_sequences=1, block_size=2, chunk_tokens=4,
            )  # fmt: skip
        gradients.append(torch.autograd.grad(output.loss_sum, leaf)[0])
    assert relative(gradients[1], gradients[0]) < 0.01


@each_objective
def test_evaluation_gives_the_same_sums_without_a_gradient(objective: Any) -> None:
    case = Case(11)
    trained = case.run(objective)
    with torch.no_grad():
        case.hidden = case.hidden.detach()
    evaluated = case.run(objective)
    assert not evaluated.loss_sum.requires_grad
    assert torch.equal(evaluated.loss_sum, trained.loss_sum.detach())
    assert torch.equal(evaluated.divisor, trained.divisor)


def test_probabilities_are_exact_for_a_large_vocabulary() -> None:
    """A fused softmax adds 60,000 exponentials in plain float32, and misses log q by some 1e-5."""
    torch.manual_seed(0)
    head = torch.randn(60_000, 4) * 3
    hidden = torch.randn(6, 1, 4, requires_grad=True)
    y = torch.randint(60_000, (6, 1))
    output = objective_head(
        hidden, head, y, torch.ones(6, 1, dtype=torch.bool), config.Dflash(gamma=None),
        num_sequences=1, block_size=2, chunk_tokens=4,
    )  # fmt: skip
    exact = -(hidden.double() @ head.double().t()).log_softmax(-1).gather(-1, y[..., None])
    assert output.loss_sum.item() == pytest.approx(exact.sum().item(), abs=3e-6)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


@each_objective
def test_no_tensor_is_larger_than_a_chunk_of_logits(objective: Any) -> None:
    torch.manual_seed(0)
    vocabulary, chunk = 2000, 16
    head, hidden = torch.randn(vocabulary, 8), torch.randn(40, 7, 8, requires_grad=True)
    y, supervised = torch.randint(vocabulary, (40, 7)), torch.ones(40, 7, dtype=torch.bool)
    with _Largest() as seen:
        output = objective_head(
            hidden, head, y, supervised, objective, num_sequences=1, block_size=8, chunk_tokens=chunk,
            target_hidden=torch.randn(40, 7, 8),
        )  # fmt: skip
        output.loss_sum.backward()
    assert seen.largest <= chunk * vocabulary


@each_objective
def test_the_gradient_scales_with_what_comes_from_above(objective: Any) -> None:
    case = Case(12)
    once = case.gradient(case.run(objective))
    output = case.run(objective)
    thrice = torch.autograd.grad(3 * output.loss_sum, case.hidden)[0]
    torch.testing.assert_close(thrice, 3 * once)


@each_objective
def test_kept_buffers_change_nothing_from_one_micro_batch_to_the_next(objective: Any) -> None:
    kept: dict[str, Tensor] = {}
    for blocks in (3, 9, 2, 9):  # of unlike sizes, so that buffers grow and are filled in part
        case = Case(blocks, blocks=blocks)
        fresh, again = case.run(objective, chunk_tokens=20), case.run(objective, chunk_tokens=20, buffers=kept)
        assert torch.equal(fresh.loss_sum, again.loss_sum)
        assert torch.equal(case.gradient(fresh), case.gradient(again))
    assert kept and all(len(buffer) <= 20 for buffer in kept.values())


@each_objective
def test_supervised_rows_alone_give_the_same(objective: Any) -> None:
    case = Case(14)
    whole = case.run(objective)
    gradient = case.gradient(whole)[case.supervised]
    case.target_hidden = case.target_hidden[case.supervised]
    case.hidden = case.hidden.detach()[case.supervised].requires_grad_()
    packed = case.run(objective)
    assert torch.equal(packed.loss_sum, whole.loss_sum)
    assert torch.equal(case.gradient(packed), gradient)


def test_shapes_that_do_not_agree_are_an_error() -> None:
    case = Case(13)
    with pytest.raises(ValueError, match="do not agree"):
        case.run(config.Dpace(), block_size=K + 1)
    with pytest.raises(ValueError, match="needs the target's hidden states"):
        case.run(config.Lk(), target_hidden=None)
