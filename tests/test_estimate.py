"""The arithmetic of sizing against real models: parameters, saved tensors, counted operations, written files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dpace_cli import attention
from dpace_cli import estimate as sizing
from dpace_cli.config import Config, TargetConfig
from dpace_cli.data import audit
from dpace_cli.data.audit import audit_rows
from dpace_cli.data.batches import TrainingRow, collate
from dpace_cli.estimate import Batch, Rates, Rows
from dpace_cli.modeling.capture import States
from dpace_cli.modeling.checkpoint import save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import Target, load_target, load_tokenizer, tokenizer_fingerprint
from dpace_cli.trainers.native import DrafterLoss

TAPS = [0, 2]
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip

IN_PLACE = {torch.ops.aten.baddbmm_: lambda _, a, b, *__, **___: 2 * a[0] * a[1] * a[2] * b[2]}
"""Operations of a product that PyTorch's counter does not know."""


def make_config(**train: object) -> Config:
    values = {"block_size": 8, "num_draft_layers": 2, "num_anchors": 16, "max_length": 128, "batch_size": 3}
    return Config.model_validate({"train": {**values, "target_layer_ids": TAPS, **train}})


def make_shapes(config: Config, target: dict | None = None, **more: object) -> sizing.Shapes:
    given = {"target_bytes": 4, "compute_bytes": 4, "device": "cpu", **more}
    return sizing.shapes({**SHAPE, **(target or {})}, config, TAPS, **given)


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    """A target of SHAPE with the tiny one's tokenizer."""
    torch.manual_seed(0)
    # Eager attention, because the counter of operations leaves the fused one out on a CPU.
    config = Qwen3Config(**SHAPE, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return Target("t", model.requires_grad_(False), load_tokenizer(TargetConfig(path=str(tiny_target))))


class Step:
    """One micro-batch of a training, ready to run."""

    def __init__(self, target: Target, config: Config) -> None:
        train, length = config.train, config.train.max_length
        built = drafter_config(target.config, target.tokenizer, train)
        self.drafter = build_drafter(built, 0)
        draw = np.random.default_rng(0)
        rows = [
            TrainingRow.make(str(i), draw.integers(0, 512, length).tolist(), [1] * length)
            for i in range(train.batch_size)
        ]
        anchors = [np.sort(draw.choice(row.candidates, train.num_anchors, replace=False)) for row in rows]
        self.blocks = collate(rows, anchors, train.block_size)
        self.states, self.last = States(target, [r.input_ids for r in rows], TAPS, False).batch(range(len(rows)))
        self.loss = DrafterLoss(self.drafter, target, train)
        supervised = float(self.blocks.supervised.sum()) / self.blocks.keep.sum().item()
        self.batch = Batch(train.batch_size, length, train.num_anchors, supervised)

    def forward(self) -> torch.Tensor:
        return self.loss(self.blocks, self.states, self.last).loss_sum


def test_groups_of_attention_are_those_of_the_attention():
    assert sizing.ATTENTION_ROWS == {"cpu": attention.GROUP_ROWS, "cuda": attention.TILE}


# --- parameters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_targets_parameters_are_counted_from_its_config(tied):
    config = Qwen3Config(**SHAPE, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    counted = make_shapes(make_config(), config.to_dict()).target_parameters
    assert counted == sum(parameter.numel() for parameter in model.parameters())


def test_other_architectures_are_counted_closely():
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False)
    counted = make_shapes(make_config(), config.to_dict()).target_parameters
    real = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert counted == pytest.approx(real, rel=0.01)


def test_counted_weights_win_over_the_config():
    assert make_shapes(make_config(), target_parameters=7).target_parameters == 7


@pytest.mark.parametrize("layers", [1, 3])
def test_a_drafters_parameters_are_those_of_the_model(target, layers):
    config = make_config(num_draft_layers=layers)
    drafter = build_drafter(drafter_config(target.config, target.tokenizer, config.train), 0)
    assert make_shapes(config).drafter_parameters == sum(parameter.numel() for parameter in drafter.parameters())


def test_a_mixture_of_experts_stores_more_than_a_token_meets():
    dense = sizing.target_stack(SHAPE)
    experts = sizing.target_stack({**SHAPE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40})
    assert experts.mlp_parameters == 8 * 3 * 64 * 40 and experts.mlp_active == 2 * 3 * 64 * 40
    assert dense.mlp_parameters == dense.mlp_active == 3 * 64 * 160


# --- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"num_anchors": 32}, {"max_length": 256}, {"block_size": 16}])
def test_activations_are_what_the_forward_pass_keeps(target, change):
    config = make_config(**change)
    step = Step(target, config)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.forward()  # held, so that no storage is used twice
    weights = {p.untyped_storage().data_ptr() for p in [*step.drafter.parameters(), *target.model.parameters()]}
    measured = sum(size for pointer, size in kept.items() if pointer not in weights)
    shape = make_shapes(config)
    gradient = 4 * step.blocks.supervised[..., 1:].numel() * 64  # the head's gradient, counted with the head
    states = 4 * step.states.numel()
    assert sizing.kept_for_backward(shape, step.batch) == pytest.approx(measured - gradient - states, rel=0.05)
    assert loss.requires_grad


def test_memory_grows_with_what_is_kept():
    config = make_config()
    shape, batch = make_shapes(config), Batch(3, 128, 16, 7)
    parts = sizing.memory(shape, batch, 1, 0)
    assert parts["optimizer"] == 2 * parts["drafter"] == 2 * 4 * shape.drafter_parameters
    assert sizing.memory(shape, batch, 2, 0)["gradients"] == 2 * parts["gradients"]
    assert sizing.memory(shape, batch, 1, 1000)["cached states"] == 1000 * 2 * 64 * 4
    half = make_shapes(config, target_bytes=2, compute_bytes=2, device="cuda")
    assert half.state_bytes_per_token == shape.state_bytes_per_token / 2
    assert not half.materialized and sizing.memory(half, batch, 1, 0)["target"] == parts["target"] / 2


def test_states_of_a_token_are_what_the_capture_keeps(target):
    rows = [[1, 2, 3], [4, 5, 6, 7]]
    for last in (False, True):
        states = States(target, rows, TAPS, last)
        assert states.bytes == 7 * make_shapes(make_config(), whole_target=last).state_bytes_per_token


# --- disk ------------------------------------------------------------------------------------------------


def test_a_checkpoint_on_disk_has_the_size_that_is_said(target, tmp_path):
    config = make_config(num_draft_layers=3)
    drafter = build_drafter(drafter_config(target.config, target.tokenizer, config.train), 0)
    moments = {
        f"{key}.{name}": p.detach().clone()
        for key in ("exp_avg", "exp_avg_sq")
        for name, p in drafter.named_parameters()
    }
    save_checkpoint(tmp_path / "step", drafter, {}, moments)
    written = sum(file.stat().st_size for file in (tmp_path / "step").iterdir())
    assert sizing.checkpoint_bytes(make_shapes(config)) == pytest.approx(written, rel=0.05)


def test_only_a_disk_cache_takes_disk():
    config = make_config(cache="memory")
    shape = make_shapes(config)
    assert "cached states" not in sizing.disk(shape, config, 1000, 1)
    for train in ({"cache": "disk"}, {"cache": "memory", "nproc": 2}):
        assert sizing.disk(shape, make_config(**train), 1000, 1)["cached states"] == 1000 * 2 * 64 * 4
    assert sizing.disk(shape, config, 0, 3)["checkpoints"] == 3 * sizing.disk(shape, config, 0, 1)["checkpoints"]


# --- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{}, {"num_anchors": 32}, {"max_length": 256}, {"num_draft_layers": 3}])
def test_products_are_those_that_a_step_does(target, change):
    config = make_config(**change)
    step = Step(target, config)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        step.forward().backward()
    counted = sizing.products(make_shapes(config), step.batch)
    assert counted["head"] + counted["drafter"] == pytest.approx(counter.get_total_flops(), rel=0.06)


def test_the_heads_products_are_two(target):
    config = make_config()
    step = Step(target, config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step.forward()
    with FlopCounterMode(display=False) as whole:
        step.forward()
    back = whole.get_total_flops() - counter.get_total_flops()  # the head's gradient is made in the forward pass
    assert sizing.products(make_shapes(config), step.batch)["head"] == 2 * back


def test_the_capture_ends_at_the_highest_tap(target):
    ids = [list(range(100))]
    batch = Batch(1, 100, 1, 1)
    for last, layers in ((False, 3), (True, 4)):
        with FlopCounterMode(display=False) as counter:
            States(target, ids, TAPS, last).batch([0])
        found = sizing.products(make_shapes(make_config(), whole_target=last), batch)["capture"]
        # The counter takes attention for full, where the half that is causal is counted here.
        other_half = 2 * layers * 2 * 64 * 100 * 100 / 2
        assert found + other_half == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_cache_takes_the_capture_out_of_the_step():
    rates = Rates(1e9, 1e9, "")
    for cache, inside in (("none", True), ("memory", False), ("disk", False)):
        config = make_config(cache=cache)
        floor = sizing.step_floor(config, make_shapes(config), Batch(3, 128, 16, 7), rates)
        assert ("capture" in floor) == inside


def test_steps_and_captures_are_counted_from_the_rows():
    config = make_config(num_epochs=6, batch_size=3, accumulation_steps=2)
    rows = Rows(100, 80.0, 128.0, 60.0, 100.0, 6.0, "")
    found = sizing.estimate(config, make_shapes(config), rows, Rates(1e9, 2e9, ""))
    assert found.steps == 17 * 6 and found.capture_s > 0
    assert sizing.estimate(make_config(max_steps=5), make_shapes(config), rows, None).steps == 5
    unknown = sizing.estimate(config, make_shapes(config), sizing.assumed_rows(config), None)
    assert unknown.steps is None and unknown.capture_s is None and unknown.floor_s == {}


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 64), st.integers(2, 32), st.integers(1, 600), st.integers(16, 4096), st.integers(1, 5),
    st.sampled_from(["none", "memory", "disk"]), st.booleans(),
)  # fmt: skip
def test_nothing_gets_cheaper_when_a_setting_doubles(batch, block, anchors, length, layers, cache, whole):
    config = make_config(batch_size=batch, block_size=block, num_anchors=anchors, max_length=length,
                         num_draft_layers=layers, cache=cache)  # fmt: skip
    shape = make_shapes(config, whole_target=whole)
    lines = sizing.growth(config, shape, sizing.assumed_rows(config), None)
    for line in lines:
        assert 1 <= line.memory <= 4.1 and 1 <= line.step_time <= 4.1 and line.states in (1, 2)
    by_name = {line.doubled: line for line in lines}
    assert by_name["batch size"].step_time == pytest.approx(2, abs=0.01)
    assert by_name["anchors"].states == 1 and by_name["sequence length"].states == 2


# --- the rows that it starts from ------------------------------------------------------------------------


def test_rows_are_measured_as_the_training_reads_them(tiny_target, answered_rows: Path):
    tokenizer, block = load_tokenizer(TargetConfig(path=str(tiny_target))), 8
    from dpace_cli.data.jsonl import read_rows
    from dpace_cli.data.tokens import encode_row

    rows = []
    for row in read_rows(answered_rows):
        for piece in encode_row(tokenizer, row, {}, None):
            rows.append(TrainingRow.make(row["id"], piece.input_ids[:140], piece.loss_mask[:140]))
    blocks = collate(rows, [row.candidates for row in rows], block)
    supervised = [blocks.supervised[i][blocks.keep[i]].sum(-1).float().mean().item() for i in range(len(rows))]
    found = audit_rows(
        answered_rows, tokenizer, tokenizer_fingerprint(tokenizer), {}, max_length=140, block_size=block,
        mask_token_id=None, stop_token_ids=[256],
    )  # fmt: skip
    assert (found.rows, found.sampled, found.empty, found.ended) == (40, 40, 0, 1.0)
    assert found.tokens == pytest.approx(np.mean([len(row.input_ids) for row in rows]))
    assert found.anchors == pytest.approx(np.mean([len(row.candidates) for row in rows]))
    assert found.most_anchors == max(len(row.candidates) for row in rows)
    assert found.supervised == pytest.approx(np.mean(supervised))
    assert found.cut == sum(len(row.input_ids) == 140 for row in rows) > 0


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3000), st.integers(1, 40))
def test_a_sample_of_a_file_is_spread_over_it(tmp_path, count, size):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n\n".join(str(number) for number in range(count)) + "\n")
    found, lines = audit._sample(file, size)
    places = [int(line) for _, line in lines]
    assert found == count and len(places) == min(count, size) and places == sorted(set(places)) and places[0] == 0
    assert all(number == 2 * place + 1 for (number, _), place in zip(lines, places))
    gaps = np.diff([*places, count])
    assert max(gaps, default=0) <= 4 * max(1, count / size)


def test_a_real_target_is_estimated_from_its_files(tiny_target):
    target = load_target(TargetConfig(path=str(tiny_target)))
    shape = sizing.shapes(
        target.config.to_dict(), make_config(), TAPS, target_bytes=4, compute_bytes=4, device="cpu"
    )  # fmt: skip
    assert shape.target_parameters == sum(parameter.numel() for parameter in target.model.parameters())
