"""The stage `dpace prep`: every row accounted for, outputs whole, and the same rows chosen whatever their order."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import zstandard
from chat_templates import tokenizer_of

from dpace_cli import prep
from dpace_cli.config import Config
from dpace_cli.data.adapters import REJECTIONS, REPAIRS
from dpace_cli.data.jsonl import RowLog, read_rows
from dpace_cli.errors import Interrupted, RunError, UsageError
from dpace_cli.prep import PrepResult
from dpace_cli.records import RunFolder, file_sha256, read_json, to_json


def convert(folder: Path, source: str = "sharegpt", inputs: list | None = None, **settings: object) -> PrepResult:
    """Run the stage; keyword `target` names the target, every other one is of the section prep."""
    config = Config()
    config.target.path = str(settings.pop("target", config.target.path))
    config.bench.data_dir = settings.pop("data_dir", None)
    config.prep = config.prep.model_validate({"source": source, "inputs": [str(i) for i in inputs or []], **settings})
    result = prep.run(config, RunFolder(folder))
    assert result.read == result.kept + sum(result.rejected.values())
    assert set(result.rejected) <= set(REJECTIONS)
    assert set(result.repaired) <= set(REPAIRS)
    rows = list(read_rows(result.output)) + (list(read_rows(result.val_output)) if result.val_output else [])
    assert len(rows) == result.kept
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(set(row) <= {"id", "conversations", "tools"} for row in rows)
    return result


def chat(key: object, *contents: object) -> dict:
    names = ("human", "gpt")
    turns = [{"from": names[i % 2], "value": content} for i, content in enumerate(contents)]
    return {"conversations": turns} if key is None else {"id": key, "conversations": turns}


def write(path: Path, rows: list, array: bool = False) -> Path:
    path.write_text(json.dumps(rows) if array else "".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(path: Path) -> list[str]:
    return [row["id"] for row in read_rows(path)]


def many(count: int) -> list[dict]:
    return [chat(f"r{n}", f"question {n} of many", "answer") for n in range(count)]


def test_rows_are_converted_counted_and_described_in_a_manifest(tmp_path):
    path = write(tmp_path / "in.json", [*many(3), chat("empty"), chat("gpt first", "", "x", "q", "a")], array=True)
    result = convert(tmp_path / "run", inputs=[path])
    assert (result.read, result.kept, result.rejected, result.partial) == (5, 4, {"empty_conversation": 1}, False)
    assert result.repaired == {"dropped_empty_turn": 1, "dropped_leading_assistant": 1}
    assert result.output == tmp_path / "run" / "prep" / "prompts.jsonl"
    first = next(iter(read_rows(result.output)))
    assert first == {
        "id": "r0",
        "conversations": [
            {"role": "user", "content": "question 0 of many"},
            {"role": "assistant", "content": "answer"},
        ],
    }
    manifest = read_json(result.manifest)
    assert manifest["inputs"] == {str(path): file_sha256(path)}
    assert manifest["config"]["source"] == "sharegpt"
    assert manifest["versions"]["dpace"]
    assert {key: manifest[key] for key in to_json(result)} == to_json(result)
    (rejected,) = read_rows(result.rejects)
    assert rejected["reason"] == "empty_conversation"
    assert rejected["file"] == str(path)
    assert path.read_bytes()[rejected["byte"] :].startswith(b'{"id": "empty"')
    assert rejected["row"] == chat("empty")


def test_a_cut_array_is_partial_and_says_where(tmp_path):
    text = json.dumps(many(50)).encode()
    path = tmp_path / "cut.json"
    path.write_bytes(text[:1000])
    result = convert(tmp_path / "run", inputs=[path])
    assert result.partial
    (cut,) = result.cuts
    assert cut["file"] == str(path)
    assert text[cut["byte"] :].startswith(b'{"id": "r%d"' % result.read)


def test_several_files_and_folders_are_one_source(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    write(folder / "a.json", many(2), array=True)
    (folder / "b.gz").write_bytes(gzip.compress(json.dumps(chat("gz", "q", "a")).encode()))
    (folder / "README.md").write_text("# A data set\n\nwith a page about it")
    (folder / "c.zst").write_bytes(zstandard.compress(json.dumps(chat("zst", "q", "a")).encode()))
    single = write(tmp_path / "d.jsonl", [chat("last", "q", "a")])
    result = convert(tmp_path / "run", inputs=[folder, single])
    assert ids(result.output) == ["r0", "r1", "gz", "zst", "last"]
    other = tmp_path / "other"
    other.mkdir()
    write(other / "data.txt", many(1))
    assert ids(convert(tmp_path / "run", inputs=[other]).output) == ["r0"]


def test_parquet_is_read_as_the_hub_keeps_it(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    pq.write_table(pa.table({"prompt_id": ["x"], "messages": [messages]}), tmp_path / "u.parquet")
    result = convert(tmp_path / "run", "ultrachat", [tmp_path / "u.parquet"])
    assert list(read_rows(result.output)) == [{"id": "x", "conversations": messages}]


def test_the_embedded_generator_gives_all_kinds_evenly(tmp_path):
    result = convert(tmp_path / "run", "demo", max_rows=9)
    rows = list(read_rows(result.output))
    assert [row["id"].split("-")[1] for row in rows] == ["math", "code", "story"] * 3
    assert [message["role"] for message in rows[0]["conversations"]] == ["user", "assistant"]
    assert ids(convert(tmp_path / "again", "demo", max_rows=9).output) == [row["id"] for row in rows]


# --- ids -------------------------------------------------------------------------------------------------


def test_repeated_and_missing_ids_become_unique_without_losing_rows(tmp_path):
    rows = [chat("a", "q1", "x"), chat("a", "q2", "x"), chat("a-2", "q3", "x"), chat("a", "q4", "x"),
            chat(None, "q5", "x"), chat(None, "q5", "x"), chat("", "q6", "x"), chat(7, "q7", "x"),
            chat(12345678901234567890123, "q8", "x")]  # fmt: skip
    result = convert(tmp_path / "run", inputs=[write(tmp_path / "in.jsonl", rows)])
    found = ids(result.output)
    assert found[:4] == ["a", "a-2", "a-2-2", "a-3"]
    assert found[7:] == ["7", "12345678901234567890123"]
    assert found[5] == f"{found[4]}-2"
    assert result.repaired == {"renamed_duplicate_id": 4, "made_id": 3}
    off = convert(tmp_path / "off", inputs=[tmp_path / "in.jsonl"], disable=["renamed_duplicate_id", "made_id"])
    assert off.rejected == {"duplicate_id": 2, "no_id": 3}


def test_made_ids_do_not_depend_on_order(tmp_path):
    rows = [chat(None, f"q{n}", "a") for n in range(20)]
    first = convert(tmp_path / "1", inputs=[write(tmp_path / "1.jsonl", rows)])
    second = convert(tmp_path / "2", inputs=[write(tmp_path / "2.jsonl", rows[::-1])])
    assert ids(first.output) == ids(second.output)[::-1]


# --- choosing --------------------------------------------------------------------------------------------


def test_max_rows_chooses_the_same_rows_in_any_order_and_keeps_the_order_of_the_source(tmp_path):
    rows = many(200)
    shuffled = random.Random(0).sample(rows, 200)
    first = convert(tmp_path / "1", inputs=[write(tmp_path / "1.jsonl", rows)], max_rows=20)
    second = convert(tmp_path / "2", inputs=[write(tmp_path / "2.jsonl", shuffled)], max_rows=20)
    assert (first.read, first.kept, first.rejected) == (200, 20, {"over_max_rows": 180})
    assert set(ids(first.output)) == set(ids(second.output))
    assert ids(second.output) == [row["id"] for row in shuffled if row["id"] in set(ids(second.output))]
    assert list(read_rows(first.rejects)) == []
    fewer = convert(tmp_path / "3", inputs=[tmp_path / "1.jsonl"], max_rows=5)
    assert set(ids(fewer.output)) < set(ids(first.output))
    other = convert(tmp_path / "4", inputs=[tmp_path / "1.jsonl"], max_rows=20, seed=1)
    assert set(ids(other.output)) != set(ids(first.output))


def test_validation_rows_are_chosen_by_their_ids_alone(tmp_path):
    rows = many(400)
    whole = convert(tmp_path / "1", inputs=[write(tmp_path / "1.jsonl", rows)], val=0.1)
    assert whole.kept == 400
    assert 20 < whole.val < 60
    chosen = set(ids(whole.val_output))
    part = random.Random(0).sample(rows, 150)
    second = convert(tmp_path / "2", inputs=[write(tmp_path / "2.jsonl", part)], val=0.1)
    assert set(ids(second.val_output)) == chosen & {row["id"] for row in part}
    assert not chosen & set(ids(whole.output))
    both = convert(tmp_path / "3", inputs=[tmp_path / "1.jsonl"], val=0.1, max_rows=100)
    assert both.kept == 100
    assert set(ids(both.val_output)) <= chosen


def test_turns_are_limited(tmp_path):
    path = write(tmp_path / "in.jsonl", [chat("a", "q", "a", "r", "b", "s", "c")])
    assert [
        len(r["conversations"]) for r in read_rows(convert(tmp_path / "1", inputs=[path], first_turn=True).output)
    ] == [2]
    assert [len(r["conversations"]) for r in read_rows(convert(tmp_path / "2", inputs=[path], max_turns=2).output)] == [
        4
    ]
    assert [len(r["conversations"]) for r in read_rows(convert(tmp_path / "3", inputs=[path], max_turns=9).output)] == [
        6
    ]


def test_lengths_are_limited_by_the_targets_own_tokens(tmp_path, tiny_target):
    from dpace_cli.modeling.target import load_tokenizer

    rows = [chat(f"r{n}", "q" * n, "a" * 10) for n in range(1, 40)]
    path = write(tmp_path / "in.jsonl", rows)
    tokenizer = load_tokenizer(Config.model_validate({"target": {"path": str(tiny_target)}}).target)

    def tokens(row: dict, prompt: bool) -> int:
        messages = [{"role": "user", "content": row["conversations"][0]["value"]}]
        if not prompt:
            messages.append({"role": "assistant", "content": row["conversations"][1]["value"]})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = convert(tmp_path / "1", inputs=[path], target=tiny_target, max_prompt_tokens=40)
    assert ids(prompts.output) == [row["id"] for row in rows if tokens(row, prompt=True) <= 40]
    assert prompts.rejected == {"prompt_too_long": 39 - prompts.kept}
    whole = convert(tmp_path / "2", inputs=[path], target=tiny_target, max_tokens=60)
    assert ids(whole.output) == [row["id"] for row in rows if tokens(row, prompt=False) <= 60]
    assert whole.rejected == {"too_long": 39 - whole.kept}


def test_repeated_prompts_are_dropped_on_request(tmp_path):
    text = "Write a short story about a small cat that lives in a big house by the sea and likes fish"
    rows = [chat("a", text, "x"), chat("b", text.upper() + "!", "y"), chat("c", text + " a lot", "z"),
            chat("d", "Write a poem about the sea", "w"), chat("e", "hi", "v"), chat("f", "Hi.", "u")]  # fmt: skip
    path = write(tmp_path / "in.jsonl", rows)
    assert ids(convert(tmp_path / "0", inputs=[path]).output) == list("abcdef")
    exact = convert(tmp_path / "1", inputs=[path], dedup="exact")
    assert (ids(exact.output), exact.rejected) == (list("acde"), {"duplicate_prompt": 2})
    near = convert(tmp_path / "2", inputs=[path], dedup="near")
    assert ids(near.output) == list("ade")
    assert near.rejected == {"duplicate_prompt": 2, "near_duplicate_prompt": 1}


def test_near_duplicates_are_found_by_jaccard_similarity(tmp_path):
    """Against the exact similarity of the shingles: far pairs are kept, close pairs dropped."""
    draw = random.Random(1)
    vocabulary = [f"w{n}" for n in range(500)]
    rows, similar = [], []
    for number in range(60):
        base = [draw.choice(vocabulary) for _ in range(60)]
        changed = list(base)
        for place in draw.sample(range(60), number % 20):
            changed[place] = draw.choice(vocabulary)
        rows += [chat(f"a{number}", " ".join(base), "x"), chat(f"b{number}", " ".join(changed), "x")]
        one, two = ({tuple(text[i : i + 3]) for i in range(58)} for text in (base, changed))
        similar.append(len(one & two) / len(one | two))
    result = convert(tmp_path / "run", inputs=[write(tmp_path / "in.jsonl", rows)], dedup="near")
    kept = set(ids(result.output))
    assert all(f"a{number}" in kept for number in range(60))
    for number, share in enumerate(similar):
        if share > 0.95:
            assert f"b{number}" not in kept
        if share < 0.65:
            assert f"b{number}" in kept


# --- decontamination -------------------------------------------------------------------------------------

BENCHMARKS = {
    "gsm8k": [{"question": "Tom’s basket holds 14 ripe pears; he sells nine of them at $2 each. How much is that?"}],
    "math500": [{"problem": r"Find the value of $\sqrt{144}$ when $x \ge 0$ and simplify as far as you can."}],
    "humaneval": [{"prompt": 'def twice(numbers):\n    """ Return a list with every number doubled.\n    """\n'}],
    "mbpp": [{"prompt": "Write a function to find the third largest odd element in a given tuple of integers."}],
    "mt-bench": [{"prompt": ["Compose a travel blog post about an unusual trip to Mars in winter.", "Rewrite it."]}],
    "alpaca": [{"instruction": "Name two deserts.", "input": ""}],
}  # fmt: skip


@pytest.fixture
def benchmark_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name, rows in BENCHMARKS.items():
        write(folder / f"{name}.jsonl", rows)
    return folder


CONTAMINATED = {
    "the prompt itself": BENCHMARKS["gsm8k"][0]["question"],
    "other case and marks": BENCHMARKS["mbpp"][0]["prompt"].upper().replace(".", "!!"),
    "DFlash's format": BENCHMARKS["math500"][0]["problem"] + "\nPlease reason step by step, and put your final answer",
    "inside a longer turn": f"Solve this:\n```python\n{BENCHMARKS['humaneval'][0]['prompt']}\n```\nThank you.",
    "a word changed": BENCHMARKS["mt-bench"][0]["prompt"][0].replace("winter", "spring"),
    "a short prompt as a whole turn": "name two deserts",
}
CLEAN = {
    "a later turn of a conversation": "Rewrite it.",
    "a short prompt inside another": "Name two deserts and describe at length the animals that live in each of them.",
    "some of its words": "Tom has a basket and sells pears. Write a function to find the largest element in a tuple.",
    "its beginning": "Compose a travel blog post about Rome",
}


@pytest.mark.parametrize("what", CONTAMINATED)
def test_a_benchmark_prompt_is_found_and_dropped(tmp_path, benchmark_folder, what):
    rows = [chat("a", "hello", "hi", CONTAMINATED[what], "x"), chat("b", "hello", "hi")]
    path = write(tmp_path / "in.jsonl", rows)
    result = convert(tmp_path / "run", inputs=[path], data_dir=str(benchmark_folder))
    assert (ids(result.output), result.rejected) == (["b"], {"contaminated": 1})
    assert result.benchmarks == dict.fromkeys(BENCHMARKS, 1)
    off = convert(tmp_path / "off", inputs=[path], data_dir=str(benchmark_folder), decontaminate=False)
    assert (off.kept, off.benchmarks) == (2, {})


@pytest.mark.parametrize("what", CLEAN)
def test_other_prompts_stay(tmp_path, benchmark_folder, what):
    path = write(tmp_path / "in.jsonl", [chat("a", CLEAN[what], "x")])
    assert convert(tmp_path / "run", inputs=[path], data_dir=str(benchmark_folder)).kept == 1


def test_that_prompts_could_not_be_checked_is_said(tmp_path, benchmark_folder, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "no-cache"))
    path = write(tmp_path / "in.jsonl", many(1))
    result = convert(tmp_path / "run", inputs=[path])
    assert result.unchecked == list(BENCHMARKS)
    assert read_json(result.manifest)["unchecked"] == list(BENCHMARKS)
    assert "decontamination: not done" in capsys.readouterr().err
    (benchmark_folder / "mbpp.jsonl").unlink()
    monkeypatch.setenv("DPACE_DATA_DIR", str(benchmark_folder))
    result = convert(tmp_path / "run", inputs=[path])
    assert result.unchecked == ["mbpp"]
    assert "only against gsm8k, math500, humaneval, mt-bench, alpaca" in " ".join(capsys.readouterr().err.split())


# --- rejects and rules -----------------------------------------------------------------------------------


def test_rejects_are_fed_back_in_after_mending(tmp_path):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps(chat("good", "q", "a")), '{"id": "open", "conversations": [', json.dumps(chat("empty")),
             json.dumps({"id": "odd", "conversations": [{"from": "narrator", "value": "x"}]}), ""]  # fmt: skip
    path.write_text("\n".join(lines))
    first = convert(tmp_path / "1", inputs=[path])
    assert first.rejected == {"invalid_json": 1, "empty_conversation": 1, "unknown_role": 1}
    rejects = list(read_rows(first.rejects))
    assert [(row["reason"], row["line"]) for row in rejects] == [
        ("invalid_json", 2), ("empty_conversation", 3), ("unknown_role", 4),
    ]  # fmt: skip
    rejects[0]["row"] += '{"from": "human", "value": "q"}, {"from": "gpt", "value": "mended"}]}'
    rejects[2]["row"]["conversations"][0]["from"] = "human"
    second = convert(tmp_path / "2", "jsonl", [write(tmp_path / "mended.jsonl", rejects)])
    assert ids(second.output) == ["open", "odd"]
    assert second.rejected == {"empty_conversation": 1}
    (again,) = read_rows(second.rejects)
    assert (again["file"], again["line"], again["row"]) == (str(path), 3, chat("empty"))


def test_unknown_and_indispensable_rules_are_refused_by_name(tmp_path):
    path = write(tmp_path / "in.jsonl", many(1))
    with pytest.raises(UsageError, match="no rule merge_turns") as error:
        convert(tmp_path / "run", inputs=[path], disable=["merge_turns"])
    assert error.value.hint == "did you mean merged_turns?"
    with pytest.raises(UsageError, match="invalid_json cannot be turned off"):
        convert(tmp_path / "run", inputs=[path], disable=["invalid_json"])


def test_halves_of_characters_and_bad_bytes_are_replaced_by_named_rules(tmp_path):
    path = tmp_path / "in.jsonl"
    half = json.dumps(chat("half\ud800", "q \ud83d end", "a")).encode()
    path.write_bytes(half + b"\n" + json.dumps(chat("bad", "AAA", "a")).encode().replace(b"AAA", b"\xff\xfe!") + b"\n")
    result = convert(tmp_path / "run", inputs=[path])
    rows = list(read_rows(result.output))
    assert rows[0]["id"] == "half\ufffd"
    assert rows[0]["conversations"][0]["content"] == "q \ufffd end"
    assert rows[1]["conversations"][0]["content"] == "\ufffd\ufffd!"
    assert result.repaired == {"replaced_surrogates": 1, "replaced_bad_utf8": 1}
    off = convert(tmp_path / "off", inputs=[path], disable=["replaced_surrogates", "replaced_bad_utf8"])
    assert off.rejected == {"lone_surrogate": 1, "bad_utf8": 1}
    assert len(list(read_rows(off.rejects))) == 2


def test_a_models_name_as_a_role_is_said_once(tmp_path, capsys):
    rows = [
        {"id": f"{n}", "conversations": [{"from": "human", "value": "q"}, {"from": "bing", "value": "a"}]} for n in "ab"
    ]
    convert(tmp_path / "run", inputs=[write(tmp_path / "in.jsonl", rows)])
    assert capsys.readouterr().err.count('role "bing"') == 1


# --- tools -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with tokenizers of two kinds: one that takes tools, one that does not."""
    made = {}
    for name in ("qwen3-thinking", "gemma"):
        made[name] = tmp_path_factory.mktemp(name)
        tokenizer_of(name).save_pretrained(made[name])
        (made[name] / "config.json").write_text('{"model_type": "qwen3"}')
    return made


TOOL_ROWS = [
    {"id": "plain", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"id": "called", "conversations": [
        {"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "r"}, {"from": "gpt", "value": "a"},
    ]},
]  # fmt: skip


def test_tool_turns_are_kept_where_the_target_takes_tools_and_else_rejected(tmp_path, targets):
    path = write(tmp_path / "in.jsonl", TOOL_ROWS)
    kept = convert(tmp_path / "1", inputs=[path], target=targets["qwen3-thinking"])
    roles = {row["id"]: [message["role"] for message in row["conversations"]] for row in read_rows(kept.output)}
    assert roles == {"plain": ["user", "assistant"], "called": ["user", "assistant", "tool", "assistant"]}
    rejected = convert(tmp_path / "2", inputs=[path], target=targets["gemma"])
    assert (ids(rejected.output), rejected.rejected) == (["plain"], {"tools_not_supported": 1})
    forced = convert(tmp_path / "3", inputs=[path], target=targets["gemma"], disable=["tools_not_supported"])
    assert forced.kept == 2


def test_rows_with_tools_are_rejected_with_a_warning_where_nobody_knows_the_target(tmp_path, capsys):
    path = write(tmp_path / "in.jsonl", TOOL_ROWS)
    result = convert(tmp_path / "run", inputs=[path], target=tmp_path / "no-model")
    assert result.rejected == {"tools_not_supported": 1}
    assert "no-model is not a folder" in " ".join(capsys.readouterr().err.split())


def test_values_that_other_readers_fail_at_are_rejected_as_text(tmp_path):
    deep, big = 1, 10**400
    for _ in range(300):
        deep = [deep]
    rows = [{**TOOL_ROWS[0], "id": key, "tools": [{"x": value}]} for key, value in (("deep", deep), ("big", big))]
    result = convert(tmp_path / "run", inputs=[write(tmp_path / "in.jsonl", rows)], disable=["tools_not_supported"])
    assert result.rejected == {"too_deep": 1, "bad_number": 1}
    assert [json.loads(row["row"])["id"] for row in read_rows(result.rejects)] == ["deep", "big"]


def test_a_row_that_the_template_refuses_is_a_rejection(tmp_path, targets):
    rows = [
        {"id": "s", "conversations": [{"from": "system", "value": "s"}, *chat(0, "q", "a")["conversations"]]},
        *many(1),
    ]
    path = write(tmp_path / "in.jsonl", rows)
    result = convert(tmp_path / "run", inputs=[path], target=targets["gemma"], max_tokens=1000)
    assert (ids(result.output), result.rejected) == (["r0"], {"refused_by_template": 1})


# --- SpecForge -------------------------------------------------------------------------------------------


@pytest.fixture
def dataset_cache(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.filterwarnings("ignore")
def test_specforges_loader_takes_every_row(tmp_path, dataset_cache):
    from specforge.data.prompt_builder import prepare_prompt_tasks
    from specforge.utils import safe_conversations_generator

    odd = [
        chat("a\u2028", "sep \u2028 \x00 \x1f 🎉", "yes\x85"),
        chat("b", "x" * 500, "y"),
        chat("c", "q", "", "r", "b"),
    ]
    path = write(tmp_path / "in.json", [*many(20), *odd, chat("d"), chat("e", "", "x")], array=True)
    result = convert(tmp_path / "run", inputs=[path])
    taken = prepare_prompt_tasks(
        str(result.output), tokenizer_of("qwen3-thinking"), chat_template="qwen3-thinking", max_length=100_000,
        is_preformatted=False, train_only_last_turn=False, cache_dir=None, cache_key=None, num_proc=None,
        min_loss_tokens=1,
    )  # fmt: skip
    assert len(taken) == result.kept == 23
    assert sum(1 for row in safe_conversations_generator(result.output) if row["conversations"]) == 23


def test_rows_with_tools_that_come_late_in_a_file_can_be_loaded(tmp_path, targets, dataset_cache):
    """`datasets`, which SpecForge reads with, takes the columns from the first 10 MB and fails at later ones."""
    from datasets import load_dataset

    plain = [chat(f"p{n}", "yes " * 10_000, "no " * 10_000) for n in range(200)]
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    path = write(tmp_path / "in.jsonl", [*plain, *TOOL_ROWS[1:], {"id": "thought", "messages": thought}])
    result = convert(tmp_path / "run", inputs=[path], target=targets["qwen3-thinking"])
    assert result.output.stat().st_size > 12 << 20
    assert ids(result.output) == ["called", "thought", *(row["id"] for row in plain)]
    loaded = load_dataset("json", data_files=str(result.output), split="train")
    assert [row["id"] for row in loaded] == ids(result.output)
    assert loaded[0]["conversations"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


# --- errors, interruptions -------------------------------------------------------------------------------


def test_inputs_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"gone\.json does not exist"):
        convert(tmp_path / "run", inputs=[tmp_path / "gone.json"])
    with pytest.raises(UsageError, match="no input"):
        convert(tmp_path / "run", "jsonl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="without data files"):
        convert(tmp_path / "run", inputs=[tmp_path / "empty"])
    assert not (tmp_path / "run").exists()


def test_a_hub_that_cannot_be_reached_is_one_error(tmp_path, monkeypatch):
    import datasets

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UsageError, match="z-lab/qwen3-4b-instruct-100k, split train, from the hub: offline") as error:
        convert(tmp_path / "run", "zlab")
    assert "HF_ENDPOINT" in error.value.hint
    with pytest.raises(UsageError, match="HuggingFaceH4/ultrachat_200k, split train_sft"):
        convert(tmp_path / "run", "ultrachat")
    with pytest.raises(UsageError, match="someone/something, split test"):
        convert(tmp_path / "run", "jsonl", ["someone/something"], split="test")


def test_hub_rows_are_read_by_name(tmp_path, monkeypatch):
    import datasets

    asked = []
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: asked.append((args, options)) or rows)
    result = convert(tmp_path / "run", "zlab", decontaminate=False)
    assert result.kept == 1
    assert asked == [(("z-lab/qwen3-4b-instruct-100k",), {"split": "train", "streaming": True})]


def test_what_was_there_stays_when_prep_is_stopped(tmp_path, monkeypatch):
    path = write(tmp_path / "in.jsonl", many(300))
    first = convert(tmp_path / "run", inputs=[path], val=0.1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run" / "prep").iterdir()}
    assert len(before) == 4

    def stop(*_: object) -> bytes:
        raise Interrupted(2)

    write(path, many(400))
    monkeypatch.setattr("dpace_cli.data.output.RowOutput.finish", stop)
    with pytest.raises(Interrupted):
        convert(tmp_path / "run", inputs=[path], val=0.1)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run" / "prep").iterdir()} == before
    monkeypatch.undo()
    again = convert(tmp_path / "run", inputs=[path], val=0.1)
    assert (first.kept, again.kept) == (300, 400)


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpace_cli.data.output.RowOutput.finish", full)
    with pytest.raises(RunError, match="No space left on device") as error:
        convert(tmp_path / "run", inputs=[write(tmp_path / "in.jsonl", many(3))])
    assert error.value.exit_code == 1
    assert list((tmp_path / "run" / "prep").iterdir()) == []


def test_a_named_output_has_its_company_beside_it(tmp_path):
    path = write(tmp_path / "in.jsonl", many(30))
    result = convert(tmp_path / "run", inputs=[path], output=str(tmp_path / "out" / "mine.jsonl"), val=0.2)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "mine.jsonl", "mine.manifest.json", "mine.rejects.jsonl", "mine.val.jsonl",
    ]  # fmt: skip
    assert result.output.name == "mine.jsonl"
    assert not (tmp_path / "run").exists()


# --- logs ------------------------------------------------------------------------------------------------


def test_a_log_holds_each_row_once_and_forgets_a_torn_last_line(tmp_path):
    path = tmp_path / "log.jsonl"
    with RowLog(path) as log:
        log.append({"id": "a", "text": "é"})
        log.append({"id": "b"})
        with pytest.raises(ValueError, match="'a'"):
            log.append({"id": "a"})
    whole = path.read_bytes()
    for torn in (b'{"id": "c"', b'{"id": "c"}', b"\0\0\0\0", b'{"id": "c"\n', b'{"other": 1}\n', b"[1]\n"):
        path.write_bytes(whole + torn)
        with RowLog(path) as log:
            assert log.ids == {"a", "b"}
            log.append({"id": "c"})
        assert [row["id"] for row in read_rows(path)] == ["a", "b", "c"]


def test_a_log_that_is_damaged_further_up_is_not_touched(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"id": "a"}\nnonsense\n{"id": "b"}\n')
    with pytest.raises(RunError, match="line 2"):
        RowLog(path)
    assert path.read_bytes() == b'{"id": "a"}\nnonsense\n{"id": "b"}\n'


def test_the_strict_reader_names_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a"}\n\n[1]\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 3: not a JSON object"):
        list(read_rows(path))
    path.write_text('{"id": "a"\n')
    with pytest.raises(UsageError, match=r"rows\.jsonl, line 1: not a JSON object"):
        list(read_rows(path))
    with pytest.raises(UsageError, match="No such file"):
        list(read_rows(tmp_path / "none.jsonl"))
