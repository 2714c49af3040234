"""`dpace bench` on small models: what is measured, in which order, and what a second call does."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_models import BLOCK, checkpoint, greedy, new_drafter, trained_drafter
from rich.console import Console

from dpace_cli import bench
from dpace_cli.config import Config, TargetConfig
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines import measure_local
from dpace_cli.errors import Interrupted, RunError, UsageError
from dpace_cli.modeling.target import Target, load_target
from dpace_cli.records import CheckpointRef, RunFolder, checkpoint_ref
from dpace_cli.results import BenchRecord, load_records

PROMPTS = [
    {"id": "one", "prompt": "What is 2?"},
    {"id": "two", "turns": ["Say a word.", "And another one."]},
    {"id": "three", "prompt": "Name a colour."},
]


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, target) -> list[CheckpointRef]:
    """Two arms: a drafter that learned two answers by heart, and a random one."""
    root = tmp_path_factory.mktemp("run") / "train"
    prompts = [
        generation_prompt(target.tokenizer, [{"role": "user", "content": row["prompt"]}], {})
        for row in PROMPTS
        if "prompt" in row
    ]
    good = trained_drafter(target, prompts, [greedy(target, prompt, 20) for prompt in prompts])
    train = {"objective": {"name": "dpace", "alpha": 0.5}}
    manifest = {"config": {"train": train, "target": {"path": target.path, "enable_thinking": None}}}
    return [
        checkpoint_ref(checkpoint(root / "dpace-seed3" / "step-000400", good, manifest)),
        checkpoint_ref(checkpoint(root / "dflash-seed3" / "step-000400", new_drafter(target, seed=1))),
    ]


@pytest.fixture
def config(tmp_path, target) -> Config:
    return make_config(tmp_path, target)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, target, trained):
    """The records of one call, for both arms and temperatures."""
    folder = tmp_path_factory.mktemp("undisturbed")
    bench.run(make_config(folder, target), trained, folder / "bench")
    return load_records([folder])


def make_config(folder: Path, target: Target) -> Config:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return Config.model_validate({
        "target": {"path": target.path},
        "bench": {"datasets": [str(path)], "max_new_tokens": 14, "warmup_tokens": 2, "temperatures": [0.0, 1.0]},
    })  # fmt: skip


def counts(record: BenchRecord) -> list:
    """Everything of a record that is not a time."""
    return [
        (p.id, p.index, p.turn, p.prompt_tokens, p.lossless, p.first_difference, p.error,
         *((d.tokens, d.acceptance_lengths, d.output_ids, d.finish_reason) for d in (p.baseline, p.draft) if d))
        for p in record.prompts
    ]  # fmt: skip


def test_one_record_for_each_arm_data_set_and_temperature(config, trained, tmp_path):
    result = bench.run(config, trained, tmp_path / "bench")
    expected = {
        (arm, t): tmp_path / "bench" / f"{arm}-seed3" / f"mine-t{t}.json" for arm in ("dpace", "dflash") for t in (0, 1)
    }
    assert {(line.arm, int(line.temperature)): line.result for line in result.results} == expected
    for (arm, temperature), path in expected.items():
        record = BenchRecord.load(path)
        assert (record.arm, record.seed, record.step, record.dataset) == (arm, 3, 400, "mine")
        assert record.block_size == BLOCK and record.temperature == temperature
        assert [(p.id, p.turn) for p in record.prompts].count(("two", 1)) == 1 and len(record.prompts) == 4
        assert record.lossless == (1.0 if temperature == 0 else None)
        assert all(p.baseline.acceptance_lengths == [1] * (p.baseline.tokens - 1) for p in record.prompts)
        assert record.sr > 0 and record.tau >= 1 and record.seconds > 0 and record.started.startswith("20")
        assert record.objective == ({"name": "dpace", "alpha": 0.5} if arm == "dpace" else {})
        assert record.versions["dflash"] == "0.1.0" and record.device.startswith("cpu")
    first = result.results[0]
    assert (result.dataset, result.tau, result.sr, result.result) == ("mine", first.tau, first.sr, first.result)
    assert first.prompts == 3 and first.requests == 4
    assert [record for _, record in load_records([tmp_path])] != []
    assert not list(tmp_path.rglob("*.partial.jsonl"))


def test_the_terminal_shows_a_row_for_each_record_and_no_empty_column(config, trained, tmp_path):
    result = bench.run(config, trained, tmp_path / "bench")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(result)
    text = console.export_text()
    lines = [line.split() for line in text.splitlines()]
    rows = [line for line in lines if "dpace" in line or "dflash" in line][:4]
    expected = [
        [f"{line.sr:.2f}", f"{line.tau:.2f}", "–" if line.lossless is None else f"{line.lossless:.1%}",
         f"{line.tau_pooled:.2f}"]
        for line in result.results
    ]  # fmt: skip
    assert [row[-4:] for row in rows] == expected
    assert "4 records in" in text and "Seed" not in text and "broken" not in text and "errors" not in text
    assert max(map(len, text.splitlines()[:12])) <= 80


def test_the_arms_of_a_call_share_the_baseline_and_every_prompt(undisturbed):
    for temperature in (0, 1):
        one, other = (record for _, record in undisturbed if record.temperature == temperature)
        assert [p.baseline for p in one.prompts] == [p.baseline for p in other.prompts]
        assert [p.prompt_tokens for p in one.prompts] == [p.prompt_tokens for p in other.prompts]


def test_each_turns_own_answer_goes_into_the_next_prompt(undisturbed, target):
    record = next(record for _, record in undisturbed if record.temperature == 0)
    first, second = (next(p for p in record.prompts if (p.id, p.turn) == ("two", turn)) for turn in (0, 1))
    said = target.tokenizer.decode(first.baseline.output_ids, skip_special_tokens=True)
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": said},
         {"role": "user", "content": "And another one."}],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert second.prompt_tokens == len(ids)
    assert second.baseline.output_ids == greedy(target, ids, 14, target.stop_token_ids)


def test_a_second_bench_elsewhere_gives_identical_counts(config, trained, undisturbed, tmp_path):
    bench.run(config, trained, tmp_path / "bench")
    for path, record in undisturbed:
        assert counts(BenchRecord.load(tmp_path / "bench" / path.parent.name / path.name)) == counts(record)
    alone = bench.run(config, trained[1:], tmp_path / "alone").results
    for line in alone:
        same = next(r for _, r in undisturbed if (r.arm, r.temperature) == (line.arm, line.temperature))
        assert counts(BenchRecord.load(line.result)) == counts(same), "an arm does not depend on the other arms"


def watch(monkeypatch) -> list[tuple[str, int]]:
    """Record which arm decodes what: its block size and the number of its prompt's tokens."""
    seen, original = [], measure_local.decode

    def decode(drafter, model, ids, **settings):
        seen.append((settings["block_size"], len(ids), settings["max_new_tokens"]))
        return original(drafter, model, ids, **settings)

    monkeypatch.setattr(measure_local, "decode", decode)
    return seen


def test_arms_are_interleaved_prompt_by_prompt_after_a_warm_up(config, trained, tmp_path, monkeypatch):
    seen = watch(monkeypatch)
    config.bench.temperatures = [0.0]
    bench.run(config, trained, tmp_path / "bench")
    warm, timed = seen[:3], seen[3:]
    assert [tokens for *_, tokens in warm] == [2, 2, 2] and {tokens for *_, tokens in timed} == {14}
    requests = [timed[i : i + 3] for i in range(0, len(timed), 3)]
    assert len(requests) == 4
    for request in requests:
        assert sorted(size for size, *_ in request) == [1, BLOCK, BLOCK] and len({n for _, n, _ in request}) == 1
    assert len({[size for size, *_ in request].index(1) for request in requests}) > 1, "who begins should change"


def test_what_is_done_is_not_done_again(config, trained, tmp_path, monkeypatch):
    first = bench.run(config, trained, tmp_path / "bench")
    seen = watch(monkeypatch)
    monkeypatch.setattr(measure_local, "load_target", lambda _: pytest.fail("nothing needs the target"))
    assert bench.run(config, trained, tmp_path / "bench") == first
    assert seen == []


@pytest.mark.parametrize(
    "change",
    [
        lambda config, _: setattr(config.bench, "max_new_tokens", 9),
        lambda config, _: setattr(config.bench, "seed", 1),
        lambda config, _: setattr(config.bench, "block_size", 3),
        lambda config, _: setattr(config.bench, "top_k", 5),
        lambda config, _: setattr(config.target, "enable_thinking", False),
        lambda config, _: Path(config.bench.datasets[0]).write_text('{"id": "one", "prompt": "What is 3?"}\n'),
        lambda _, ref: checkpoint(ref.path, new_drafter(load_target(TargetConfig(path="demo")), 5)),
    ],
    ids=["max_new_tokens", "seed", "block_size", "top_k", "template", "prompts", "checkpoint"],
)
def test_another_setting_is_measured_anew(config, trained, tmp_path, monkeypatch, target, change, request):
    config.bench.temperatures = [0.0]
    ref = replace(trained[1], path=tmp_path / "own" / "dflash-seed3" / "step-000400")
    checkpoint(ref.path, new_drafter(target, seed=1))
    before = BenchRecord.load(bench.run(config, [ref], tmp_path / "bench").result)
    if request.node.callspec.id == "checkpoint":
        checkpoint(ref.path, new_drafter(target, seed=5))
    else:
        change(config, ref)
    seen = watch(monkeypatch)
    again = bench.run(config, [ref], tmp_path / "bench").result
    after = BenchRecord.load(again)
    assert seen and after.key != before.key
    assert BenchRecord.load(again.with_name(f"{again.name}.replaced")).key == before.key  # no measurement is lost


class Killed(BaseException):
    """What a kill -9 leaves behind is what this leaves: nothing is cleaned up by the code under test."""


@pytest.mark.parametrize("after", [0, 7, 17])
def test_a_killed_bench_resumes_inside_the_data_set(config, trained, undisturbed, tmp_path, monkeypatch, after):
    original, calls = measure_local.decode, []

    def dies(*args, **settings):
        calls.append(1)
        if len(calls) > after + 3:
            raise Killed
        return original(*args, **settings)

    monkeypatch.setattr(measure_local, "decode", dies)
    with pytest.raises(Killed):
        bench.run(config, trained, tmp_path / "bench")
    for log in (tmp_path / "bench").rglob("*.partial.jsonl"):
        log.write_bytes(log.read_bytes() + b'{"id": "three", "ke')  # a torn last line
    monkeypatch.setattr(measure_local, "decode", original)
    seen = watch(monkeypatch)
    bench.run(config, trained, tmp_path / "bench")
    if after:
        assert len(seen) < 2 * (4 * 3 + 3), "finished prompts are not answered again"
    for _, record in undisturbed:
        path = tmp_path / "bench" / f"{record.arm}-seed3" / f"mine-t{record.temperature:g}.json"
        assert counts(BenchRecord.load(path)) == counts(record)
    assert not list(tmp_path.rglob("*.partial.jsonl"))


def test_a_log_of_other_settings_is_not_used(config, trained, tmp_path, monkeypatch):
    original = measure_local.decode
    calls = []

    def stops(*args, **settings):
        calls.append(1)
        if len(calls) > 8:
            raise Interrupted(2)
        return original(*args, **settings)

    monkeypatch.setattr(measure_local, "decode", stops)
    config.bench.temperatures = [0.0]
    with pytest.raises(Interrupted):
        bench.run(config, trained[:1], tmp_path / "bench")
    assert list(tmp_path.rglob("*.partial.jsonl"))
    monkeypatch.setattr(measure_local, "decode", original)
    config.bench.max_new_tokens = 5
    record = BenchRecord.load(bench.run(config, trained[:1], tmp_path / "bench").result)
    assert max(p.draft.tokens for p in record.prompts) <= 5 and len(record.prompts) == 4


def test_several_steps_of_one_arm_get_files_of_their_own(config, trained, tmp_path):
    config.bench.temperatures = [0.0]
    steps = [trained[0], replace(trained[0], step=200)]
    result = bench.run(config, steps, RunFolder(tmp_path))
    assert [line.result.name for line in result.results] == ["mine-t0-step400.json", "mine-t0-step200.json"]
    assert [line.step for line in result.results] == [400, 200]
    with pytest.raises(UsageError, match="both dpace-seed3, step 400"):
        bench.run(config, [trained[0], trained[0]], tmp_path / "bench")


def test_a_prompt_that_runs_out_of_memory_is_reported_and_the_others_count(
    config, trained, undisturbed, tmp_path, monkeypatch
):
    original = measure_local.decode

    def short_of_memory(drafter, model, ids, **settings):
        if settings["block_size"] > 1 and settings["max_new_tokens"] == 14 and len(ids) == shortest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return original(drafter, model, ids, **settings)

    config.bench.temperatures = [0.0]
    shortest = min(p.prompt_tokens for p in undisturbed[0][1].prompts)
    monkeypatch.setattr(measure_local, "decode", short_of_memory)
    result = bench.run(config, trained[:1], tmp_path / "bench")
    record = BenchRecord.load(result.result)
    failed = [p for p in record.prompts if not p.finished]
    assert len(failed) == result.results[0].errors == 1 and "3 GiB" in failed[0].error
    assert len(record.finished) == 3 and record.tau is not None


def test_no_answer_at_all_is_a_failed_run(config, trained, tmp_path, monkeypatch):
    original = measure_local.decode

    def short_of_memory(drafter, model, ids, **settings):
        if settings["max_new_tokens"] == 14:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(drafter, model, ids, **settings)

    monkeypatch.setattr(measure_local, "decode", short_of_memory)
    with pytest.raises(RunError, match="no prompt of mine was answered; the first: out of memory"):
        bench.run(config, trained[:1], tmp_path / "bench")
    assert not list((tmp_path / "bench").rglob("*.json*"))


def test_other_template_options_than_in_training_are_said_loudly(config, trained, tmp_path, capsys):
    config.target.enable_thinking = False
    bench.run(config, trained[:1], tmp_path / "bench")
    assert "was trained with template options {}" in capsys.readouterr().err.replace("\n", " ")


def test_wrong_inputs_are_errors_before_anything_is_decoded(config, trained, tmp_path, target):
    with pytest.raises(UsageError, match="no checkpoint"):
        bench.run(config, [], tmp_path)
    with pytest.raises(UsageError, match="names mine twice"):
        bench.run(config.model_copy(update={"bench": config.bench.model_copy(
            update={"datasets": [config.bench.datasets[0]] * 2})}), trained, tmp_path)  # fmt: skip
    with pytest.raises(UsageError, match=r"has no model\.safetensors|does not exist"):
        bench.run(config, [CheckpointRef(tmp_path / "none", "none")], tmp_path)
    narrow = tmp_path / "narrow"
    from conftest import make_tiny_target

    other = load_target(TargetConfig(path=str(make_tiny_target(tmp_path / "other", hidden_size=16))))
    with pytest.raises(UsageError, match=r"16 wide, and target .* is 32"):
        bench.run(config, [checkpoint_ref(checkpoint(narrow, new_drafter(other)))], tmp_path)
    foreign = tmp_path / "foreign"
    shutil.copytree(trained[0].path, foreign)
    edited = json.loads((foreign / "config.json").read_text())
    edited["dflash_config"]["mask_token_id"] = 99_999
    (foreign / "config.json").write_text(json.dumps(edited))
    with pytest.raises(UsageError, match="has mask token 99999"):
        bench.run(config, [CheckpointRef(foreign, "foreign")], tmp_path)
    edited["dflash_config"].update(mask_token_id=3, block_size=1)
    (foreign / "config.json").write_text(json.dumps({**edited, "block_size": 1}))
    with pytest.raises(UsageError, match="has blocks of 1: it drafts nothing"):
        bench.run(config, [CheckpointRef(foreign, "foreign")], tmp_path)
    ruined = new_drafter(target)
    ruined.norm.weight[3] = torch.nan
    with pytest.raises(UsageError, match=r"norm\.weight of the drafter in .* not finite"):
        bench.run(config, [checkpoint_ref(checkpoint(tmp_path / "ruined", ruined))], tmp_path)


def test_simulate_agrees_with_decoding(config, trained, undisturbed, tmp_path):
    config.bench.engine, config.bench.temperatures = "simulate", [0.0]
    simulated = bench.run(config, trained, tmp_path / "bench")
    for line, ref in zip(simulated.results, trained):
        real = next(r for _, r in undisturbed if (r.arm, r.temperature) == (ref.arm, 0))
        record = BenchRecord.load(line.result)
        assert line.result.name == "mine-t0-simulated.json" and record.engine == "simulate"
        assert [p.draft.output_ids for p in record.prompts] == [p.baseline.output_ids for p in real.prompts]
        assert [p.draft.acceptance_lengths for p in record.prompts] == [
            p.draft.acceptance_lengths for p in real.prompts
        ]
        assert (record.tau, record.rounds, record.sr) == (pytest.approx(real.tau), real.rounds, None)
        assert record.simulated["anchors"] == real.rounds
        assert len(record.simulated["accuracy"]) == BLOCK - 1
    assert max(line.tau for line in simulated.results) > 1


def test_simulate_makes_the_targets_answers_once(config, trained, tmp_path, monkeypatch):
    config.bench.engine, config.bench.temperatures = "simulate", [0.0]
    config.regen.batch_size = 2
    bench.run(config, trained[:1], tmp_path / "bench")
    from dpace_cli.engines import measure_simulate

    monkeypatch.setattr(measure_simulate, "greedy_batch", lambda *_: pytest.fail("they are there"))
    result = bench.run(config, trained, tmp_path / "bench")
    assert len(result.results) == 2
    config.bench.temperatures = [0.0, 1.0]
    with pytest.raises(UsageError, match="engine simulate is greedy"):
        bench.run(config, trained, tmp_path / "bench")


def let_end(config: Config, folder: Path, ends: list[int]) -> None:
    """Measure a copy of the target whose answers end at these tokens."""
    shutil.copytree(config.target.path, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": ends}))
    config.target.path = str(folder)


@pytest.fixture
def said(undisturbed) -> dict[str, list[int]]:
    """The target's greedy answers to first turns; no end token is among their 14 tokens."""
    free = next(record for _, record in undisturbed if record.temperature == 0)
    assert {p.finish_reason for p in (q.baseline for q in free.prompts)} == {"length"}
    return {p.id: p.baseline.output_ids for p in free.prompts if p.turn == 0}


def test_the_targets_own_answer_goes_into_the_next_prompt_where_a_drafters_is_another(undisturbed, target):
    warm = [record for _, record in undisturbed if record.temperature == 1]
    for record in warm:
        first, second = (next(p for p in record.prompts if (p.id, p.turn) == ("two", turn)) for turn in (0, 1))
        lengths = {}
        for name, answer in (("own", first.baseline), ("drafted", first.draft)):
            said = target.tokenizer.decode(answer.output_ids, skip_special_tokens=True)
            messages = [{"role": "user", "content": "Say a word."}, {"role": "assistant", "content": said},
                        {"role": "user", "content": "And another one."}]  # fmt: skip
            lengths[name] = len(generation_prompt(target.tokenizer, messages, {}))
        assert second.prompt_tokens == lengths["own"]
        assert lengths["own"] != lengths["drafted"], "else this tells nothing"


def steps_by_engine(config, ref, folder: Path) -> dict[str, list[list[int]]]:
    found = {}
    for engine in ("local", "simulate"):
        config.bench.engine = engine
        record = BenchRecord.load(bench.run(config, [ref], folder / engine).result)
        found[engine] = [p.draft.acceptance_lengths for p in record.prompts]
    return found


def test_simulate_cuts_blocks_at_the_maximum_length_as_decoding_does(config, trained, tmp_path):
    """What a drafter says depends on how many positions it fills, so that cuts at many lengths tell."""
    config.bench.temperatures, config.bench.block_size, config.bench.warmup_tokens = [0.0], 11, 0
    last = set()
    for count in range(3, 15):
        config.bench.max_new_tokens = count
        found = steps_by_engine(config, trained[0], tmp_path / str(count))
        assert found["simulate"] == found["local"], count
        last |= {lengths[-1] for lengths in found["local"]}
    assert len(last) > 2


def test_simulate_cuts_no_block_where_an_answer_ends_by_itself(config, trained, said, tmp_path):
    path = config.target.path
    config.bench.temperatures, config.bench.block_size, config.bench.warmup_tokens = [0.0], 11, 0
    for at in range(2, 13):
        config.target.path = path
        let_end(config, tmp_path / f"target{at}", [said["one"][at], said["three"][at]])
        found = steps_by_engine(config, trained[0], tmp_path / str(at))
        assert found["simulate"] == found["local"], at
