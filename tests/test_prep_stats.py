"""`dpace prep stats` and `dpace prep preview`, and the page that documents the rules."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from chat_templates import KINDS, tokenizer_of
from rich.console import Console

from dpace_cli import prep
from dpace_cli.config import TargetConfig
from dpace_cli.data.adapters import HUB_IDS, REJECTIONS, REPAIRS, UNCONDITIONAL
from dpace_cli.data.statistics import main_script
from dpace_cli.errors import UsageError
from dpace_cli.records import to_json


def write(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(key: str, *contents: str) -> dict:
    roles = ("user", "assistant")
    return {"id": key, "conversations": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


ROWS = [
    chat("a", "hello", "yes"),
    chat("b", "q", "one", "r", "two two"),
    chat("c", "Что это такое", "ответ"),
    chat("d", "prompt alone"),
    {"id": "e", "conversations": [{"role": "user", "content": "q"},
                                  {"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
]  # fmt: skip


def target(tmp_path: Path, kind: str) -> TargetConfig:
    tokenizer_of(kind).save_pretrained(tmp_path / kind)
    (tmp_path / kind / "config.json").write_text('{"model_type": "qwen3"}')
    return TargetConfig(path=str(tmp_path / kind))


def shown(result: object, color: bool = False) -> str:
    out = io.StringIO()
    Console(file=out, width=100, force_terminal=color, color_system="standard" if color else None).print(result)
    return out.getvalue()


def test_stats_counts_what_is_in_a_file(tmp_path):
    result = prep.stats(write(tmp_path / "rows.jsonl", ROWS))
    assert (result.rows, result.roles) == (5, {"user": 6, "assistant": 5})
    assert result.turns == {1: 4, 2: 1}
    assert result.scripts == {"Latin": 4, "Cyrillic": 1}
    assert (result.without_answer, result.with_reasoning, result.with_tools) == (1, 1, 0)
    assert result.user_chars.total == sum(len(t) for t in ("hello", "q", "r", "Что это такое", "prompt alone", "q"))
    assert sum(result.user_chars.counts) == 6
    assert sum(result.assistant_chars.counts) == 5
    assert result.supervised is None
    text = shown(result)
    assert "Cyrillic 1" in text
    assert "characters of a user turn" in text
    json.dumps(to_json(result))


def test_stats_measures_tokens_and_the_share_supervised_as_training_sees_them(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:2])
    result = prep.stats(path, target(tmp_path, "chatml"), tmp_path / "plots" / "rows.png")
    tokenizer = tokenizer_of("chatml")
    lengths = [len(tokenizer(tokenizer.apply_chat_template(row["conversations"], tokenize=False)[:-1],
                             add_special_tokens=False)["input_ids"]) for row in ROWS[:2]]  # fmt: skip
    answers = [
        len(tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]) for text in ("yes", "one", "two two")
    ]
    assert result.row_tokens.total == sum(lengths)
    assert result.prompt_tokens.total == lengths[0] - answers[0] + lengths[1] - answers[2]
    assert result.supervised == pytest.approx(sum(answers) / sum(lengths))
    assert (result.tokenized, result.sequences, result.refused) == (2, 2, 0)
    assert (tmp_path / "plots" / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert f"{result.supervised:.1%}" in shown(result)


def test_stats_counts_rows_that_the_template_refuses(tmp_path):
    rows = [{"id": "s", "conversations": [{"role": "system", "content": "s"}, *ROWS[0]["conversations"]]}, ROWS[0]]
    result = prep.stats(write(tmp_path / "rows.jsonl", rows), target(tmp_path, "gemma"))
    assert (result.refused, result.tokenized) == (1, 2)


def test_stats_without_the_targets_tokenizer_leaves_tokens_out(tmp_path, capsys):
    result = prep.stats(write(tmp_path / "rows.jsonl", ROWS), TargetConfig(path=str(tmp_path / "none")))
    assert result.row_tokens is None
    assert "no lengths in tokens" in capsys.readouterr().err


def test_stats_names_what_is_no_file_of_rows(tmp_path):
    with pytest.raises(UsageError, match="has no rows"):
        prep.stats(write(tmp_path / "empty.jsonl", []))
    with pytest.raises(UsageError, match="row 2: no conversation"):
        prep.stats(write(tmp_path / "odd.jsonl", [ROWS[0], {"text": "x"}]))
    with pytest.raises(UsageError, match=r"none\.jsonl"):
        prep.stats(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("text", "script"),
    [("hello", "Latin"), ("안녕하세요 ok", "Hangul"), ("これは日本語です", "Japanese"), ("这是中文", "Han"),
     ("مرحبا", "Arabic"), ("123 !?", "none"), ("", "none"), ("été", "Latin")],
)  # fmt: skip
def test_the_main_script_is_that_of_most_letters(text, script):
    assert main_script([text, "é"] if script == "Latin" else [text]) == script


def test_preview_shows_a_row_as_the_target_sees_it(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    result = prep.preview(path, target(tmp_path, "chatml"), 1)
    (runs,) = result.sequences
    text = tokenizer_of("chatml").apply_chat_template(ROWS[1]["conversations"], tokenize=False)
    assert "".join(piece for piece, _ in runs) == text.removesuffix("\n")
    assert [piece for piece, supervised in runs if supervised] == ["one<|im_end|>", "two two<|im_end|>"]
    assert result.tokens[0] > result.supervised[0] > 0
    plain, coloured = shown(result), shown(result, color=True)
    assert "⟦one<|im_end|>⟧" in plain
    assert "\x1b[1;32mone<|im_end|>" in coloured
    assert "⟦" not in coloured


def test_preview_shows_every_sequence_of_a_row_whose_history_is_rewritten(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    result = prep.preview(path, target(tmp_path, "qwen3-thinking"), 1)
    assert len(result.sequences) == 2
    assert "sequence 2 of 2" in shown(result)
    assert KINDS["qwen3-thinking"].reasoning


def test_preview_of_a_prompt_alone_and_of_no_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert "nothing is supervised" in shown(prep.preview(path, target(tmp_path, "chatml"), 3))
    with pytest.raises(UsageError, match="no row 5"):
        prep.preview(path, TargetConfig(path=str(tmp_path / "chatml")), 5)


def rule_tables() -> str:
    """The tables of docs/data.md, from the rules themselves."""
    lines = [
        "| repair | what it does |",
        "| --- | --- |",
        *(f"| `{name}` | {text} |" for name, text in REPAIRS.items()),
    ]
    lines += ["", "| rejection | reason | can be turned off |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {text} | {'' if name in UNCONDITIONAL else 'yes'} |" for name, text in REJECTIONS.items()]
    return "\n".join(lines)


def test_the_page_on_data_has_every_rule_and_hub_data_set():
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text()
    assert rule_tables() in page
    assert all(name in page for name, _ in HUB_IDS.values())
