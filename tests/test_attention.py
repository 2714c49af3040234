"""Block attention and the drafter's walk over blocks, against DFlash's own forward pass with the dense mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from dpace_cli.attention import BlockLayout, block_attention, flex_block_attention
from dpace_cli.errors import UsageError
from dpace_cli.modeling.drafter_forward import drafter_hidden, packed_hidden

WIDTH, TAPS = 32, 3


def make_drafter(block_size: int, heads: int = 4, key_heads: int = 2, **changes: Any) -> DFlashDraftModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **{"layer_types": ["full_attention"] * 2, **changes},
    )  # fmt: skip
    config.num_target_layers = 6
    config.block_size = block_size
    config.dflash_config = {"mask_token_id": 63, "target_layer_ids": [1, 2, 3], "block_size": block_size}
    drafter = DFlashDraftModel(config).float()
    with torch.no_grad():  # norms of all ones would hide one that is left out
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return drafter


class Batch:
    """Random blocks: overlapping, equal, at the first token, past the end; some of them not kept."""

    def __init__(self, seed: int, batch: int, length: int, number: int, block_size: int) -> None:
        torch.manual_seed(seed)
        self.anchors = torch.randint(0, length, (batch, number))
        self.keep = torch.rand(batch, number) < 0.7
        if number:
            self.anchors[0, 0], self.keep[0, 0] = 0, True
        if batch > 2:
            self.keep[2] = False
        self.noise = torch.randn(batch, number, block_size, WIDTH, requires_grad=True)
        self.context = torch.randn(batch, length, TAPS * WIDTH, requires_grad=True)
        self.upstream = torch.randn(batch, number, block_size, WIDTH) * self.keep[..., None, None]

    def dense(self, drafter: DFlashDraftModel) -> Tensor:
        """DFlash's forward pass with the mask written out."""
        batch, number, block_size, _ = self.noise.shape
        length = self.context.shape[1]
        mask = torch.zeros(batch, 1, number * block_size, length + number * block_size, dtype=torch.bool)
        positions = torch.zeros(batch, length + number * block_size, dtype=torch.long)
        for b in range(batch):
            positions[b, :length] = torch.arange(length)
            for n in range(number):
                rows = slice(n * block_size, (n + 1) * block_size)
                mask[b, 0, rows, : self.anchors[b, n]] = True
                mask[b, 0, rows, length + rows.start : length + rows.stop] = True
                positions[b, length + rows.start : length + rows.stop] = self.anchors[b, n] + torch.arange(block_size)
        out = drafter(
            position_ids=positions,
            attention_mask=mask,
            noise_embedding=self.noise.flatten(1, 2),
            target_hidden=self.context,
        )
        return out.view(batch, number, block_size, WIDTH)

    def walk(self, drafter: DFlashDraftModel) -> Tensor:
        return drafter_hidden(drafter, self.noise, self.context, self.anchors, self.keep)

    def gradients(self, drafter: DFlashDraftModel, out: Tensor) -> list[Tensor]:
        inputs = [self.noise, self.context, *drafter.parameters()]
        return list(torch.autograd.grad((out * self.upstream).sum(), inputs))


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).norm() / y.norm().clamp_min(1e-12)) for x, y in zip(a, b))


@given(
    seed=st.integers(0, 1000),
    batch=st.integers(1, 4),
    length=st.integers(1, 40),
    number=st.integers(1, 9),
    block_size=st.sampled_from([2, 3, 4, 8]),
    heads=st.sampled_from([(4, 2), (4, 4), (3, 1)]),
)
@settings(deadline=None, max_examples=40)
def test_walk_equals_the_dense_mask_in_value_and_in_every_gradient(
    seed: int, batch: int, length: int, number: int, block_size: int, heads: tuple[int, int]
) -> None:
    drafter = make_drafter(block_size, *heads)
    case = Batch(seed, batch, length, number, block_size)
    expected, out = case.dense(drafter), case.walk(drafter)
    torch.testing.assert_close(out[case.keep], expected[case.keep], rtol=1e-4, atol=1e-5)
    assert out[~case.keep].eq(0).all()
    assert largest_difference(case.gradients(drafter, out), case.gradients(drafter, expected)) < 1e-5


def test_walk_equals_the_dense_mask_where_blocks_fill_several_groups() -> None:
    drafter = make_drafter(16)
    case = Batch(0, 2, 300, 70, 16)
    expected, out = case.dense(drafter), case.walk(drafter)
    torch.testing.assert_close(out[case.keep], expected[case.keep], rtol=1e-4, atol=1e-5)
    assert largest_difference(case.gradients(drafter, out), case.gradients(drafter, expected)) < 1e-5


def test_rows_that_are_asked_for_alone_have_the_same_outputs_and_gradients() -> None:
    drafter = make_drafter(4)
    case = Batch(1, 3, 40, 9, 4)
    wanted = (torch.rand(case.noise.shape[:3]) < 0.6) & case.keep[..., None]
    case.upstream = case.upstream * wanted[..., None]
    layout = BlockLayout.make(case.anchors, case.keep, 40)
    rows = wanted.flatten(0, 1)[layout.block_index].flatten().nonzero()[:, 0]
    packed = packed_hidden(
        drafter,
        case.noise.flatten(0, 1)[layout.block_index],
        case.context.flatten(0, 1)[layout.context_index],
        layout,
        rows,
    )
    out = torch.zeros(case.noise.shape).flatten(0, 1)
    out[layout.block_index] = (
        torch.zeros(len(layout.block_index) * 4, WIDTH).index_copy(0, rows, packed).view(-1, 4, WIDTH)
    )
    out = out.view(case.noise.shape)
    expected = case.dense(drafter)
    torch.testing.assert_close(out[wanted], expected[wanted], rtol=1e-4, atol=1e-5)
    assert largest_difference(case.gradients(drafter, out), case.gradients(drafter, expected)) < 1e-5


def test_the_walk_can_be_compiled_around_its_attention() -> None:
    drafter = make_drafter(4)
    case = Batch(2, 2, 30, 6, 4)
    compiled = torch.compile(drafter_hidden, backend="aot_eager")
    out = compiled(drafter, case.noise, case.context, case.anchors, case.keep)
    expected = case.walk(drafter)
    torch.testing.assert_close(out, expected)
    assert largest_difference(case.gradients(drafter, out), case.gradients(drafter, expected)) < 1e-5


def reach(case: Batch, walk: Any) -> Tensor:
    """[B, N, S] bool: the context positions that change a block's output when they are changed."""
    out = walk(case)
    seen = torch.zeros(*case.keep.shape, case.context.shape[1], dtype=torch.bool)
    for position in range(case.context.shape[1]):
        with torch.no_grad():
            before = case.context[:, position].clone()
            case.context[:, position] += 3.0
            seen[:, :, position] = (walk(case) != out).flatten(2).any(-1)
            case.context[:, position] = before
    return seen


def test_a_block_sees_the_states_before_its_anchor_and_no_other() -> None:
    drafter = make_drafter(4)
    case = Batch(3, 2, 12, 8, 4)
    with torch.no_grad():
        seen = reach(case, lambda case: case.walk(drafter))
    expected = torch.arange(12) < case.anchors[..., None]
    assert torch.equal(seen[case.keep], expected[case.keep])


def test_the_reach_test_notices_an_anchor_that_is_one_too_late() -> None:
    drafter = make_drafter(4)
    case = Batch(3, 2, 12, 8, 4)

    def faulty(case: Batch) -> Tensor:
        return drafter_hidden(drafter, case.noise, case.context, (case.anchors + 1).clamp(max=12), case.keep)

    with torch.no_grad():
        seen = reach(case, faulty)
    expected = torch.arange(12) < case.anchors[..., None]
    assert not torch.equal(seen[case.keep], expected[case.keep])


def test_no_block_sees_another_block() -> None:
    drafter = make_drafter(4)
    case = Batch(4, 2, 20, 8, 4)
    with torch.no_grad():
        before = case.walk(drafter)
        kept = case.keep.nonzero().tolist()
        for b, n in kept:
            noise = case.noise.clone()
            case.noise[b, n] += 1.0
            changed = (case.walk(drafter) != before).flatten(2).any(-1).nonzero().tolist()
            case.noise.copy_(noise)
            assert changed == [[b, n]]


def test_blocks_that_are_not_kept_and_empty_batches_give_zeros() -> None:
    drafter = make_drafter(4)
    case = Batch(5, 2, 20, 6, 4)
    with torch.no_grad():
        case.noise[~case.keep] = torch.nan
    assert all(gradient.isfinite().all() for gradient in case.gradients(drafter, case.walk(drafter))[2:])
    for keep, number in ((torch.zeros(2, 6, dtype=torch.bool), 6), (torch.zeros(2, 0, dtype=torch.bool), 0)):
        noise = torch.randn(2, number, 4, WIDTH)
        out = drafter_hidden(drafter, noise, case.context, torch.zeros(2, number, dtype=torch.long), keep)
        assert out.shape == noise.shape and out.eq(0).all()
        assert all(g.eq(0).all() for g in torch.autograd.grad(out.sum(), list(drafter.parameters())))


class _Largest(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_no_mask_or_score_matrix_of_all_blocks_is_made() -> None:
    drafter = make_drafter(8, heads=1, key_heads=1)
    case = Batch(6, 1, 600, 200, 8)
    with _Largest() as seen:
        case.walk(drafter).sum().backward()
    rows = 200 * 8
    assert seen.largest < rows * 600 / 2  # not even the context's half of the dense mask, [rows, 600 + rows]


def test_under_bf16_the_walk_stays_near_float32() -> None:
    drafter = make_drafter(4)
    case = Batch(7, 3, 40, 9, 4)
    exact = case.walk(drafter)
    with torch.autocast("cpu", torch.bfloat16):
        out = case.walk(drafter)
    assert largest_difference([out.detach()], [exact.detach()]) < 0.03
    a, b = case.gradients(drafter, out), case.gradients(drafter, exact)
    assert largest_difference(a, b) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8, "use_sliding_window": True},
         "sliding window"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
    ],
)  # fmt: skip
def test_drafters_of_another_kind_are_refused(changes: dict, message: str) -> None:
    drafter = make_drafter(4, **changes).train()
    with pytest.raises(UsageError, match=message):
        Batch(8, 1, 10, 2, 4).walk(drafter)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@given(
    seed=st.integers(0, 1000),
    batch=st.integers(1, 3),
    length=st.sampled_from([1, 30, 200, 300]),
    number=st.integers(1, 40),
    block_size=st.sampled_from([2, 3, 7, 10, 16]),
)
@settings(deadline=None, max_examples=30)
def test_flex_attention_and_its_sparse_mask_agree(
    seed: int, batch: int, length: int, number: int, block_size: int
) -> None:
    torch.manual_seed(seed)
    anchors, keep = torch.randint(0, length, (batch, number)), torch.rand(batch, number) < 0.7
    keep[0, 0] = True
    layout = BlockLayout.make(anchors, keep, length)
    blocks, context = len(layout.anchors), len(layout.context_index)
    q = torch.randn(2, blocks, 3, block_size, 8)
    parts = [torch.randn(2, context, 8), torch.randn(2, context, 8)]
    parts += [torch.randn(2, blocks, block_size, 8), torch.randn(2, blocks, block_size, 8)]
    flexible = flex_block_attention(q, *parts, layout, 0.3)
    torch.testing.assert_close(block_attention(q, *parts, layout, 0.3), flexible, rtol=1e-4, atol=1e-5)
    mask = layout.flex_mask(block_size, context)
    whole = create_block_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device="cpu", BLOCK_SIZE=mask.BLOCK_SIZE[0])
    assert torch.equal(mask.to_dense(), whole.to_dense())
