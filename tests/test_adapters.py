"""Each source's rows become conversations, by rules that are named, counted, and can be turned off."""

from __future__ import annotations

import json

import pytest

from dpace_cli.data.adapters import ADAPTERS, REJECTIONS, REPAIRS, UNCONDITIONAL, Cleaner, Rejected


def clean(
    row: object, source: str = "sharegpt", disabled: tuple[str, ...] = ()
) -> tuple[list[tuple[str, str]], set[str]]:
    """(role, content) of the turns, and the repairs."""
    made = Cleaner(source, disabled).row(row)
    return [(message["role"], message["content"]) for message in made.messages], made.repairs


def reason(row: object, source: str = "sharegpt", disabled: tuple[str, ...] = ()) -> str:
    with pytest.raises(Rejected) as rejection:
        Cleaner(source, disabled).row(row)
    assert rejection.value.reason in REJECTIONS
    return rejection.value.reason


def turns(*pairs: tuple[str, object]) -> dict:
    return {"id": "a", "conversations": [{"from": role, "value": content} for role, content in pairs]}


QA = [("user", "q"), ("assistant", "a")]
MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FROM_VALUE = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("sharegpt", turns(("human", "q"), ("gpt", "a"))),
        ("sharegpt", {"id": "a", "conversations": MESSAGES}),
        ("sharegpt", turns(("user", "q"), ("assistant", "a"))),
        ("zlab", {"messages": MESSAGES}),
        ("ultrachat", {"prompt": "q", "prompt_id": "x",
                       "messages": MESSAGES}),
        ("ultrachat", {"id": "0", "data": ["q", "a"]}),
        ("perfectblend", {"conversations": FROM_VALUE, "source": "s"}),
        ("alpaca", {"instruction": "q", "input": "", "output": "a", "text": "..."}),
        ("jsonl", {"id": "a", "messages": MESSAGES}),
    ],
)  # fmt: skip
def test_every_source_gives_roles_and_contents(source, row):
    assert clean(row, source) == (QA, set())


def test_every_source_of_the_config_has_an_adapter():
    from typing import get_args

    from dpace_cli.config import Source

    assert set(ADAPTERS) == set(get_args(Source))


def test_alpaca_input_follows_its_instruction():
    assert clean({"instruction": "Add.", "input": "1, 2", "output": "3"}, "alpaca")[0][0] == ("user", "Add.\n\n1, 2")


def test_a_row_keeps_only_what_specforge_takes():
    row = {
        "id": 7, "status": "ok", "max_length": 3, "score": 1.5,
        "conversations": [
            {"role": "user", "content": "q", "name": "me", "weight": 0},
            {"role": "assistant", "content": "a", "reasoning_content": "hm", "train": True},
        ],
    }  # fmt: skip
    made = Cleaner("jsonl").row(row).to_json()
    assert made == {
        "id": "7",
        "conversations": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        ],
    }


@pytest.mark.parametrize("name", ["chatgpt", "bing", "bard", "ChatGPT", "gpt-4", "Claude-3.5", "llama2", "bot"])
def test_a_role_that_is_a_models_name_is_the_assistant_and_is_remembered(name):
    cleaner = Cleaner("sharegpt")
    made = cleaner.row(turns(("human", "q"), (name, "a"), ("human", "q"), (name, "a")))
    assert [m["role"] for m in made.messages] == ["user", "assistant"] * 2
    assert made.repairs == {"model_role"}
    assert cleaner.model_roles == {name: 2}


# One row for each repair: (rule, row, turns after it, what becomes of the row when the rule is off).
REPAIRED = [
    ("dropped_leading_assistant", turns(("gpt", "x"), ("human", "q"), ("gpt", "a")), QA, "starts_with_assistant"),
    ("dropped_leading_assistant", turns(("system", "s"), ("gpt", "x"), ("human", "q"), ("gpt", "a")),
     [("system", "s"), *QA], "starts_with_assistant"),
    ("merged_turns", turns(("human", "q"), ("human", "r"), ("gpt", "a")), [("user", "q\n\nr"), QA[1]],
     "not_alternating"),
    ("merged_turns", turns(("human", "q"), ("gpt", "a"), ("gpt", "b")), [QA[0], ("assistant", "a\n\nb")],
     "not_alternating"),
    ("dropped_empty_turn", turns(("human", "q"), ("gpt", "a"), ("human", None)), QA, "empty_turn"),
    ("dropped_empty_turn", turns(("human", "q"), ("gpt", "a"), ("human", "")), QA, "empty_turn"),
    ("trimmed_whitespace", turns(("human", "q\n"), ("gpt", " a")), QA, [("user", "q\n"), ("assistant", " a")]),
    ("joined_text_parts", turns(("human", [{"type": "text", "text": "q"}]), ("gpt", "a")), QA, "bad_content"),
    ("joined_text_parts", turns(("human", {"type": "text", "text": "q"}), ("gpt", "a")), QA, "bad_content"),
    ("stringified_content", turns(("human", 3), ("gpt", 1.5)), [("user", "3"), ("assistant", "1.5")], "bad_content"),
    ("model_role", turns(("human", "q"), ("bing", "a")), QA, "unknown_role"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "row", "expected", "otherwise"), REPAIRED)
def test_a_repair_is_named_and_can_be_turned_off(rule, row, expected, otherwise):
    assert clean(row) == (expected, {rule})
    if isinstance(otherwise, str):
        assert reason(row, disabled=(rule,)) == otherwise
    else:
        assert clean(row, disabled=(rule,)) == (otherwise, set())


REJECTED = [
    ("not_an_object", None),
    ("not_an_object", ["a"]),
    ("not_an_object", "text"),
    ("no_conversation", {"id": "a"}),
    ("no_conversation", {"conversations": "hello"}),
    ("no_conversation", {"conversations": {"from": "human"}}),
    ("empty_conversation", {"conversations": []}),
    ("empty_conversation", turns(("human", " "), ("gpt", None))),
    ("no_user_turn", turns(("system", "s"))),
    ("no_user_turn", turns(("gpt", "a"))),
    ("no_answer", turns(("human", "q"))),
    ("bad_turn", {"conversations": ["hello"]}),
    ("bad_turn", {"conversations": [None]}),
    ("bad_turn", {"conversations": [{"value": "q"}]}),
    ("bad_turn", {"conversations": [{"from": 3, "value": "q"}]}),
    ("bad_turn", {"conversations": [{"from": ["human"], "value": "q"}]}),
    ("bad_content", turns(("human", True))),
    ("bad_content", turns(("human", {"a": 1}))),
    ("bad_content", turns(("human", [{"type": "image", "url": "u"}]))),
    ("unknown_role", turns(("narrator", "q"))),
    ("misplaced_system", turns(("human", "q"), ("system", "s"), ("gpt", "a"))),
    ("misplaced_tool", turns(("human", "q"), ("tool", "r"), ("gpt", "a"))),
    ("bad_tools", turns(("human", "q"), ("function_call", "no json"))),
    ("bad_tools", turns(("human", "q"), ("function_call", '{"arguments": {}}'))),
    ("bad_tools", {**turns(("human", "q"), ("gpt", "a")), "tools": "no json"}),
    ("bad_tools", {**turns(("human", "q"), ("gpt", "a")), "tools": [1]}),
    ("bad_content", {"messages": [{"role": "user", "content": "q", "reasoning_content": 3}]}),
]


@pytest.mark.parametrize(("name", "row"), REJECTED)
def test_what_cannot_be_repaired_is_rejected_by_name(name, row):
    assert reason(row) == name


@pytest.mark.parametrize(
    ("name", "row", "left"),
    [
        ("no_user_turn", turns(("system", "s"), ("gpt", "a")), None),
        ("no_answer", turns(("human", "q")), [("user", "q")]),
        ("unknown_role", turns(("narrator", "n"), ("human", "q"), ("gpt", "a")), [("narrator", "n"), *QA]),
        ("misplaced_system", turns(("human", "q"), ("system", "s"), ("gpt", "a")), [QA[0], ("system", "s"), QA[1]]),
    ],
)
def test_a_rejection_can_be_turned_off_where_something_is_left_to_keep(name, row, left):
    if left is None:
        assert reason(row, disabled=(name,)) == "no_answer"
        assert clean(row, disabled=(name, "no_answer"))[0] == [("system", "s")]
    else:
        assert clean(row, disabled=(name,))[0] == left


def test_two_rules_turned_off_leave_the_row_as_it_is():
    row = turns(("gpt", "x"), ("human", "q"), ("human", "r"), ("gpt", ""))
    off = ("dropped_leading_assistant", "starts_with_assistant", "merged_turns", "not_alternating",
           "dropped_empty_turn", "empty_turn")  # fmt: skip
    assert clean(row, disabled=off) == ([("assistant", "x"), ("user", "q"), ("user", "r"), ("assistant", "")], set())


def test_every_rule_has_a_sentence_and_the_unconditional_ones_are_reasons():
    assert all({**REPAIRS, **REJECTIONS}.values())
    assert set(REJECTIONS) >= UNCONDITIONAL
    assert not set(REPAIRS) & set(REJECTIONS)


def test_a_prompt_alone_is_a_row_of_the_source_jsonl():
    assert clean({"messages": [{"role": "user", "content": "q"}]}, "jsonl") == ([("user", "q")], set())


# --- tools -----------------------------------------------------------------------------------------------

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


def test_function_call_and_observation_become_tool_calls_and_tool_by_a_named_rule():
    row = turns(("human", "q"), ("function_call", json.dumps(CALL)), ("observation", "rain"), ("gpt", "It rains."))
    made = Cleaner("sharegpt").row(row)
    assert made.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "It rains."},
    ]
    assert made.repairs == {"tool_turns"}
    assert made.has_tools
    assert not made.plain
    assert reason(row, disabled=("tool_turns",)) == "unknown_role"


def test_openai_tool_calls_and_tools_are_kept_as_they_are():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    row = {
        "id": "a",
        "tools": json.dumps(tools),
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It rains."},
        ],
    }
    made = Cleaner("jsonl").row(row)
    assert made.repairs == set()
    assert made.tools == tools
    assert [m["role"] for m in made.messages] == ["user", "assistant", "tool", "assistant"]
    assert made.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert made.to_json()["tools"] == tools


def test_rejects_are_taken_back_in_the_layout_that_they_had():
    mended = {"reason": "no_conversation", "source": "alpaca", "file": "f", "line": 3,
              "row": {"instruction": "q", "output": "a"}}  # fmt: skip
    assert clean(mended, "jsonl") == (QA, set())
    as_text = {"reason": "invalid_json", "source": "sharegpt", "row": json.dumps(turns(("human", "q"), ("gpt", "a")))}
    assert clean(as_text, "jsonl") == (QA, set())
    assert reason({**as_text, "row": '{"id": '}, "jsonl") == "invalid_json"
    assert reason({**as_text, "row": 3}, "jsonl") == "not_an_object"
    nested = {"reason": "x", "row": {"reason": "y", "row": turns(("human", "q"))}, "source": "jsonl"}
    assert reason(nested, "jsonl") == "no_conversation"
