"""RMSNorm, and RMSNorm with rotary positions, in few passes over memory.

A drafter is narrow and its batch is long, so on a CPU the time outside matrix products goes into passes over
activations. Composed of single operations, the backward pass of RMSNorm alone costs more than a projection.
Equal to Transformers' Qwen3 modules to rounding; arithmetic in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def rms_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """Qwen3's RMSNorm over the last dimension, in the autocast type where autocast is on."""
    return _RmsNorm.apply(x, norm.weight, norm.variance_epsilon, _compute_dtype(x))


def norm_and_rotate(norm: nn.Module, x: Tensor, rotation: Rotation) -> Tensor:
    """RMSNorm over each head, then rotary positions.

    Args:
        x: [..., D], of any strides.
        rotation: tables that broadcast to `x`.
    Returns:
        The same shape, contiguous.
    """
    return _NormRotate.apply(x, norm.weight, norm.variance_epsilon, *rotation, _compute_dtype(x))


Rotation = tuple[Tensor, Tensor]
"""Cosine, and sine with the sign of Transformers' `rotate_half`: minus in the first half."""


def rotation(rotary: nn.Module, positions: Tensor, dtype: torch.dtype) -> Rotation:
    """Tables [*positions.shape, D] of a Transformers rotary embedding."""
    like = torch.empty(0, dtype=dtype, device=positions.device)
    cos, sin = rotary(like, positions.reshape(1, -1))
    shape = (*positions.shape, cos.shape[-1])
    half = cos.shape[-1] // 2
    sign = torch.ones(2 * half, device=sin.device)
    sign[:half] = -1
    return cos.float().view(shape), (sin.float() * sign).view(shape)


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _normalized(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x), contiguous float32, and 1 / rms(x) [..., 1]."""
    x = x.float()
    scale = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / x.shape[-1] + eps).rsqrt_()
    return torch.mul(x, scale, out=torch.empty(x.shape, device=x.device)), scale


def _norm_backward(upstream: Tensor, normalized: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of weight * x / rms(x) by x and by weight."""
    width = weight.shape[0]
    product = (upstream * normalized).view(-1, width)
    d_weight = product.sum(0)
    along = torch.mv(product, weight.float()).div_(width).view(scale.shape)
    d_x = upstream.mul(weight).addcmul_(normalized, along, value=-1).mul_(scale)
    return d_x, d_weight.to(weight.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        normalized, scale = _normalized(x, eps)
        ctx.save_for_backward(normalized, scale, weight)
        ctx.dtype = x.dtype
        return (normalized * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        normalized, scale, weight = ctx.saved_tensors
        d_x, d_weight = _norm_backward(upstream.float(), normalized, scale, weight)
        return d_x.to(ctx.dtype), d_weight, None, None


class _NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype
    ) -> Tensor:
        normalized, scale = _normalized(x, eps)
        half = x.shape[-1] // 2
        ctx.save_for_backward(normalized, scale, weight, cos, sin)
        ctx.dtype = x.dtype
        # Both factors of the norm's weight go into the tables, which are shared by all heads.
        rolled = normalized.roll(half, -1).mul_(sin * weight.roll(half, 0))
        return rolled.addcmul_(normalized, cos * weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        normalized, scale, weight, cos, sin = ctx.saved_tensors
        upstream = upstream.float()
        unrotated = (upstream * sin).roll(upstream.shape[-1] // 2, -1).addcmul_(upstream, cos)
        d_x, d_weight = _norm_backward(unrotated, normalized, scale, weight)
        return d_x.to(ctx.dtype), d_weight, None, None, None, None
