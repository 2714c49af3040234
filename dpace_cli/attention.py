"""Attention of anchor blocks: each position of a block sees the context before the anchor, and its own block.

Nothing of size [blocks x K, sequence + blocks x K] is made. Blocks and context are packed: only kept blocks,
and only the context that some block sees, of all sequences one after the other.

Shapes: M kept blocks, K positions in a block, C context rows, Hkv key and value heads, G query heads for each of
them, D width of a head.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

GROUP_ROWS = 512
"""Query rows of one matrix product on a CPU: few enough that a group of blocks shares a context length."""

TILE = 128
"""Rows of a tile of queries or keys in flex_attention's sparse mask."""


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a batch and their context stand in the packed rows.

    Attributes:
        block_index: [M] place of each packed block among the B x N blocks, by sequence and then by anchor.
        context_index: [C] place of each packed context row among the B x S rows.
        context_positions: [C] position of each packed context row in its sequence.
        anchors: [M] the block's anchor, which is also how many context rows it sees.
        begin: [M] packed row where the context of its sequence begins.
        sequences: [M] the sequence that the block is from.
        spans: for each sequence with a kept block: its first block, the block after its last, its first
            context row, and the anchors of its blocks, ascending.
    """

    block_index: Tensor
    context_index: Tensor
    context_positions: Tensor
    anchors: Tensor
    begin: Tensor
    sequences: Tensor
    spans: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    _masks: dict[int, BlockMask] = field(default_factory=dict, repr=False)
    _groups: dict[int, list[Group]] = field(default_factory=dict, repr=False)

    @classmethod
    @torch.compiler.disable
    def make(
        cls, anchors: Tensor, keep: Tensor, context_length: int, device: torch.device | None = None
    ) -> BlockLayout:
        """Lay out the kept blocks. This reads the anchors, so give them on the CPU where they are there already.

        Args:
            anchors: [B, N] int64.
            keep: [B, N] bool.
            context_length: S, context rows of a sequence.
            device: where the layout is used; null: where the anchors are.
        """
        device = device or anchors.device
        at, kept = anchors.cpu(), keep.cpu()
        number = at.shape[1]
        blocks, positions, contexts, spans, begins = [], [], [], [], []
        first_block = first_row = 0
        for sequence in range(at.shape[0]):
            own = kept[sequence].nonzero()[:, 0]
            if not len(own):
                continue
            own = own[at[sequence, own].argsort(stable=True)]
            own_anchors = tuple(at[sequence, own].tolist())
            spans.append((first_block, first_block + len(own), first_row, own_anchors))
            blocks.append(own + sequence * number)
            positions.append(torch.arange(own_anchors[-1]))
            contexts.append(positions[-1] + sequence * context_length)
            begins.append(torch.full((len(own),), first_row))
            first_block, first_row = first_block + len(own), first_row + own_anchors[-1]
        empty = torch.zeros(0, dtype=torch.long)
        block_index, context_index = torch.cat([empty, *blocks]), torch.cat([empty, *contexts])
        return cls(
            block_index.to(device),
            context_index.to(device),
            torch.cat([empty, *positions]).to(device),
            at.reshape(-1)[block_index].to(device),
            torch.cat([empty, *begins]).to(device),
            (block_index // max(number, 1)).to(device),
            tuple(spans),
        )

    def flex_mask(self, positions: int, context: int) -> BlockMask:
        """flex_attention's sparse mask for blocks of `positions`, made once for all layers."""
        if positions not in self._masks:
            self._masks[positions] = _tile_mask(self.anchors, self.begin, positions, context)
        return self._masks[positions]

    def groups(self, rows_per_block: int) -> list[Group]:
        """Blocks of one sequence with like anchors, made once for all layers."""
        if rows_per_block not in self._groups:
            width = max(1, GROUP_ROWS // rows_per_block)
            device = self.anchors.device
            made = []
            for first, _, row, anchors in self.spans:
                pieces = -(-len(anchors) // width)
                bounds = [first + len(anchors) * piece // pieces for piece in range(pieces + 1)]
                for start, stop in itertools.pairwise(bounds):
                    own = torch.tensor(anchors[start - first : stop - first], device=device)
                    least, most = anchors[start - first], anchors[stop - first - 1]
                    hidden = torch.arange(least, most, device=device) >= own[:, None, None]
                    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
                    made.append(Group(slice(start, stop), slice(row, row + most), least, mask))
            self._groups[rows_per_block] = made
        return self._groups[rows_per_block]


class Group(NamedTuple):
    """Some blocks of one sequence, m of them, whose attention is computed in one product.

    Attributes:
        blocks: their places among the packed blocks.
        rows: the context rows that at least one of them sees.
        common: how many of those rows all of them see.
        mask: [m, 1, rows - common] -inf at the rows that a block must not see, else 0.
    """

    blocks: slice
    rows: slice
    common: int
    mask: Tensor


@torch.compiler.disable
def block_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: BlockLayout,
    scaling: float,
) -> Tensor:
    """Softmax attention of each block to its context and to itself, without a causal order inside the block.

    Tensors are head-major, so that a slice of blocks is one batch of matrix products without a copy.

    Args:
        q: [Hkv, M, G, K, D] queries, G query heads for each key head.
        k_context, v_context: [Hkv, C, D].
        k_block, v_block: [Hkv, M, K, D].
        scaling: factor on the scores.
    Returns:
        [Hkv, M, G, K, D], in the type of the autocast where it is on, else of `q`; the softmax is made in float32.
    """
    device = q.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k_context, v_context = q.to(dtype), k_context.to(dtype), v_context.to(dtype)
        k_block, v_block = k_block.to(dtype), v_block.to(dtype)
    if device == "cuda":
        return flex_block_attention(q, k_context, v_context, k_block, v_block, layout, scaling)
    return _Grouped.apply(q, k_context, v_context, k_block, v_block, layout, scaling)


class _Grouped(torch.autograd.Function):
    """A loop over groups of blocks with like anchors; the probabilities are kept for the backward pass.

    The blocks' own keys are multiplied for all blocks at once. A group's scores lie side by side in one tensor,
    [Hkv, m x G x K, context rows + K], so one softmax goes over both.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, layout: BlockLayout, scaling: float
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            heads, blocks, group, positions, width = q.shape
            rows = group * positions
            q, kb, vb = q.reshape(heads * blocks, rows, width), kb.flatten(0, 1), vb.flatten(0, 1)
            own = torch.bmm(q, kb.transpose(1, 2)).mul_(scaling).view(heads, blocks, rows, positions)
            by_head = q.view(heads, blocks * rows, width)
            probabilities = []
            for part in layout.groups(rows):
                length = part.rows.stop - part.rows.start
                flat = slice(part.blocks.start * rows, part.blocks.stop * rows)
                p = q.new_empty(heads, flat.stop - flat.start, length + positions)
                scores = p.view(heads, -1, rows, length + positions)
                seen = p[..., :length]
                torch.baddbmm(seen, by_head[:, flat], kc[:, part.rows].transpose(1, 2), beta=0, alpha=scaling, out=seen)
                scores[..., part.common : length].add_(part.mask)
                scores[..., length:] = own[:, part.blocks]
                torch.softmax(p, -1, out=p)
                own[:, part.blocks] = scores[..., length:]
                probabilities.append(p)
            out = torch.bmm(own.view(heads * blocks, rows, positions), vb).view(heads, blocks * rows, width)
            for part, p in zip(layout.groups(rows), probabilities):
                flat = slice(part.blocks.start * rows, part.blocks.stop * rows)
                out[:, flat].baddbmm_(p[..., : part.rows.stop - part.rows.start], vc[:, part.rows])
        ctx.layout, ctx.scaling, ctx.shape = layout, scaling, (heads, blocks, group, positions, width)
        ctx.save_for_backward(q, kc, vc, kb, vb, own, out, *probabilities)
        return out.view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, own, out, *probabilities = ctx.saved_tensors
        heads, blocks, group, positions, width = ctx.shape
        rows, scaling = group * positions, ctx.scaling
        with torch.autocast(upstream.device.type, enabled=False):
            g = upstream.reshape(heads * blocks, rows, width)
            g_by_head, q_by_head = g.view(heads, -1, width), q.view(heads, -1, width)
            inner = (g_by_head * out).sum(-1, keepdim=True)
            own = own.view(heads * blocks, rows, positions)
            dvb = torch.bmm(own.transpose(1, 2), g)
            ds_own = torch.bmm(g, vb.transpose(1, 2)).sub_(inner.view(-1, rows, 1)).mul_(own)
            dq = torch.bmm(ds_own, kb).mul_(scaling).view(heads, -1, width)
            dkb = torch.bmm(ds_own.transpose(1, 2), q).mul_(scaling)
            dkc, dvc = torch.zeros_like(kc), torch.zeros_like(vc)
            for part, p in zip(ctx.layout.groups(rows), probabilities):
                flat = slice(part.blocks.start * rows, part.blocks.stop * rows)
                p = p[..., : part.rows.stop - part.rows.start]
                own_g = g_by_head[:, flat]
                dvc[:, part.rows].baddbmm_(p.transpose(1, 2), own_g)
                ds = torch.bmm(own_g, vc[:, part.rows].transpose(1, 2)).sub_(inner[:, flat]).mul_(p)
                dq[:, flat].baddbmm_(ds, kc[:, part.rows], alpha=scaling)
                dkc[:, part.rows].baddbmm_(ds.transpose(1, 2), q_by_head[:, flat], alpha=scaling)
        block_shape = (heads, blocks, positions, width)
        return dq.view(ctx.shape), dkc, dvc, dkb.view(block_shape), dvb.view(block_shape), None, None


def flex_block_attention(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    layout: BlockLayout,
    scaling: float,
) -> Tensor:
    """`block_attention` by PyTorch's flex_attention, as on CUDA. On a CPU it runs uncompiled, for tests."""
    heads, blocks, group, positions, width = q.shape
    if blocks == 0:
        return q
    mask = layout.flex_mask(positions, k_context.shape[1])

    def padded(x: Tensor, length: int) -> Tensor:
        """[heads, rows, D] to [1, heads, length, D], with zeros at the end."""
        return F.pad(x, (0, 0, 0, length - x.shape[1]))[None]

    queries = q.transpose(1, 2).reshape(heads * group, blocks * positions, width)
    keys, values = (
        torch.cat([block.flatten(1, 2), context], 1) for block, context in ((k_block, k_context), (v_block, v_context))
    )
    out = _flex_attention(q.device.type)(
        padded(queries, mask.seq_lengths[0]),
        padded(keys, mask.seq_lengths[1]),
        padded(values, mask.seq_lengths[1]),
        block_mask=mask,
        scale=scaling,
        enable_gqa=group != 1,
    )
    return out[0, :, : blocks * positions].view(heads, group, blocks, positions, width).transpose(1, 2)


@functools.cache
def _flex_attention(device: str) -> Any:
    return flex_attention if device == "cpu" else torch.compile(flex_attention)


def _tile_mask(anchors: Tensor, begin: Tensor, positions: int, context: int) -> BlockMask:
    """Which tiles of keys each tile of queries needs, from the anchors alone: no dense mask is made.

    Queries are the rows of all blocks, keys the rows of all blocks and then the context, each filled up to
    whole tiles.
    """
    blocks, device = len(anchors), anchors.device
    rows = blocks * positions
    q_tiles, k_tiles = -(-rows // TILE), -(-(rows + context) // TILE)
    row = torch.arange(max(q_tiles, k_tiles) * TILE, device=device)
    is_block = row < rows
    block = (row // positions).clamp(max=blocks - 1)
    # A key row is of a block, or of the context, or filling (-1 twice); a query row of a block, or filling (-2).
    key_block = torch.where(is_block, block, -1)
    key_context = torch.where(is_block | (row >= rows + context), -1, row - rows)
    query_block = torch.where(is_block, block, -2)
    query_begin, query_end = begin[block], torch.where(is_block, begin[block] + anchors[block], -1)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = query_block[query] == key_block[key]
        return own | ((key_context[key] >= query_begin[query]) & (key_context[key] < query_end[query]))

    # The blocks that a tile of queries touches, the last one repeated.
    tile = torch.arange(q_tiles, device=device) * TILE
    touched = tile[:, None] // positions + torch.arange(TILE // positions + 2, device=device)
    touched = torch.minimum(touched, ((tile + TILE - 1) // positions)[:, None]).clamp(max=blocks - 1)
    first = torch.arange(k_tiles, device=device) * TILE  # first key row of each tile of keys
    at = torch.arange(blocks, device=device) * positions
    own = (at[:, None] < first + TILE) & (at[:, None] + positions > first)
    end = (begin + anchors)[:, None]
    some = (begin[:, None] < first - rows + TILE) & (end > (first - rows).clamp(min=0)) & (anchors[:, None] > 0)
    every = (begin[:, None] <= first - rows) & (end >= first - rows + TILE)
    full = every[touched].all(1)
    partial = (own | some)[touched].any(1) & ~full
    (partial_count, partial_order), (full_count, full_order) = (
        (
            tiles.sum(1, dtype=torch.int32)[None, None],
            tiles.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
        )
        for tiles in (partial, full)
    )
    return BlockMask.from_kv_blocks(
        partial_count,
        partial_order,
        full_count,
        full_order,
        BLOCK_SIZE=TILE,
        mask_mod=sees,
        seq_lengths=(q_tiles * TILE, k_tiles * TILE),
    )
