"""regen: what is in its files, what it refuses, and that being stopped leaves no trace."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dpace_cli import regen
from dpace_cli.config import Config, RegenConfig
from dpace_cli.data.tokens import encode_row, encode_stored
from dpace_cli.engines.base import Completion, Request
from dpace_cli.engines.conversation import Conversation
from dpace_cli.errors import Interrupted, RunError, UsageError
from dpace_cli.modeling.target import tokenizer_fingerprint
from dpace_cli.records import RunFolder, only_one


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_prompts(path: Path, count: int, seed: int = 0, most_turns: int = 2) -> Path:
    """Conversations of unequal length and number of turns."""
    draws = random.Random(seed)
    with open(path, "w") as file:
        for number in range(count):
            messages = []
            for _ in range(draws.randint(1, most_turns)):
                text = "".join(draws.choice("abcdef ghij") for _ in range(draws.randrange(1, 40)))
                messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "source"}]
            file.write(json.dumps({"id": f"row-{number}", "conversations": messages}) + "\n")
    return path


def config(target: Path, **options: Any) -> Config:
    options = {"max_new_tokens": 12, "batch_size": 4, **options}
    return Config.model_validate({"target": {"path": str(target)}, "regen": options})


def run(settings_: Config, tmp_path: Path, prompts: Path) -> regen.RegenResult:
    return regen.run(settings_, RunFolder(tmp_path / "run"), data=prompts)


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("train.jsonl", "tokens.jsonl", "errors.jsonl")}


def test_every_answer_is_the_targets_own_after_the_regenerated_history(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 9)
    result = run(config(tiny_target), tmp_path, prompts)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    sources = lines(prompts)
    rows, stored = lines(result.output), lines(tmp_path / "run/regen/tokens.jsonl")
    assert [r["id"] for r in rows] == [r["id"] for r in stored] == [r["id"] for r in sources]
    for source, row, tokens in zip(sources, rows, stored):
        assert set(row) == {"id", "conversations"}
        asked = [m for m in source["conversations"] if m["role"] == "user"]
        assert [m for m in row["conversations"] if m["role"] == "user"] == asked
        assert tokens["fingerprint"] == tokenizer_fingerprint(tokenizer)
        for number, turn in enumerate(tokens["turns"]):
            history = row["conversations"][: 2 * number + 1]
            prompt = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
            assert turn["prompt_ids"] == prompt
            alone = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0, len(prompt) :]
            assert turn["answer_ids"] == alone.tolist()
            told = row["conversations"][2 * number + 1]
            assert told == {"role": "assistant", "content": tokenizer.decode(alone, skip_special_tokens=True)}
            assert turn["finish_reason"] == ("stop" if alone[-1] == tokenizer.eos_token_id else "length")
    turns = [turn for row in stored for turn in row["turns"]]
    cut = sum(any(t["finish_reason"] == "length" for t in row["turns"]) for row in stored)
    assert (result.rows, result.done, result.errors, result.truncated) == (9, 9, 0, cut)
    assert result.tokens == sum(len(turn["answer_ids"]) for turn in turns)


def test_the_stored_ids_are_what_training_would_make_of_the_text(tmp_path: Path) -> None:
    """With the demo's target, whose answers are text: the two ways to the ids of a row agree."""
    prompts = tmp_path / "p.jsonl"
    asked = ["Write a short story.", "What is 3 + 4?"]
    rows = [{"id": str(n), "conversations": [{"role": "user", "content": q}]} for n, q in enumerate(asked)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    demo = Config.model_validate({"regen": {"max_new_tokens": 200}})
    result = run(demo, tmp_path, prompts)
    from dpace_cli.modeling.target import load_tokenizer

    tokenizer = load_tokenizer(demo.target)
    for row, tokens in zip(lines(result.output), lines(tmp_path / "run/regen/tokens.jsonl")):
        assert [t["finish_reason"] for t in tokens["turns"]] == ["stop"]
        assert encode_stored(tokens["turns"]) == encode_row(tokenizer, row, demo.target.template_options(), None)


def test_a_second_run_does_nothing_and_adds_nothing(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    first = run(config(tiny_target), tmp_path, prompts)
    before = contents(tmp_path / "run/regen")
    second = run(config(tiny_target), tmp_path, prompts)
    assert contents(tmp_path / "run/regen") == before
    assert (second.done, second.resumed, second.tokens) == (6, 6, first.tokens)


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"temperature": 0.5}, "regen.temperature 0.0, now 0.5"), ({"max_new_tokens": 13}, "regen.max_new_tokens")],
)
def test_other_settings_are_refused_or_replace_everything(
    tmp_path: Path, tiny_target: Path, changed: dict[str, Any], named: str
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 5)
    run(config(tiny_target), tmp_path, prompts)
    before = contents(tmp_path / "run/regen")
    with pytest.raises(UsageError, match=named) as refused:
        run(config(tiny_target, **changed), tmp_path, prompts)
    assert "regen.overwrite=true" in refused.value.hint
    assert contents(tmp_path / "run/regen") == before
    replaced = run(config(tiny_target, overwrite=True, **changed), tmp_path, prompts)
    assert (replaced.done, replaced.resumed) == (5, 0)
    fresh = run(config(tiny_target, **changed), tmp_path / "fresh", prompts)
    assert contents(tmp_path / "run/regen") == contents(tmp_path / "fresh/run/regen")
    assert fresh.tokens == replaced.tokens
    again = run(config(tiny_target, overwrite=True, **changed), tmp_path, prompts)
    assert again.resumed == 5  # to overwrite what was made just so is to go on with it


def test_how_answers_are_made_may_change_between_two_runs(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 7)
    run(config(tiny_target, limit=3), tmp_path, prompts)
    result = run(config(tiny_target, batch_size=2), tmp_path, prompts)
    assert (result.done, result.resumed) == (7, 3)
    assert [row["id"] for row in lines(result.output)] == [f"row-{n}" for n in range(7)]
    fewer = run(config(tiny_target, limit=2), tmp_path, prompts)
    assert (fewer.rows, fewer.done) == (2, 2)
    assert len(lines(result.output)) == 7  # nothing that was paid for is thrown away


def test_answers_to_other_prompts_are_refused_and_more_prompts_are_welcome(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 4)
    run(config(tiny_target), tmp_path, prompts)
    rows = lines(prompts)
    more = tmp_path / "more.jsonl"
    more.write_text(prompts.read_text() + json.dumps({**rows[0], "id": "new"}) + "\n")
    assert run(config(tiny_target), tmp_path, more).done == 5
    rows[2]["conversations"][0]["content"] += "?"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {**rows[0], "id": "new"}]))
    with pytest.raises(UsageError, match="row-2"):
        run(config(tiny_target), tmp_path, prompts)
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(UsageError, match=r"row-2.*not in"):
        run(config(tiny_target), tmp_path, prompts)


def test_a_file_that_regen_did_not_write_is_not_touched(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    precious = tmp_path / "train.jsonl"
    precious.write_text(prompts.read_text())
    with pytest.raises(UsageError, match="not written by"):
        regen.run(config(tiny_target), RunFolder(tmp_path / "run"), data=prompts, output=precious)
    assert precious.read_text() == prompts.read_text()


def test_answers_never_replace_their_prompts(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    before = prompts.read_bytes()
    with pytest.raises(UsageError, match="is the input"):
        regen.run(config(tiny_target, overwrite=True), RunFolder(tmp_path / "run"), data=prompts, output=prompts)
    assert prompts.read_bytes() == before


def test_two_outputs_in_one_folder_keep_their_files_apart(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    for name, most in (("a", 3), ("b", 4)):
        regen.run(config(tiny_target, max_new_tokens=most), RunFolder(tmp_path), prompts, tmp_path / f"{name}.jsonl")
    for name, most in (("a", 3), ("b", 4)):
        stored = lines(tmp_path / f"{name}.tokens.jsonl")
        assert {len(turn["answer_ids"]) for row in stored for turn in row["turns"]} <= set(range(1, most + 1))
        assert json.loads((tmp_path / f"{name}.manifest.json").read_text())["result"]["done"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no prompts at"),
        ("", "has no rows"),
        ('{"id": "a", "messages": []}\n', "row 1 has no id or no conversations"),
        ('{"id": 3, "conversations": []}\n', "row 1 has no id"),
        ('{"id": "a", "conversations": []}\n' * 2, "two rows have the id 'a'"),
        ('{"id": "a", "conversations": []}\n{"id": \n', "line 2"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing_behind(
    tmp_path: Path, tiny_target: Path, text: str | None, message: str
) -> None:
    prompts = tmp_path / "p.jsonl"
    if text is not None:
        prompts.write_text(text)
    with pytest.raises(UsageError, match=message):
        run(config(tiny_target), tmp_path, prompts)
    assert not (tmp_path / "run").exists()


def test_a_row_that_the_template_refuses_or_that_asks_nothing_is_in_the_errors(
    tmp_path: Path, tiny_target: Path
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    with open(prompts, "a") as file:
        file.write(json.dumps({"id": "silent", "conversations": [{"role": "system", "content": "x"}]}) + "\n")
        file.write(json.dumps({"id": "odd", "conversations": [{"role": "user", "content": {"no": "text"}}]}) + "\n")
    for _ in range(2):  # the second run tries them again
        result = run(config(tiny_target), tmp_path, prompts)
        assert (result.rows, result.done, result.errors) == (5, 3, 2)
        failed = {row["id"]: row["error"] for row in lines(tmp_path / "run/regen/errors.jsonl")}
        assert failed.keys() == {"silent", "odd"}
        assert "no user turn" in failed["silent"]
        assert "template" in failed["odd"]
    prompts.write_text(json.dumps({"id": "silent", "conversations": []}) + "\n")
    with pytest.raises(RunError, match=r"no row could be answered.*no user turn"):
        run(config(tiny_target), tmp_path / "other", prompts)


def test_a_dry_run_shows_the_first_prompt_and_writes_nothing(tmp_path: Path, tiny_target: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    turn = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "x"}]
    prompts.write_text(
        json.dumps({"id": "a", "conversations": turn * 2})
        + "\n"
        + json.dumps({"id": "b", "conversations": turn})
        + "\n"
    )
    shown = regen.dry_run(config(tiny_target), RunFolder(tmp_path / "run"), data=prompts)
    assert shown.first_prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert (shown.rows, shown.answers, shown.most_tokens, shown.done, shown.first_id) == (2, 3, 36, 0, "a")
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    assert shown.prompt_tokens == 2 * len(tokenizer(shown.first_prompt)["input_ids"])
    assert not (tmp_path / "run").exists()


KILLED = """
import json, os, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from dpace_cli import regen
from dpace_cli.config import Config
from dpace_cli.records import RunFolder
from dpace_cli.modeling.target import load_target
import dpace_cli.engines.local

configs, root, prompts, stops = json.loads(sys.argv[1])
load_target(Config.model_validate(configs[0]).target)  # all imports are done before the first fork

def work(config, folder):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        regen.run(Config.model_validate(config), RunFolder(Path(root) / folder), data=Path(prompts))
        os._exit(0)
    return child

killed = 0
for place, config in enumerate(configs):
    os.waitpid(work(config, f"undisturbed{place}"), 0)
    grown = Path(root) / f"killed{place}" / "regen" / "train.jsonl"
    for stop in stops:
        child = work(config, f"killed{place}")
        while True:
            done, _ = os.waitpid(child, os.WNOHANG)
            if done or (grown.exists() and grown.read_bytes().count(b"\\n") >= stop):
                break
            time.sleep(0.001)
        if not done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            killed += 1
    os.waitpid(work(config, f"killed{place}"), 0)
print(killed)
"""


def test_a_run_that_was_killed_ends_with_the_same_files_as_one_that_was_not(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 42)
    both = [config(tiny_target, max_new_tokens=20, batch_size=6, temperature=t).model_dump(mode="json") for t in (0, 1)]
    arguments = json.dumps([both, str(tmp_path), str(prompts), [1, 14, 25]])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, arguments], capture_output=True, text=True, timeout=600, check=True
    )
    assert int(done.stdout.split()[-1]) == 6, done.stderr
    for place in range(2):
        undisturbed = contents(tmp_path / f"undisturbed{place}/regen")
        assert undisturbed["train.jsonl"].count(b"\n") == 42
        assert contents(tmp_path / f"killed{place}/regen") == undisturbed


@pytest.mark.parametrize("cut", ["a torn line in both files", "killed between the two lines of a row"])
def test_what_a_kill_may_leave_is_mended(tmp_path: Path, tiny_target: Path, cut: str) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 8)
    run(config(tiny_target), tmp_path, prompts)
    whole = contents(tmp_path / "run/regen")
    folder = tmp_path / "run/regen"
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "complete": False, "answered_before": 0}))
    rows = whole["train.jsonl"].splitlines(keepends=True)
    tokens = whole["tokens.jsonl"].splitlines(keepends=True)
    torn = cut.startswith("a torn line")
    (folder / "train.jsonl").write_bytes(b"".join(rows[:5]) + (rows[5][:20] if torn else b""))
    (folder / "tokens.jsonl").write_bytes(b"".join(tokens[:6]) + (tokens[6][:20] if torn else b""))
    assert run(config(tiny_target), tmp_path, prompts).done == 8
    assert contents(folder) == whole


class Grouped:
    """An engine whose answers name everything that was asked with them, as roundings would.

    Args:
        stops: completions after which it breaks off, each time that it is used.
    """

    name, fingerprint, group_rows = "grouped", None, 3

    def __init__(self, stops: list[int]) -> None:
        self.stops, self.given = stops, 0

    def complete(self, requests: Iterator[Request | None]) -> Iterator[Completion]:
        while True:
            batch, more = [], False
            for request in requests:
                if request is None:
                    more = True
                    break
                batch.append(request)
            if not more and not batch:
                return
            company = " ".join(f"{r.id}/{len(r.messages)}" for r in batch)
            for request in batch:
                if self.stops and self.given == self.stops[0]:
                    self.stops.pop(0)
                    raise Interrupted(15)
                self.given += 1
                broken = request.id.endswith("8")
                yield Completion(request.id, text=company, finish_reason="stop", error="no" if broken else None)
            if not more:
                return

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.given = 0


@given(stops=st.lists(st.integers(0, 40), max_size=4), base=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_rows_are_answered_in_the_same_company_however_often_the_work_is_broken_off(
    stops: list[int], base: int
) -> None:
    def work(folder: Path, prompts: Path, stops: list[int], limit: int | None) -> None:
        engine = Grouped(stops)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(regen, "make_engine", lambda config: engine)
            plain = Config.model_validate({"regen": {"limit": limit, "batch_size": 3}})
            while True:
                with contextlib.suppress(Interrupted):
                    regen.run(plain, RunFolder(folder), data=prompts)
                    return

    with tempfile.TemporaryDirectory() as root:
        prompts = write_prompts(Path(root) / "p.jsonl", 23)
        ends = []
        for name, breaks in (("broken", stops), ("whole", [])):
            if base:  # some rows were done by an earlier, finished run
                work(Path(root) / name, prompts, [], base)
            work(Path(root) / name, prompts, list(breaks), None)
            ends.append(contents(Path(root) / name / "regen"))
        assert ends[0] == ends[1]
        assert sorted(json.loads(line)["id"] for line in ends[0]["errors.jsonl"].splitlines()) == ["row-18", "row-8"]
        assert ends[0]["train.jsonl"].count(b"\n") == 21


# --- one conversation ------------------------------------------------------------------------------------

ROLES = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=9)


@given(roles=ROLES, reasons=st.lists(st.sampled_from(["stop", "length"]), min_size=9, max_size=9), drop=st.booleans())
@settings(max_examples=300, deadline=None)
def test_no_conversation_holds_a_word_of_the_sources_answers(roles: list[str], reasons: list[str], drop: bool) -> None:
    source = [{"role": role, "content": f"{role} {place}"} for place, role in enumerate(roles)]
    options = RegenConfig(truncated="drop" if drop else "keep")
    conversation = Conversation({"id": "x", "conversations": source}, options)
    asked = 0
    while not conversation.over:
        request = conversation.request()
        assert request.messages[-1]["role"] in ("user", "tool")
        conversation.take(Completion("x", text=f"own {asked}", finish_reason=reasons[asked], tokens=1))
        asked += 1
    made = conversation.result()["conversations"]
    own = [m["content"] for m in made if m["role"] == "assistant"]
    assert own == [f"own {n}" for n in range(len(own))]
    assert len(own) == len(conversation.turns)
    others = [m for m in source if m["role"] != "assistant"]
    assert [m for m in made if m["role"] != "assistant"] == others[: len(made) - len(own)]
    assert bool(own) == (conversation.error is None)
    if own:
        assert made[-1]["role"] == "assistant"
    if drop:
        assert len(own) == asked - conversation.truncated
    assert conversation.truncated == ("length" in reasons[:asked])


@pytest.mark.parametrize("keep", [True, False])
def test_ids_of_reasoning_that_is_left_out_are_not_kept_for_training(keep: bool) -> None:
    row = {"id": "x", "conversations": [{"role": "user", "content": "q"}]}
    conversation = Conversation(row, RegenConfig(keep_reasoning=keep))
    conversation.take(Completion("x", text="a", reasoning="r", prompt_ids=[1], answer_ids=[2], finish_reason="stop"))
    assert conversation.turns[0]["answer_ids"] == ([2] if keep else None)
    answer = conversation.result()["conversations"][1]
    assert answer == {"role": "assistant", "content": "a", **({"reasoning_content": "r"} if keep else {})}


def test_two_at_once_do_not_answer_the_same_rows(tmp_path: Path, tiny_target: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    with (
        only_one(tmp_path / "run" / "regen" / "lock"),
        pytest.raises(UsageError, match="is at work"),
    ):
        run(config(tiny_target), tmp_path, prompts)
    assert not (tmp_path / "run" / "regen" / "train.jsonl").exists()
    run(config(tiny_target), tmp_path, prompts)
    assert contents(tmp_path / "run" / "regen")["train.jsonl"].count(b"\n") == 3
