"""regen over HTTP servers that fail in every way they can: each row ends in the answers or in the errors, once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from regen_server import TRANSIENT_FAULTS, ChatServer, reply

from dpace_cli import console, regen
from dpace_cli.config import Config
from dpace_cli.engines import http
from dpace_cli.errors import Interrupted, RunError, UsageError
from dpace_cli.records import RunFolder


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "SHORTEST_WAIT_S", 0.01)
    monkeypatch.setattr(http, "LONGEST_WAIT_S", 0.1)


def write_prompts(path: Path, count: int, turns: int = 1) -> Path:
    rows = []
    for number in range(count):
        messages = []
        for turn in range(turns):
            messages += [{"role": "user", "content": f"q{number}.{turn}"}, {"role": "assistant", "content": "source"}]
        rows.append({"id": f"row-{number}", "conversations": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(*servers: ChatServer, **regen_options: Any) -> Config:
    options = {"engine": "http", "base_urls": [s.url for s in servers], "concurrency": 6, "timeout_s": 20,
               "max_retries": 6, "max_new_tokens": 16, **regen_options}  # fmt: skip
    return Config.model_validate({"regen": options})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(config: Config, tmp_path: Path, prompts: Path) -> regen.RegenResult:
    return regen.run(config, RunFolder(tmp_path / "run"), data=prompts)


def answers_by_id(tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    rows = lines(tmp_path / "run" / "regen" / "train.jsonl")
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["conversations"] for row in rows}


def expected_conversation(number: int, turns: int = 1) -> list[dict[str, Any]]:
    """Replayed with the server's rule: every answer follows from the regenerated history."""
    history: list[dict[str, Any]] = []
    for turn in range(turns):
        history.append({"role": "user", "content": f"q{number}.{turn}"})
        history.append({"role": "assistant", "content": reply(history)})
    return history


def test_each_turn_is_answered_from_the_regenerated_history(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 8, turns=3)
    with ChatServer() as server:
        result = run(settings(server), tmp_path, prompts)
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n, 3) for n in range(8)}
    assert (result.rows, result.done, result.errors, result.tokens) == (8, 8, 0, 8 * 3 * 3)
    assert [row["id"] for row in lines(result.output)] == [f"row-{n}" for n in range(8)]


def test_only_the_first_turn_is_answered_where_that_is_wanted(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 3, turns=2)
    with ChatServer() as server:
        run(settings(server, multi_turn=False), tmp_path, prompts)
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n) for n in range(3)}


def test_servers_share_the_work_and_none_gets_more_than_its_concurrency(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 60)
    with ChatServer(delay_s=0.01) as one, ChatServer(delay_s=0.01) as two:
        run(settings(one, two, concurrency=4), tmp_path, prompts)
    for server in (one, two):
        assert server.most_in_flight <= 4
        assert sum(server.answered.values()) > 10
    assert sum((one.answered + two.answered).values()) == 60


@pytest.mark.parametrize("fault", TRANSIENT_FAULTS)
def test_a_transient_fault_is_retried(tmp_path: Path, fault: str) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 4)
    patience = {"timeout_s": 0.4} if fault == "slow" else {}
    with ChatServer(lambda body, earlier: fault if earlier < 1 else None) as server:
        result = run(settings(server, **patience), tmp_path, prompts)
    assert (result.done, result.errors) == (4, 0)
    assert server.faults[fault] == 4
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n) for n in range(4)}


def test_a_row_that_keeps_failing_is_in_the_errors_and_is_tried_again_by_the_next_run(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 12)
    broken = {"q3.0": "500", "q5.0": "400"}
    with ChatServer(lambda body, earlier: broken.get(body["messages"][-1]["content"])) as server:
        config = settings(server, max_retries=2)
        first = run(config, tmp_path, prompts)
        assert (first.rows, first.done, first.errors) == (12, 10, 2)
        failed = {row["id"]: row["error"] for row in lines(tmp_path / "run/regen/errors.jsonl")}
        assert sorted(failed) == ["row-3", "row-5"]
        assert "refused with 500" in failed["row-3"] and "3 times" in failed["row-3"]
        assert "refused with 400" in failed["row-5"]
        assert (server.asked["q3.0"], server.asked["q5.0"]) == (3, 1)  # a permanent error is not retried

        del broken["q3.0"]
        second = run(config, tmp_path, prompts)
        assert (second.done, second.errors, second.resumed) == (11, 1, 10)
        assert [row["id"] for row in lines(tmp_path / "run/regen/errors.jsonl")] == ["row-5"]
        broken.clear()
        third = run(config, tmp_path, prompts)
        assert (third.done, third.errors) == (12, 0)
    assert lines(tmp_path / "run/regen/errors.jsonl") == []
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n) for n in range(12)}
    assert all(count == 1 for count in server.answered.values())  # no answer was made twice


@pytest.mark.parametrize(("code", "most"), [("400", 12), ("401", 6), ("403", 6), ("404", 6)])
def test_a_permanent_error_of_every_row_stops_early_with_the_servers_message(
    tmp_path: Path, code: str, most: int
) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 80)
    with ChatServer(lambda body, earlier: code) as server:
        with pytest.raises(RunError, match=f"refused with {code}"):
            run(settings(server), tmp_path, prompts)
        assert sum(server.asked.values()) <= most
        server.fault = lambda body, earlier: None
        mended = run(settings(server, max_new_tokens=17), tmp_path, prompts)
    assert (mended.done, mended.errors) == (80, 0)  # nothing was answered, so that other settings are no matter


def test_failures_without_an_answer_between_them_stop_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 90)
    broken = True

    def fault(body: dict[str, Any], earlier: int) -> str | None:
        return "500" if broken and int(body["messages"][-1]["content"][1:-2]) >= 20 else None

    with ChatServer(fault) as server:
        with pytest.raises(RunError, match=r"rows in a row failed.*refused with 500"):
            run(settings(server, max_retries=1), tmp_path, prompts)
        assert len(lines(tmp_path / "run/regen/errors.jsonl")) < 60
        broken = False
        result = run(settings(server, max_retries=1), tmp_path, prompts)
    assert (result.done, result.errors) == (90, 0)
    assert answers_by_id(tmp_path).keys() == {f"row-{n}" for n in range(90)}


def test_rows_that_failed_before_do_not_stop_the_next_run_by_failing_again(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2 * http.GIVE_UP_AFTER + 4)
    with ChatServer(lambda body, earlier: "400" if body["messages"][0]["content"][-3] in "02468" else None) as server:
        config = settings(server, concurrency=1)
        for resumed in (0, http.GIVE_UP_AFTER + 2):
            result = run(config, tmp_path, prompts)
            assert (result.done, result.errors) == (http.GIVE_UP_AFTER + 2, http.GIVE_UP_AFTER + 2)
            assert result.resumed == resumed


def test_a_refusing_server_is_left_out_where_another_one_works(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 20)
    with ChatServer(lambda body, earlier: "401") as bad, ChatServer() as good:
        result = run(settings(bad, good), tmp_path, prompts)
    assert (result.done, result.errors) == (20, 0)
    assert sum(bad.asked.values()) <= http.FIRST_IN_FLIGHT


def test_a_dead_server_is_left_out_and_taken_back(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 150)
    with ChatServer() as steady:
        unsteady = ChatServer()
        before_return = 0
        left = []  # what the unsteady server has been through
        turn = threading.Lock()

        def at_the_steady_one(body: dict[str, Any], answer: dict[str, Any]) -> None:
            nonlocal before_return
            with turn:
                answered = sum(steady.answered.values())
                if not left and answered >= 10 and unsteady.answered:
                    left.append("closed")
                    unsteady.close()
                elif left == ["closed"] and answered >= 50:
                    before_return = sum(unsteady.answered.values())
                    left.append("back")
                    unsteady.restart()
            time.sleep(0.02)

        steady.edit = at_the_steady_one
        unsteady.edit = lambda body, answer: time.sleep(0.02)
        try:
            result = run(settings(steady, unsteady, concurrency=3), tmp_path, prompts)
        finally:
            unsteady.close()
    assert (result.done, result.errors) == (150, 0)
    assert 0 < before_return < sum(unsteady.answered.values())
    assert steady.most_in_flight <= 3  # also while it was the only one
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n) for n in range(150)}


def test_when_every_server_stays_dead_the_run_ends_and_keeps_what_it_has(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 40)
    server = ChatServer()

    def die_at_ten(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if sum(server.answered.values()) == 10:
            threading.Thread(target=server.close).start()
            time.sleep(0.2)

    server.edit = die_at_ten
    with pytest.raises(RunError, match="no server can be reached"):
        run(settings(server, timeout_s=0.5, max_retries=50, concurrency=2), tmp_path, prompts)
    done = len(lines(tmp_path / "run/regen/train.jsonl"))
    assert done > 0
    server.edit = lambda body, answer: None
    server.restart()
    with server:
        result = run(settings(server, timeout_s=0.5, max_retries=50, concurrency=2), tmp_path, prompts)
    assert (result.done, result.errors, result.resumed) == (40, 0, done)


def test_no_server_at_all_is_one_clear_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    server = ChatServer()
    server.close()
    with pytest.raises(RunError, match=f"no server answers.*{server.port}"):
        run(settings(server), tmp_path, prompts)
    assert not (tmp_path / "run").exists()


def test_the_models_name_is_found_or_must_be_given(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 2)
    with ChatServer(models=("a", "b")) as server:
        with pytest.raises(UsageError, match=r"2 models \(a, b\)"):
            run(settings(server), tmp_path, prompts)
        run(settings(server, served_model="b"), tmp_path, prompts)
        assert {body["model"] for body in server.bodies} == {"b"}
    for status in (404, 500):  # `transformers serve` answers 500 where there is no cache of models to list
        with ChatServer(models=status) as unlisted:
            with pytest.raises(UsageError, match="0 models"):
                run(settings(unlisted), tmp_path / str(status), prompts)
            run(settings(unlisted, served_model="c"), tmp_path / str(status), prompts)
            assert {body["model"] for body in unlisted.bodies} == {"c"}
    with ChatServer(models=401) as closed, pytest.raises(UsageError, match="refused with 401"):
        run(settings(closed, served_model="c"), tmp_path / "closed", prompts)


def test_what_a_request_carries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "hush")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # this machine is reached without it
    prompts = write_prompts(tmp_path / "p.jsonl", 3)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "api_key_env": "SOME_KEY"}
    with ChatServer() as server:
        config = settings(server, **options)
        config = config.model_copy(update={"target": config.target.model_copy(update={"enable_thinking": False})})
        run(config, tmp_path, prompts)
        run(config, tmp_path / "again", prompts)
    assert {headers["authorization"] for headers in server.headers} == {"Bearer hush"}
    first = {body["messages"][0]["content"]: body for body in server.bodies[:3]}
    again = {body["messages"][0]["content"]: body for body in server.bodies[3:]}
    assert first == again  # the seed of a row is its own, whatever the order
    assert len({body["seed"] for body in first.values()}) == 3
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_tokens": 16,
              "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
    assert wanted.items() <= first["q0.0"].items()
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(UsageError, match="SOME_KEY"):
        run(config, tmp_path / "third", prompts)


def test_cut_answers_are_kept_or_dropped_and_counted(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 6, turns=2)

    def cut(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] in ("q1.0", "q2.1"):
            answer["choices"][0]["finish_reason"] = "length"

    with ChatServer(edit=cut) as server:
        kept = run(settings(server), tmp_path / "keep", prompts)
        dropped = run(settings(server, truncated="drop"), tmp_path / "drop", prompts)
        asked = sum(server.asked.values())
        assert run(settings(server, truncated="drop"), tmp_path / "drop", prompts).dropped == 1
        assert sum(server.asked.values()) == asked  # what was dropped is settled
    assert (kept.done, kept.truncated, kept.dropped, kept.errors) == (6, 2, 0, 0)
    assert (dropped.done, dropped.truncated, dropped.dropped, dropped.errors) == (5, 2, 1, 0)
    assert answers_by_id(tmp_path / "keep") == {f"row-{n}": expected_conversation(n, 2) for n in range(6)}
    # Row 1 lost its first answer and with it everything; row 2 is as good as ever up to its second.
    expected = {f"row-{n}": expected_conversation(n, 2) for n in (0, 3, 4, 5)} | {"row-2": expected_conversation(2)}
    assert answers_by_id(tmp_path / "drop") == expected
    assert [row["id"] for row in lines(tmp_path / "drop/run/regen/errors.jsonl")] == ["row-1"]
    reasons = {row["id"]: [t["finish_reason"] for t in row["turns"]]
               for row in lines(tmp_path / "keep/run/regen/tokens.jsonl")}  # fmt: skip
    assert reasons["row-1"] == ["length", "stop"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "text"])
@pytest.mark.parametrize("keep", [True, False])
def test_reasoning_is_kept_or_left_out(tmp_path: Path, field: str, keep: bool) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 1)

    def think(body: dict[str, Any], answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        if field == "text":
            message["content"] = f"<think>\nhm\n</think>\n\n{message['content']}"
        else:
            message[field] = "hm"

    with ChatServer(edit=think) as server:
        run(settings(server, keep_reasoning=keep), tmp_path, prompts)
    message = answers_by_id(tmp_path)["row-0"][1]
    assert message["content"] == reply([{"role": "user", "content": "q0.0"}])
    assert message.get("reasoning_content") == ("hm" if keep else None)
    assert set(message) <= {"role", "content", "reasoning_content"}


def test_token_ids_of_the_server_are_stored_with_the_tokenizers_fingerprint(tmp_path: Path, tiny_target: Path) -> None:
    from transformers import AutoTokenizer

    from dpace_cli.modeling.target import tokenizer_fingerprint

    prompts = write_prompts(tmp_path / "p.jsonl", 2)

    def ids(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body.get("return_token_ids") and body["messages"][0]["content"] == "q0.0":
            answer["prompt_token_ids"] = [1, 2]
            answer["choices"][0]["token_ids"] = [3, 4]

    with ChatServer(edit=ids) as server:
        config = settings(server, return_token_ids=True)
        target = config.target.model_copy(update={"path": str(tiny_target)})
        run(config.model_copy(update={"target": target}), tmp_path, prompts)
    first, second = lines(tmp_path / "run/regen/tokens.jsonl")
    assert first["fingerprint"] == tokenizer_fingerprint(AutoTokenizer.from_pretrained(tiny_target))
    assert (first["turns"][0]["prompt_ids"], first["turns"][0]["answer_ids"]) == ([1, 2], [3, 4])
    assert second["fingerprint"] is None  # a row without ids is tokenized by the training


TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("same", [True, False])
def test_a_tools_reply_follows_only_the_call_that_it_answers(tmp_path: Path, same: bool) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"city": "Bonn"}}}
    source = [
        {"role": "user", "content": "where"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "here", "tool_call_id": "c1"},
        {"role": "assistant", "content": "source"},
    ]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"id": "r", "conversations": source, "tools": TOOLS}) + "\n")

    def call_first(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["messages"][-1]["role"] == "user":
            city = "Bonn" if same else "Trier"
            arguments = json.dumps({"city": city}, indent=1)
            made = {"id": "x9", "type": "function", "function": {"name": "find", "arguments": arguments}}
            answer["choices"][0].update(
                message={"role": "assistant", "content": None, "tool_calls": [made]}, finish_reason="tool_calls"
            )

    with ChatServer(edit=call_first) as server:
        result = run(settings(server), tmp_path, prompts)
    assert result.done == 1
    assert all(body["tools"] == TOOLS for body in server.bodies)
    row = lines(result.output)[0]
    assert row["tools"] == TOOLS
    made = row["conversations"]
    if same:
        assert [m["role"] for m in made] == ["user", "assistant", "tool", "assistant"]
        assert made[:3] == source[:3]
        assert made[3]["content"].startswith("answer ")
        sent = server.bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(sent) == {"city": "Bonn"}
    else:
        assert [m["role"] for m in made] == ["user", "assistant"]
        assert json.loads(made[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Trier"}


def test_a_signal_stops_at_once_and_the_next_run_goes_on(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 60)
    with ChatServer(delay_s=0.02) as server:

        def stop_once(body: dict[str, Any], answer: dict[str, Any]) -> None:
            if sum(server.answered.values()) == 20:
                os.kill(os.getpid(), signal.SIGTERM)

        server.edit = stop_once
        with pytest.raises(Interrupted), console.stoppable():
            run(settings(server, concurrency=4), tmp_path, prompts)
        some = answers_by_id(tmp_path)
        assert 0 < len(some) < 60
        result = run(settings(server, concurrency=4), tmp_path, prompts)
    assert (result.done, result.errors, result.resumed) == (60, 0, len(some))
    assert answers_by_id(tmp_path) == {f"row-{n}": expected_conversation(n) for n in range(60)}


KILLED_AT_RANDOM = """
import json, os, random, signal, sys, time
from pathlib import Path
from dpace_cli import regen
from dpace_cli.config import Config
from dpace_cli.engines import http
from dpace_cli.records import RunFolder

http.SHORTEST_WAIT_S, http.LONGEST_WAIT_S = 0.01, 0.1
config, folder, prompts, waits = json.loads(sys.argv[1])

def work():
    child = os.fork()
    if child == 0:
        regen.run(Config.model_validate(config), RunFolder(Path(folder)), data=Path(prompts))
        os._exit(0)
    return child

killed = 0
for wait in waits:
    child = work()
    time.sleep(wait)
    done, _ = os.waitpid(child, os.WNOHANG)
    if done == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
_, status = os.waitpid(work(), 0)
print(json.dumps([killed, os.waitstatus_to_exitcode(status)]))
"""


def test_after_kills_at_random_times_every_row_is_there_exactly_once(tmp_path: Path) -> None:
    draws = random.Random(11)
    prompts = write_prompts(tmp_path / "p.jsonl", 120, turns=2)
    schedule = {f"q{n}.{t}": draws.choices([None, *TRANSIENT_FAULTS], k=3) for n in range(120) for t in range(2)}

    def fault(body: dict[str, Any], earlier: int) -> str | None:
        prompt = body["messages"][-1]["content"]
        if prompt == "q7.1":
            return "400"
        return schedule[prompt][earlier] if earlier < 3 and draws.random() < 0.3 else None

    with ChatServer(fault, delay_s=0.01, slow_s=1.0) as one, ChatServer(fault, delay_s=0.01, slow_s=1.0) as two:
        config = settings(one, two, concurrency=3, timeout_s=0.7, max_retries=12).model_dump(mode="json")
        folder = tmp_path / "run"
        waits = [draws.uniform(0.1, 0.5) for _ in range(5)]
        done = subprocess.run(
            [sys.executable, "-c", KILLED_AT_RANDOM, json.dumps([config, str(folder), str(prompts), waits])],
            capture_output=True, text=True, timeout=300, check=True,
        )  # fmt: skip
        killed, code = json.loads(done.stdout.splitlines()[-1])
    assert (killed, code) == (5, 0), done.stderr
    expected = {f"row-{n}": expected_conversation(n, 2) for n in range(120) if n != 7}
    assert answers_by_id(tmp_path) == expected
    assert [row["id"] for row in lines(folder / "regen/errors.jsonl")] == ["row-7"]
    assert [row["id"] for row in lines(folder / "regen/tokens.jsonl")] == list(expected)
