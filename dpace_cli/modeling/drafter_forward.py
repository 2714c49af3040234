"""DFlash's drafter over all anchor blocks of a batch, with its own modules and weights.

Equal to `drafter.forward` with the dense boolean mask to rounding (a test holds that), but only kept blocks and
the context that they see are computed, and attention follows the structure of the blocks.

Shapes: B sequences, S context positions, N blocks, K positions in a block, M kept blocks, T tapped layers, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dpace_cli.attention import BlockLayout, block_attention
from dpace_cli.errors import UsageError
from dpace_cli.modeling.fused import Rotation, norm_and_rotate, rms_norm, rotation


def drafter_hidden(
    drafter: nn.Module, noise_embedding: Tensor, target_hidden: Tensor, anchors: Tensor, keep: Tensor
) -> Tensor:
    """The drafter's output at every position of every block.

    Args:
        drafter: a `DFlashDraftModel`.
        noise_embedding: [B, N, K, H] the target's embedding of anchor token, mask, mask, ...
        target_hidden: [B, S, T * H] tapped states of the target.
        anchors: [B, N] int64; a block sees the states before its anchor and itself, and nothing else.
        keep: [B, N] bool.
    Returns:
        [B, N, K, H], zero for blocks that are not kept.
    Raises:
        UsageError: the drafter has layers with a sliding window, dropout or convolutions.
    """
    batch, number, positions, width = noise_embedding.shape
    layout = BlockLayout.make(anchors, keep, target_hidden.shape[1])
    hidden = packed_hidden(
        drafter,
        noise_embedding.flatten(0, 1)[layout.block_index],
        target_hidden.flatten(0, 1)[layout.context_index],
        layout,
    )
    out = hidden.new_zeros(batch * number, positions, width)
    hidden = hidden.view(len(layout.block_index), positions, width)
    return out.index_copy(0, layout.block_index, hidden).view(batch, number, positions, width)


def packed_hidden(
    drafter: nn.Module, noise_embedding: Tensor, target_hidden: Tensor, layout: BlockLayout, rows: Tensor | None = None
) -> Tensor:
    """The drafter's output at the positions that are asked for, from inputs that are packed already.

    Args:
        drafter: a `DFlashDraftModel`.
        noise_embedding: [M, K, H] as in `drafter_hidden`, of the blocks `layout.block_index`.
        target_hidden: [C, T * H] tapped states of the target at `layout.context_index`.
        layout: where blocks and context stand.
        rows: [R] places among the M x K positions; null: all. The last layer computes nothing for the others.
    Returns:
        [R, H].
    Raises:
        UsageError: the drafter has layers with a sliding window, dropout or convolutions.
    """
    _check_kind(drafter)
    hidden = noise_embedding
    context = rms_norm(drafter.hidden_norm, drafter.fc(target_hidden))
    offsets = torch.arange(hidden.shape[1], device=hidden.device)
    rotations = (
        rotation(drafter.rotary_emb, layout.anchors[:, None] + offsets, hidden.dtype),
        rotation(drafter.rotary_emb, layout.context_positions, hidden.dtype),
    )
    for number, layer in enumerate(drafter.layers, 1):
        attended = _attend(layer.self_attn, rms_norm(layer.input_layernorm, hidden), context, rotations, layout)
        if number == len(drafter.layers):  # from here on no position sees another
            attended, hidden = attended.flatten(0, 1), hidden.flatten(0, 1)
            if rows is not None:
                attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        hidden = hidden + layer.self_attn.o_proj(attended)
        hidden = hidden + layer.mlp(rms_norm(layer.post_attention_layernorm, hidden))
    return rms_norm(drafter.norm, hidden)


def _attend(
    attention: nn.Module, hidden: Tensor, context: Tensor, rotations: tuple[Rotation, Rotation], layout: BlockLayout
) -> Tensor:
    """[M, K, Hq * D] what each position attends to, before the output projection; hidden [M, K, H], context [C, H]."""
    blocks, positions, _ = hidden.shape
    rows, width, group = len(context), attention.head_dim, attention.num_key_value_groups

    def by_block(projected: Tensor) -> Tensor:
        """[M, K, heads x D] to [heads, M, K, D], a view."""
        return projected.view(blocks, positions, projected.shape[-1] // width, width).permute(2, 0, 1, 3)

    def by_row(projected: Tensor) -> Tensor:
        """[C, heads x D] to [heads, C, D], a view."""
        return projected.view(rows, projected.shape[-1] // width, width).transpose(0, 1)

    (cos, sin), of_context = rotations
    q = by_block(attention.q_proj(hidden)).unflatten(0, (-1, group)).transpose(1, 2)
    q = norm_and_rotate(attention.q_norm, q, (cos[:, None], sin[:, None]))
    k_block = norm_and_rotate(attention.k_norm, by_block(attention.k_proj(hidden)), (cos, sin))
    k_context = norm_and_rotate(attention.k_norm, by_row(attention.k_proj(context)), of_context)
    v_block = by_block(attention.v_proj(hidden)).contiguous()
    v_context = by_row(attention.v_proj(context))
    attended = block_attention(q, k_context, v_context, k_block, v_block, layout, attention.scaling)
    return attended.permute(1, 3, 0, 2, 4).flatten(2)


def _check_kind(drafter: nn.Module) -> None:
    for layer in drafter.layers:
        attention = layer.self_attn
        if attention.sliding_window is not None or attention.is_causal:
            raise UsageError(
                "the drafter has layers with a sliding window or causal blocks; only full attention is trained"
            )
        if drafter.training and attention.attention_dropout:
            raise UsageError("the drafter's attention_dropout is not 0; DFlash drafters are trained without dropout")
        if getattr(layer, "attention_conv", None) is not None:
            raise UsageError("the drafter is a DFlash2 model (it has convolutions); only DFlash is trained")
