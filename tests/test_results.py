"""The record: what its figures are made of, and that it can be read again."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dflash.benchmark import _print_decode_summary
from hypothesis import given, settings
from hypothesis import strategies as st

from dpace_cli.errors import UsageError
from dpace_cli.results import RECORD_VERSION, BenchRecord, Decoded, PromptResult, load_records

BLOCK = 8


def decoded(lengths: list[int], decode_s: float = 1.0, **more) -> Decoded:
    return Decoded(1 + sum(lengths), lengths, 0.1, decode_s, "stop", list(range(1 + sum(lengths))), **more)


def record(prompts: list[PromptResult], **more) -> BenchRecord:
    fields = {
        "arm": "dpace", "seed": 0, "objective": {"name": "dpace", "alpha": 0.5}, "checkpoint": "c",
        "checkpoint_sha256": "0" * 64, "step": 400, "target": "demo", "engine": "local", "dataset": "gsm8k",
        "data_sha256": "1" * 64, "temperature": 0.0, "top_p": 1.0, "top_k": 0, "block_size": BLOCK,
        "num_draft_layers": 3, "max_new_tokens": 64, "template_options": {"enable_thinking": False},
        "versions": {"torch": "2"}, "device": "cpu", "bench_seed": 0, "started": "2026-01-01T00:00:00+00:00",
        "seconds": 3.5, "prompts": prompts,
    }  # fmt: skip
    return BenchRecord(**{**fields, **more})


def prompt(index: int, draft: Decoded | None, baseline: Decoded | None = None, **more) -> PromptResult:
    return PromptResult(f"p{index}", index, 0, 12, baseline, draft, **more)


lengths = st.lists(st.integers(1, BLOCK), max_size=12)
seconds = st.floats(1e-3, 10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(lengths, seconds, seconds), min_size=1, max_size=6))
def test_the_figures_are_those_that_dflash_prints_for_the_same_responses(answers):
    prompts, responses = [], []
    for index, (accepted, slow, fast) in enumerate(answers):
        tokens = 1 + sum(accepted)
        draft, baseline = decoded(accepted, fast), decoded([1] * (tokens - 1), slow)
        prompts.append(prompt(index, draft, baseline))
        responses.append({
            1: SimpleNamespace(time_per_output_token=slow / tokens, acceptance_lengths=[1] * (tokens - 1)),
            BLOCK: SimpleNamespace(time_per_output_token=fast / tokens, acceptance_lengths=accepted),
        })  # fmt: skip
    made = record(prompts)
    printed = printed_by_dflash(responses)
    assert f"{made.sr:.2f}" == printed["Decoding speedup"]
    if made.tau is None:
        assert printed["Average Acceptance length"] == "n/a"
        assert made.tau_pooled is None and made.histogram() == []
    else:
        assert f"{made.tau:.2f}" == printed["Average Acceptance length"]
        assert str([f"{share * 100:.1f}%" for share in made.histogram()]) == printed["Acceptance length histogram"]
        pooled = [length for accepted, _, _ in answers for length in accepted]
        assert made.tau_pooled == pytest.approx(sum(pooled) / len(pooled))
        assert made.rounds == len(pooled)


def printed_by_dflash(responses) -> dict[str, str]:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        _print_decode_summary(responses, BLOCK)
    return dict(line.split(": ", 1) for line in out.getvalue().splitlines() if ": " in line)


def test_only_requests_that_every_arm_finished_count():
    made = record([
        prompt(0, decoded([4, 4], 1.0), decoded([1] * 8, 2.0), lossless=True),
        prompt(1, None, None, error="out of memory"),
        prompt(2, decoded([2, 2], 1.0), decoded([1] * 4, 3.0), lossless=False, near_tie=True),
        prompt(3, decoded([6], 1.0), decoded([1] * 6, 3.0), lossless=False, near_tie=False),
        prompt(4, decoded([8], 1.0), decoded([1] * 8, 9.0), lossless=True, error="the next turn failed"),
    ])  # fmt: skip
    assert [p.index for p in made.finished] == [0, 2, 3]
    assert made.tau == pytest.approx((4 + 2 + 6) / 3) and made.tau_pooled == pytest.approx(18 / 5)
    assert made.lossless == pytest.approx(1 / 3)
    assert (made.near_ties, made.broken) == (1, 1)


def test_a_record_without_a_baseline_claims_no_speed_up():
    assert record([prompt(0, decoded([4, 4]))]).sr is None
    assert record([prompt(0, decoded([4]), decoded([1] * 4))], engine="simulate").sr is None


def test_acceptance_by_position_counts_drafts_that_came_that_far():
    # Drafts whose fate is known in full: each position is accepted with its own chance until one is not.
    chances, draw = [0.9, 0.8, 0.5, 0.7, 0.9, 0.3, 0.6], random.Random(1)
    tried, right = [0] * (BLOCK - 1), [0] * (BLOCK - 1)
    prompts = []
    for index in range(60):
        steps = []
        for step in range(20):
            accepted = 0
            while accepted < BLOCK - 1 and draw.random() < chances[accepted]:
                accepted += 1
            if step < 19:
                for k in range(min(accepted + 1, BLOCK - 1)):
                    tried[k] += 1
                    right[k] += k < accepted
                steps.append(accepted + 1)
            else:  # the end cuts the last step; what came after was never judged
                cut = draw.randint(1, accepted + 1)
                for k in range(cut - 1):
                    tried[k] += 1
                    right[k] += 1
                steps.append(cut)
        prompts.append(prompt(index, decoded(steps)))
    assert record(prompts).acceptance_by_position() == pytest.approx([r / t for r, t in zip(right, tried)])
    assert record([prompt(0, decoded([2, 1]))]).acceptance_by_position() == [1.0, 0.0] + [None] * 5


def test_servers_tell_means_and_counters_in_place_of_steps():
    sglang = record([prompt(i, Decoded(9, [], 0.1, 1.0, "stop", steps=s, mean_acceptance=m)) for i, (s, m) in
                     enumerate([(2, 4.0), (4, 2.0)])], engine="sglang")  # fmt: skip
    assert sglang.tau == 3.0 and sglang.tau_pooled == pytest.approx((2 * 4 + 4 * 2) / 6) and sglang.rounds == 6
    vllm = record([prompt(0, Decoded(9, [], 0.1, 1.0, "stop"))], engine="vllm",
                  counters={"drafts": 4, "accepted": 10}, wall_s={"draft": 3.0})  # fmt: skip
    assert vllm.tau is None and vllm.tau_pooled == 3.5 and vllm.throughput == {"draft": 3.0}


def test_a_record_is_read_as_it_was_written(tmp_path):
    made = record([
        prompt(0, decoded([4, 4], 0.3), decoded([1] * 8, math.pi), lossless=True),
        prompt(1, None, error="Ärger – out of memory"),
    ])  # fmt: skip
    path = tmp_path / "deep" / "gsm8k-t0.json"
    made.save(path)
    assert BenchRecord.load(path) == made
    assert load_records([tmp_path]) == [(path, made)]
    assert len(path.read_text("utf-8").splitlines()) < 60, "one line for each field and each prompt"


def test_a_record_of_an_older_dpace_stays_readable(tmp_path):
    path = tmp_path / "old.json"
    made = record([prompt(0, decoded([3]))])
    made.save(path)
    old = json.loads(path.read_text())
    for later in ("key", "counters", "wall_s", "concurrency", "tie_tolerance", "warmup_tokens", "dtype"):
        del old[later]
    del old["prompts"][0]["near_tie"]
    path.write_text(json.dumps({**old, "a_field_of_another_time": 1}))
    assert BenchRecord.load(path) == replace(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "not a bench record"),
        ("[1]", "not a bench record"),
        (json.dumps({"version": RECORD_VERSION + 1, "prompts": []}), "update"),
        ('{"version": 1, "prompts": []}', "BenchRecord without arm"),
        ('{"version": 1, "prompts": [{"id": "a"}]}', "PromptResult without index"),
        ('{"version": 1, "prompts": [3]}', "not a whole bench record"),
        ("not json", "cannot read"),
    ],
)
def test_what_is_no_record_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        BenchRecord.load(path)
    assert message in caught.value.message + caught.value.hint and str(path) in caught.value.message


def test_a_folder_without_records_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no bench record"):
        load_records([tmp_path])


def test_a_record_of_an_older_version_is_read(tmp_path, monkeypatch):
    from dpace_cli import results

    path = tmp_path / "old.json"
    made = record([prompt(0, decoded([3]))])
    made.save(path)
    monkeypatch.setattr(results, "RECORD_VERSION", RECORD_VERSION + 1)  # what the next version of dpace will meet
    assert BenchRecord.load(path) == replace(made, version=RECORD_VERSION + 1)
