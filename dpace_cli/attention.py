"""Attention of anchor blocks: each position of a block sees the context before the anchor, and its own block.

Nothing of size [blocks x K, sequence + blocks x K] is made. Blocks and context are packed: only kept blocks,
and only the context that some block sees, of all sequences one after the other.

Shapes: M kept blocks, K positions in a block, C context rows, Hq query heads, Hkv key and value heads, D width
of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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
        anchors: [M] the block's anchor, which is also how many context rows it sees.
        begin: [M] packed row where the context of its sequence begins.
        spans: for each sequence with a kept block: its first block, the block after its last, its first
            context row, and the anchors of its blocks, ascending.
    """

    block_index: Tensor
    context_index: Tensor
    anchors: Tensor
    begin: Tensor
    spans: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    _masks: dict[int, BlockMask] = field(default_factory=dict, repr=False)

    @classmethod
    def make(cls, anchors: Tensor, keep: Tensor, context_length: int) -> BlockLayout:
        """Lay out the kept blocks.

        Args:
            anchors: [B, N] int64.
            keep: [B, N] bool.
            context_length: S, context rows of a sequence.
        """
        device = anchors.device
        at, kept = anchors.cpu(), keep.cpu()
        number = at.shape[1]
        blocks, contexts, spans, begins = [], [], [], []
        first_block = first_row = 0
        for sequence in range(at.shape[0]):
            own = kept[sequence].nonzero()[:, 0]
            if not len(own):
                continue
            own = own[at[sequence, own].argsort(stable=True)]
            own_anchors = tuple(at[sequence, own].tolist())
            spans.append((first_block, first_block + len(own), first_row, own_anchors))
            blocks.append(own + sequence * number)
            contexts.append(torch.arange(own_anchors[-1]) + sequence * context_length)
            begins.append(torch.full((len(own),), first_row))
            first_block, first_row = first_block + len(own), first_row + own_anchors[-1]
        empty = torch.zeros(0, dtype=torch.long)
        block_index, context_index = torch.cat([empty, *blocks]), torch.cat([empty, *contexts])
        return cls(
            block_index.to(device),
            context_index.to(device),
            at.reshape(-1)[block_index].to(device),
            torch.cat([empty, *begins]).to(device),
            tuple(spans),
        )

    def flex_mask(self, positions: int, context: int) -> BlockMask:
        """flex_attention's sparse mask for blocks of `positions`, made once for all layers."""
        if positions not in self._masks:
            self._masks[positions] = _tile_mask(self.anchors, self.begin, positions, context)
        return self._masks[positions]

    def groups(self, rows_per_block: int) -> Iterator[tuple[slice, slice, tuple[int, ...]]]:
        """(blocks, context rows that some of them see, their anchors): blocks of one sequence with like anchors."""
        width = max(1, GROUP_ROWS // rows_per_block)
        for first, end, row, anchors in self.spans:
            for start in range(first, end, width):
                own = anchors[start - first : min(start + width, end) - first]
                yield slice(start, start + len(own)), slice(row, row + own[-1]), own


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

    Args:
        q: [M, K, Hq, D] queries.
        k_context, v_context: [C, Hkv, D].
        k_block, v_block: [M, K, Hkv, D].
        scaling: factor on the scores.
    Returns:
        [M, K, Hq, D], in the type of the autocast where it is on, else of `q`. Scores in float32 on a GPU and
        their softmax in float32 everywhere.
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

    Layouts inside: queries [Hkv, M, G x K, D] (G query heads share a key head), keys [Hkv, rows, D].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k_context: Tensor, v_context: Tensor, k_block: Tensor, v_block: Tensor,
        layout: BlockLayout, scaling: float,
    ) -> Tensor:  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            return _Grouped._forward(ctx, q * scaling, k_context, v_context, k_block, v_block, layout, scaling)

    @staticmethod
    def _forward(
        ctx: Any, q: Tensor, kc: Tensor, vc: Tensor, kb: Tensor, vb: Tensor, layout: BlockLayout, scaling: float
    ) -> Tensor:
        heads = kc.shape[1]
        q = _fold(q, heads)
        kc, vc = (t.transpose(0, 1).contiguous() for t in (kc, vc))
        kb, vb = (t.permute(2, 0, 1, 3).contiguous() for t in (kb, vb))
        out = torch.empty_like(q)
        probabilities = []
        for blocks, rows, anchors in layout.groups(q.shape[2]):
            p = _probabilities(q[:, blocks], kc[:, rows], kb[:, blocks], anchors)
            probabilities.append(p)
            length = rows.stop - rows.start
            own = torch.matmul(p[..., length:], vb[:, blocks])
            context = torch.bmm(p[..., :length].flatten(1, 2), vc[:, rows])
            torch.add(own, context.view(own.shape), out=out[:, blocks])
        ctx.layout, ctx.scaling, ctx.heads = layout, scaling, heads
        ctx.save_for_backward(q, kc, vc, kb, vb, out, *probabilities)
        return _unfold(out, kb.shape[2])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            return _Grouped._backward(ctx, upstream)

    @staticmethod
    def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, kc, vc, kb, vb, out, *probabilities = ctx.saved_tensors
        heads, positions = ctx.heads, kb.shape[2]
        upstream = _fold(upstream, heads)
        inner = (upstream * out).sum(-1, keepdim=True)
        dq, dkb, dvb = torch.empty_like(q), torch.empty_like(kb), torch.empty_like(vb)
        dkc, dvc = torch.zeros_like(kc), torch.zeros_like(vc)
        for (blocks, rows, _), p in zip(ctx.layout.groups(q.shape[2]), probabilities):
            length = rows.stop - rows.start
            p_context = p[..., :length].flatten(1, 2)
            p_own = p[..., length:]
            g = upstream[:, blocks]
            flat_g = g.flatten(1, 2)
            flat_q = q[:, blocks].flatten(1, 2)
            dvc[:, rows] += torch.bmm(p_context.transpose(1, 2), flat_g)
            dvb[:, blocks] = torch.matmul(p_own.transpose(2, 3), g)
            d = inner[:, blocks]
            ds_own = (torch.matmul(g, vb[:, blocks].transpose(2, 3)) - d) * p_own
            ds_context = (torch.bmm(flat_g, vc[:, rows].transpose(1, 2)) - d.flatten(1, 2)) * p_context
            dq[:, blocks] = torch.matmul(ds_own, kb[:, blocks]) + torch.bmm(ds_context, kc[:, rows]).view(g.shape)
            dkb[:, blocks] = torch.matmul(ds_own.transpose(2, 3), q[:, blocks])
            dkc[:, rows] += torch.bmm(ds_context.transpose(1, 2), flat_q)
        return (
            _unfold(dq, positions) * ctx.scaling,
            dkc.transpose(0, 1), dvc.transpose(0, 1), dkb.permute(1, 2, 0, 3), dvb.permute(1, 2, 0, 3), None, None,
        )  # fmt: skip


def _fold(x: Tensor, heads: int) -> Tensor:
    """[M, K, Hq, D] to [Hkv, M, G x K, D]."""
    m, k, hq, d = x.shape
    return x.view(m, k, heads, hq // heads, d).permute(2, 0, 3, 1, 4).reshape(heads, m, hq // heads * k, d)


def _unfold(x: Tensor, positions: int) -> Tensor:
    """[Hkv, M, G x K, D] to [M, K, Hq, D]."""
    heads, m, rows, d = x.shape
    group = rows // positions
    return x.view(heads, m, group, positions, d).permute(1, 3, 0, 2, 4).reshape(m, positions, heads * group, d)


def _probabilities(q: Tensor, k_context: Tensor, k_block: Tensor, anchors: tuple[int, ...]) -> Tensor:
    """[Hkv, m, G x K, L + K] softmax over context and own block, of the type of `q`."""
    heads, m, rows, d = q.shape
    length = k_context.shape[1]
    scores = q.new_empty(heads, m, rows, length + k_block.shape[2])
    scores[..., :length] = torch.bmm(q.flatten(1, 2), k_context.transpose(1, 2)).view(heads, m, rows, length)
    scores[..., length:] = torch.matmul(q, k_block.transpose(2, 3))
    for block, anchor in enumerate(anchors):
        scores[:, block, :, anchor:length] = -torch.inf
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype)


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
    blocks, positions, heads, width = q.shape
    if blocks == 0:
        return q
    rows = blocks * positions
    mask = layout.flex_mask(positions, len(k_context))

    def one_sequence(*parts: Tensor, length: int) -> Tensor:
        """[rows, heads, D] parts one after the other as [1, heads, length, D], with zeros at the end."""
        joined = torch.cat([part.reshape(-1, *part.shape[-2:]) for part in parts])
        return F.pad(joined, (0, 0, 0, 0, 0, length - len(joined))).transpose(0, 1)[None]

    out = _flex_attention(q.device.type)(
        one_sequence(q, length=mask.seq_lengths[0]),
        one_sequence(k_block, k_context, length=mask.seq_lengths[1]),
        one_sequence(v_block, v_context, length=mask.seq_lengths[1]),
        block_mask=mask,
        scale=scaling,
        enable_gqa=heads != k_block.shape[2],
    )
    return out[0, :, :rows].transpose(0, 1).reshape(blocks, positions, heads, width)


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
