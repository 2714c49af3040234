"""Rows out of damaged and oddly named files: what is whole is read, and what is not is reported."""

from __future__ import annotations

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpace_cli.data import reading
from dpace_cli.data.reading import SourceFile
from dpace_cli.errors import UsageError


def rows_of(path: Path) -> tuple[list, SourceFile]:
    source = SourceFile(path)
    return list(source.rows()), source


def conversation(number: int, text: str = "hello") -> dict:
    return {"id": f"row-{number}", "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]}


ROWS = [
    conversation(number, text)
    for number, text in enumerate(
        ["plain", 'quote " and \\ and { [ } ]', '\n  },\n  {\n    "id"', "né 한 🎉", "", "x" * 3000]
    )
]
LAYOUTS = {
    "array": lambda rows: json.dumps(rows, ensure_ascii=False),
    "pretty array": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "array with a row a line": lambda rows: "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n",
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "lines without a last end": lambda rows: "\n".join(map(json.dumps, rows)),
    "lines with returns": lambda rows: "\r\n".join(map(json.dumps, rows)) + "\r\n",
    "values": lambda rows: "\n".join(json.dumps(row, indent=1) for row in rows),
    "values in lines of old Macs": lambda rows: "\r".join(map(json.dumps, rows)) + "\r",
    "values with nothing between": lambda rows: "".join(map(json.dumps, rows)),
    "values with commas and without brackets": lambda rows: ",\n".join(map(json.dumps, rows)) + "\n",
    "values between which anything may lie": lambda rows: (
        " ".join(map(json.dumps, rows[:2])) + "\n\n" + ",".join(map(json.dumps, rows[2:]))
    ),
}
PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("chunk", [7, 64, 1 << 20])
def test_every_layout_is_read_by_content_whatever_the_file_is_called(tmp_path, monkeypatch, layout, packing, chunk):
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    path = tmp_path / "data.txt"
    path.write_bytes(PACKINGS[packing](LAYOUTS[layout](ROWS).encode()))
    rows, source = rows_of(path)
    if layout.startswith("values") and chunk < 1 << 20:
        return  # what a file is, is found out from its first piece: a piece of 7 bytes tells too little
    assert [row.value for row in rows] == ROWS
    assert source.cut_at is None
    assert not source.oddities


def test_places_lead_back_to_the_rows(tmp_path):
    text = LAYOUTS["pretty array"](ROWS).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(text)
    for row in rows_of(path)[0]:
        assert row.place == "byte"
        assert text[row.number : row.number + len(row.data)] == row.data
        assert json.loads(row.data) == row.value
    path.write_text("\n" + LAYOUTS["lines"](ROWS))
    assert [(row.place, row.number) for row in rows_of(path)[0]] == [("line", n + 2) for n in range(len(ROWS))]


@settings(max_examples=100, deadline=None)
@given(
    ends=st.lists(st.sampled_from([[], [{}], {}, "}", '}, {"id": 1', 3, [[["x"]]], None]), min_size=1, max_size=30),
    layout=st.sampled_from(["array", "pretty array", "values"]),
    chunk=st.sampled_from([16, 200, 1 << 20]),
)
@example(ends=[[], None, [], None, []], layout="array", chunk=1 << 20)
def test_rows_of_an_array_may_end_as_they_like(tmp_path_factory, ends, layout, chunk):
    rows = [{"id": str(n), "conversations": end} if end is not None else "no row" for n, end in enumerate(ends)]
    if layout == "values":
        rows = [row for row in rows if row != "no row"]
    text = LAYOUTS[layout](rows).encode()
    path = tmp_path_factory.mktemp("ends") / "rows.json"
    path.write_bytes(text)
    before, reading.CHUNK_BYTES = reading.CHUNK_BYTES, chunk if layout != "values" else 1 << 20
    try:
        found, source = rows_of(path)
    finally:
        reading.CHUNK_BYTES = before
    assert [row.value for row in found] == rows
    if source.layout != "lines":
        assert all(text[row.number : row.number + len(row.data)] == row.data for row in found)


@settings(max_examples=150, deadline=None)
@given(
    layout=st.sampled_from(["array", "pretty array", "lines", "values"]),
    share=st.floats(0, 1),
    chunk=st.sampled_from([16, 100, 1 << 20]),
)
def test_a_file_cut_anywhere_gives_every_whole_row_and_says_where_it_breaks_off(tmp_path_factory, layout, share, chunk):
    whole = LAYOUTS[layout](ROWS).encode()
    size = int(share * len(whole))
    path = tmp_path_factory.mktemp("cut") / "cut.json"
    path.write_bytes(whole[:size])
    before, reading.CHUNK_BYTES = reading.CHUNK_BYTES, chunk if layout != "values" else 1 << 20
    try:
        rows, source = rows_of(path)
    finally:
        reading.CHUNK_BYTES = before
    expected = ends_before(whole, size)
    assert [row.value for row in rows] == ROWS[: len(expected)]
    inside = size < len(whole.rstrip()) and (layout not in ("lines", "values") or size not in (0, *boundaries(whole)))
    if inside and whole[:size].strip():
        assert source.cut_at is not None
        assert (expected[-1] if expected else 0) <= source.cut_at <= size
    elif not inside:
        assert source.cut_at is None


def ends_before(whole: bytes, size: int) -> list[int]:
    """Ends of the rows that lie before a position, found by another parser."""
    return [end for _, end in spans(whole) if end <= size]


def boundaries(whole: bytes) -> set[int]:
    """Positions between two rows, at which a file without brackets is whole."""
    found = spans(whole)
    return {p for (_, end), (start, _) in pairwise(found) for p in range(end, start + 1)} | set(
        range(found[-1][1], len(whole) + 1)
    )


def spans(whole: bytes) -> list[tuple[int, int]]:
    text, decoder, found, at = whole.decode(), json.JSONDecoder(), [], 0
    while (at := text.find("{", at)) >= 0:
        _, end = decoder.raw_decode(text, at)
        found.append((len(text[:at].encode()), len(text[:end].encode())))
        at = end
    return found


def test_a_truncated_archive_gives_the_rows_before_the_damage(tmp_path):
    random.seed(0)
    many = [conversation(n, str(random.random()) * 50) for n in range(400)]
    for pack, name in ((gzip.compress, "a.json"), (zstandard.compress, "b.json")):
        packed = pack(json.dumps(many).encode())
        path = tmp_path / name
        path.write_bytes(packed[: len(packed) // 2])
        rows, source = rows_of(path)
        assert 0 < len(rows) < 400
        assert [row.value for row in rows] == many[: len(rows)]
        assert source.cut_at is not None


def test_oddities_are_read_and_counted(tmp_path):
    path = tmp_path / "odd.json"
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n\n  \n" + json.dumps(ROWS[1]).encode() + b"\n"
    )
    rows, source = rows_of(path)
    assert [row.value for row in rows] == ROWS[:2]
    assert source.oddities == {"byte_order_mark": 1, "blank_lines": 2}


@pytest.mark.parametrize("content", [b"", b"  \n \n", b"\xef\xbb\xbf"])
def test_a_file_without_content_has_no_rows(tmp_path, content):
    path = tmp_path / "empty.json"
    path.write_bytes(content)
    rows, source = rows_of(path)
    assert rows == []
    assert source.oddities["empty_file"] == 1
    assert source.cut_at is None


def test_bad_utf8_stays_in_its_row(tmp_path):
    path = tmp_path / "bad.jsonl"
    bad = json.dumps(conversation(1, "AAAA")).encode().replace(b"AAAA", b"a\xff\xe2\x82b")
    three = [json.dumps(ROWS[0]).encode(), bad, json.dumps(ROWS[2]).encode()]
    for text in (b"\n".join(three), b"[" + b",".join(three) + b"]"):
        path.write_bytes(text)
        rows, _ = rows_of(path)
        assert [row.bad_utf8() for row in rows] == [False, True, False]
        assert rows[1].value["id"] == "row-1"
        assert rows[2].value == ROWS[2]


DAMAGED = [
    '{"id": "x", "conversations": [nonsense]}',
    '{"id": "x", "conversations": [{"from": "human", "value": "open}]}',
    '{"id": "x", "conversations": [{"from": "human", "value": "a"}',
    '{"id": "x" "conversations": []}',
    '{"id": "x", "n": ' + "9" * 5000 + "}",
    "???",
    '"just text',
]


@pytest.mark.parametrize("damaged", DAMAGED)
@pytest.mark.parametrize("layout", ["lines", "array"])
def test_a_damaged_row_takes_no_other_row_with_it(tmp_path, damaged, layout):
    texts = [json.dumps(ROWS[0]), json.dumps(ROWS[1]), damaged, json.dumps(ROWS[3]), json.dumps(ROWS[4])]
    path = tmp_path / "d.json"
    path.write_text("\n".join(texts) + "\n" if layout == "lines" else "[" + ",\n".join(texts) + "]")
    rows, source = rows_of(path)
    good = [row.value for row in rows if row.reason is None]
    assert [row for row in good if isinstance(row, dict)] == [ROWS[0], ROWS[1], ROWS[3], ROWS[4]]
    assert {row.reason for row in rows} == {None, "invalid_json"}
    assert source.cut_at is None


def test_rows_that_are_json_but_odd_are_read(tmp_path):
    path = tmp_path / "odd.jsonl"
    lines = [
        '{"id": 1, "id": 2}',
        '{"a": NaN, "b": -Infinity}',
        '{"a": "line\tbreak\\ud800"}',
        '{"a": 123456789012345678901}',
    ]
    path.write_text("\n".join(lines) + "\n")
    rows, _ = rows_of(path)
    assert [row.value for row in rows[:3]] == [{"id": 2}, {"a": None, "b": None}, {"a": "line\tbreak\ud800"}]
    assert rows[3].exact() == {"a": 123456789012345678901}


def test_deep_nesting_is_a_reason_and_no_crash(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" + "[" * 100_000 + "]" * 100_000 + "," + json.dumps(ROWS[0]) + "]")
    rows, _ = rows_of(path)
    assert [row.reason for row in rows] == ["too_deep", None]
    assert rows[1].value == ROWS[0]


@pytest.mark.parametrize("layout", ["lines", "array"])
@pytest.mark.parametrize("text", ["y", "\\", '"', "\\}]", "{{["])
@pytest.mark.parametrize("chunk", [3_999, 4_000])
def test_a_row_beyond_the_bound_is_passed_over_without_being_held(tmp_path, monkeypatch, layout, text, chunk):
    monkeypatch.setattr(reading, "MAX_ROW_BYTES", 20_000)
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
    rows = [conversation(0), conversation(1, text * 50_000), conversation(2), conversation(3)]
    path = tmp_path / "huge.json"
    path.write_text(LAYOUTS[layout](rows))
    read, source = rows_of(path)
    assert [row.reason for row in read if row.reason] == ["row_too_large"]
    assert [row.value for row in read if row.reason is None] == [rows[0], rows[2], rows[3]]
    assert source.cut_at is None


def test_a_line_of_many_megabytes_is_read(tmp_path):
    rows = [conversation(0), conversation(1, "word " * 1_000_000), conversation(2)]
    path = tmp_path / "long.jsonl"
    path.write_text(LAYOUTS["lines"](rows))
    assert [row.value for row in rows_of(path)[0]] == rows


def test_the_hash_is_that_of_the_file(tmp_path):
    import hashlib

    path = tmp_path / "a.json"
    for content in (b"", LAYOUTS["array"](ROWS).encode(), gzip.compress(b"{}" * 9)):
        path.write_bytes(content)
        assert rows_of(path)[1].sha256 == hashlib.sha256(content).hexdigest()


def test_utf16_and_missing_files_are_named(tmp_path):
    path = tmp_path / "wide.json"
    path.write_text(json.dumps(ROWS), encoding="utf-16")
    with pytest.raises(UsageError, match="UTF-16") as error:
        rows_of(path)
    assert "iconv" in error.value.hint
    with pytest.raises(UsageError, match="no\\.json"):
        rows_of(tmp_path / "no.json")
