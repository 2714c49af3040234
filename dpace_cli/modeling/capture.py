"""The target's hidden states that a drafter reads, and where they are kept between epochs.

Shapes: B sequences, L tokens, T tapped layers, H the target's width.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.target import Target
from dpace_cli.records import writing

CAPTURE_TOKENS = 4096
"""Tokens in one pass of the target, padding included; a fixed number, so that states do not depend on a resume."""

SHARD_BYTES = 256 << 20
"""States in one file of a cache on disk, and so in memory while it is made."""


class _Enough(Exception):
    """Raised by the hook of the highest layer that is needed, to leave the target's forward pass."""


@torch.no_grad()
def tapped_states(target: Target, input_ids: Tensor, layer_ids: Sequence[int]) -> Tensor:
    """Outputs of the tapped decoder layers, side by side as DFlash reads them.

    The target runs no further than the highest tapped layer.

    Args:
        input_ids: [B, L] int64, padded on the right with any token: no token of a causal model sees what follows
            it, so no mask is made, and attention takes its fastest path.
    Returns:
        [B, L, T * H] in the target's dtype.
    """
    layers = _decoder(target.model).layers
    taps: dict[int, Tensor] = {}

    def keep(index: int) -> Callable:
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> None:
            taps[index] = output[0] if isinstance(output, tuple) else output
            if index == layer_ids[-1]:
                raise _Enough

        return hook

    handles = [layers[index].register_forward_hook(keep(index)) for index in layer_ids]
    try:
        _decoder(target.model)(input_ids=input_ids, use_cache=False)
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([taps[index] for index in layer_ids], dim=-1)


@torch.no_grad()
def tapped_and_last_states(target: Target, input_ids: Tensor, layer_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """`tapped_states`, and [B, L, H]: the last hidden state, after the final norm, which the head reads."""
    output = _decoder(target.model)(input_ids=input_ids, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[i + 1] for i in layer_ids], dim=-1), output.last_hidden_state


def _decoder(model: nn.Module) -> nn.Module:
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        raise UsageError(f"{type(model).__name__} has no decoder layers to tap", "use a decoder-only target")
    return decoder


class States:
    """Hidden states of the training rows: made anew for each batch, or kept in memory or on disk.

    Args:
        target: the loaded target.
        rows: token ids of each row.
        layer_ids: tapped layers.
        last: keep the last hidden state too, for objectives that need the target's distribution.
    """

    def __init__(self, target: Target, rows: Sequence[Sequence[int]], layer_ids: Sequence[int], last: bool) -> None:
        self.target, self.rows, self.layer_ids, self.last = target, rows, list(layer_ids), last
        self.width = (len(self.layer_ids) + last) * target.config.hidden_size
        self._kept: Callable[[int], Tensor] | None = None

    @property
    def bytes(self) -> int:
        """Size of all states of all rows."""
        return sum(len(row) for row in self.rows) * self.width * self.target.model.dtype.itemsize

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """States of some rows, padded on the right.

        Returns:
            [B, L, T * H] tapped states, and [B, L, H] last states or None.
        """
        if self._kept is None:
            captured = dict(pair for group in self._groups(indices) for pair in self._captured(group))
            rows = [captured[i] for i in indices]
        else:
            rows = [self._kept(i) for i in indices]
        states = pad_sequence(rows, batch_first=True).to(self.target.device)
        if not self.last:
            return states, None
        split = states.shape[-1] - self.target.config.hidden_size
        return states[..., :split], states[..., split:]

    def ahead(self, requests: Iterable[Sequence[int]], in_thread: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """`batch` of each request in turn.

        Args:
            in_thread: read kept states and send them to the device one request ahead. On a CPU this gains nothing:
                the step needs the same cores, and a thread keeps memory of its own.
        """
        if self._kept is None or not in_thread:
            yield from map(self.batch, requests)
            return
        with ThreadPoolExecutor(1) as reader:
            reads: deque[Future] = deque()
            for indices in requests:
                reads.append(reader.submit(self.batch, indices))
                if len(reads) > 1:
                    yield reads.popleft().result()
            while reads:
                yield reads.popleft().result()

    def keep_in_memory(self, progress: Callable[[int], None]) -> None:
        """Capture every row once and hold the states."""
        held: dict[int, Tensor] = {}
        for group in self._groups(range(len(self.rows))):
            held.update((index, states.cpu()) for index, states in self._captured(group))
            progress(sum(len(self.rows[i]) for i in group))
        self._kept = held.__getitem__

    def keep_on_disk(
        self, folder: Path, progress: Callable[[int], None], rank: int = 0, world: int = 1,
        barrier: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Capture every row once into memory-mapped safetensors shards; whole shards of an earlier try are kept.

        Ranks share the work and the folder.

        Raises:
            RunError: a shard of another rank is not there, so the folder is not shared.
        """
        key = self._key()
        shards = self._shards()
        paths = [folder / f"{key}-{number:05d}.safetensors" for number in range(len(shards))]
        for number, (path, shard) in enumerate(zip(paths, shards)):
            if number % world == rank and not path.exists():
                tensors: dict[str, Tensor] = {}
                for group in self._groups(shard):
                    tensors.update({str(index): states.cpu() for index, states in self._captured(group)})
                with writing(path, "wb") as file:
                    save_file(tensors, file.name)
            progress(sum(len(self.rows[i]) for i in shard))
        barrier()
        missing = [path.name for path in paths if not path.exists()]
        if missing:
            raise RunError(
                f"{folder} lacks {missing[0]}, which another process wrote",
                "put the run on a file system that all machines share, or set train.cache=none",
            )
        opened: dict[int, safe_open] = {}
        firsts = [shard.start for shard in shards]

        def read(index: int) -> Tensor:
            number = bisect.bisect_right(firsts, index) - 1
            if number not in opened:
                opened[number] = safe_open(paths[number], framework="pt")
            return opened[number].get_tensor(str(index))

        self._kept = read

    def _key(self) -> str:
        """Names what the states depend on, so that shards of another target or other rows are never used."""
        digest = hashlib.sha256()
        digest.update(json.dumps([self.layer_ids, self.last, str(self.target.model.dtype), SHARD_BYTES]).encode())
        for name, parameter in self.target.model.named_parameters():
            digest.update(f"{name}{tuple(parameter.shape)}{parameter.float().sum().item()!r}".encode())
        for row in self.rows:
            digest.update(json.dumps(list(row)).encode())
        return digest.hexdigest()[:16]

    def _shards(self) -> list[range]:
        """Consecutive rows whose states fit into SHARD_BYTES together; a longer row has a file to itself."""
        shards: list[range] = []
        first, size, token = 0, 0, self.width * self.target.model.dtype.itemsize
        for index, row in enumerate(self.rows):
            if index > first and size + len(row) * token > SHARD_BYTES:
                shards.append(range(first, index))
                first, size = index, 0
            size += len(row) * token
        return [*shards, range(first, len(self.rows))]

    def _groups(self, indices: Sequence[int]) -> list[list[int]]:
        """Rows of like length, at most CAPTURE_TOKENS together with their padding."""
        groups: list[list[int]] = []
        for index in sorted(indices, key=lambda i: (len(self.rows[i]), i), reverse=True):
            longest = len(self.rows[groups[-1][0]]) if groups else 0
            if groups and (len(groups[-1]) + 1) * longest <= CAPTURE_TOKENS:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _captured(self, group: Sequence[int]) -> list[tuple[int, Tensor]]:
        states = self._capture(group)
        return [(index, states[place, : len(self.rows[index])].clone()) for place, index in enumerate(group)]

    def _capture(self, indices: Sequence[int]) -> Tensor:
        ids = [torch.tensor(self.rows[i]) for i in indices]
        padded = pad_sequence(ids, batch_first=True).to(self.target.device)
        if self.last:
            return torch.cat(tapped_and_last_states(self.target, padded, self.layer_ids), dim=-1)
        return tapped_states(self.target, padded, self.layer_ids)
