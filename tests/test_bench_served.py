"""`dpace bench` against a real OpenAI-compatible server: answers, counts, times and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_models import checkpoint, new_drafter
from test_regen_served import served  # noqa: F401 - the fixture

from dpace_cli import bench
from dpace_cli.config import Config, TargetConfig
from dpace_cli.demo.prompts import samples
from dpace_cli.errors import RunError
from dpace_cli.modeling.target import load_target
from dpace_cli.records import CheckpointRef, checkpoint_ref
from dpace_cli.results import BenchRecord


@pytest.fixture(scope="module")
def refs(tmp_path_factory: pytest.TempPathFactory) -> list[CheckpointRef]:
    folder = tmp_path_factory.mktemp("run") / "train" / "dpace-seed0" / "step-000010"
    return [checkpoint_ref(checkpoint(folder, new_drafter(load_target(TargetConfig()))))]


@pytest.fixture
def settings(tmp_path: Path) -> dict:
    asked = [sample.prompt for sample in samples(None, 4, 3, "heldout")]
    rows = [{"id": f"p{n}", "prompt": text} for n, text in enumerate(asked[:3])] + [{"id": "two", "turns": asked[2:]}]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"datasets": [str(path)], "max_new_tokens": 40, "warmup_tokens": 2}


def measured(settings: dict, refs: list[CheckpointRef], folder: Path, **more: object) -> BenchRecord:
    result = bench.run(Config.model_validate({"bench": {**settings, **more}}), refs, folder)
    return BenchRecord.load(result.result)


def test_a_real_servers_answers_are_those_of_the_local_baseline(settings, refs, tmp_path, served):  # noqa: F811
    local = measured(settings, refs, tmp_path / "local")
    both = measured(settings, refs, tmp_path / "both", engine="vllm", baseline_url=served, base_url=served)
    assert len(both.finished) == len(local.finished) == 5
    for here, there in zip(local.prompts, both.prompts):
        assert (here.id, here.turn, here.prompt_tokens) == (there.id, there.turn, there.prompt_tokens)
        assert here.baseline.tokens == there.baseline.tokens == there.draft.tokens
        assert here.baseline.finish_reason == there.baseline.finish_reason
        assert there.baseline.decode_s > 0 and there.draft.decode_s > 0
    assert both.lossless == 1.0 and both.sr > 0
    assert both.tau is None and both.tau_pooled is None and both.counters is None
    assert all(rate > 0 for rate in both.throughput.values()) and set(both.wall_s) == {"baseline", "draft"}


def test_one_real_server_alone_claims_no_speed_up(settings, refs, tmp_path, served):  # noqa: F811
    alone = measured(settings, refs, tmp_path / "alone", engine="vllm", base_url=served, concurrency=[2])
    assert alone.sr is None and alone.lossless is None and len(alone.finished) == 5
    assert alone.throughput.keys() == {"draft"}


def test_a_real_server_that_refuses_every_request_ends_the_bench(settings, refs, tmp_path, served):  # noqa: F811
    """It takes no field that it does not know, and SGLang's `return_meta_info` is one."""
    with pytest.raises(RunError, match=r"baseline server at .* refuses requests: 422 .*return_meta_info") as caught:
        measured(settings, refs, tmp_path / "x", engine="sglang", baseline_url=served)
    assert "bench.engine" in caught.value.hint
