"""Seeded prompts for the demo target, with reference answers and a judge for generated ones.

There are three kinds of samples: ``math`` (word problems solved step by step), ``code`` (one small Python
function) and ``story`` (four or five sentences). Most of an answer follows from its prompt, but how a
sentence is put is a weighted choice, so that a model of these texts has real uncertainty in some places and
hardly any in others. The first option of every choice is the most likely one, which settles the answer at
temperature 0.

Everything here needs the standard library only and depends on nothing but the arguments.
"""

import ast
import hashlib
import operator
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

KINDS = ("math", "code", "story")

# One prompt in ten is held out. The prompt's own hash decides, so no seed can ever mix the two splits.
HELDOUT_ONE_IN = 10

Fields = dict[str, Any]


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
            prompt, answer = _WRITERS[chosen](rng)
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
    return _JUDGES[sample.kind](sample.prompt, answer.strip())


def _pick(rng: random.Random, options: Sequence[str]) -> str:
    """Choose an option, each one three times as likely as the next."""
    weights = [3.0**-rank for rank in range(len(options))]
    return rng.choices(options, weights)[0]


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _matcher(template: str) -> re.Pattern[str]:
    """Turn a prompt template into the pattern that reads its fields back from a prompt."""
    pieces = []
    known: set[str] = set()
    for piece in re.split(r"(\{\w+\})", template):
        if not piece.startswith("{"):
            pieces.append(re.escape(piece))
        elif piece in known:
            pieces.append(f"(?P={piece[1:-1]})")
        else:
            known.add(piece)
            # Fields with a name of one letter are numbers.
            content = r"\d+" if len(piece) == 3 else ".+?"
            pieces.append(f"(?P<{piece[1:-1]}>{content})")
    return re.compile("".join(pieces))


def _read(matchers: dict[str, list[re.Pattern[str]]], prompt: str) -> tuple[str, Fields]:
    """Find the shape of a prompt and its fields, with numbers as integers."""
    for shape, patterns in matchers.items():
        for pattern in patterns:
            if found := pattern.fullmatch(prompt):
                fields = found.groupdict()
                return shape, {key: int(text) if text.isdigit() else text for key, text in fields.items()}
    raise ValueError(f"not a prompt of the demo: {prompt!r}")


# --- words --------------------------------------------------------------------------------------------------

_SHE = [
    "Ada",
    "Alma",
    "Anna",
    "Bella",
    "Carla",
    "Clara",
    "Dana",
    "Elena",
    "Emma",
    "Fiona",
    "Freya",
    "Greta",
    "Hana",
    "Ida",
    "Iris",
    "Jana",
    "Julia",
    "Kira",
    "Lena",
    "Lucy",
    "Maria",
    "Maya",
    "Mina",
    "Nadia",
    "Nora",
    "Olga",
    "Paula",
    "Petra",
    "Rosa",
    "Sara",
    "Sofia",
    "Tara",
    "Tina",
    "Vera",
    "Wanda",
    "Yara",
    "Zoe",
]
_HE = [
    "Adam",
    "Alan",
    "Anton",
    "Ben",
    "Boris",
    "Carl",
    "Colin",
    "David",
    "Dario",
    "Eric",
    "Felix",
    "Frank",
    "Georg",
    "Hugo",
    "Ivan",
    "Jack",
    "Jonas",
    "Karl",
    "Leo",
    "Liam",
    "Luca",
    "Marco",
    "Max",
    "Milo",
    "Nils",
    "Noah",
    "Omar",
    "Oscar",
    "Paul",
    "Peter",
    "Ralf",
    "Robin",
    "Sam",
    "Simon",
    "Theo",
    "Tom",
    "Victor",
]
_NAMES = _SHE + _HE

_THINGS = [
    "apples",
    "pears",
    "plums",
    "lemons",
    "cherries",
    "nuts",
    "marbles",
    "stamps",
    "coins",
    "shells",
    "stones",
    "beads",
    "cards",
    "books",
    "pencils",
    "buttons",
    "stickers",
    "balloons",
    "cookies",
    "candles",
    "flowers",
    "eggs",
]
_BOXES = ["boxes", "bags", "baskets", "jars", "trays", "packs"]
_GOODS = ["pen", "cup", "ball", "ticket", "book", "cake", "lamp", "kite", "rope", "map", "bell", "brush"]
_GETS = ("buys", "finds", "wins", "receives", "collects")
_LOSES = ("gives away", "loses", "sells", "uses up")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

_VERBS = [
    "adjust",
    "boost",
    "build",
    "change",
    "check",
    "clean",
    "collect",
    "convert",
    "filter",
    "find",
    "fix",
    "get",
    "handle",
    "limit",
    "make",
    "map",
    "mark",
    "merge",
    "move",
    "pick",
    "process",
    "read",
    "refine",
    "scale",
    "score",
    "select",
    "shift",
    "sort",
    "trim",
    "update",
]
_NOUNS = [
    "age",
    "batch",
    "block",
    "color",
    "cost",
    "count",
    "data",
    "depth",
    "energy",
    "entry",
    "field",
    "group",
    "height",
    "item",
    "level",
    "list",
    "mark",
    "name",
    "node",
    "number",
    "order",
    "part",
    "point",
    "power",
    "price",
    "range",
    "rate",
    "record",
    "result",
    "row",
    "sample",
    "score",
    "size",
    "speed",
    "step",
    "table",
    "task",
    "time",
    "total",
    "value",
    "weight",
    "width",
]
_LISTS = ("numbers", "values", "items", "scores", "prices", "points", "rows", "sizes")
_SCALARS = ("x", "n", "number", "value", "amount", "score", "price", "size")
_STRINGS = ("text", "word", "name", "line", "title", "label")
_WORDS = [
    "abc",
    "end",
    "go",
    "hello",
    "hi",
    "key",
    "new",
    "note",
    "ok",
    "old",
    "out",
    "red",
    "run",
    "set",
    "start",
    "stop",
    "sun",
    "top",
    "up",
    "yes",
]
_COMPARISONS = {"greater than": ">", "less than": "<", "at least": ">=", "at most": "<="}
_OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "greater than": operator.gt,
    "less than": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
}

_PLACES = [
    f"the {look} {spot}"
    for look in [
        "old",
        "quiet",
        "empty",
        "northern",
        "hidden",
        "sunny",
        "windy",
        "narrow",
        "little",
        "ruined",
    ]
    for spot in [
        "harbour",
        "garden",
        "library",
        "station",
        "market",
        "castle",
        "forest",
        "bridge",
        "valley",
        "mill",
        "museum",
        "tower",
        "beach",
        "school",
        "attic",
        "kitchen",
        "theatre",
        "cave",
        "orchard",
        "village",
    ]
]
_OBJECTS = [
    f"{look} {thing}"
    for look in [
        "copper",
        "silver",
        "golden",
        "broken",
        "tiny",
        "wooden",
        "painted",
        "rusty",
        "blue",
        "green",
        "glass",
        "heavy",
        "ancient",
        "odd",
    ]
    for thing in [
        "key",
        "coin",
        "lantern",
        "mirror",
        "compass",
        "whistle",
        "ring",
        "box",
        "clock",
        "map",
        "letter",
        "feather",
        "bell",
        "spoon",
        "kite",
        "crown",
        "flute",
        "button",
        "bottle",
        "violin",
    ]
]
_MOODS = ("happy", "sad", "funny", "scary", "calm", "brave")


# --- math ---------------------------------------------------------------------------------------------------

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
_MATH_MATCHERS = {shape: [_matcher(text) for text in texts] for shape, texts in _MATH_QUESTIONS.items()}

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


def _write_math(rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(list(_MATH_QUESTIONS))
    name, friend = rng.sample(_NAMES, 2)
    while True:
        # Small numbers keep the arithmetic within reach of a model of about a million parameters.
        fields: Fields = {"a": rng.randint(10, 60), "b": rng.randint(3, 29), "c": rng.randint(2, 19)}
        fields |= {"k": rng.randint(2, 6), "m": rng.randint(2, 9)}
        results = _math_results(shape, fields)
        if all(0 < result < 100 for result in results):
            break
    fields |= {f"r{number}": result for number, result in enumerate(results, start=1)}
    fields |= {"name": name, "friend": friend, "thing": rng.choice(_THINGS), "box": rng.choice(_BOXES)}
    fields |= {"good": rng.choice(_GOODS), "gets": rng.choice(_GETS), "loses": rng.choice(_LOSES)}
    fields |= {"day": rng.choice(_DAYS)}
    question = rng.choice(_MATH_QUESTIONS[shape]).format(**fields)
    steps = " ".join(_pick(rng, options).format(**fields) for options in _MATH_STEPS[shape])
    return question, f"{steps}\nThe answer is {results[-1]}."


def _judge_math(prompt: str, answer: str) -> tuple[bool, bool]:
    expected = _math_results(*_read(_MATH_MATCHERS, prompt))[-1]
    found = re.fullmatch(r"The answer is (\d+)\.", answer.splitlines()[-1] if answer else "")
    return found is not None, found is not None and int(found[1]) == expected


# --- code ---------------------------------------------------------------------------------------------------

_CODE_QUESTIONS = {
    "keep": (
        "Write a Python function `{function}` that takes a list `{argument}`, keeps the items {comparison} "
        "{n} and returns each of them {operation} {m}.",
        "I need a Python function `{function}({argument})`. From the list it takes every item {comparison} "
        "{n} and returns a list of these items {operation} {m}.",
    ),
    "count": (
        "Write a Python function `{function}` that counts the items of the list `{argument}` that are "
        "{comparison} {n} and returns the count {operation} {m}.",
        "I need a Python function `{function}({argument})`. It returns how many items are {comparison} {n}, "
        "{operation} {m}.",
    ),
    "total": (
        "Write a Python function `{function}` that adds up the items of the list `{argument}` that are "
        "{comparison} {n} and returns the sum {operation} {m}.",
        "I need a Python function `{function}({argument})`. It returns the sum of all items {comparison} "
        "{n}, {operation} {m}.",
    ),
    "number": (
        "Write a Python function `{function}` that takes a number `{argument}` and returns it {first} "
        "{n}, and all of that {operation} {m}.",
        "I need a Python function `{function}({argument})`. It first computes the number {first} {n} and "
        "then returns the result {operation} {m}.",
    ),
    "text": (
        'Write a Python function `{function}` that takes a string `{argument}`, puts "{word}" {where} it and '
        "returns the result {k} times in a row.",
        'I need a Python function `{function}({argument})`. It returns the string with "{word}" {where} it, '
        "repeated {k} times.",
    ),
}
_CODE_MATCHERS = {shape: [_matcher(text) for text in texts] for shape, texts in _CODE_QUESTIONS.items()}

_DOCSTRINGS = {
    "keep": (
        "Return the {argument} {comparison} {n}, each {operation} {m}.",
        "Keep {argument} {comparison} {n}.",
    ),
    "count": ("Count the {argument} {comparison} {n}.", "Return how many {argument} are {comparison} {n}."),
    "total": ("Add up the {argument} {comparison} {n}.", "Return the sum of {argument} {comparison} {n}."),
    "number": ("Return the {argument} {first} {n}, then {operation} {m}.", "Compute the new {argument}."),
    "text": ('Put "{word}" {where} the {argument}, {k} times.', "Repeat the {argument} {k} times."),
}

_BODIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "keep": (
        (
            "result = []",
            "for {each} in {argument}:",
            "    if {each} {compare} {n}:",
            "        result.append({each} {sign} {m})",
            "return result",
        ),
        ("return [{each} {sign} {m} for {each} in {argument} if {each} {compare} {n}]",),
    ),
    "count": (
        (
            "count = 0",
            "for {each} in {argument}:",
            "    if {each} {compare} {n}:",
            "        count += 1",
            "return count {sign} {m}",
        ),
        ("return len([{each} for {each} in {argument} if {each} {compare} {n}]) {sign} {m}",),
    ),
    "total": (
        (
            "total = 0",
            "for {each} in {argument}:",
            "    if {each} {compare} {n}:",
            "        total += {each}",
            "return total {sign} {m}",
        ),
        ("return sum({each} for {each} in {argument} if {each} {compare} {n}) {sign} {m}",),
    ),
    "number": (
        ("result = {argument} {first_sign} {n}", "return result {sign} {m}"),
        ("return ({argument} {first_sign} {n}) {sign} {m}",),
    ),
    "text": (
        ("result = {joined}", "return result * {k}"),
        ("return ({joined}) * {k}",),
    ),
}
_INTRODUCTIONS = ("Here is the function `{function}`:\n", "", "This function does what you asked for:\n")
_REMARKS = ("", "\nCall it as `{function}({argument})`.", "\nThe result is returned, nothing is printed.")

_BUILTINS = {"len": len, "sum": sum, "list": list, "str": str, "int": int}
# Generated code is run to judge it, so only what the answers are made of is let through.
_ALLOWED_NODES = (
    *(ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Expr, ast.Constant, ast.Return),
    *(ast.Assign, ast.AugAssign, ast.Name, ast.expr_context, ast.For, ast.If, ast.Compare, ast.cmpop),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp, ast.USub, ast.Call, ast.Attribute),
    *(ast.List, ast.ListComp, ast.GeneratorExp, ast.comprehension),
)


def _write_code(rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(list(_CODE_QUESTIONS))
    arguments = {"number": _SCALARS, "text": _STRINGS}.get(shape, _LISTS)
    fields: Fields = {"function": f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"}
    fields |= {"argument": rng.choice(arguments)}
    fields |= {"comparison": rng.choice(list(_COMPARISONS)), "operation": rng.choice(list(_OPERATIONS))}
    fields |= {"first": rng.choice(list(_OPERATIONS)), "n": rng.randint(2, 99), "m": rng.randint(2, 99)}
    fields |= {"k": rng.randint(2, 9), "word": rng.choice(_WORDS), "where": rng.choice(("before", "after"))}
    question = rng.choice(_CODE_QUESTIONS[shape]).format(**fields)

    fields |= {"compare": _COMPARISONS[fields["comparison"]], "sign": _OPERATIONS[fields["operation"]]}
    fields |= {"first_sign": _OPERATIONS[fields["first"]]}
    fields["each"] = _pick(rng, (fields["argument"].removesuffix("s"), "x", "item"))
    quoted, argument = f'"{fields["word"]}"', fields["argument"]
    fields["joined"] = f"{quoted} + {argument}" if fields["where"] == "before" else f"{argument} + {quoted}"
    docstring = _pick(rng, _DOCSTRINGS[shape])
    body = rng.choices(_BODIES[shape], (3, 1))[0]
    quotes = "'''" if shape == "text" else '"""'  # the text docstring ends in words that may hold a quote
    lines = ["def {function}({argument}):", f"    {quotes}{docstring}{quotes}"]
    lines += [f"    {line}" for line in body]
    code = "```python\n" + "\n".join(lines) + "\n```"
    answer = _pick(rng, _INTRODUCTIONS) + code + _pick(rng, _REMARKS)
    return question, answer.format(**fields)


def _expected(shape: str, fields: Fields, value: Any) -> Any:
    """Compute what the asked function returns for ``value``."""
    if shape == "text":
        word = str(fields["word"])
        return (word + value if fields["where"] == "before" else value + word) * fields["k"]
    last = _FUNCTIONS[fields["operation"]]
    if shape == "number":
        return last(_FUNCTIONS[fields["first"]](value, fields["n"]), fields["m"])
    kept = [item for item in value if _FUNCTIONS[fields["comparison"]](item, fields["n"])]
    if shape == "keep":
        return [last(item, fields["m"]) for item in kept]
    return last(len(kept) if shape == "count" else sum(kept), fields["m"])


def _judge_code(prompt: str, answer: str) -> tuple[bool, bool]:
    shape, fields = _read(_CODE_MATCHERS, prompt)
    block = re.search(r"```python\n(.*?)\n```", answer, re.DOTALL)
    try:
        tree = ast.parse(block[1] if block else "")
    except (SyntaxError, ValueError):
        return False, False
    if [getattr(node, "name", None) for node in tree.body] != [fields["function"]]:
        return False, False
    form = isinstance(tree.body[0], ast.FunctionDef)
    return form, form and _returns_the_expected(tree, shape, fields)


def _returns_the_expected(tree: ast.Module, shape: str, fields: Fields) -> bool:
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and node.attr != "append"
        if private or not isinstance(node, _ALLOWED_NODES):
            return False
    match shape:
        case "text":
            inputs: list[Any] = ["", "a", "two words"]
        case "number":
            inputs = [0, 1, -7, 50]
        case _:
            # Tuples, so that a wrong answer that appends to its own input fails instead of looping for ever.
            n = fields["n"]
            inputs = [(), (n - 1, n, n + 1), (0, 3, 120, n, 55, -4, 98)]
    namespace: dict[str, Any] = {"__builtins__": _BUILTINS}
    try:
        exec(compile(tree, "<answer>", "exec"), namespace)
        function = namespace[fields["function"]]
        return all(function(value) == _expected(shape, fields, value) for value in inputs)
    except Exception:  # whatever a wrong program raises, it is a wrong answer
        return False


# --- stories ------------------------------------------------------------------------------------------------

_STORY_QUESTIONS = (
    "Write a short {mood} story about {name}, who finds {object} at {place}.",
    "Tell me a {mood} story. The hero is {name}, the place is {place}, and there is {object} in it.",
    "Please write a few sentences about {name}, {place} and {object}. Make it {mood}.",
)
_STORY_MATCHERS = {"story": [_matcher(text) for text in _STORY_QUESTIONS]}

_OPENINGS = (
    "One {weather} {time}, {name} walked to {place}.",
    "{name} had always wanted to see {place}.",
    "It was a {weather} {time}, and {name} was alone at {place}.",
)
_WEATHERS = ("cold", "warm", "rainy", "foggy", "bright")
_TIMES = ("morning", "evening", "afternoon", "night")
_FINDS = (
    "There {who} found {object} {where}.",
    "{Where}, {who} noticed {object}.",
    "After a while {who} saw {object} {where}.",
)
_WHERES = ("under a bench", "behind a door", "between two stones", "in the dust", "on a shelf")
_REACTIONS = {
    "happy": (
        "{Who} laughed and held the {bare} up to the light.",
        "What a wonderful day it was for {name}.",
    ),
    "sad": ("{Who} thought of a friend who had left long ago.", "Looking at the {bare}, {who} began to cry."),
    "funny": ("When {who} touched the {bare}, it sneezed.", "{Who} put the {bare} on {own} head and danced."),
    "scary": ("Suddenly all the lights went out.", "Then {who} heard slow steps behind {own} back."),
    "calm": ("{Who} sat down and listened to the wind.", "For a long time {who} just looked at the {bare}."),
    "brave": (
        "{Who} was afraid, but {who} did not run away.",
        "Without waiting, {who} took the {bare} and ran.",
    ),
}
_TWISTS = (
    "",
    "Nobody knew how long the {bare} had been there.",
    "An old {person} said that it had been lost for {years} years.",
    "On its side {who} could read the number {years}.",
)
_PEOPLE = ("man", "woman", "sailor", "teacher", "farmer")
_ENDINGS = {
    "happy": ("In the end {name} gave the {bare} to a child and smiled.", "{name} sang all the way home."),
    "sad": ("{name} left the {bare} there and never came back.", "That evening {name} went home in silence."),
    "funny": (
        "Even the birds of {place} had to laugh.",
        "Since then {name} has been careful with every {noun}.",
    ),
    "scary": (
        "{name} dropped the {bare} and ran away from {place}.",
        "{name} never told anyone about that {noun}.",
    ),
    "calm": (
        "Then {name} went home slowly, with the {bare} in {own} hand.",
        "Everything was still, and {name} slept.",
    ),
    "brave": ("That is how {name} saved {place}.", "Since then everyone at {place} has known {name}."),
}


def _write_story(rng: random.Random) -> tuple[str, str]:
    name, mood, bare = rng.choice(_NAMES), rng.choice(_MOODS), rng.choice(_OBJECTS)
    fields: Fields = {"name": name, "mood": mood, "place": rng.choice(_PLACES), "object": _with_article(bare)}
    question = rng.choice(_STORY_QUESTIONS).format(**fields)

    who, own = ("she", "her") if name in _SHE else ("he", "his")
    where = _pick(rng, _WHERES)
    fields |= {"bare": bare, "noun": bare.split()[-1], "who": who, "Who": who.capitalize(), "own": own}
    fields |= {"where": where, "Where": where.capitalize(), "weather": _pick(rng, _WEATHERS)}
    fields |= {"time": _pick(rng, _TIMES), "person": _pick(rng, _PEOPLE), "years": rng.randint(20, 99)}
    # The opening that most often comes first depends on the mood, so that the prompt has a say in it.
    turn = _MOODS.index(mood) % len(_OPENINGS)
    chosen = [_pick(rng, _OPENINGS[turn:] + _OPENINGS[:turn]), _pick(rng, _FINDS)]
    chosen += [_pick(rng, _REACTIONS[mood]), _pick(rng, _TWISTS), _pick(rng, _ENDINGS[mood])]
    return question, " ".join(sentence.format(**fields) for sentence in chosen if sentence)


def _judge_story(prompt: str, answer: str) -> tuple[bool, bool]:
    _, fields = _read(_STORY_MATCHERS, prompt)
    sentences = [part for part in re.split(r"(?<=[.!?])\s+", answer) if part]
    form = answer.endswith(".") and 3 <= len(sentences) <= 6
    wanted = (fields["name"], fields["place"], fields["object"].split(" ", 1)[1])
    # Words at a sentence's start are capitalised, so case must not matter.
    return form, answer.endswith(".") and all(part.lower() in answer.lower() for part in wanted)


_WRITERS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "math": _write_math,
    "code": _write_code,
    "story": _write_story,
}
_JUDGES: dict[str, Callable[[str, str], tuple[bool, bool]]] = {
    "math": _judge_math,
    "code": _judge_code,
    "story": _judge_story,
}
