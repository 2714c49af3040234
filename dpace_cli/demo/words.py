"""Words of the demo prompts, and how a prompt is written from a template and read back."""

import operator
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

Fields = dict[str, Any]


def pick(rng: random.Random, options: Sequence[str]) -> str:
    """Choose an option, each one three times as likely as the next."""
    weights = [3.0**-rank for rank in range(len(options))]
    return rng.choices(options, weights)[0]


def with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def matcher(template: str) -> re.Pattern[str]:
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


def read_prompt(matchers: dict[str, list[re.Pattern[str]]], prompt: str) -> tuple[str, Fields]:
    """Find the shape of a prompt and its fields, with numbers as integers."""
    for shape, patterns in matchers.items():
        for pattern in patterns:
            if found := pattern.fullmatch(prompt):
                fields = found.groupdict()
                return shape, {key: int(text) if text.isdigit() else text for key, text in fields.items()}
    raise ValueError(f"not a prompt of the demo: {prompt!r}")


SHE = [
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
HE = [
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
NAMES = SHE + HE

THINGS = [
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
BOXES = ["boxes", "bags", "baskets", "jars", "trays", "packs"]
GOODS = ["pen", "cup", "ball", "ticket", "book", "cake", "lamp", "kite", "rope", "map", "bell", "brush"]
GETS = ("buys", "finds", "wins", "receives", "collects")
LOSES = ("gives away", "loses", "sells", "uses up")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

VERBS = [
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
NOUNS = [
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
LISTS = ("numbers", "values", "items", "scores", "prices", "points", "rows", "sizes")
SCALARS = ("x", "n", "number", "value", "amount", "score", "price", "size")
STRINGS = ("text", "word", "name", "line", "title", "label")
WORDS = [
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
COMPARISONS = {"greater than": ">", "less than": "<", "at least": ">=", "at most": "<="}
OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "greater than": operator.gt,
    "less than": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
    "plus": operator.add,
    "minus": operator.sub,
    "times": operator.mul,
}

PLACES = [
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
OBJECTS = [
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
MOODS = ("happy", "sad", "funny", "scary", "calm", "brave")
