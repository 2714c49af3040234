"""The objective of a micro-batch as a function of the drafter: its walk over the blocks, then head and loss."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpace_cli.attention import BlockLayout
from dpace_cli.config import Objective, TrainConfig
from dpace_cli.data.batches import Blocks
from dpace_cli.head import Buffers, HeadOutput, objective_head
from dpace_cli.modeling.drafter import embedding_scale
from dpace_cli.modeling.drafter_forward import packed_hidden
from dpace_cli.modeling.target import Target
from dpace_cli.objectives import FROM_TARGET, make_objective


class DrafterLoss:
    """The objective of one micro-batch as a function of the drafter, with its backward pass."""

    def __init__(self, drafter: nn.Module, target: Target, train: TrainConfig) -> None:
        self.drafter, self.target, self.train = drafter, target, train
        self.forward = torch.compile(packed_hidden) if train.compile else packed_hidden
        device = target.device.type
        half = train.compute_dtype == "bfloat16" or (train.compute_dtype == "auto" and device == "cuda")
        self.autocast = (lambda: torch.autocast(device, torch.bfloat16)) if half else nullcontext
        self.scale = embedding_scale(target.model)
        self.buffers: Buffers | None = {} if device == "cpu" else None  # a GPU's allocator keeps memory by itself

    def __call__(self, blocks: Blocks, states: Tensor, last: Tensor | None) -> HeadOutput:
        """Numerator, divisor and metrics of a micro-batch; no division has been done.

        Args:
            states: [B, L, T * H] tapped states of the target.
            last: [B, L, H] its last hidden state, for objectives that need its distribution.
        """
        device = self.target.device
        # Only kept blocks, the context that they see, and the supervised positions are computed from here on.
        layout = BlockLayout.make(blocks.anchors, blocks.keep, states.shape[1], device)
        targets, supervised = (
            values.flatten(0, 1).to(device)[layout.block_index] for values in (blocks.targets, blocks.supervised)
        )
        noise_ids = torch.full_like(targets, self.drafter.mask_token_id)
        noise_ids[:, 0] = targets[:, 0]
        noise = F.embedding(noise_ids, self.target.embedding).float() * self.scale
        context = states.flatten(0, 1)[layout.context_index].float()
        rows = supervised.flatten().nonzero()[:, 0]
        with self.autocast():
            return objective_head(
                self.forward(self.drafter, noise, context, layout, rows),
                self.target.head,
                targets[:, 1:],
                supervised[:, 1:],
                self.train.objective,
                num_sequences=int(blocks.keep.any(1).sum()),
                block_size=self.train.block_size,
                chunk_tokens=self.train.head_chunk_tokens,
                target_hidden=self._predicting(layout, last, targets.shape[1], rows) if last is not None else None,
                softcap=getattr(self.target.config, "final_logit_softcapping", None),
                buffers=self.buffers,
            )

    def _predicting(self, layout: BlockLayout, last: Tensor, positions: int, rows: Tensor) -> Tensor:
        """[T, H] the target's state from which it predicts each supervised position: the one before it."""
        sequence = layout.sequences[:, None].expand(-1, positions).flatten()
        position = (layout.anchors[:, None] + torch.arange(positions, device=rows.device)).flatten()
        return last[sequence[rows], position[rows] - 1]


def needs_target(objective: Objective) -> bool:
    """True where the objective reads the target's whole distribution, which its last state gives."""
    return bool(make_objective(objective).needs & set(FROM_TARGET))
