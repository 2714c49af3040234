"""Acceptance without decoding: draft blocks at the tokens of known answers, in batches.

Greedy decoding accepts a drafted token where the target would have written it. When the answers are the
target's own greedy ones, that is where it equals the answer's next token, so the whole course of decoding
can be followed: begin at the answer's first token (the prefill gives it), jump by the accepted length,
repeat. The number of jumps is the number of verify steps that real decoding takes.

Two ways, with the same walk as result: a block at every token in one pass, which gives accuracies over all of
them (training looks at these), or only the blocks that the walk comes by, a step of all answers at a time.

Shapes: B rows, L tokens, N anchors, K positions in a block (0 is the anchor), T tapped layers, H width.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from dflash.model import _draft_value, _output_head
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpace_cli.attention import BlockLayout
from dpace_cli.modeling.capture import tapped_states
from dpace_cli.modeling.cpu import make_cache
from dpace_cli.modeling.drafter_forward import packed_hidden
from dpace_cli.modeling.target import Target

GROUP_TOKENS = 4096
"""Tokens of rows that are handled together, padding included."""

BLOCK_POSITIONS = 16384
"""Drafted positions in one pass of the drafter; bounds its activations."""

LOGITS = 2**26
"""Logits that are held at once: 256 MB in float32, whatever the vocabulary."""

Row = tuple[Sequence[int], Sequence[int]]
"""input_ids and loss_mask of a conversation; a stretch of ones is an answer, its end token included."""


@dataclass(frozen=True)
class SimulatedAnswer:
    """One answer of a row.

    Attributes:
        row: index of its row.
        start: where it begins in the row.
        steps: acceptance length of each verify step that greedy decoding takes; None where anchors were thinned.
    """

    row: int
    start: int
    steps: list[int] | None


@dataclass(frozen=True)
class SimulatedAcceptance:
    """What greedy decoding of known answers would have accepted.

    Attributes:
        answers: every answer, in row order.
        anchors: blocks that were drafted.
        mean_acceptance: mean acceptance length over all of them.
        accuracy: for position 1, 2, ... K-1 the share of right tokens; None where no answer is that long.
        accuracy_given_prefix: the same over blocks whose earlier positions are all right.
        accepted: share of blocks whose first k positions are all right.
    """

    answers: list[SimulatedAnswer]
    anchors: int
    mean_acceptance: float | None
    accuracy: list[float | None]
    accuracy_given_prefix: list[float | None]
    accepted: list[float | None]

    @property
    def tau(self) -> float | None:
        """Mean over answers of each answer's mean acceptance length, as `dpace bench` has it."""
        means = [statistics.fmean(answer.steps) for answer in self.answers if answer.steps]
        return statistics.fmean(means) if means else None

    @property
    def tau_pooled(self) -> float | None:
        """Mean acceptance length over all verify steps."""
        steps = list(chain.from_iterable(answer.steps or [] for answer in self.answers))
        return statistics.fmean(steps) if steps else None

    @property
    def rounds(self) -> int:
        """Verify steps that the answers take together."""
        return sum(len(answer.steps or []) for answer in self.answers)


@torch.no_grad()
def simulate(
    drafter: Any,
    target: Target,
    rows: Sequence[Row],
    *,
    block_size: int,
    states: Callable[[Sequence[int]], Tensor] | None = None,
    limits: Sequence[int] | None = None,
    every_anchor: bool = True,
    max_anchors: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> SimulatedAcceptance:
    """Draft at the tokens of known answers and count what greedy decoding would accept.

    Args:
        drafter: a DFlashDraftModel; call `eval()` on it first.
        rows: conversations whose answers are known.
        block_size: K.
        states: row indices to their tapped states [B, L, T * H], padded on the right; null: the target is run.
        limits: for each row the length at which decoding would be cut (prompt + max_new_tokens). Near it
            DFlash drafts shorter blocks, and so does this. Null: far away.
        every_anchor: draft at every token of an answer, else only where decoding would: the fewer, the better
            the drafter is.
        max_anchors: at most this many anchors of an answer, evenly spaced; then there are no verify steps,
            and `tau` is None.
        progress: told the number of rows that are done.
    """
    ids = [torch.tensor(list(input_ids), dtype=torch.long) for input_ids, _ in rows]
    answers = [
        _Answer(row, start, end, limits[row] if limits else end + 1 + block_size, max_anchors)
        for row, (_, mask) in enumerate(rows)
        for start, end in _stretches(mask)
    ]
    by_row: dict[int, list[_Answer]] = {}
    for answer in answers:
        by_row.setdefault(answer.row, []).append(answer)
    states = states or (lambda indices: padded_states(target, [ids[i] for i in indices], drafter.target_layer_ids))
    tally = _Tally(block_size)
    for group in _groups([len(i) for i in ids]):
        if any(row in by_row for row in group):
            drafting = _Group(drafter, target, group, ids, states(group), block_size, tally)
            own = [answer for row in group for answer in by_row.get(row, []) if answer.start < answer.end]
            if every_anchor:
                drafting.draft_everywhere(own)
            elif own:
                drafting.walk(own)
        progress(len(group))
    return tally.result(answers)


# --- anchors and what was accepted there ------------------------------------------------------------------


@dataclass
class _Answer:
    """An answer at start..end (inclusive), and the accepted length found at each anchor."""

    row: int
    start: int
    end: int
    limit: int
    max_anchors: int | None
    lengths: dict[int, int] = field(default_factory=dict)

    def anchors(self) -> list[int]:
        """Tokens that a block may start from: all but the last, which nothing follows."""
        every = list(range(self.start, self.end))
        if self.max_anchors is None or len(every) <= self.max_anchors:
            return every
        step = len(every) / self.max_anchors
        return [every[int(i * step)] for i in range(self.max_anchors)]

    def steps(self) -> list[int] | None:
        """Walk through the answer as greedy decoding does; None where the walk came to a token without a block."""
        steps, at = [], self.start
        while at < self.end:
            if at not in self.lengths:
                return None
            steps.append(self.lengths[at])
            at += self.lengths[at]
        return steps


class _Tally:
    """Sums over all drafted blocks, by position."""

    def __init__(self, block_size: int) -> None:
        self.blocks = self.tokens = 0
        self.supervised, self.right, self.tried, self.prefix = (torch.zeros(block_size - 1).long() for _ in range(4))

    def add(self, right: Tensor, supervised: Tensor, lengths: Tensor) -> None:
        """Count blocks: [M, k - 1] bool is the token right, is there one; [M] accepted lengths."""
        width = right.shape[1]
        prefix = (right & supervised).long().cumprod(dim=1).bool()
        before = torch.cat([torch.ones_like(prefix[:, :1]), prefix[:, :-1]], dim=1)
        self.blocks += len(lengths)
        self.tokens += int(lengths.sum())
        self.supervised[:width] += supervised.sum(0).cpu()
        self.right[:width] += (right & supervised).sum(0).cpu()
        self.tried[:width] += (before & supervised).sum(0).cpu()
        self.prefix[:width] += (prefix & supervised).sum(0).cpu()

    def result(self, answers: Sequence[_Answer]) -> SimulatedAcceptance:
        return SimulatedAcceptance(
            answers=[SimulatedAnswer(answer.row, answer.start, answer.steps()) for answer in answers],
            anchors=self.blocks,
            mean_acceptance=self.tokens / self.blocks if self.blocks else None,
            accuracy=_ratio(self.right, self.supervised),
            accuracy_given_prefix=_ratio(self.prefix, self.tried),
            accepted=_ratio(self.prefix, self.supervised),
        )


def _ratio(part: Tensor, whole: Tensor) -> list[float | None]:
    return [p / w if w else None for p, w in zip(part.tolist(), whole.tolist())]


def _stretches(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last index of every run of ones."""
    start: int | None = None
    for index, supervised in enumerate([*mask, 0]):
        if supervised and start is None:
            start = index
        elif not supervised and start is not None:
            yield start, index - 1
            start = None


# --- the batched pass -------------------------------------------------------------------------------------


class _Group:
    """Some rows with the target's states of them, at whose tokens blocks are drafted."""

    def __init__(
        self, drafter: Any, target: Target, group: Sequence[int], ids: Sequence[Tensor], states: Tensor,
        block_size: int, tally: _Tally,
    ) -> None:  # fmt: skip
        self.drafter, self.target, self.block_size, self.tally = drafter, target, block_size, tally
        self.place = {row: place for place, row in enumerate(group)}
        self.tokens = pad_sequence([ids[i] for i in group], batch_first=True).to(target.device)
        self.states = states.to(target.device, next(drafter.parameters()).dtype)

    def draft_everywhere(self, answers: Sequence[_Answer]) -> None:
        """Draft at all anchors; blocks of one size together, a bounded number at a time."""
        sized: dict[int, list[tuple[_Answer, int]]] = {}
        for answer in answers:
            for anchor in answer.anchors():
                sized.setdefault(min(self.block_size, answer.limit - anchor), []).append((answer, anchor))
        for size, found in sized.items():
            per_pass = max(1, BLOCK_POSITIONS // size)
            for begin in range(0, len(found), per_pass):
                blocks = found[begin : begin + per_pass]
                drafts = self._drafts([self.place[a.row] for a, _ in blocks], [anchor for _, anchor in blocks], size)
                self._accept(blocks, drafts)

    def walk(self, answers: Sequence[_Answer]) -> None:
        """Draft where decoding would, one step of all answers at a time, with DFlash's own forward and cache.

        A block near the maximum length is cut by its mask.
        """
        device, size = self.tokens.device, self.block_size
        places = torch.tensor([self.place[answer.row] for answer in answers], device=device)
        offsets = torch.arange(size, device=device)
        cache, length = make_cache(self.drafter.config), 0
        going = [(answer, answer.start) for answer in answers]  # and where its walk has come to
        while going:
            at = torch.tensor([anchor for _, anchor in going], device=device)
            limits = torch.tensor([answer.limit for answer, _ in going], device=device)
            # The context that a block may see enters the cache when the first of them comes by it.
            new = slice(length, max(length, int(at.max())))
            length = new.stop
            context = torch.arange(length, device=device)
            seen = torch.cat([context < at[:, None], offsets < (limits - at)[:, None]], dim=1)
            hidden = self.drafter(
                target_hidden=self.states[places, new],
                noise_embedding=self._noise(self.tokens[places, at], size),
                position_ids=torch.cat([context[new].expand(len(going), -1), at[:, None] + offsets], dim=1),
                attention_mask=seen[:, None, None].expand(-1, 1, size, -1),
                past_key_values=cache,
                use_cache=True,
            )
            cache.crop(-size)
            drafts = self._best(hidden[:, 1:].flatten(0, 1)).view(len(going), size - 1)
            self._accept(going, drafts)
            going = [(answer, anchor + answer.lengths[anchor]) for answer, anchor in going]
            left = [i for i, (answer, anchor) in enumerate(going) if anchor < answer.end]
            if 0 < len(left) < len(going):
                kept = torch.tensor(left, device=device)
                cache.batch_select_indices(kept)
                places = places[kept]
            going = [going[i] for i in left]

    def _accept(self, blocks: Sequence[tuple[_Answer, int]], drafts: Tensor) -> None:
        """Compare drafts [M, k] with the answers, and note how far each is accepted."""
        device = self.tokens.device
        rows = torch.tensor([self.place[answer.row] for answer, _ in blocks], device=device)
        anchors = torch.tensor([anchor for _, anchor in blocks], device=device)
        ends = torch.tensor([answer.end for answer, _ in blocks], device=device)
        where = anchors[:, None] + torch.arange(1, drafts.shape[1] + 1, device=device)
        supervised = where <= ends[:, None]
        right = drafts == self.tokens[rows[:, None], where.clamp_max(self.tokens.shape[1] - 1)]
        matching = (right & supervised).long().cumprod(dim=1).sum(dim=1)
        # The target's own next token comes on top, unless the answer ends before.
        lengths = torch.minimum(matching + 1, ends - anchors)
        self.tally.add(right, supervised, lengths)
        for (answer, anchor), length in zip(blocks, lengths.tolist()):
            answer.lengths[anchor] = length

    def _drafts(self, places: Sequence[int], anchors: Sequence[int], size: int) -> Tensor:
        """[M, size - 1] greedy drafts of blocks given by the place of their row and their anchor."""
        device = self.tokens.device
        columns, counts = [], [0] * len(self.tokens)
        for place in places:
            columns.append(counts[place])
            counts[place] += 1
        at = torch.zeros(len(self.tokens), max(counts), dtype=torch.long)
        keep = torch.zeros_like(at, dtype=torch.bool)
        at[places, columns], keep[places, columns] = torch.tensor(anchors), True
        layout = BlockLayout.make(at, keep, self.states.shape[1], device)
        # The layout has an order of its own; the drafted positions are asked for in ours.
        packed = torch.empty(at.numel(), dtype=torch.long, device=device)
        packed[layout.block_index] = torch.arange(len(places), device=device)
        own = packed[torch.tensor(places, device=device) * at.shape[1] + torch.tensor(columns, device=device)]
        hidden = packed_hidden(
            self.drafter,
            self._noise(self.tokens[layout.block_index // at.shape[1], layout.anchors], size),
            self.states.flatten(0, 1)[layout.context_index],
            layout,
            rows=(own[:, None] * size + torch.arange(1, size, device=device)).flatten(),
        )
        return self._best(hidden).view(len(places), size - 1)

    def _noise(self, anchor_tokens: Tensor, size: int) -> Tensor:
        """[M, size, H] the target's embedding of anchor, mask, mask, ..."""
        ids = anchor_tokens.new_full((len(anchor_tokens), size), self.drafter.mask_token_id)
        ids[:, 0] = anchor_tokens
        scale = float(_draft_value(self.drafter.config, "input_embedding_scale", 1.0))
        return (torch.nn.functional.embedding(ids, self.target.embedding) * scale).to(self.states.dtype)

    def _best(self, hidden: Tensor) -> Tensor:
        """The most probable token at each of [R, H] positions."""
        head, most = _output_head(self.target.model), max(1, LOGITS // len(self.target.embedding))
        parts = hidden.to(self.target.embedding.dtype).split(most)
        return torch.cat([self.drafter.compute_logits(part, head).argmax(dim=-1) for part in parts])


def padded_states(target: Target, rows: Sequence[Sequence[int] | Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Tapped states [B, L, T * H] of rows of any lengths, padded on the right."""
    tokens = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True).to(target.device)
    return tapped_states(target, tokens, layer_ids)


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Rows of like length, at most GROUP_TOKENS together with their padding."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if group and (len(group) + 1) * lengths[group[0]] > GROUP_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
