"""Head and loss alone: dpace against SpecForge 0.2.0 and against the two matrix products that neither can avoid.

    python benchmarks/objective.py --quick

Prints one JSON document. `floor` is logits = hidden x head and gradient = logits x head over the supervised
positions, whole, into tensors that are there already.
"""

from __future__ import annotations

import json

import torch
from _common import (
    OBJECTIVES,
    SHAPES,
    Batch,
    Ours,
    Theirs,
    arguments,
    interleaved,
    machine,
    median_ratio,
    peak_bytes,
    peaks_of,
    ratio,
    relative_difference,
    shapes,
)


class Case:
    """One shape and objective: the arms, each leaving its gradient in `gradient`."""

    def __init__(self, name: str, objective: str, options: object) -> None:
        shape = SHAPES[name]
        self.batch = Batch(shape, getattr(torch, options.dtype))
        size = (shape.batch, shape.blocks, shape.block_size, shape.width)
        self.hidden = (torch.randn(size) * 0.5).to(self.batch.dtype).requires_grad_()
        self.ours_step = Ours(self.batch, OBJECTIVES[objective], options.chunk_tokens)
        self.theirs_step = Theirs(self.batch, OBJECTIVES[objective])
        # dpace's walk hands over the supervised positions alone, SpecForge's all of them.
        self.rows = self.hidden.detach()[self.batch.supervised].requires_grad_()
        self.gradient = torch.empty(0)
        self.arms = {"dpace": self.ours, "specforge": self.theirs}

    def add_floor(self) -> None:
        tokens, shape = self.batch.tokens, self.batch.shape
        states = self.hidden.detach().flatten(0, 2)[:tokens]
        head = self.batch.head.to(self.batch.dtype)
        logits = torch.empty(tokens, shape.vocabulary, dtype=self.batch.dtype)
        gradient = torch.empty(tokens, shape.width, dtype=self.batch.dtype)

        def floor() -> None:
            torch.mm(states, head.t(), out=logits)
            torch.mm(logits, head, out=gradient)

        self.arms["floor"] = floor

    def ours(self) -> float:
        with self.batch.autocast():
            output = self.ours_step.head(self.rows)
        (self.gradient,) = torch.autograd.grad(output.loss_sum / output.divisor, self.rows)
        return float(output.loss_sum.detach() / output.divisor)

    def theirs(self) -> float:
        with self.batch.autocast():
            loss = self.theirs_step.loss(self.hidden)
        (self.gradient,) = torch.autograd.grad(loss, self.hidden)
        return float(loss.detach())


def measure(name: str, objective: str, options: object) -> dict[str, object]:
    case = Case(name, objective, options)
    ours_loss, ours_gradient = case.ours(), case.gradient
    theirs_loss, theirs_gradient = case.theirs(), case.gradient[case.batch.supervised]
    case.add_floor()
    seconds = interleaved(case.arms, options.rounds, options.clock)
    memory = peaks_of(("dpace", "specforge"), name, options, f"{objective}/")
    return {
        "shape": name,
        "objective": objective,
        "supervised_positions": case.batch.tokens,
        "speedup_over_specforge": median_ratio(seconds, "specforge", "dpace"),
        "times_the_floor": median_ratio(seconds, "dpace", "floor"),
        "specforge_times_the_floor": median_ratio(seconds, "specforge", "floor"),
        "peak_bytes": memory,
        "peak_ratio": ratio(memory, "dpace", "specforge"),
        "loss_difference": abs(ours_loss / theirs_loss - 1),
        "gradient_difference": relative_difference(ours_gradient, theirs_gradient),
        "seconds": seconds,
    }


def main() -> None:
    options = arguments(__doc__)
    if options.peak:
        objective, arm = options.peak.split("/")
        case = Case(options.shape, objective, options)
        print(json.dumps({"peak_bytes": peak_bytes(case.arms[arm])}))
        return
    results = [measure(name, objective, options) for name in shapes(options) for objective in OBJECTIVES]
    print(json.dumps({"benchmark": "objective", "machine": machine(options), "results": results}, indent=2))


if __name__ == "__main__":
    main()
