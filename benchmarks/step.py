"""A whole drafter step (forward, loss, backward, clip, AdamW): dpace against SpecForge 0.2.0, and D-PACE's own cost.

    python benchmarks/step.py --quick

Prints one JSON document. `floor` is the matrix products of the linear layers and of the head, without attention:
forward, by input and by weight, into tensors that are there already. On a machine that does other work at the same
time, `--clock cpu` counts processor time.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from _common import (
    OBJECTIVES,
    SHAPES,
    TAPS,
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


def products(batch: Batch) -> Callable[[], None]:
    """The matrix products that a step cannot avoid, on random data."""
    shape, dtype = batch.shape, batch.dtype
    block_rows = shape.batch * shape.blocks * shape.block_size
    context_rows = int(batch.anchors.max(1).values.sum())
    q, kv = shape.heads * shape.head_dim, shape.key_heads * shape.head_dim
    width, mlp = shape.width, shape.mlp
    # rows, inputs, outputs, products: forward, by input, by weight
    linear = [(context_rows, TAPS * width, width, (True, False, True))]
    for _ in range(shape.layers):
        sizes = [(width, q), (width, kv), (width, kv), (q, width), (width, mlp), (width, mlp), (mlp, width)]
        linear += [(block_rows, inputs, outputs, (True, True, True)) for inputs, outputs in sizes]
        linear += [(context_rows, width, kv, (True, True, True))] * 2
    linear.append((batch.tokens, width, shape.vocabulary, (True, True, False)))
    tensors: dict[tuple[str, int, int], torch.Tensor] = {}

    def tensor(role: str, rows: int, columns: int) -> torch.Tensor:
        key = (role, rows, columns)
        if key not in tensors:
            tensors[key] = torch.randn(rows, columns).to(dtype)
        return tensors[key]

    def run() -> None:
        for rows, inputs, outputs, (forward, by_input, by_weight) in linear:
            x, y, w = tensor("x", rows, inputs), tensor("y", rows, outputs), tensor("w", outputs, inputs)
            if forward:
                torch.mm(x, w.t(), out=y)
            if by_input:
                torch.mm(y, w, out=tensor("dx", rows, inputs))
            if by_weight:
                torch.mm(y.t(), x, out=tensor("dw", outputs, inputs))

    return run


def measure(name: str, options: object) -> dict[str, object]:
    batch = Batch(SHAPES[name], getattr(torch, options.dtype))
    ours = {label: Ours(batch, objective, options.chunk_tokens) for label, objective in OBJECTIVES.items()}
    theirs = Theirs(batch, OBJECTIVES["dpace"])
    agreement = compare(batch, options)
    arms = {"dpace": ours["dpace"].step, "dflash": ours["dflash"].step, "specforge": theirs.step}
    seconds = interleaved({**arms, "floor": products(batch)}, options.rounds, options.clock)
    memory = peaks_of(("dpace", "specforge"), name, options)
    return {
        "shape": name,
        "supervised_positions": batch.tokens,
        "speedup_over_specforge": median_ratio(seconds, "specforge", "dpace"),
        "dpace_over_dflash": median_ratio(seconds, "dpace", "dflash"),
        "times_the_floor": median_ratio(seconds, "dpace", "floor"),
        "specforge_times_the_floor": median_ratio(seconds, "specforge", "floor"),
        "peak_bytes": memory,
        "peak_ratio": ratio(memory, "dpace", "specforge"),
        "agreement": agreement,
        "seconds": seconds,
    }


def compare(batch: Batch, options: object) -> dict[str, dict[str, float]]:
    """Largest relative difference of the loss and of any parameter's gradient between the tools."""
    found = {}
    for label, objective in OBJECTIVES.items():
        ours, theirs = Ours(batch, objective, options.chunk_tokens), Theirs(batch, objective)
        our_loss, their_loss = ours.gradients(), theirs.gradients()
        their_gradients = {key: p.grad for key, p in theirs.drafter.named_parameters()}
        found[label] = {
            "loss": abs(our_loss / their_loss - 1),
            "gradient": max(
                relative_difference(p.grad, their_gradients[key]) for key, p in ours.drafter.named_parameters()
            ),
        }
    return found


def main() -> None:
    options = arguments(__doc__)
    if options.peak:
        batch = Batch(SHAPES[options.shape], getattr(torch, options.dtype))
        objective = OBJECTIVES["dpace"]
        arm = Ours(batch, objective, options.chunk_tokens) if options.peak == "dpace" else Theirs(batch, objective)
        print(json.dumps({"peak_bytes": peak_bytes(arm.step)}))
        return
    results = [measure(name, options) for name in shapes(options)]
    print(json.dumps({"benchmark": "step", "machine": machine(options), "results": results}, indent=2))


if __name__ == "__main__":
    main()
