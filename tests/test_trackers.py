"""What a training sends to trackers, read back with TensorBoard's own reader."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dpace_cli import train
from dpace_cli.errors import UsageError
from dpace_cli.records import RunFolder
from dpace_cli.settings import load_config
from dpace_cli.trainers.trackers import Trackers

SMALL = [
    "train.num_draft_layers=1", "train.block_size=4", "train.num_anchors=6", "train.batch_size=4",
    "train.max_length=128", "train.max_steps=6", "train.save_steps=6", "train.logging_steps=2", "train.val_rows=4",
]  # fmt: skip


def test_tensorboard_has_every_figure_of_the_metrics_by_position_and_step(tiny_target, answered_rows, tmp_path):
    flags = {"target.path": str(tiny_target), "train.data": str(answered_rows)}
    config = load_config(flags=flags, overrides=[*SMALL, "train.report_to=[tensorboard]"], environ={})[0]
    train.run(config, RunFolder(tmp_path))
    folder = tmp_path / "train" / "dpace-seed0"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    expected = {}
    for line in lines:
        for name, value in line.items():
            values = {f"{name}/{k}": v for k, v in enumerate(value, 1)} if isinstance(value, list) else {name: value}
            for tag, one in values.items():
                expected.setdefault(tag, []).append((line["step"], pytest.approx(one, rel=1e-6)))
    speed = found.pop("tokens_per_s")
    assert found == expected and [step for step, _ in speed] == [2, 4, 6]
    for quantity in ("weight", "confidence", "accepted"):
        assert {tag for tag in found if tag.startswith(quantity)} == {f"{quantity}_by_position/{k}" for k in (1, 2, 3)}


def test_wandb_gets_one_run_with_the_config_and_a_row_for_each_step(tmp_path, monkeypatch):
    """A stand-in with the three calls that are made of wandb."""
    made, rows, ended = [], [], []
    run = SimpleNamespace(log=lambda row, step: rows.append((step, row)), finish=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: made.append(options) or run))
    with Trackers(["wandb"], tmp_path, {"name": "mine"}) as trackers:
        trackers.log({"loss": 2.0, "weight_by_position": [0.5, 0.25]}, 10)
        assert not ended
    assert made == [{"project": "dpace", "dir": str(tmp_path), "config": {"name": "mine"}}]
    assert rows == [(10, {"loss": 2.0, "weight_by_position/1": 0.5, "weight_by_position/2": 0.25})]
    assert ended == [True]


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(UsageError, match="names wandb, which is not installed") as caught,
        Trackers(["wandb"], tmp_path, {}),
    ):
        pass
    assert caught.value.hint == "pip install wandb"


def test_no_tracker_is_opened_unasked(tmp_path):
    with Trackers([], tmp_path, {}) as trackers:
        trackers.log({"loss": 1.0}, 1)
    assert list(tmp_path.iterdir()) == []
