"""What a training needs: memory, disk, and the least time of a step, by arithmetic on shapes alone.

docs/scale.md explains the terms and holds the comparison with measured runs. Everything is per process unless
it says otherwise. A product of [m, k] and [k, n] matrices is counted as 2 m k n operations.

Symbols, as in docs/scale.md: H width, V vocabulary, Q = heads x head width, KV = key heads x head width, I width of
the MLP, L layers; T tapped layers; B sequences in a micro-batch, S tokens of a sequence, N blocks of a sequence, K
positions of a block; R = B x N x K rows that the drafter computes, C = B x S rows of context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpace_cli.config import Config

FLOAT32 = 4

PROCESS_BYTES = 500 << 20
"""Memory of a Python process with PyTorch, Transformers and DFlash at work, without any model (measured on a CPU)."""

ATTENTION_ROWS = {"cpu": 512, "cuda": 128}
"""Query rows of one product in `attention.py`: blocks that share it share the longest of their contexts."""

ANSWER_BYTES_PER_TOKEN = 10
"""Disk for one token of a regenerated row: its text, and its id as JSON (measured: docs/scale.md)."""


@dataclass(frozen=True)
class Stack:
    """A stack of decoder layers.

    Attributes:
        mlp_parameters: weights of one layer's MLP (of all its experts).
        mlp_active: weights of it that one token meets.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_parameters: int
    mlp_active: int

    @property
    def q(self) -> int:
        return self.heads * self.head_width

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_width

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's four projections."""
        return 2 * self.width * (self.q + self.kv)

    @property
    def layer_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + 2 * self.width + 2 * self.head_width


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one process: B sequences of like length.

    Attributes:
        length: S, tokens of a sequence.
        blocks: N, anchor blocks of a sequence.
        supervised: positions of a block that cost something, at most K - 1.
    """

    sequences: int
    length: float
    blocks: float
    supervised: float


@dataclass(frozen=True)
class Shapes:
    """Everything that the arithmetic needs to know about target, drafter and machine.

    Attributes:
        target_parameters: of the whole target, from its weights where they are there.
        highest_tap: highest tapped layer; the capture stops there unless `whole_target`.
        whole_target: the objective needs the target's distribution, so its last state too.
        target_bytes: of one number of the target.
        compute_bytes: of one number in the drafter's matrix products.
        materialized: does attention keep its probabilities (everywhere but on CUDA)?
    """

    target: Stack
    drafter: Stack
    vocabulary: int
    tied: bool
    target_parameters: int
    taps: int
    highest_tap: int
    whole_target: bool
    block_size: int
    head_chunk_tokens: int
    target_bytes: int
    compute_bytes: int
    device: str

    @property
    def materialized(self) -> bool:
        return self.device != "cuda"

    def context_seen(self, length: float, blocks: float) -> float:
        """Mean context of the products of attention, for blocks at anchors spread evenly over a sequence.

        Half the sequence, and more where blocks that are computed together see as far as the last of them.
        """
        folded = self.drafter.heads / self.drafter.kv_heads if self.materialized else 1
        rows = ATTENTION_ROWS["cpu" if self.materialized else "cuda"]
        groups = max(1.0, blocks * self.block_size * folded / rows)
        return length / 2 * (1 + 1 / groups)

    @property
    def drafter_parameters(self) -> int:
        """Weights of the drafter: its layers, the projection of the tapped states, two norms."""
        width = self.drafter.width
        return self.drafter.layers * self.drafter.layer_parameters + self.taps * width * width + 2 * width

    @property
    def state_bytes_per_token(self) -> int:
        """Hidden states of one token, as the target makes them and the cache keeps them."""
        return (self.taps + self.whole_target) * self.target.width * self.target_bytes


def target_stack(config: Mapping[str, Any]) -> Stack:
    """A target's layers from its config.json (the text part of it).

    Raises:
        KeyError: a field that decides a shape is missing.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    dense = 3 * width * (config.get("intermediate_size") or 0)
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    stored = active = dense
    if experts:
        expert = 3 * width * (config.get("moe_intermediate_size") or config.get("intermediate_size") or 0)
        stored, active = experts * expert, (config.get("num_experts_per_tok") or experts) * expert
    return Stack(
        layers=config["num_hidden_layers"], width=width, heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads, head_width=config.get("head_dim") or width // heads,
        mlp_parameters=stored, mlp_active=active,
    )  # fmt: skip


def shapes(
    target: Mapping[str, Any],
    config: Config,
    layer_ids: Sequence[int],
    *,
    target_bytes: int,
    compute_bytes: int,
    device: str,
    whole_target: bool = False,
    target_parameters: int | None = None,
) -> Shapes:
    """Shapes of a training.

    Args:
        target: the target's config.json as a mapping.
        layer_ids: tapped layers.
        device: "cpu", "cuda" or "mps".
        whole_target: does the objective read the target's whole distribution?
        target_parameters: counted in its weights; null: from the config.
    """
    stack, train = target_stack(target), config.train
    vocabulary, tied = target["vocab_size"], bool(target.get("tie_word_embeddings", False))
    counted = (1 if tied else 2) * vocabulary * stack.width + stack.layers * stack.layer_parameters + stack.width
    mlp = 3 * stack.width * (train.intermediate_size or target.get("intermediate_size") or 0)
    return Shapes(
        target=stack,
        drafter=replace(stack, layers=train.num_draft_layers, mlp_parameters=mlp, mlp_active=mlp),
        vocabulary=vocabulary, tied=tied, target_parameters=target_parameters or counted,
        taps=len(layer_ids), highest_tap=layer_ids[-1], whole_target=whole_target,
        block_size=train.block_size, head_chunk_tokens=train.head_chunk_tokens,
        target_bytes=target_bytes, compute_bytes=compute_bytes, device=device,
    )  # fmt: skip


# --- memory ----------------------------------------------------------------------------------------------


def memory(s: Shapes, peak: Batch, ranks: int, cached_tokens: float) -> dict[str, int]:
    """Peak memory of one process in bytes, by what takes it.

    Args:
        peak: the largest micro-batch.
        ranks: processes; with more than one, the gradient is copied into one message.
        cached_tokens: tokens whose hidden states are kept in memory.
    """
    drafter = s.drafter_parameters * FLOAT32
    parts = {
        "process": PROCESS_BYTES,
        "target": s.target_parameters * s.target_bytes,
        "drafter": drafter + (s.drafter_parameters * s.compute_bytes if s.compute_bytes < FLOAT32 else 0),
        "gradients": drafter * (2 if ranks > 1 else 1),
        "optimizer": 2 * drafter,
        "cached states": round(cached_tokens * s.state_bytes_per_token),
        "states of the batch": _batch_states(s, peak),
        "activations": kept_for_backward(s, peak),
        "head": _head(s, peak),
    }
    return {name: int(size) for name, size in parts.items() if size}


def _batch_states(s: Shapes, b: Batch) -> float:
    """Padded states, their float32 copy, and the rows of them that blocks see."""
    tokens, width = b.sequences * b.length, s.taps * s.target.width
    made = tokens * s.state_bytes_per_token
    return made + tokens * width * (FLOAT32 * (s.target_bytes < FLOAT32) + s.compute_bytes)


def kept_for_backward(s: Shapes, b: Batch) -> float:
    """What the drafter's forward pass keeps for its backward pass, in bytes.

    Of each row a layer keeps: of two norms the normalized input in float32 and the output (4 H); of queries and keys
    the same, the values, and the attended values twice (4 Q + 3 KV); in the MLP the gate, its activation, the other
    branch and their product (4 I). Of each context row, keys and values (3 KV). Where attention is not fused, its
    probabilities over the context and the own block.
    """
    d, item = s.drafter, s.compute_bytes
    rows, context = b.sequences * b.blocks * s.block_size, b.sequences * b.length
    row = 2 * d.width * (FLOAT32 + item) + d.q * (FLOAT32 + 3 * item) + d.kv * (FLOAT32 + 2 * item)
    row += 4 * d.mlp_active / (3 * d.width) * item
    if s.materialized:
        row += d.heads * (s.context_seen(b.length, b.blocks) + 2 * s.block_size) * item
    layer = rows * row + context * d.kv * (FLOAT32 + 2 * item)
    return d.layers * layer + (rows + 2 * context) * d.width * FLOAT32  # the last norm, the projected context


def _head(s: Shapes, b: Batch) -> float:
    """One chunk of logits; the drafter's input and output rows; for each supervised position its state and gradient."""
    rows, positions = b.sequences * b.blocks * s.block_size, b.sequences * b.blocks * b.supervised
    chunk = min(s.head_chunk_tokens, positions) * s.vocabulary
    copies = FLOAT32 + (s.compute_bytes if s.compute_bytes < FLOAT32 else 0)
    return chunk * copies * (3 if s.whole_target else 1) + (2 * rows + 4 * positions) * s.target.width * FLOAT32


# --- disk ------------------------------------------------------------------------------------------------


def checkpoint_bytes(s: Shapes) -> int:
    """One checkpoint: the drafter's weights and AdamW's two moments, in float32."""
    return 3 * s.drafter_parameters * FLOAT32


def disk(s: Shapes, config: Config, tokens: float, arms: int) -> dict[str, int]:
    """Disk that a run fills, in bytes: answers, cached states, checkpoints of all arms.

    Args:
        tokens: of all training rows; 0 where they are not known.
    """
    train = config.train
    kept = train.keep_last + 1 + train.keep_best  # one more while the next is written
    cached = train.cache == "disk" or (train.cache == "memory" and train.nproc > 1)
    parts = {
        "answers": tokens * ANSWER_BYTES_PER_TOKEN,
        "cached states": tokens * s.state_bytes_per_token if cached else 0,
        "checkpoints": arms * kept * checkpoint_bytes(s),
    }
    return {name: int(size) for name, size in parts.items() if size}


# --- time ------------------------------------------------------------------------------------------------


def products(s: Shapes, b: Batch) -> dict[str, float]:
    """Operations in the matrix products of one micro-batch: of head, drafter, and capture of the target's states."""
    return {"head": _head_products(s, b), "drafter": _drafter_products(s, b), "capture": _capture_products(s, b)}


def _head_products(s: Shapes, b: Batch) -> float:
    """Logits forward, and their gradient back to the hidden states; the head itself is frozen."""
    positions = b.sequences * b.blocks * b.supervised
    passes = 3 if s.whole_target else 2  # the target's own logits have no way back
    return passes * 2.0 * positions * s.vocabulary * s.target.width


def _drafter_products(s: Shapes, b: Batch) -> float:
    """Forward once, and back twice (weights, inputs); the tapped states need no gradient."""
    d = s.drafter
    rows, context = b.sequences * b.blocks * s.block_size, b.sequences * b.length
    seen = s.context_seen(b.length, b.blocks) + s.block_size
    block = rows * (d.attention_parameters + d.mlp_active + 2 * d.q * seen)
    own_context = context * 2 * d.width * d.kv
    projection = 2 * context * s.taps * d.width * d.width  # forward, and the gradient of its weights
    return 2.0 * (3 * d.layers * (block + own_context) + projection)


def _capture_products(s: Shapes, b: Batch) -> float:
    """The target's layers up to the highest tap, forward."""
    t = s.target
    layers = t.layers if s.whole_target else s.highest_tap + 1
    token = t.attention_parameters + t.mlp_active + 2 * t.q * b.length / 2
    return 2.0 * b.sequences * b.length * layers * token


# --- all of it -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """Operations a second that this machine was measured at.

    Attributes:
        head: in products of a chunk of positions with the head.
        drafter: in products of the rows of a batch with a weight of the drafter; also taken for the target.
        how: the device, number type and shapes that were measured.
    """

    head: float
    drafter: float
    how: str


@dataclass(frozen=True)
class Rows:
    """The training rows, measured on a sample or assumed from the config.

    Attributes:
        count: None where it is not known.
        tokens: mean tokens of a row, cut at `train.max_length`.
        longest: tokens of the longest.
        anchors: mean number of places where an anchor can stand.
        supervised: mean positions of a block that cost something.
        source: where the numbers are from.
    """

    count: int | None
    tokens: float
    longest: float
    anchors: float
    most_anchors: float
    supervised: float
    source: str


def assumed_rows(config: Config) -> Rows:
    """Rows as long as the config allows, answered from end to end: the most that they can cost."""
    train = config.train
    longest = float(train.max_length)
    return Rows(config.prep.max_rows, longest, longest, longest - 1, longest - 1, train.block_size - 1,
                "assumed: every row as long as train.max_length, all of it supervised")  # fmt: skip


def mean_batch(config: Config, rows: Rows) -> Batch:
    """An average micro-batch."""
    train = config.train
    return Batch(train.batch_size, rows.tokens, min(train.num_anchors, rows.anchors), rows.supervised)


def largest_batch(config: Config, rows: Rows) -> Batch:
    """The micro-batch of the longest rows."""
    train = config.train
    return Batch(train.batch_size, rows.longest, min(train.num_anchors, rows.most_anchors), train.block_size - 1)


@dataclass(frozen=True)
class Growth:
    """How the cost of a step changes when one setting doubles, as factors."""

    doubled: str
    memory: float
    step_time: float
    states: float


@dataclass(frozen=True)
class Estimate:
    """What a config needs.

    Attributes:
        rows: what was assumed about the training rows.
        parameters: of target and drafter.
        memory: bytes of one process, by what takes them; memory_bytes: their sum.
        disk: bytes, by what takes them; disk_bytes: their sum.
        state_bytes_per_token: hidden states of one token.
        floor_s: least seconds of an optimizer step, by matrix product; a step takes longer by what is not a product.
        capture_s: least seconds to capture the states of all rows once; None where the rows are not known.
        steps: optimizer steps of one arm; None where the rows are not known.
        arms: trainings that the run does.
        growth: what doubling a setting does.
        rates: what was measured; None where nothing was, and times are 0.
    """

    rows: Rows
    parameters: dict[str, int]
    memory: dict[str, int]
    memory_bytes: int
    disk: dict[str, int]
    disk_bytes: int
    state_bytes_per_token: int
    floor_s: dict[str, float]
    capture_s: float | None
    steps: int | None
    arms: int
    growth: list[Growth]
    rates: Rates | None


def estimate(config: Config, s: Shapes, rows: Rows, rates: Rates | None) -> Estimate:
    """Everything that a config needs, of one process and of the run.

    Args:
        rates: measured rates; null: no times.
    """
    train = config.train
    arms = len(config.expand_arms())
    tokens = rows.tokens * rows.count if rows.count else 0.0
    in_memory = tokens if train.cache == "memory" and train.nproc == 1 else 0.0
    step_rows = train.batch_size * train.accumulation_steps * train.nproc
    steps = train.max_steps
    if steps is None and rows.count:
        steps = -(-rows.count // step_rows) * train.num_epochs
    one_row = replace(mean_batch(config, rows), sequences=1)
    capture = None
    if rates and rows.count:
        capture = rows.count * _capture_products(s, one_row) / rates.drafter / train.nproc
    needed, filled = memory(s, largest_batch(config, rows), train.nproc, in_memory), disk(s, config, tokens, arms)
    return Estimate(
        rows=rows,
        parameters={"target": s.target_parameters, "drafter": s.drafter_parameters},
        memory=needed, memory_bytes=sum(needed.values()), disk=filled, disk_bytes=sum(filled.values()),
        state_bytes_per_token=s.state_bytes_per_token,
        floor_s=step_floor(config, s, mean_batch(config, rows), rates) if rates else {},
        capture_s=capture, steps=steps, arms=arms, growth=growth(config, s, rows, rates), rates=rates,
    )  # fmt: skip


def step_floor(config: Config, s: Shapes, b: Batch, rates: Rates) -> dict[str, float]:
    """Least seconds of an optimizer step, by matrix product."""
    train = config.train
    count = products(s, b)
    if train.cache != "none":
        count.pop("capture")  # done once, before the first step
    rate = {"head": rates.head, "drafter": rates.drafter, "capture": rates.drafter}
    return {name: train.accumulation_steps * value / rate[name] for name, value in count.items()}


def growth(config: Config, s: Shapes, rows: Rows, rates: Rates | None) -> list[Growth]:
    """What doubling each of the settings does to memory, to a step's products, and to the hidden states."""
    rates = rates or Rates(1.0, 1.0, "")
    train = config.train
    before, peak = mean_batch(config, rows), largest_batch(config, rows)

    def cost(shape: Shapes, mean: Batch, largest: Batch, ranks: int = train.nproc) -> tuple[float, float, float]:
        step = sum(step_floor(config, shape, mean, rates).values())
        return sum(memory(shape, largest, ranks, 0.0).values()), step, shape.state_bytes_per_token * mean.length

    def longer(b: Batch) -> Batch:
        return replace(b, length=2 * b.length)

    def more_blocks(b: Batch) -> Batch:
        return replace(b, blocks=2 * b.blocks)

    def wider(b: Batch) -> Batch:
        return replace(b, supervised=2 * b.supervised + 1)

    base = cost(s, before, peak)
    changed = {
        "sequence length": cost(s, longer(before), longer(peak)),
        "anchors": cost(s, more_blocks(before), more_blocks(peak)),
        "block size": cost(replace(s, block_size=2 * s.block_size), wider(before), wider(peak)),
        "vocabulary": cost(_wider_vocabulary(s), before, peak),
        "batch size": cost(s, replace(before, sequences=2 * before.sequences),
                           replace(peak, sequences=2 * peak.sequences)),
        "draft layers": cost(replace(s, drafter=replace(s.drafter, layers=2 * s.drafter.layers)), before, peak),
        "ranks (each)": cost(s, before, peak, 2 * train.nproc),
    }  # fmt: skip
    return [Growth(name, *(round(new / old, 3) for new, old in zip(costs, base))) for name, costs in changed.items()]


def _wider_vocabulary(s: Shapes) -> Shapes:
    added = (1 if s.tied else 2) * s.vocabulary * s.target.width
    return replace(s, vocabulary=2 * s.vocabulary, target_parameters=s.target_parameters + added)
