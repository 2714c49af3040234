"""Drafters whose right answer is known: what the tests of decoding, bench and simulation measure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from dflash.model import DFlashDraftModel
from torch import nn
from torch.nn import functional as F

from dpace_cli.config import Config
from dpace_cli.modeling.checkpoint import save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import Target

BLOCK = 6


def new_drafter(target: Target, seed: int = 0, block_size: int = BLOCK, layers: int = 2) -> DFlashDraftModel:
    """A random drafter for a target."""
    train = Config.model_validate({"train": {"block_size": block_size, "num_draft_layers": layers}}).train
    return build_drafter(drafter_config(target.config, target.tokenizer, train), seed).eval().requires_grad_(False)


def greedy(target: Target, prompt: Sequence[int], count: int, stops: Iterable[int] = ()) -> list[int]:
    """The target's own greedy answer, token by token without a cache."""
    ids, stops = list(prompt), set(stops)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def script(drafter: DFlashDraftModel, tokens: dict[int, int], vocabulary: int, filler: int) -> DFlashDraftModel:
    """Let a drafter say a given token at each absolute position, and `filler` elsewhere."""
    place: list[torch.Tensor] = []
    forward = drafter.forward

    def watched(position_ids: torch.Tensor, noise_embedding: torch.Tensor, **rest: Any) -> torch.Tensor:
        place.append(position_ids[0, -noise_embedding.shape[1] :])
        return forward(position_ids=position_ids, noise_embedding=noise_embedding, **rest)

    def logits(hidden: torch.Tensor, _head: nn.Module) -> torch.Tensor:
        positions = place[-1][-hidden.shape[1] :].tolist()
        said = torch.tensor([[tokens.get(position, filler) for position in positions]])
        return F.one_hot(said, vocabulary).float() * 100

    drafter.forward, drafter.compute_logits = watched, logits
    return drafter


def trained_drafter(target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Any:
    """A drafter that learned some answers by heart, not all of them well: accepted lengths of every size."""
    drafter = new_drafter(target).requires_grad_(True)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    rows = [[*p, *a] for p, a in zip(prompts, answers)]
    offsets = torch.arange(BLOCK)
    for step in range(60):
        row = torch.tensor([rows[step % len(rows)]])
        first, last = len(prompts[step % len(rows)]), row.shape[1] - BLOCK
        anchors = torch.arange(first, last)
        with torch.no_grad():
            states = target.model(row, output_hidden_states=True).hidden_states
            hidden = torch.cat([states[i + 1] for i in drafter.target_layer_ids], dim=-1)
        logits = dense_logits(drafter, target, row, hidden, anchors, BLOCK)
        labels = row[0][anchors[:, None] + offsets[1:]]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)


def dense_logits(
    drafter: Any, target: Target, row: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, size: int
) -> torch.Tensor:
    """[M, size - 1, V] drafts of blocks at `anchors` by DFlash's own forward, one boolean mask for all."""
    blocks, context = len(anchors), hidden.shape[1]
    ids = torch.full((blocks, size), drafter.mask_token_id)
    ids[:, 0] = row[0, anchors]
    positions = torch.cat([torch.arange(context), (anchors[:, None] + torch.arange(size)).flatten()])[None]
    sees_context = (torch.arange(context)[None] < anchors[:, None]).repeat_interleave(size, dim=0)
    own = torch.block_diag(*[torch.ones(size, size)] * blocks).bool()
    mask = torch.cat([sees_context, own], dim=1)[None, None]
    out = drafter(
        position_ids=positions,
        attention_mask=mask,
        noise_embedding=F.embedding(ids, target.embedding).reshape(1, blocks * size, -1),
        target_hidden=hidden,
    )
    return F.linear(out.reshape(blocks, size, -1)[:, 1:], target.head)


def checkpoint(folder: Path, drafter: DFlashDraftModel, manifest: dict[str, Any] | None = None) -> Path:
    """Save a drafter as `train/ARM-seedN/step-S` would be saved."""
    from dpace_cli.records import write_json

    save_checkpoint(folder, drafter)
    if manifest is not None:
        write_json(folder.parent / "manifest.json", manifest)
    return folder


# --- a target that is a table -----------------------------------------------------------------------------


class TableTarget(nn.Module):
    """A Markov chain as a target: the next token's logits are a row of a table."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        from transformers import Qwen3Config

        self.table = table
        self.config = Qwen3Config(num_hidden_layers=1, hidden_size=2, vocab_size=len(table))
        self.embedding = nn.Embedding(len(table) + 1, 2)  # a row for the mask token
        self.lm_head = nn.Identity()

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, logits_to_keep: int = 0, **_: Any) -> Any:
        logits = self.table[input_ids][:, -logits_to_keep:]
        hidden = torch.zeros(*input_ids.shape, 2)
        return SimpleNamespace(logits=logits, hidden_states=(hidden, hidden))


class TableDrafter(nn.Module):
    """Draws every drafted token from its own distribution by position in the block, whatever the context."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        from transformers import Qwen3Config

        self.logits = logits
        self.block_size, self.mask_token_id = len(logits) + 1, logits.shape[1]
        self.config = Qwen3Config(num_hidden_layers=1, hidden_size=2)
        self.target_layer_ids = [0]

    def forward(self, noise_embedding: torch.Tensor, **_: Any) -> torch.Tensor:
        return noise_embedding

    def compute_logits(self, hidden: torch.Tensor, _head: nn.Module) -> torch.Tensor:
        return self.logits[None, : hidden.shape[1]]
