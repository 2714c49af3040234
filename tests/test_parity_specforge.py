"""The same loss and gradients as SpecForge 0.2.0 for the objectives that both have, and speculators' weights."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from dpace_cli import config
from dpace_cli.head import objective_head
from dpace_cli.modeling.drafter_forward import drafter_hidden
from dpace_cli.objectives import dpace_weights

VOCABULARY, WIDTH, TAPS, MASK = 200, 32, 3, 199

PAIRS = [
    (config.Dflash(gamma=None), {"loss_type": "dflash", "loss_decay_gamma": None}),
    (config.Dflash(gamma=7.0), {"loss_type": "dflash", "loss_decay_gamma": 7.0}),
    (config.Dpace(alpha=0.5), {"loss_type": "dpace", "dpace_alpha": 0.5}),
    (config.Dpace(alpha=1.0), {"loss_type": "dpace", "dpace_alpha": 1.0}),
    (config.DpaceCumulative(), {"loss_type": "dpace-cumulative-confidence-only", "dpace_alpha": 0.5}),
    (config.DpaceContinuation(), {"loss_type": "dpace-continuation-value-only", "dpace_alpha": 0.5}),
]


def drafter_config(block_size: int) -> Qwen3Config:
    made = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, layer_types=["full_attention"] * 2,
    )  # fmt: skip
    made.num_target_layers = 6
    made.block_size = block_size
    made.dflash_config = {"mask_token_id": MASK, "target_layer_ids": [1, 2, 3], "block_size": block_size}
    made._attn_implementation = "sdpa"
    return made


class Case:
    """One batch: answers with gaps, blocks over the end, overlapping anchors, blocks that are not kept."""

    def __init__(self, block_size: int, seed: int) -> None:
        torch.manual_seed(seed)
        batch, length, number = 3, 41, 9
        self.block_size = block_size
        self.input_ids = torch.randint(0, MASK, (batch, length))
        self.states = torch.randn(batch, length, TAPS * WIDTH)
        self.loss_mask = (torch.rand(batch, length) < 0.85).float()
        self.loss_mask[1, 20:] = 0  # a short row
        self.loss_mask[:, -6:-2] = 1
        self.anchors = torch.randint(0, length - 1, (batch, number)).sort(1).values
        self.anchors[0, :2] = torch.tensor([0, 1])
        self.keep = torch.rand(batch, number) < 0.8
        self.embedding = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False).requires_grad_(False)
        with torch.no_grad():
            self.head.weight.mul_(6)
        self.drafter = DFlashDraftModel(drafter_config(block_size)).float()

    def theirs(self, monkeypatch: pytest.MonkeyPatch, options: dict) -> tuple[Tensor, dict[str, Tensor]]:
        drafter = SpecForgeDrafter(drafter_config(self.block_size)).float()
        drafter.load_state_dict(self.drafter.state_dict())
        model = OnlineDFlashModel(
            drafter, self.head, self.embedding, MASK, block_size=self.block_size, attention_backend="sdpa", **options
        )
        monkeypatch.setattr(model, "_sample_anchor_positions", lambda *_: (self.anchors, self.keep))
        loss, _, _ = model(self.input_ids, self.states, self.loss_mask)
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}

    def ours(self, objective: Any) -> tuple[Tensor, dict[str, Tensor]]:
        ids = torch.full((*self.anchors.shape, self.block_size), MASK)
        targets, supervised = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for b, n in self.keep.nonzero().tolist():
            anchor = int(self.anchors[b, n])
            ids[b, n, 0] = self.input_ids[b, anchor]
            for k in range(1, self.block_size):
                if anchor + k < self.input_ids.shape[1]:
                    targets[b, n, k] = self.input_ids[b, anchor + k]
                    supervised[b, n, k] = bool(self.loss_mask[b, anchor + k])
        hidden = drafter_hidden(self.drafter, self.embedding(ids), self.states, self.anchors, self.keep)
        output = objective_head(
            hidden[:, :, 1:][self.keep], self.head.weight, targets[:, :, 1:][self.keep],
            supervised[:, :, 1:][self.keep], objective, num_sequences=len(self.input_ids),
            block_size=self.block_size, chunk_tokens=37,
        )  # fmt: skip
        loss = output.loss_sum / output.divisor
        self.drafter.zero_grad()
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in self.drafter.named_parameters()}


@pytest.mark.parametrize(("objective", "options"), PAIRS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_every_gradient_equal_specforges(
    objective: Any, options: dict, block_size: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(block_size, seed)
    their_loss, their_gradients = case.theirs(monkeypatch, options)
    our_loss, our_gradients = case.ours(objective)
    assert our_loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    assert our_gradients.keys() == their_gradients.keys()
    for name, theirs in their_gradients.items():
        difference = float((our_gradients[name] - theirs).norm() / theirs.norm())
        assert theirs.norm() > 0 and difference < 1e-5, f"{name}: {difference:.2e}"


def speculators_dpace() -> Any:
    """speculators' `dpace_loss_decay` alone: importing the whole package asks for servers and GPU libraries."""
    spec = importlib.util.find_spec("speculators")
    package = types.ModuleType("speculators")
    package.__path__ = list(spec.submodule_search_locations)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "speculators", package)
        module = importlib.import_module("speculators.losses.utils")
        for name in [name for name in sys.modules if name.startswith("speculators.")]:
            patch.delitem(sys.modules, name)
    return module.dpace_loss_decay


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_weights_equal_those_of_speculators(alpha: float) -> None:
    torch.manual_seed(0)
    supervised = torch.rand(9, 7) < 0.8
    logq = torch.where(supervised, -torch.rand(9, 7) * 8, 0.0)
    # Its blocks hold the anchor as well, masked out.
    loss, mask = torch.zeros(9, 8), torch.zeros(9, 8)
    loss[:, 1:], mask[:, 1:] = -logq, supervised.float()
    theirs = speculators_dpace()(
        pos_idx=None, loss_mask=mask.view(1, -1), block_size=8, dpace_alpha=alpha, elementwise_loss=loss.view(1, -1)
    ).view(9, 8)
    torch.testing.assert_close(dpace_weights(logq, supervised, alpha), theirs[:, 1:], rtol=1e-6, atol=1e-7)
