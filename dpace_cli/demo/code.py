"""Small Python functions, and their judge, which runs them."""

import ast
import random
import re
from typing import Any

from dpace_cli.demo.words import (
    COMPARISONS,
    FUNCTIONS,
    LISTS,
    NOUNS,
    OPERATIONS,
    SCALARS,
    STRINGS,
    VERBS,
    WORDS,
    Fields,
    matcher,
    pick,
    read_prompt,
)

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
_CODE_MATCHERS = {shape: [matcher(text) for text in texts] for shape, texts in _CODE_QUESTIONS.items()}

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


def write(rng: random.Random) -> tuple[str, str]:
    shape = rng.choice(list(_CODE_QUESTIONS))
    arguments = {"number": SCALARS, "text": STRINGS}.get(shape, LISTS)
    fields: Fields = {"function": f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"}
    fields |= {"argument": rng.choice(arguments)}
    fields |= {"comparison": rng.choice(list(COMPARISONS)), "operation": rng.choice(list(OPERATIONS))}
    fields |= {"first": rng.choice(list(OPERATIONS)), "n": rng.randint(2, 99), "m": rng.randint(2, 99)}
    fields |= {"k": rng.randint(2, 9), "word": rng.choice(WORDS), "where": rng.choice(("before", "after"))}
    question = rng.choice(_CODE_QUESTIONS[shape]).format(**fields)

    fields |= {"compare": COMPARISONS[fields["comparison"]], "sign": OPERATIONS[fields["operation"]]}
    fields |= {"first_sign": OPERATIONS[fields["first"]]}
    fields["each"] = pick(rng, (fields["argument"].removesuffix("s"), "x", "item"))
    quoted, argument = f'"{fields["word"]}"', fields["argument"]
    fields["joined"] = f"{quoted} + {argument}" if fields["where"] == "before" else f"{argument} + {quoted}"
    docstring = pick(rng, _DOCSTRINGS[shape])
    body = rng.choices(_BODIES[shape], (3, 1))[0]
    quotes = "'''" if shape == "text" else '"""'  # the text docstring ends in words that may hold a quote
    lines = ["def {function}({argument}):", f"    {quotes}{docstring}{quotes}"]
    lines += [f"    {line}" for line in body]
    code = "```python\n" + "\n".join(lines) + "\n```"
    answer = pick(rng, _INTRODUCTIONS) + code + pick(rng, _REMARKS)
    return question, answer.format(**fields)


def _expected(shape: str, fields: Fields, value: Any) -> Any:
    """Compute what the asked function returns for ``value``."""
    if shape == "text":
        word = str(fields["word"])
        return (word + value if fields["where"] == "before" else value + word) * fields["k"]
    last = FUNCTIONS[fields["operation"]]
    if shape == "number":
        return last(FUNCTIONS[fields["first"]](value, fields["n"]), fields["m"])
    kept = [item for item in value if FUNCTIONS[fields["comparison"]](item, fields["n"])]
    if shape == "keep":
        return [last(item, fields["m"]) for item in kept]
    return last(len(kept) if shape == "count" else sum(kept), fields["m"])


def judge(prompt: str, answer: str) -> tuple[bool, bool]:
    shape, fields = read_prompt(_CODE_MATCHERS, prompt)
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
