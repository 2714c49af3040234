"""Arithmetic word problems, solved step by step, and their judge."""

import random
import re
from collections.abc import Sequence

from dpace_cli.demo.words import BOXES, DAYS, GETS, GOODS, LOSES, NAMES, THINGS, Fields, matcher, pick, read_prompt

_MATH_QUESTIONS = {
    "change": (
        "{name} has {a} {thing}. Then {name} {gets} {b} more and {loses} {c}. How many {thing} does {name} have now?",
        "In the morning {name} has {a} {thing}. During the day {name} {gets} {b} more and {loses} {c}. "
        "How many {thing} are left?",
    ),
    "boxes": (
        "{name} has {a} {thing} and {gets} {k} {box} with {m} {thing} each. "
        "How many {thing} does {name} have in total?",
        "{name} {gets} {k} {box} of {m} {thing}. Before that there were {a} {thing}. How many {thing} are there now?",
    ),
    "shop": (
        "A {good} costs {m} coins. {name} buys {k} of them and pays with {a} coins. "
        "How many coins does {name} get back?",
        "{name} takes {a} coins to the shop and buys {k} times a {good} for {m} coins. How many coins are left?",
    ),
    "fewer": (
        "{name} has {a} {thing}. {friend} has {b} fewer. How many {thing} do they have together?",
        "{friend} has {b} {thing} fewer than {name}, who has {a}. How many {thing} do both have in total?",
    ),
    "days": (
        "{name} {gets} {a} {thing} on {day}, {b} on the next day and {c} on the third. "
        "How many {thing} is that in total?",
        "On {day} {name} {gets} {a} {thing}, then {b} and then {c}. How many {thing} are there at the end?",
    ),
    "group": (
        "{k} children bring {m} {thing} each and {name} brings {a}. Then {name} {loses} {c}. "
        "How many {thing} are left?",
        "{name} has {a} {thing}. {k} friends add {m} {thing} each, and then {name} {loses} {c}. "
        "How many {thing} remain?",
    ),
}
_MATH_MATCHERS = {shape: [matcher(text) for text in texts] for shape, texts in _MATH_QUESTIONS.items()}

# Each step is a choice; the values r1, r2 and r3 are what the steps come to.
_START = ("{name} starts with {a} {thing}.", "At first there are {a} {thing}.", "We begin with {a} {thing}.")
_MATH_STEPS: dict[str, tuple[Sequence[str], ...]] = {
    "change": (
        _START,
        (
            "Then {name} {gets} {b} more, so there are {a} + {b} = {r1} {thing}.",
            "With {b} more that makes {a} + {b} = {r1} {thing}.",
            "{a} + {b} = {r1}, so now there are {r1} {thing}.",
        ),
        (
            "After that {name} {loses} {c}, which leaves {r1} - {c} = {r2} {thing}.",
            "Without the {c} that are gone, {r1} - {c} = {r2} are left.",
        ),
    ),
    "boxes": (
        (
            "The {k} {box} hold {k} * {m} = {r1} {thing}.",
            "In the {k} {box} there are {k} * {m} = {r1} {thing}.",
        ),
        (
            "There were {a} {thing} already.",
            "{name} also has the other {a} {thing}.",
            "We still have to add {a}.",
        ),
        ("Together that makes {a} + {r1} = {r2} {thing}.", "So the total is {a} + {r1} = {r2}."),
    ),
    "shop": (
        ("Each {good} costs {m} coins.", "{name} has {a} coins to spend.", "First we need the full price."),
        (
            "To buy {k} of them, {name} pays {k} * {m} = {r1} coins.",
            "The full price is {k} * {m} = {r1} coins.",
        ),
        ("That leaves {a} - {r1} = {r2} coins.", "So {name} has {a} - {r1} = {r2} coins left."),
    ),
    "fewer": (
        ("{name} has {a} {thing}.", "We know that {name} has {a} {thing}."),
        (
            "{friend} has {b} fewer, which is {a} - {b} = {r1} {thing}.",
            "Since {friend} has {b} fewer, that is {a} - {b} = {r1}.",
        ),
        ("Together they have {a} + {r1} = {r2} {thing}.", "Both of them have {a} + {r1} = {r2} in total."),
    ),
    "days": (
        ("On {day} there are {a} {thing}.", "{name} starts on {day} with {a} {thing}."),
        (
            "After the second day there are {a} + {b} = {r1} {thing}.",
            "The next {b} make it {a} + {b} = {r1}.",
        ),
        (
            "With the last {c} that makes {r1} + {c} = {r2} {thing}.",
            "In the end there are {r1} + {c} = {r2}.",
        ),
    ),
    "group": (
        ("The {k} others bring {k} * {m} = {r1} {thing}.", "{k} times {m} is {k} * {m} = {r1}."),
        (
            "With the {a} of {name} there are {r1} + {a} = {r2} {thing}.",
            "{name} has {a}, so together they have {r1} + {a} = {r2} {thing}.",
        ),
        (
            "Then {name} {loses} {c}, which leaves {r2} - {c} = {r3} {thing}.",
            "Without the {c} that are gone, {r2} - {c} = {r3} are left.",
        ),
    ),
}


def _math_results(shape: str, fields: Fields) -> list[int]:
    """Compute what the steps of a problem come to; the last result is the answer."""
    a, b, c, k, m = (fields.get(key, 0) for key in "abckm")
    match shape:
        case "change":
            return [a + b, a + b - c]
        case "boxes":
            return [k * m, a + k * m]
        case "shop":
            return [k * m, a - k * m]
        case "fewer":
            return [a - b, a + a - b]
        case "days":
            return [a + b, a + b + c]
        case _:
            return [k * m, k * m + a, k * m + a - c]


def write(rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(list(_MATH_QUESTIONS))
    name, friend = rng.sample(NAMES, 2)
    while True:
        # Small numbers keep the arithmetic within reach of a model of about a million parameters.
        fields: Fields = {"a": rng.randint(10, 60), "b": rng.randint(3, 29), "c": rng.randint(2, 19)}
        fields |= {"k": rng.randint(2, 6), "m": rng.randint(2, 9)}
        results = _math_results(shape, fields)
        if all(0 < result < 100 for result in results):
            break
    fields |= {f"r{number}": result for number, result in enumerate(results, start=1)}
    fields |= {"name": name, "friend": friend, "thing": rng.choice(THINGS), "box": rng.choice(BOXES)}
    fields |= {"good": rng.choice(GOODS), "gets": rng.choice(GETS), "loses": rng.choice(LOSES)}
    fields |= {"day": rng.choice(DAYS)}
    question = rng.choice(_MATH_QUESTIONS[shape]).format(**fields)
    steps = " ".join(pick(rng, options).format(**fields) for options in _MATH_STEPS[shape])
    return question, f"{steps}\nThe answer is {results[-1]}."


def judge(prompt: str, answer: str) -> tuple[bool, bool]:
    expected = _math_results(*read_prompt(_MATH_MATCHERS, prompt))[-1]
    found = re.fullmatch(r"The answer is (\d+)\.", answer.splitlines()[-1] if answer else "")
    return found is not None, found is not None and int(found[1]) == expected
