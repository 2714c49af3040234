"""DFlash's drafter over all anchor blocks of a batch, with its own modules and weights.

Equal to `drafter.forward` with the dense boolean mask to rounding (a test holds that), but only kept blocks and
the context that they see are computed, and attention follows the structure of the blocks.

Shapes: B sequences, S context positions, N blocks, K positions in a block, M kept blocks, T tapped layers, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import rotate_half

from dpace_cli.attention import BlockLayout, block_attention
from dpace_cli.errors import UsageError


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
    _check_kind(drafter)
    batch, number, positions, width = noise_embedding.shape
    layout = BlockLayout.make(anchors, keep, target_hidden.shape[1])
    hidden = noise_embedding.reshape(-1, positions, width)[layout.block_index]
    context = target_hidden.reshape(-1, target_hidden.shape[-1])[layout.context_index]
    context = drafter.hidden_norm(drafter.fc(context))
    offsets = torch.arange(positions, device=anchors.device)
    block_rotation = _rotation(drafter, hidden, layout.anchors[:, None] + offsets)
    context_rotation = _rotation(drafter, hidden, layout.context_index % target_hidden.shape[1])
    for layer in drafter.layers:
        residual = hidden
        hidden = layer.input_layernorm(hidden)
        hidden = residual + _attend(layer.self_attn, hidden, context, block_rotation, context_rotation, layout)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    hidden = drafter.norm(hidden)
    out = hidden.new_zeros(batch * number, positions, width)
    return out.index_copy(0, layout.block_index, hidden).view(batch, number, positions, width)


def _attend(
    attention: nn.Module,
    hidden: Tensor,
    context: Tensor,
    block_rotation: tuple[Tensor, Tensor],
    context_rotation: tuple[Tensor, Tensor],
    layout: BlockLayout,
) -> Tensor:
    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (projected.shape[-1] // attention.head_dim, attention.head_dim))

    q = _rotate(attention.q_norm(heads(attention.q_proj(hidden))), block_rotation)
    k_block = _rotate(attention.k_norm(heads(attention.k_proj(hidden))), block_rotation)
    k_context = _rotate(attention.k_norm(heads(attention.k_proj(context))), context_rotation)
    v_block, v_context = heads(attention.v_proj(hidden)), heads(attention.v_proj(context))
    attended = block_attention(q, k_context, v_context, k_block, v_block, layout, attention.scaling)
    return attention.o_proj(attended.flatten(-2))


def _rotation(drafter: nn.Module, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [..., 1, D] of each position, to be shared by all heads."""
    cos, sin = drafter.rotary_emb(like, positions.reshape(1, -1))
    shape = (*positions.shape, 1, cos.shape[-1])
    return cos.view(shape), sin.view(shape)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    return x * cos + rotate_half(x) * sin


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
