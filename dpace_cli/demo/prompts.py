"""Seeded prompts for the demo target, with reference answers and a judge for generated ones.

There are three kinds of samples: ``math`` (word problems solved step by step), ``code`` (one small Python
function) and ``story`` (four or five sentences). Most of an answer follows from its prompt, but how a
sentence is put is a weighted choice, so that a model of these texts has real uncertainty in some places and
hardly any in others. The first option of every choice is the most likely one, which settles the answer at
temperature 0.

Everything here needs the standard library only and depends on nothing but the arguments.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dpace_cli.demo import code, math, story

_KINDS = {"math": math, "code": code, "story": story}
KINDS = tuple(_KINDS)

# One prompt in ten is held out. The prompt's own hash decides, so no seed can ever mix the two splits.
HELDOUT_ONE_IN = 10


@dataclass(frozen=True)
class Sample:
    """A prompt of the demo and one answer to it."""

    id: str
    kind: str
    prompt: str
    answer: str


def samples(kind: str | None, count: int, seed: int, split: Literal["train", "heldout"]) -> Iterator[Sample]:
    """Yield ``count`` samples with distinct prompts of one kind, or of all kinds in turn when it is None."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r}: expected one of {', '.join(KINDS)}")
    if split not in ("train", "heldout"):
        raise ValueError(f"unknown split {split!r}: expected train or heldout")
    kinds = KINDS if kind is None else (kind,)
    # Seeding with a string goes through SHA-512, not through hash(), so PYTHONHASHSEED has no say.
    rng = random.Random(f"dpace-demo/{kind}/{seed}/{split}")
    seen: set[str] = set()
    for index in range(count):
        chosen = kinds[index % len(kinds)]
        while True:
            prompt, answer = _KINDS[chosen].write(rng)
            if split_of(prompt) == split and prompt not in seen:
                break
        seen.add(prompt)
        yield Sample(f"demo-{chosen}-{index:06d}", chosen, prompt, answer)


def split_of(prompt: str) -> Literal["train", "heldout"]:
    """Say which split a prompt belongs to."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % HELDOUT_ONE_IN == 0 else "train"


def check(sample: Sample, answer: str) -> tuple[bool, bool]:
    """Judge an answer to ``sample.prompt``: (right in form, right in substance).

    The reference answer is not looked at. What a right answer must hold is read from the prompt.
    """
    return _KINDS[sample.kind].judge(sample.prompt, answer.strip())
