"""Prompts that were there before: among the training prompts, and in the benchmark data sets."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation: what counts when prompts are compared."""
    return _WORD.findall(text.lower())


# --- benchmarks ------------------------------------------------------------------------------------------

RUN_WORDS = 8
"""A benchmark prompt shorter than this counts only where it is a whole turn."""
SHARE = 0.8
"""A longer one counts where a turn holds this share of its runs of RUN_WORDS words."""


PROMPT_FIELDS = {
    "gsm8k": ("question",),
    "math500": ("problem",),
    "humaneval": ("prompt",),
    "mbpp": ("prompt",),
    "mt-bench": ("prompt",),
    "alpaca": ("instruction", "input"),
}
"""Benchmark to the fields of its rows that make the bare prompt, without any format around it."""


_MARKS = bytes.maketrans(b'.,;:!?"()', b" " * 9)
_LEARN_TURNS = 3000
_ANCHORS = 3
"""Rare pieces of a prompt, of which a turn must hold two before it is looked at."""
PIECES = 0.6
"""Share of a prompt's rarer pieces that a turn must hold before its runs of words are compared."""


@dataclass(eq=False)
class _Prompt:
    """A benchmark prompt.

    Attributes:
        pieces: what `_pieces` cuts it into.
        words, runs: what is compared; no runs where it has fewer words than one.
        anchors, rarer: the rarest pieces, and the rarer half of them.
    """

    benchmark: str
    pieces: frozenset[bytes]
    words: list[str]
    runs: frozenset[tuple[str, ...]]
    anchors: tuple[bytes, ...] = ()
    rarer: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, benchmark: str, text: str) -> _Prompt:
        found = words(text)
        return cls(benchmark, frozenset(_pieces(text)), found, frozenset(_runs(found)))


class BenchmarkPrompts:
    """The prompts of the benchmark data sets that could be found.

    Attributes:
        found: name to number of prompts.
        missing: names of those that are neither in the folder nor in the hub's local cache.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.missing: list[str] = []
        self._prompts: list[_Prompt] = []
        self._rare: dict[bytes, list[_Prompt]] = {}
        self._counts: Counter[bytes] = Counter()  # of pieces, in how many texts
        self._learning = _LEARN_TURNS

    def add(self, name: str, texts: Iterable[str]) -> None:
        """Take up the prompts of a benchmark."""
        prompts = [_Prompt.of(name, text) for text in texts]
        self.found[name] = len(prompts)
        self._prompts += (prompt for prompt in prompts if prompt.words)
        for prompt in prompts:
            self._counts.update(prompt.pieces)
        self._index()

    def match(self, turns: Iterable[str]) -> str | None:
        """Name of a benchmark whose prompt one of the turns holds, or None; the slow looks come last."""
        for turn in turns:
            pieces = _pieces(turn)
            if self._learning:
                self._learn(pieces)
            rare = self._rare
            if rare.keys().isdisjoint(pieces):
                continue
            held, found, runs = frozenset(pieces), None, None
            for prompt in {prompt for piece in rare.keys() & held for prompt in rare[piece]}:
                if sum(piece in held for piece in prompt.anchors) < min(2, len(prompt.anchors)):
                    continue
                if len(prompt.rarer & held) < PIECES * len(prompt.rarer):
                    continue
                found = words(turn) if found is None else found
                if not prompt.runs:
                    if found == prompt.words:
                        return prompt.benchmark
                    continue
                runs = frozenset(_runs(found)) if runs is None else runs
                if len(prompt.runs & runs) >= SHARE * len(prompt.runs):
                    return prompt.benchmark
        return None

    def _learn(self, pieces: Sequence[bytes]) -> None:
        """See from the first turns which pieces are rare in this data, whatever its language and subject."""
        self._counts.update(set(pieces))
        self._learning -= 1
        if not self._learning:
            self._index()

    def _index(self) -> None:
        """Choose the rarest pieces of each prompt: most turns hold none of them and need not be looked at."""
        often = {piece: max(count - 2, 0) for piece, count in self._counts.items()}
        rare: dict[bytes, list[_Prompt]] = defaultdict(list)
        for prompt in self._prompts:
            # Of the rare ones those of letters alone, since a copy may put other marks around a word, and the longest.
            order = sorted(prompt.pieces, key=lambda piece: (often[piece], not piece.isalpha(), -len(piece), piece))
            prompt.anchors, prompt.rarer = tuple(order[:_ANCHORS]), frozenset(order[: (len(order) + 1) // 2])
            for piece in order[: _ANCHORS - 1]:
                rare[piece].append(prompt)
        self._rare = dict(rare)


def _pieces(text: str) -> list[bytes]:
    """A text cut at white space and common marks: coarser than `words`, and several times as fast."""
    return text.lower().encode(errors="surrogatepass").translate(_MARKS).split()


def _runs(found: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return zip(*(found[i:] for i in range(RUN_WORDS)))


def load_benchmarks(data_dir: str | None, without: Collection[str] = ()) -> BenchmarkPrompts:
    """Benchmark prompts from NAME.jsonl in `data_dir` (or DPACE_DATA_DIR), else from the hub's local cache.

    Nothing is downloaded: a check that is on by default must not need a network.

    Args:
        without: benchmarks whose cached hub copy is not to be used.
    """
    folder = data_dir or os.environ.get("DPACE_DATA_DIR")
    prompts = BenchmarkPrompts()
    for name, fields in PROMPT_FIELDS.items():
        rows = _from_folder(Path(folder).expanduser() / f"{name}.jsonl") if folder else None
        if rows is None and name not in without:
            rows = _from_cache(name)
        if rows is None:
            prompts.missing.append(name)
        else:
            prompts.add(name, filter(None, (_prompt_of(row, fields) for row in rows)))
    return prompts


def _prompt_of(row: Any, fields: Sequence[str]) -> str:
    if not isinstance(row, Mapping):
        return ""
    parts = [row.get(name) for name in fields]
    if parts and isinstance(parts[0], list):
        parts = parts[0][:1]  # later turns of mt-bench ("Rewrite your previous response.") are anyone's
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _from_folder(path: Path) -> list[Any] | None:
    try:
        with open(path, "rb") as file:
            return [json.loads(line) for line in file if line.strip()]
    except (OSError, ValueError):
        return None


def _from_cache(name: str) -> list[Any] | None:
    """Rows that `datasets` has prepared on this machine before."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets"))
    if not cache.is_dir():
        return None
    from dpace_cli.data.benchmarks import TABLE

    entry = TABLE[name]
    if not (cache / entry["load_args"][0].replace("/", "___")).is_dir():
        return None
    import datasets

    offline, datasets.config.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE, True
    try:
        return list(datasets.load_dataset(*entry["load_args"], **entry["load_kwargs"]))
    except Exception:  # a half-filled cache is as good as none, whatever datasets makes of it
        return None
    finally:
        datasets.config.HF_HUB_OFFLINE = offline


# --- repeated prompts ------------------------------------------------------------------------------------

SHINGLE_WORDS = 3
NEAR = 0.8
"""Estimated Jaccard similarity of two prompts' shingles from which they count as nearly the same."""
_BANDS, _BAND_ROWS = 32, 4
_PRIME = (1 << 31) - 1
_RNG = np.random.default_rng(0)
_FACTORS = _RNG.integers(1, _PRIME, _BANDS * _BAND_ROWS, dtype=np.uint64)
_SUMMANDS = _RNG.integers(0, _PRIME, _BANDS * _BAND_ROWS, dtype=np.uint64)
_MOST_SHINGLES = 4096


class PromptIndex:
    """Remembers prompts, to find those that come again.

    "exact" compares the words of all user turns (about 100 bytes a row). "near" compares MinHash signatures
    (Broder 1997) of 128 values over runs of three words: rows that share a band of four values are compared
    whole. It takes about 6 kB a row.
    """

    def __init__(self, kind: Literal["exact", "near"]) -> None:
        self.kind = kind
        self._exact: set[bytes] = set()
        self._signatures: list[np.ndarray] = []
        self._bands: dict[bytes, int] = {}
        self._key = b""
        self._signature: np.ndarray | None = None

    def seen(self, prompts: Sequence[str]) -> Literal["duplicate_prompt", "near_duplicate_prompt"] | None:
        """What the prompts are to those that were added."""
        found = words("\n".join(prompts))
        self._key = hashlib.blake2b("\0".join(found or prompts).encode(errors="surrogatepass"), digest_size=16).digest()
        if self._key in self._exact:
            return "duplicate_prompt"
        if self.kind == "exact":
            return None
        self._signature = _signature(found)
        if self._signature is None:
            return None
        for band in _bands(self._signature):
            other = self._bands.get(band)
            if other is not None and np.mean(self._signatures[other] == self._signature) >= NEAR:
                return "near_duplicate_prompt"
        return None

    def add(self) -> None:
        """Remember the prompts that `seen` was last asked about."""
        self._exact.add(self._key)
        if self.kind == "near" and self._signature is not None:
            for band in _bands(self._signature):
                self._bands.setdefault(band, len(self._signatures))
            self._signatures.append(self._signature)


def _signature(found: Sequence[str]) -> np.ndarray | None:
    """[128] uint32 MinHash values, or None for a prompt of fewer words than a shingle."""
    if len(found) < SHINGLE_WORDS:
        return None
    shingles = {" ".join(run) for run in zip(*(found[i:] for i in range(SHINGLE_WORDS)))}
    hashes = np.fromiter((zlib.crc32(shingle.encode(errors="replace")) for shingle in shingles), np.uint64)
    if len(hashes) > _MOST_SHINGLES:
        hashes = np.partition(hashes, _MOST_SHINGLES)[:_MOST_SHINGLES]  # the smallest are as good as any
    permuted = (hashes[:, None] % _PRIME * _FACTORS + _SUMMANDS) % _PRIME
    return permuted.min(axis=0).astype(np.uint32)


def _bands(signature: np.ndarray) -> Iterator[bytes]:
    rows = signature.reshape(_BANDS, _BAND_ROWS)
    return (bytes([number]) + row.tobytes() for number, row in enumerate(rows))
