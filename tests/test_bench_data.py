"""Which prompts are measured: DFlash's formats and order, from the hub's fields, a folder, or any JSONL file."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import datasets
import dflash.benchmark
import pytest

from dpace_cli.data.benchmarks import DEMO_NAMES, TABLE, dataset_name, load_prompts
from dpace_cli.demo.prompts import split_of
from dpace_cli.errors import UsageError

REAL = os.environ.get("DPACE_TEST_BENCHMARKS")
"""Folder with the real files."""

ROWS = {
    "gsm8k": [{"question": f"How many are {i} and {i}?", "answer": "#### 1"} for i in range(7)],
    "math500": [{"problem": f"Solve ${{x}} = {i}$.", "answer": "1"} for i in range(7)],
    "humaneval": [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n"} for i in range(7)],
    "mbpp": [{"task_id": i, "prompt": f"Write function {i}."} for i in (2, 9, 10, 11, 300, 510, 511, 974)],
    "mt-bench": [{"prompt_id": i, "prompt": [f"First {i}.", f"Then {i}."]} for i in range(7)],
    "alpaca": [{"instruction": f"Do {i}.", "input": "" if i % 2 else f"with {i}"} for i in range(7)],
}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, rows in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return tmp_path


def published(name: str, rows: list[dict], count: int | None, monkeypatch) -> list[list[str]]:
    """What the published benchmark would run, by its own loader and selection."""
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: rows)
    chosen = dflash.benchmark._select_dataset(dflash.benchmark.load_and_process_dataset(name), count)
    return [row["turns"] for row in chosen]


@pytest.mark.parametrize("name", sorted(dflash.benchmark.DATASETS))
@pytest.mark.parametrize("count", [None, 3, 100])
def test_the_prompts_and_their_order_are_the_published_tools(folder, monkeypatch, name, count):
    test_rows = [row for row in ROWS[name] if name != "mbpp" or 11 <= row["task_id"] <= 510]
    expected = published(name, test_rows, count, monkeypatch)
    found = load_prompts(name, str(folder), count)
    assert [prompt.turns for prompt in found.prompts] == expected
    assert len({prompt.id for prompt in found.prompts}) == len(expected)


def test_alpaca_puts_the_input_under_the_instruction(folder):
    turns = sorted(prompt.turns[0] for prompt in load_prompts("alpaca", str(folder), None).prompts)
    assert turns[:2] == ["Do 0.\n\nInput:\nwith 0", "Do 1."]


def test_the_hub_gives_the_same_prompts_as_the_folder(folder, monkeypatch):
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        return ROWS["gsm8k"]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_prompts("gsm8k", None, 4) == load_prompts("gsm8k", str(folder), 4)
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]


def test_the_folder_may_be_named_in_the_environment(folder, monkeypatch):
    monkeypatch.setenv("DPACE_DATA_DIR", str(folder))
    assert load_prompts("math500", None, 2) == load_prompts("math500", str(folder), 2)


def test_the_hash_tells_other_prompts_apart(folder):
    same, fewer = load_prompts("gsm8k", str(folder), 5), load_prompts("gsm8k", str(folder), 4)
    assert same.sha256 == load_prompts("gsm8k", str(folder), 5).sha256 != fewer.sha256
    rows = [{**row, "question": row["question"].upper()} for row in ROWS["gsm8k"]]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_prompts("gsm8k", str(folder), 5).sha256 != same.sha256


def test_an_unreachable_hub_says_how_to_use_files(monkeypatch):
    def load_dataset(*_args, **_options):
        raise ConnectionError("Couldn't reach the Hub\nafter 5 tries")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(UsageError) as caught:
        load_prompts("humaneval", None, None)
    assert "openai/openai_humaneval" in caught.value.message and "after 5 tries" in caught.value.message
    assert "--data-dir" in caught.value.hint and "humaneval.jsonl" in caught.value.hint


def test_a_folder_without_the_file_or_the_field_is_an_error(folder):
    (folder / "gsm8k.jsonl").write_text('{"question": "a"}\n{"problem": "b"}\n')
    with pytest.raises(UsageError, match=r"row 2 of gsm8k in .* has no 'question'"):
        load_prompts("gsm8k", str(folder), None)
    (folder / "mbpp.jsonl").unlink()
    with pytest.raises(UsageError, match=r"has no mbpp\.jsonl"):
        load_prompts("mbpp", str(folder), None)
    (folder / "alpaca.jsonl").write_text("")
    with pytest.raises(UsageError, match="no rows"):
        load_prompts("alpaca", str(folder), None)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UsageError) as caught:
        load_prompts("gsm9k", None, None)
    assert "gsm8k" in caught.value.hint and "demo-math" in caught.value.hint and "JSONL" in caught.value.hint


@pytest.mark.parametrize("name", DEMO_NAMES)
def test_demo_prompts_are_held_out_and_the_same_every_time(name):
    found = load_prompts(name, None, 5)
    assert found == load_prompts(name, None, 5) != load_prompts(name, None, 5, seed=1)
    assert len(found.prompts) == 5 and all(split_of(prompt.turns[0]) == "heldout" for prompt in found.prompts)


def test_any_jsonl_file_of_prompts_will_do(tmp_path):
    rows = [
        {"prompt": "one"},
        {"id": "two", "turns": ["a", "b"], "system": "Be brief."},
        {"prompt": ["c", "d"]},
        {"id": 4, "conversations": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "x"},
                                    {"role": "user", "content": "f"}]},
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "g"}]},
        {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "x"}]},
    ]  # fmt: skip
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_prompts(str(path), None, None)
    assert found.name == dataset_name(str(path)) == "mine"
    order = list(range(6))
    random.Random(42).shuffle(order)
    turns = [["one"], ["a", "b"], ["c", "d"], ["e", "f"], ["g"], ["h"]]
    assert [prompt.turns for prompt in found.prompts] == [turns[i] for i in order]
    by_id = {prompt.id: prompt for prompt in found.prompts}
    assert by_id["two"].system == "Be brief." and by_id["mine-00004"].system == "S" and "4" in by_id


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"text": "b"}\n', "row 2 of .* has no prompt"),
        ('{"prompt": ""}\n', "row 1 of .* has no prompt"),
        ('{"prompt": [1]}\n', "row 1 of .* has no prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}\n', "row 1 of .* has no prompt"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n', "row 2 of .* twice"),
        ('{"prompt": "a"}\n{"prompt"', "line 2"),
        ("", "no rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path, text, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_prompts(str(path), None, None)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_prompts(str(tmp_path / "none.jsonl"), None, None)


@pytest.mark.parametrize("name", sorted(TABLE))
def test_the_real_files_load_where_they_are(name):
    """Set DPACE_TEST_BENCHMARKS to a folder with the real files; without it the rows above stand for them."""
    if REAL is None:
        assert set(ROWS) == set(TABLE)
        return
    sizes = {"gsm8k": 1319, "math500": 500, "humaneval": 164, "mbpp": 257, "mt-bench": 80, "alpaca": 80}
    found = load_prompts(name, REAL, None)
    assert len(found.prompts) == sizes[name]
    assert all(len(prompt.turns) == (2 if name == "mt-bench" else 1) for prompt in found.prompts)
