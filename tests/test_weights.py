"""Position weights against a loop over blocks with DFlash's own forward pass and double sums."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tiny_target, write_rows
from rich.console import Console
from scipy import stats as scipy_stats

from dpace_cli import weights
from dpace_cli.config import Config
from dpace_cli.data.tokens import encode_row
from dpace_cli.errors import UsageError
from dpace_cli.modeling.checkpoint import load_drafter, save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import load_target
from dpace_cli.records import file_sha256, to_json, write_json
from dpace_cli.stats import Bootstrap, correlate

BLOCK, ALPHA = 5, 0.4


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """A target, rows, and two checkpoints of one training.

    The drafters' confidence is far from uniform: their output is made large.
    """
    root = tmp_path_factory.mktemp("weights")
    target_path = make_tiny_target(root / "target")
    write_rows(root / "train.jsonl", 9)
    settings = {
        "target": {"path": str(target_path)},
        "train": {"block_size": BLOCK, "num_draft_layers": 2, "data": str(root / "train.jsonl"), "val_rows": 0},
        "weights": {"alpha": ALPHA, "num_rows": 6, "num_anchors": 7, "seed": 3},
        "report": {"bootstrap_samples": 199},
    }
    config = Config.model_validate(settings)
    target = load_target(config.target)
    paths = []
    for step in (10, 20):
        drafter = build_drafter(drafter_config(target.config, target.tokenizer, config.train), step)
        with torch.no_grad():
            drafter.norm.weight.mul_(3.0 * step / 10)
        paths.append(root / "train" / "dpace-seed0" / f"step-{step:06d}")
        save_checkpoint(paths[-1], drafter)
    return config, target, paths, root


def ranked(config: Config) -> Config:
    """The same, with the rank correlation."""
    return config.model_copy(update={"weights": config.weights.model_copy(update={"correlation": True})})


@pytest.fixture(scope="module")
def result(setup):
    config, _, paths, root = setup
    return weights.run(ranked(config), paths[-1:], root / "train.jsonl")


def rows_of(config, target):
    for line in Path(config.train.data).read_text().splitlines():
        for piece in encode_row(target.tokenizer, json.loads(line), {}, config.train.max_length):
            yield piece.input_ids, piece.loss_mask


def brute_force(config, target, path, anchors_of):
    """For each block: weights, confidences, right or not, supervised or not, worked out one at a time."""
    drafter = load_drafter(path)
    found = []
    for number, (ids, mask) in enumerate(rows_of(config, target)):
        with torch.no_grad():
            states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        tapped = torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)
        for anchor in anchors_of(number, mask):
            noise_ids = torch.tensor([[ids[anchor]] + [drafter.mask_token_id] * (BLOCK - 1)])
            with torch.no_grad():
                hidden = drafter(
                    position_ids=torch.arange(anchor + BLOCK)[None],
                    noise_embedding=target.model.get_input_embeddings()(noise_ids),
                    target_hidden=tapped[:, :anchor],
                )
                logq = target.model.lm_head(hidden).log_softmax(-1)[0]
            q, right, there = [], [], []
            for k in range(1, BLOCK):
                inside = anchor + k < len(ids) and mask[anchor + k] == 1
                there.append(inside)
                q.append(math.exp(logq[k, ids[anchor + k]]) if inside else None)
                right.append(bool(inside and logq[k].argmax() == ids[anchor + k]))
            own = []
            for k in range(BLOCK - 1):
                total = 0.0
                for j in range(k, BLOCK - 1):
                    if there[j]:
                        total += math.prod((1 - ALPHA) * q[i] + ALPHA for i in range(j + 1) if there[i])
                own.append(total if there[k] else 0.0)
            found.append((own, q, right, there, number))
    return found


def every_anchor(_number, mask):
    return [i for i in range(len(mask) - 1) if mask[i] and mask[i + 1]]


# --- the numbers ------------------------------------------------------------------------------------------


def test_every_figure_is_the_brute_force_one(setup):
    config, target, paths, root = setup
    every = config.model_copy(
        update={"weights": config.weights.model_copy(update={"num_rows": 99, "num_anchors": 9999})}
    )
    found = weights.run(every, paths[-1:], root / "train.jsonl")
    blocks = brute_force(every, target, paths[-1], every_anchor)
    assert found.blocks == len(blocks)
    assert found.rows == 9
    total = sum(sum(own) for own, *_ in blocks)
    for k, position in enumerate(found.positions):
        here = [block for block in blocks if block[3][k]]
        whole = [block for block in here if all(block[3][: k + 1])]
        assert position.blocks == len(here)
        assert position.weight == pytest.approx(statistics.fmean(own[k] for own, *_ in here), rel=1e-4)
        assert position.share == pytest.approx(sum(own[k] for own, *_ in here) / total, rel=1e-4)
        assert position.confidence == pytest.approx(statistics.fmean(q[k] for _, q, *_ in here), rel=1e-4)
        assert position.accuracy == pytest.approx(statistics.fmean(right[k] for _, _, right, *_ in here))
        assert position.accepted == pytest.approx(statistics.fmean(all(right[: k + 1]) for _, _, right, *_ in whole))
        assert position.decay == pytest.approx(math.exp(-k / (4 * BLOCK / 8)))
    # Blocks at the end of an answer are cut, so later positions have fewer.
    assert [p.blocks for p in found.positions] == sorted((p.blocks for p in found.positions), reverse=True)
    assert found.positions[-1].blocks < found.positions[0].blocks
    assert sum(p.share for p in found.positions) == pytest.approx(1)


def test_correlation_is_scipys_over_whole_blocks(setup):
    config, target, _, root = setup
    settings = {
        **config.model_dump(),
        "weights": {"alpha": ALPHA, "num_rows": 99, "num_anchors": 9999, "correlation": True},
    }
    settings["target"]["path"] = config.target.path
    # A drafter that has seen the head: the confidence has to differ, and some tokens have to be right.
    path = _lucky_checkpoint(config, target, root)
    found = weights.run(Config.model_validate(settings), [path], root / "train.jsonl").correlation
    blocks = [block for block in brute_force(config, target, path, every_anchor) if all(block[3])]
    lengths = [next((k for k, ok in enumerate(right) if not ok), BLOCK - 1) for _, _, right, *_ in blocks]
    assert len(set(lengths)) > 1
    surrogate = [sum(math.prod(q[: k + 1]) for k in range(BLOCK - 1)) for _, q, *_ in blocks]
    assert found.blocks == len(blocks)
    assert found.surrogate.value == pytest.approx(scipy_stats.spearmanr(lengths, surrogate).statistic, abs=2e-3)
    plain = scipy_stats.spearmanr(lengths, [sum(q) for _, q, *_ in blocks]).statistic
    assert found.confidence_sum.value == pytest.approx(plain, abs=2e-3)
    # The rows that are resampled are the rows that the blocks are from.
    q, right, there, row = (np.array([block[part] for block in blocks]) for part in (1, 2, 3, 4))
    oracle = correlate(q, right, there, row, Bootstrap(0.95, 199, 0)).surrogate
    assert (found.surrogate.low, found.surrogate.high) == pytest.approx((oracle.low, oracle.high), abs=5e-4)


def _lucky_checkpoint(config, target, root) -> Path:
    """A drafter trained for a moment, so that some of its tokens are right."""
    torch.manual_seed(0)
    drafter = build_drafter(drafter_config(target.config, target.tokenizer, config.train), 1)
    optimizer = torch.optim.AdamW(drafter.parameters(), 3e-3)
    ids, mask = next(iter(rows_of(config, target)))
    with torch.no_grad():
        states = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    tapped = torch.cat([states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)
    anchors = [i for i in every_anchor(0, mask) if i + BLOCK <= len(ids)]
    for step in range(60):
        anchor = anchors[step % len(anchors)]
        noise_ids = torch.tensor([[ids[anchor]] + [drafter.mask_token_id] * (BLOCK - 1)])
        hidden = drafter(
            position_ids=torch.arange(anchor + BLOCK)[None],
            noise_embedding=target.model.get_input_embeddings()(noise_ids),
            target_hidden=tapped[:, :anchor],
        )
        wanted = torch.tensor(ids[anchor + 1 : anchor + BLOCK])
        loss = torch.nn.functional.cross_entropy(target.model.lm_head(hidden)[0, 1:], wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    path = root / "lucky"
    save_checkpoint(path, drafter.eval())
    return path


def test_alpha_one_weighs_by_what_is_left_of_the_block(setup):
    config, _, paths, root = setup
    settings = config.model_copy(update={"weights": config.weights.model_copy(update={"alpha": 1.0})})
    found = weights.run(settings, paths[-1:], root / "train.jsonl")
    full = [BLOCK - 1 - k for k in range(BLOCK - 1)]
    assert [p.quantiles[-1] for p in found.positions] == pytest.approx(full)
    assert all(p.weight <= most for p, most in zip(found.positions, full))


def test_same_seed_same_blocks_another_seed_others(setup):
    config, _, paths, root = setup
    again = weights.run(config, paths[-1:], root / "train.jsonl")
    first = weights.run(config, paths[-1:], root / "train.jsonl")
    assert first == again
    other = config.model_copy(update={"weights": config.weights.model_copy(update={"seed": 4})})
    assert weights.run(other, paths[-1:], root / "train.jsonl").positions != first.positions
    assert first.rows == 6
    assert first.blocks == 6 * 7


# --- which rows -------------------------------------------------------------------------------------------


def test_rows_that_the_training_held_out_are_the_ones_used(setup, tmp_path):
    from dpace_cli.data.batches import TrainingRow, split_validation

    config, target, paths, _ = setup
    data = tmp_path / "train.jsonl"
    write_rows(data, 30)
    checkpoint = tmp_path / "dpace-seed0" / "step-000010"
    save_checkpoint(checkpoint, load_drafter(paths[0]))
    manifest = {"data": {"sha256": file_sha256(data)}, "config": {"train": {"val_rows": 2}}}
    write_json(checkpoint.parent / "manifest.json", manifest)
    every = config.model_copy(
        update={"weights": config.weights.model_copy(update={"num_rows": 99, "num_anchors": 9999})}
    )
    found = weights.run(every, [checkpoint], data)
    assert (found.rows, found.held_out) == (2, True)
    rows = []
    for number, line in enumerate(data.read_text().splitlines()):
        (piece,) = encode_row(target.tokenizer, json.loads(line), {}, None)
        rows.append(TrainingRow.make(f"row-{number}", piece.input_ids, piece.loss_mask))
    assert found.blocks == sum(len(row.candidates) for row in split_validation(rows, 2)[1])
    manifest["config"]["train"]["val_rows"] = 0
    write_json(checkpoint.parent / "manifest.json", manifest)
    assert weights.run(config, [checkpoint], data).held_out is False
    manifest["data"]["sha256"] = "other"
    write_json(checkpoint.parent / "manifest.json", manifest)
    assert weights.run(config, [checkpoint], data).held_out is True


def test_without_a_manifest_it_is_not_known_what_was_held_out(result):
    assert result.held_out is None


# --- several checkpoints, files, words ---------------------------------------------------------------------


def test_several_checkpoints_are_a_trajectory_on_the_same_blocks(setup, tmp_path):
    config, _, paths, root = setup
    found = weights.run(config, paths, root / "train.jsonl", tmp_path)
    assert [one.step for one in found.checkpoints] == [10, 20]
    assert found.positions == found.checkpoints[-1].positions
    alone = weights.run(config, paths[:1], root / "train.jsonl")
    for one, other in zip(found.checkpoints[0].positions, alone.positions):
        assert one.weight == pytest.approx(other.weight, rel=1e-5)
    assert set(found.files) == {
        "json", "weights-dpace-seed0-step20.png", "weights-dpace-seed0-step20.csv", "dynamics-dpace-seed0.png",
        "dynamics-dpace-seed0.csv",
    }  # fmt: skip
    assert Path(found.files["json"]).name == "dynamics.json"
    for path in found.files.values():
        assert Path(path).stat().st_size > 0


def test_a_written_result_is_read_back_without_a_model(setup, tmp_path, monkeypatch):
    config, target, paths, root = setup
    lucky = _lucky_checkpoint(config, target, root)
    found = weights.run(ranked(config), [*paths, lucky], root / "train.jsonl", tmp_path)
    monkeypatch.setattr(weights, "load_target", None)
    loaded = weights.redraw(Path(found.files["json"]), tmp_path / "again")
    assert loaded.checkpoints == found.checkpoints
    assert (loaded.rows, loaded.alpha, loaded.data) == (found.rows, found.alpha, found.data)
    assert set(loaded.files) == set(found.files)
    for name, path in loaded.files.items():
        assert Path(path).read_bytes() == Path(found.files[name]).read_bytes(), name


def test_result_is_json_with_the_documented_fields(result):
    saved = json.loads(json.dumps(to_json(result), allow_nan=False))
    assert [p["k"] for p in saved["positions"]] == [1, 2, 3, 4]
    assert {"weight", "share", "confidence", "accepted"} <= set(saved["positions"][0])


def printed(result, encoding="utf-8", width=80) -> str:
    import io

    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Console(file=file, width=width).print(result)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_terminal_shows_a_bar_for_each_position(result):
    lines = printed(result).splitlines()
    assert "Position weights of dpace-seed0, step 20" in lines[0]
    bars = lines[2:6]
    assert [int(line.split()[0]) for line in bars] == [1, 2, 3, 4]
    assert bars[0].count("█") > bars[3].count("█")
    assert max(map(len, lines)) <= 80
    assert printed(result, "ascii").isascii()


# --- bad input --------------------------------------------------------------------------------------------


def test_a_drafter_of_another_target_is_refused(setup, tmp_path):
    config, _, paths, root = setup
    wide = make_tiny_target(tmp_path / "wide", hidden_size=48)
    other = config.model_copy(update={"target": config.target.model_copy(update={"path": str(wide)})})
    with pytest.raises(UsageError, match=r"32 wide, and target .* is 48"):
        weights.run(other, paths, root / "train.jsonl")


def test_rows_without_an_answer_are_refused(setup, tmp_path):
    config, _, paths, _ = setup
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"id": "a", "conversations": [{"role": "user", "content": "hello"}]}) + "\n")
    with pytest.raises(UsageError, match="no row to draft at"):
        weights.run(config, paths, data)
    data.write_text('{"text": "x"}\n')
    with pytest.raises(UsageError, match="no id or no conversations"):
        weights.run(config, paths, data)


def test_neither_data_nor_checkpoint(setup):
    config, _, paths, _ = setup
    bare = config.model_copy(update={"train": config.train.model_copy(update={"data": None})})
    with pytest.raises(UsageError, match="needs rows") as caught:
        weights.run(bare, paths)
    assert "--data" in caught.value.hint
    with pytest.raises(UsageError, match="needs a checkpoint"):
        weights.run(config, [])


def test_a_file_of_something_else_is_not_loaded(tmp_path, result):
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError, match="not a file of position weights"):
        weights.redraw(path, tmp_path)
    path.write_text(json.dumps({"checkpoints": [to_json(found) for found in result.checkpoints]}))
    with pytest.raises(UsageError, match="no 'data'"):
        weights.redraw(path, tmp_path)


def test_confidences_are_probabilities(result):
    values = np.array([[p.confidence, p.accuracy, p.accepted] for p in result.positions])
    assert ((values >= 0) & (values <= 1)).all()
