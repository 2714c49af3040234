"""Twenty thousand broken rows and hundreds of broken files: no traceback, and every row accounted for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpace_cli import prep
from dpace_cli.config import Config
from dpace_cli.data.jsonl import read_rows
from dpace_cli.errors import DpaceError
from dpace_cli.records import RunFolder

ROWS_A_FILE = 500
FILES = 40

WRONG = [
    None, True, False, 0, -1, 1.5, 10**30, float("nan"), float("inf"), "", " ", "text", "\ud800", "\udc00 a \ud83d",
    "\x00", "\x1b[31m\x07\x7f\u2028\u2029\x85", "🎉" * 50, "x" * 20_000, [], {}, [[]], [None], [{}], {"": ""},
    {"from": "human"}, [{"type": "text", "text": "part"}], [{"type": "text"}], {"text": "t"}, "[1, 2",
    '{"name": "f"}', "<|im_end|>", "null",
]  # fmt: skip
KEYS = ["id", "conversations", "messages", "from", "value", "role", "content", "tools", "tool_calls",
        "reasoning_content", "reason", "row", "", "\ud800", "name", "status"]  # fmt: skip
NAMES = [
    "human",
    "gpt",
    "system",
    "user",
    "assistant",
    "tool",
    "function_call",
    "observation",
    "bing",
    "narrator",
    "HUMAN",
]


def good_row(draw: random.Random, number: int) -> dict[str, Any]:
    turns = []
    for turn in range(draw.randint(1, 6)):
        name = ("human", "gpt")[turn % 2]
        turns.append({"from": name, "value": f"{name} says {draw.random()} é 한"})
    return {"id": f"row-{number}", "conversations": turns}


def mutated(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """The value with something in it replaced, added, left out or doubled."""
    if depth > 6 or draw.random() < 0.2:
        return wrong(draw)
    if isinstance(value, dict):
        changed = dict(value)
        key = draw.choice([*changed, draw.choice(KEYS)])
        what = draw.randrange(5)
        if what == 0:
            changed.pop(key, None)
        elif what == 1:
            changed[draw.choice(KEYS)] = wrong(draw)
        elif what == 2 and key in ("from", "role"):
            changed[key] = draw.choice(NAMES)
        else:
            changed[key] = mutated(draw, changed.get(key), depth + 1)
        return changed
    if isinstance(value, list):
        changed = list(value)
        what = draw.randrange(5)
        if what == 0 or not changed:
            changed.insert(draw.randint(0, len(changed)), wrong(draw))
        elif what == 1:
            changed.pop(draw.randrange(len(changed)))
        elif what == 2:
            changed += changed
        elif what == 3:
            draw.shuffle(changed)
        else:
            place = draw.randrange(len(changed))
            changed[place] = mutated(draw, changed[place], depth + 1)
        return changed
    return wrong(draw)


def wrong(draw: random.Random) -> Any:
    if draw.random() < 0.05:
        nested: Any = draw.choice(WRONG)
        for _ in range(draw.choice([3, 100, 300, 600, 940])):
            nested = [nested] if draw.random() < 0.5 else {draw.choice(KEYS): nested}
        return nested
    return draw.choice(WRONG)


def as_text(draw: random.Random, row: Any) -> bytes:
    """JSON of the row as Python writes it (NaN and halves of characters included), now and then with a doubled key."""
    text = json.dumps(row, ensure_ascii=draw.random() < 0.5)
    if isinstance(row, dict) and row and draw.random() < 0.1:
        text = text[:-1] + ', "id": "double", "conversations": []}'
    return text.encode(errors="surrogatepass")


def damaged(draw: random.Random, text: bytes) -> bytes:
    """Bytes changed, cut or put in, without a line end."""
    data = bytearray(text)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(data) + 1)
        what = draw.randrange(6)
        if what == 0:
            data[place:place] = draw.choice([b"\xff", b"\xe2\x82", b"\xf0\x9f", b"\xc0\x80", b"\x00", b"\x1f", b"\r"])
        elif what == 1:
            data[place:place] = draw.choice(
                [b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"NaN", b"9" * 5000, b"\\ud800"]
            )
        elif what == 2:
            del data[place : place + draw.randint(1, 30)]
        elif what == 3:
            del data[place:]
        elif what == 4 and place < len(data):
            data[place] = draw.choice([0, 9, 34, 44, 91, 92, 123, 128, 200, 255])
        else:
            data[place:place] = b"[" * draw.choice([1, 50, 2000])
    return bytes(data).replace(b"\n", b" ")


def convert(path: Path, folder: Path, source: str, **settings: Any) -> prep.PrepResult:
    config = Config()
    config.target.path = str(folder / "no-target")
    config.prep = config.prep.model_validate(
        {"source": source, "inputs": [str(path)], "decontaminate": False, **settings}
    )
    result = prep.run(config, RunFolder(folder))
    assert result.read == result.kept + sum(result.rejected.values())
    kept = list(read_rows(result.output)) + (list(read_rows(result.val_output)) if result.val_output else [])
    assert len(kept) == result.kept
    assert len({row["id"] for row in kept}) == result.kept
    for row in kept:
        assert set(row) <= {"id", "conversations", "tools"}
        for message in row["conversations"]:
            assert set(message) <= {"role", "content", "reasoning_content", "tool_calls"}
            assert isinstance(message["content"], str)
            assert message["role"] in ("user", "assistant", "system", "tool")
    listed = sum(1 for _ in read_rows(result.rejects))
    assert listed == sum(count for reason, count in result.rejected.items() if reason != "over_max_rows")
    return result


SETTINGS: list[dict[str, Any]] = [
    {},
    {"val": 0.2, "max_turns": 2},
    {"max_rows": 50, "val": 0.1},
    {"dedup": "exact"},
    {"dedup": "near", "first_turn": True},
    {"disable": ["tools_not_supported", "no_user_turn", "no_answer"]},
]


@pytest.mark.parametrize("number", range(FILES))
def test_mutated_rows(tmp_path, number):
    draw = random.Random(number)
    source = ("sharegpt", "jsonl", "ultrachat", "alpaca", "perfectblend")[number % 5]
    texts = []
    for place in range(ROWS_A_FILE):
        row = good_row(draw, place)
        if draw.random() < 0.9:
            for _ in range(draw.randint(1, 3)):
                row = mutated(draw, row)
        text = as_text(draw, row)
        if number % 2 and draw.random() < 0.4:
            text = damaged(draw, text)
        texts.append(text)
    path = tmp_path / "in.json"
    layouts: list[Callable[[], bytes]] = [lambda: b"[" + b",\n".join(texts) + b"]", lambda: b"\n".join(texts) + b"\n"]
    path.write_bytes(layouts[number % 2]())
    result = convert(path, tmp_path / "run", source, **SETTINGS[number % len(SETTINGS)])
    # Lines keep damaged rows apart; an array holds rows that are JSON, however odd, in this test.
    assert result.read == sum(1 for text in texts if not text.isspace() and text)
    assert not result.partial
    again = convert(result.rejects, tmp_path / "again", "jsonl")
    assert again.read == sum(1 for _ in read_rows(result.rejects))


@pytest.mark.parametrize("number", range(FILES))
def test_damaged_files(tmp_path, number):
    """Damage anywhere in a file: what lies before it is kept, and nothing raises but errors for people."""
    draw = random.Random(1000 + number)
    for _ in range(10):
        rows = [good_row(draw, place) for place in range(draw.randint(1, 8))]
        texts = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
        whole = draw.choice([b"[" + b",".join(texts) + b"]", json.dumps(rows, indent=2).encode(), b"\n".join(texts)])
        whole = draw.choice([b"", b"\xef\xbb\xbf", b"\n\n "]) + whole
        place = draw.randrange(len(whole) + 1)
        broken = whole[:place] + draw.choice([b"", damaged(draw, whole[place : place + 200])])
        if draw.random() < 0.5:
            broken += whole[place + 200 :]
        path = tmp_path / "in.bin"
        path.write_bytes(broken)
        try:
            result = convert(path, tmp_path / "run", "jsonl")
        except DpaceError as error:
            assert "UTF-16" in error.message
            continue
        before = sum(1 for text in texts if text in whole[:place])
        kept = {row["id"] for row in read_rows(result.output)}
        assert {f"row-{n}" for n in range(before - 1)} <= kept


def test_random_bytes_are_no_rows(tmp_path):
    draw = random.Random(5)
    for number in range(200):
        path = tmp_path / "in.bin"
        start = draw.choice(
            [b"", b"[", b"{", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1", b'[{"id": "a", ', b"\xef\xbb\xbf"]
        )
        path.write_bytes(start + draw.randbytes(draw.choice([0, 1, 5, 300])))
        try:
            result = convert(path, tmp_path / f"run-{number}", "jsonl")
        except DpaceError as error:
            assert "UTF-16" in error.message or "Parquet" in error.message
        else:
            assert result.kept == 0
