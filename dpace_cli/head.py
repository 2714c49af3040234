"""The target's frozen head and the training objective in one pass.

The head is frozen and an objective depends on a few numbers per position, so one matrix product forward
and one back per chunk of positions give the loss and its gradient with respect to the hidden states:
nothing is computed twice, and no [tokens, vocabulary] tensor is larger than a chunk.

For each differentiable quantity s of a position (such as log q(y)), the pass stores the row ds/dh. The
objective then sees all blocks at once, and scales each row by its d loss/ds.

Shapes: n blocks of K positions, the anchor left out; V vocabulary; H hidden; T supervised positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpace_cli.objectives import DIFFERENTIABLE, FROM_TARGET, Terms, make_objective, survival

Buffers = dict[str, Tensor]
"""[positions of a chunk, V] tensors by their use."""


@dataclass(frozen=True)
class HeadOutput:
    """Sums over a micro-batch; nothing is divided yet.

    Attributes:
        loss_sum: scalar, the numerator, with its gradient with respect to the hidden states.
        divisor: scalar float32, detached: what the objective's reduction divides by.
        metrics: detached float32 sums. Scalars: `correct` and `supervised` positions, `blocks` with a
            supervised position, `expected_accepted` length by the drafter's own confidences. Vectors over
            positions 1 .. K - 1: `supervised_count`, `weight_sum`, `confidence_sum` (of q(y)),
            `correct_sum`, and `accepted_sum` (right, and so are all supervised positions before it).
    """

    loss_sum: Tensor
    divisor: Tensor
    metrics: dict[str, Tensor]


def objective_head(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    supervised: Tensor,
    objective: Any,
    *,
    num_sequences: int,
    block_size: int,
    chunk_tokens: int,
    target_hidden: Tensor | None = None,
    target_head: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    buffers: Buffers | None = None,
) -> HeadOutput:
    """Loss of all blocks, with its gradient, in one pass.

    Args:
        hidden: [n, K - 1, H] drafter's output at the drafted positions, or [T, H] at the supervised ones alone,
            in the order of `supervised`.
        head_weight: [V, H] the target's output projection, frozen.
        targets: [n, K - 1] int64, the target's token y.
        supervised: [n, K - 1] bool; other positions cost nothing.
        objective: config section `train.objective`.
        num_sequences: sequences that the blocks are from, the divisor of `reduction: sequence`.
        block_size: K.
        chunk_tokens: positions whose logits are held at once.
        target_hidden: shaped as `hidden`; the target's last hidden state, after its final norm, at the position
            that predicts y. Only for objectives that need the target's distribution.
        target_head: [V, H]; null: head_weight.
        logit_scale: factor on the logits of drafter and target.
        softcap: logits become softcap * tanh(logits / softcap), of drafter and target.
        buffers: an empty dictionary that the caller hands over at every call with this head and these types. Then
            the memory of the logits is kept: on a CPU, fresh memory costs 5% of the pass. Null: given back.

    The products are made in the autocast type where autocast is on, else in the type of `hidden`;
    everything after them in float32. A tie for the most probable token counts as a hit.
    """
    index = supervised.reshape(-1).nonzero()[:, 0]
    places = targets.shape if hidden.ndim == 3 else index.shape
    if hidden.shape[:-1] != places or targets.shape != supervised.shape or targets.shape[1] != block_size - 1:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)} and supervised {tuple(supervised.shape)}"
            f" do not agree on {block_size - 1} positions of a block"
        )
    chosen = make_objective(objective)
    if chosen.needs & set(FROM_TARGET) and target_hidden is None:
        raise ValueError(f"objective {chosen.label} needs the target's hidden states")
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.no_grad(), torch.autocast(device, enabled=False):
        scan = _Scan(chosen.needs, head_weight.to(dtype), logit_scale, softcap, with_gradient=hidden.requires_grad,
                     buffers={} if buffers is None else buffers)  # fmt: skip
        scan.run(
            _supervised_rows(hidden, index).to(dtype),
            targets.reshape(-1)[index],
            _supervised_rows(target_hidden, index).to(dtype) if target_hidden is not None else None,
            (head_weight if target_head is None else target_head).to(dtype),
            chunk_tokens,
        )
        quantities = {name: _spread(value, index, supervised.shape) for name, value in scan.quantities.items()}
        quantities["supervised"] = supervised
        terms, slopes = _apply(chosen, quantities, with_gradient=hidden.requires_grad)
        loss_sum = terms.loss.detach().sum()
        metrics = _metrics(terms.weights, quantities)
        divisor = {
            "sequence": torch.tensor(float(num_sequences), device=hidden.device),
            "block": metrics["blocks"],
            "token": metrics["supervised"],
            "weight": terms.weights.sum(),
        }[objective.reduction]
        if hidden.requires_grad:
            gradient = _gradient(scan.rows, slopes, index, hidden)
    if hidden.requires_grad:
        loss_sum = _WithGradient.apply(hidden, loss_sum, gradient)
    return HeadOutput(loss_sum, divisor, metrics)


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to `hidden` is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None


class _Scan:
    """The two matrix products, chunk by chunk, in buffers that are used again."""

    def __init__(
        self, needs: frozenset[str], weight: Tensor, scale: float, softcap: float | None, with_gradient: bool,
        buffers: Buffers,
    ) -> None:  # fmt: skip
        self.needs = needs | {"logq", "hit"}  # metrics are made of these
        self.weight, self.scale, self.softcap = weight, scale, softcap
        self.learned = [name for name in DIFFERENTIABLE if name in needs] if with_gradient else []
        self.buffers = buffers
        self.quantities: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}

    def run(
        self, hidden: Tensor, y: Tensor, target_hidden: Tensor | None, target_weight: Tensor, chunk_tokens: int
    ) -> None:
        """Fill `quantities` ([T] each) and `rows` ([T, H] each: the derivative of a quantity by the hidden state)."""
        tokens = len(hidden)
        self.rows = {name: torch.empty_like(hidden) for name in self.learned}
        parts: list[dict[str, Tensor]] = []
        size = -(-tokens // max(1, -(-tokens // chunk_tokens)))  # chunks of equal size
        self._size, self._device = size, hidden.device
        for start in range(0, max(tokens, 1), max(size, 1)):
            chunk = slice(start, start + size)
            own_target = target_hidden[chunk] if target_hidden is not None else None
            parts.append(self._chunk(hidden[chunk], y[chunk], own_target, target_weight, chunk))
        self.quantities = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _buffer(self, name: str, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[count, V], uninitialized."""
        kept = self.buffers.get(name)
        if kept is None or len(kept) < count:
            self.buffers[name] = kept = torch.empty(self._size, len(self.weight), dtype=dtype, device=self._device)
        return kept[:count]

    def _logits(self, name: str, hidden: Tensor, weight: Tensor) -> Tensor:
        """[c, V] logits in float32; in the type of the product where nothing but their softmax is needed."""
        product = torch.mm(hidden, weight.t(), out=self._buffer(f"{name}-product", len(hidden), hidden.dtype))
        plain = self.scale == 1.0 and not self.softcap and not self.needs & set(FROM_TARGET)
        if product.dtype == torch.float32 or plain:
            logits = product
        else:
            logits = self._buffer(name, len(hidden)).copy_(product)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def _chunk(
        self, hidden: Tensor, y: Tensor, target_hidden: Tensor | None, target_weight: Tensor, chunk: slice
    ) -> dict[str, Tensor]:
        y = y[:, None]
        logits = self._logits("drafter", hidden, self.weight)
        at_y = logits.gather(1, y).float()
        found: dict[str, Tensor] = {}
        if "rank" in self.needs:
            found["rank"] = (logits > at_y).sum(1)  # before the softmax takes the logits' place
        slope_of_cap = None
        if self.softcap and self.learned:
            slope_of_cap = torch.div(logits, self.softcap, out=self._buffer("cap", len(y))).square_().neg_().add_(1)

        def learn(name: str, derivative: Tensor, factor: Tensor) -> None:
            """Store d quantity/d hidden, given d quantity/d logits over `factor` [c, 1] (which is used up)."""
            if slope_of_cap is not None:
                derivative.mul_(slope_of_cap)
            if hidden.dtype != torch.float32:
                derivative = self._buffer("drafter-product", len(y), hidden.dtype).copy_(derivative)
            rows = torch.mm(derivative, self.weight, out=self.rows[name][chunk])
            rows.mul_(factor * self.scale)

        if self.needs & set(FROM_TARGET):
            target_logits = self._logits("target", target_hidden, target_weight)
            target_at_y = target_logits.gather(1, y)
            p = _softmax(target_logits, out=self._buffer("target-exponentials", len(y)))
            found["logp"] = (target_at_y - p.log_total)[:, 0]
            if self.needs & {"soft_logp", "soft_logq"}:
                soft = [torch.linalg.vecdot(p.values, values)[:, None] / p.total for values in (target_logits, logits)]
                found["soft_logp"] = (soft[0] - p.log_total)[:, 0]
        if "log_overlap" in self.needs:
            q = _softmax(logits, out=self._buffer("exponentials", len(y)))
            below = self._buffer("below", len(y), torch.bool)
            torch.lt(logits.sub_(q.log_total), target_logits.sub_(p.log_total), out=below)
            least = torch.minimum(logits, target_logits, out=logits)
            share = _softmax(least, out=target_logits)  # min(p, q) / A
            found["log_overlap"] = share.log_total[:, 0]
            if "log_overlap" in self.learned:
                # d log A/d z = share * [q < p] - q * (sum of share over [q < p])
                lower = share.values.mul_(below)
                lower.addcmul_(q.values, lower.sum(1, keepdim=True) / q.total, value=-1)
                learn("log_overlap", lower, 1 / share.total)
        else:
            in_place = logits.dtype == torch.float32 and not logits.is_cuda
            q = _softmax(logits, out=logits if in_place else self._buffer("exponentials", len(y)))
        found["hit"] = (at_y >= q.top)[:, 0]
        found["logq"] = (at_y - q.log_total)[:, 0]
        if "soft_logq" in self.needs:
            found["soft_logq"] = (soft[1] - q.log_total)[:, 0]
            if "soft_logq" in self.learned:
                # d/d z = p - q
                learn("soft_logq", p.values.mul_(q.total / p.total).sub_(q.values), 1 / q.total)
        if "logq" in self.learned:
            # d log q(y)/d z = onehot(y) - q; 1 - q(y) is taken before any rounding to a shorter type
            learn("logq", q.values.scatter_add_(1, y, -q.total), -1 / q.total)
        return {name: value for name, value in found.items() if name in self.needs}


class _Softmax(NamedTuple):
    """exp(z - log-sum-exp(z)) is `values / total`; all but `values` are [c, 1]."""

    values: Tensor
    total: Tensor
    log_total: Tensor
    top: Tensor


def _softmax(logits: Tensor, out: Tensor) -> _Softmax:
    """Softmax of [c, V] logits, written to `out` in float32 (on a CPU also `logits`), and their log-sum-exp.

    One fused kernel is several times as fast on a CPU as maximum, subtraction, exponential and sum in turn. But it
    adds in plain float32, so that its probabilities miss one by up to 1e-5 for large vocabularies: `total`, from a
    pairwise sum, says by how much.
    """
    if logits.is_cuda:
        top, place = logits.max(1, keepdim=True)
        torch.softmax(logits, 1, dtype=torch.float32, out=out)
        highest, total = out.gather(1, place), torch.ones_like(top, dtype=torch.float32)
    else:
        top = logits.amax(1, keepdim=True)
        exact = logits if logits.dtype == torch.float32 else out.copy_(logits)
        torch.softmax(exact, 1, out=out)
        highest, total = out.amax(1, keepdim=True), out.sum(1, keepdim=True)
    top = top.float()
    return _Softmax(out, total, top - (highest / total).log(), top)


def _supervised_rows(states: Tensor, index: Tensor) -> Tensor:
    """[T, H] rows of [n, K - 1, H] states, or of states that are these rows already."""
    return states.flatten(0, 1).index_select(0, index) if states.ndim == 3 else states


def _spread(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """[T] values of the supervised positions to [n, K - 1], zero elsewhere."""
    return values.new_zeros(shape.numel()).index_copy_(0, index, values).view(shape)


def _apply(chosen: Any, quantities: dict[str, Tensor], with_gradient: bool) -> tuple[Terms, dict[str, Tensor]]:
    """Terms of the objective, and the derivative of the numerator by each quantity that the drafter shapes."""
    asked = {name: quantities[name] for name in chosen.needs}
    if not with_gradient:
        return chosen.terms(**asked), {}
    leaves = {name: asked[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in asked}
    with torch.enable_grad():
        terms = chosen.terms(**{**asked, **leaves})
        slopes = torch.autograd.grad(terms.loss.sum(), list(leaves.values()), allow_unused=True)
    return terms, {name: slope for name, slope in zip(leaves, slopes) if slope is not None}


def _gradient(rows: dict[str, Tensor], slopes: dict[str, Tensor], index: Tensor, hidden: Tensor) -> Tensor:
    """Derivative of the numerator by the hidden states, in their shape and type."""
    total = None
    for name, slope in slopes.items():
        part = rows[name].mul_(slope.reshape(-1, 1)[index])
        total = part if total is None else total.add_(part)
    if total is None:
        return torch.zeros_like(hidden)
    if hidden.ndim == 2:
        return total.to(hidden.dtype)
    gradient = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    gradient.flatten(0, 1).index_copy_(0, index, total.to(hidden.dtype))
    return gradient


def _metrics(weights: Tensor, quantities: dict[str, Tensor]) -> dict[str, Tensor]:
    supervised, logq = quantities["supervised"], quantities["logq"]
    right = quantities["hit"] & supervised
    accepted = (right | ~supervised).long().cumprod(-1).bool() & supervised
    counted = supervised.float().sum(0)
    correct = right.float().sum(0)
    return {
        "correct": correct.sum(),
        "supervised": counted.sum(),
        "blocks": supervised.any(-1).float().sum(),
        "expected_accepted": survival(logq, supervised).sum(),
        "supervised_count": counted,
        "weight_sum": weights.sum(0),
        "confidence_sum": (logq.exp() * supervised).sum(0),
        "correct_sum": correct,
        "accepted_sum": accepted.float().sum(0),
    }
