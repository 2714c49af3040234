"""What `dpace bench` asks of the decoder for each request, and what it makes of the outputs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_models import checkpoint, greedy, trained_drafter
from dflash.model import dflash_generate

from dpace_cli import bench
from dpace_cli.config import Config, TargetConfig
from dpace_cli.data.tokens import generation_prompt
from dpace_cli.engines import measure_local
from dpace_cli.engines.measure_base import request_seed
from dpace_cli.modeling import decode as decoding
from dpace_cli.modeling.target import load_target
from dpace_cli.records import checkpoint_ref
from dpace_cli.results import BenchRecord, PromptResult

QUESTIONS = {"one": "What is 2?", "two": "Name a colour.", "three": "What is 2?", "four": "Say a word."}
"""Two ask the same."""

ANSWER = 14
SEED = 5


class Setup:
    """A target that ends its answers with either of two tokens, and a drafter that is right now and then."""

    def __init__(self, root: Path, tiny_target: Path) -> None:
        folder = root / "target"
        shutil.copytree(tiny_target, folder)
        endless = load_target(TargetConfig(path=str(folder)))
        self.prompts = {
            name: generation_prompt(endless.tokenizer, [{"role": "user", "content": text}], {})
            for name, text in QUESTIONS.items()
        }
        answers = {name: greedy(endless, prompt, 40) for name, prompt in self.prompts.items()}
        self.stops = [answers["one"][5], answers["two"][8]]
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": self.stops}))
        self.target = load_target(TargetConfig(path=str(folder)))
        self.drafter = trained_drafter(self.target, list(self.prompts.values()), [a[:30] for a in answers.values()])
        self.checkpoint = checkpoint_ref(checkpoint(root / "train" / "dpace-seed0" / "step-000001", self.drafter))

    def measured(self, root: Path, names: list[str] | None = None, **settings: Any) -> dict[str, PromptResult]:
        """Every request of one bench, by prompt id."""
        root.mkdir(parents=True, exist_ok=True)
        path = root / "mine.jsonl"
        path.write_text("".join(json.dumps({"id": n, "prompt": QUESTIONS[n]}) + "\n" for n in names or QUESTIONS))
        config = Config.model_validate({
            "target": {"path": self.target.path},
            "bench": {"datasets": [str(path)], "max_new_tokens": ANSWER, "warmup_tokens": 0, "seed": SEED, **settings},
        })  # fmt: skip
        (line,) = bench.run(config, [self.checkpoint], root / "bench").results
        return {prompt.id: prompt for prompt in BenchRecord.load(line.result).prompts}


@pytest.fixture(scope="module")
def setup(tmp_path_factory, tiny_target) -> Setup:
    return Setup(tmp_path_factory.mktemp("requests"), tiny_target)


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.6, 0), (1.3, 1.0, 3), (0.9, 0.8, 5)]
)
def test_a_request_is_answered_as_dflash_answers_it(setup, tmp_path, temperature, top_p, top_k):
    found = setup.measured(tmp_path, temperatures=[temperature], top_p=top_p, top_k=top_k)
    for name, prompt in setup.prompts.items():
        for decoded, block_size in ((found[name].baseline, 1), (found[name].draft, None)):
            torch.manual_seed(request_seed(SEED, name, 0))
            ids = dflash_generate(
                setup.drafter, setup.target.model, torch.tensor([prompt]), ANSWER, setup.stops,
                temperature, top_p, top_k, block_size=block_size,
            )  # fmt: skip
            assert decoded.output_ids == ids[0, len(prompt) :].tolist()
    if temperature == 0:
        assert [found[name].draft.finish_reason for name in ("one", "two")] == ["stop", "stop"]
        assert max(len(found[name].draft.output_ids) for name in ("one", "two")) < ANSWER


def test_a_request_has_a_seed_of_its_own_whatever_is_asked_before_it(setup, tmp_path):
    warm = {"temperatures": [1.0]}

    def said(found: dict[str, PromptResult]) -> dict[str, tuple]:
        return {name: (tuple(r.baseline.output_ids), tuple(r.draft.output_ids)) for name, r in found.items()}

    first = said(setup.measured(tmp_path / "all", **warm))
    assert first["one"] != first["three"], "the same question, another request"
    assert said(setup.measured(tmp_path / "turned", ["four", "three", "two", "one"], **warm)) == first
    assert said(setup.measured(tmp_path / "alone", ["three"], **warm)) == {"three": first["three"]}
    other = said(setup.measured(tmp_path / "other", **warm, seed=SEED + 1))
    assert all(other[name] != first[name] for name in QUESTIONS)


@pytest.mark.parametrize("tolerance", [0.0, 1e9])
def test_an_output_that_is_not_the_targets_is_found_where_it_parts(setup, tmp_path, monkeypatch, tolerance):
    original = measure_local.decode

    def faulty(drafter: Any, model: Any, ids: list[int], **settings: Any) -> Any:
        answer = original(drafter, model, ids, **settings)
        if settings["block_size"] == 1 or ids != setup.prompts["four"]:
            return answer
        wrong = [*answer.output_ids]
        wrong[3] = next(token for token in range(300) if token not in (wrong[3], *setup.stops))
        return replace(answer, output_ids=wrong)

    monkeypatch.setattr(measure_local, "decode", faulty)
    monkeypatch.setattr(decoding, "tie_tolerance", lambda _dtype: tolerance)
    found = setup.measured(tmp_path)
    assert [(r.lossless, r.first_difference, r.near_tie) for name, r in found.items() if name != "four"] == (
        [(True, None, None)] * 3
    )
    broken = found["four"]
    assert (broken.lossless, broken.first_difference, broken.near_tie) == (False, 3, tolerance > 0)
    prefix = [*setup.prompts["four"], *broken.baseline.output_ids[:3]]
    with torch.no_grad():
        best, second = setup.target.model(torch.tensor([prefix])).logits[0, -1].topk(2).values.tolist()
    assert broken.logit_gap == pytest.approx(best - second, rel=1e-3)


def test_without_the_check_nothing_is_claimed(setup, tmp_path):
    found = setup.measured(tmp_path, check_lossless=False)
    assert {result.lossless for result in found.values()} == {None}


def test_the_drafter_of_the_setup_is_right_now_and_then(setup, tmp_path):
    lengths = [n for result in setup.measured(tmp_path).values() for n in result.draft.acceptance_lengths]
    assert min(lengths) == 1 < max(lengths), "else the tests above could not tell the arms apart"
