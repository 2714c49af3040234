"""The target's states, the drafter's config, checkpoints."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import make_tiny_target
from dflash.model import DFlashDraftModel
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Qwen3Config

from dpace_cli.config import TargetConfig, TrainConfig
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling import capture
from dpace_cli.modeling.capture import States, tapped_and_last_states, tapped_states
from dpace_cli.modeling.checkpoint import load_drafter, newest_whole, prune, save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config, mask_token_id, rope_parameters, target_layer_ids
from dpace_cli.modeling.target import load_target, load_tokenizer


@pytest.fixture(scope="module")
def target(tiny_target):
    return load_target(TargetConfig(path=str(tiny_target)))


@pytest.fixture(scope="module")
def tokenizer(target):
    return target.tokenizer


ROWS = [[5, 6, 7, 8, 9], [1, 2, 3], [20, 21, 22, 23, 24, 25, 26], [4]]


def test_layer_id_k_is_the_output_of_layer_k(target):
    ids = torch.tensor([ROWS[2]])
    hidden = target.model(ids, output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[1], hidden[3]], dim=-1)  # hidden_states[0] is the embedding
    assert torch.equal(tapped_states(target, ids, [0, 2]), expected)


def test_the_target_runs_no_further_than_the_highest_tap(target):
    ran = []
    handles = [
        layer.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, layer in enumerate(target.model.model.layers)
    ]
    tapped_states(target, torch.tensor([ROWS[0]]), [0, 1])
    for handle in handles:
        handle.remove()
    assert 2 not in ran and 3 not in ran


def test_the_last_state_is_what_the_head_reads(target):
    ids = torch.tensor([ROWS[2]])
    taps, last = tapped_and_last_states(target, ids, [0, 2])
    assert torch.allclose(last @ target.head.T, target.model(ids).logits, atol=1e-6)
    assert torch.equal(taps, tapped_states(target, ids, [0, 2]))


def test_what_a_row_is_padded_with_does_not_reach_it(target):
    ids = torch.full((len(ROWS), max(map(len, ROWS))), 11)
    for place, row in enumerate(ROWS):
        ids[place, : len(row)] = torch.tensor(row)
    taps, last = tapped_and_last_states(target, ids, [0, 2])
    for place, row in enumerate(ROWS):
        alone = target.model(torch.tensor([row]), output_hidden_states=True).hidden_states
        own = slice(0, len(row))
        torch.testing.assert_close(taps[place, own], torch.cat([alone[1], alone[3]], -1)[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(last[place, own], alone[-1][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_states_are_the_same_however_they_are_kept(target, tmp_path, last, monkeypatch):
    monkeypatch.setattr(capture, "CAPTURE_TOKENS", 12)
    monkeypatch.setattr(capture, "SHARD_BYTES", 4000)
    made, memory, disk = (States(target, ROWS, [0, 2], last) for _ in range(3))
    memory.keep_in_memory(lambda _: None)
    disk.keep_on_disk(tmp_path, lambda _: None)
    for indices in ([0], [2, 1], [3, 2, 0, 1]):
        expected, last_expected = made.batch(indices)
        for states in (memory, disk):
            found, last_found = states.batch(indices)
            for place, index in enumerate(indices):  # beyond its own length a row has no states
                own = slice(0, len(ROWS[index]))
                assert torch.allclose(found[place, own], expected[place, own], atol=1e-5)
                if last:
                    assert torch.allclose(last_found[place, own], last_expected[place, own], atol=1e-5)


def test_an_interrupted_capture_keeps_its_whole_shards(target, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "SHARD_BYTES", 1024)
    first = States(target, ROWS, [1], last=False)

    def stop_after_one(_tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.keep_on_disk(tmp_path, stop_after_one)
    (shard,) = tmp_path.iterdir()
    made_at = shard.stat().st_mtime_ns
    States(target, ROWS, [1], last=False).keep_on_disk(tmp_path, lambda _: None)
    assert shard.stat().st_mtime_ns == made_at and len(list(tmp_path.iterdir())) == 2


def test_states_of_other_rows_or_layers_are_never_reused(target, tmp_path):
    for rows, layers in ((ROWS, [0]), (ROWS, [1]), (ROWS[:3], [0])):
        States(target, rows, layers, last=False).keep_on_disk(tmp_path, lambda _: None)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_shard_that_another_machine_kept_to_itself_is_an_error(target, tmp_path, monkeypatch):
    monkeypatch.setattr(capture, "SHARD_BYTES", 1024)
    states = States(target, ROWS, [0], last=False)
    with pytest.raises(RunError, match="lacks"):
        states.keep_on_disk(tmp_path, lambda _: None, rank=0, world=2)


def test_tied_and_untied_heads_are_the_targets_own(tmp_path):
    for tied in (True, False):
        folder = make_tiny_target(tmp_path / str(tied), tie_word_embeddings=tied)
        loaded = load_target(TargetConfig(path=str(folder)))
        ids = torch.tensor([ROWS[0]])
        _, last = tapped_and_last_states(loaded, ids, [0])
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert torch.allclose(last @ loaded.head.T, plain(ids).logits, atol=1e-5)
        assert torch.equal(loaded.head, loaded.embedding) == tied


# --- the drafter's config --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        ),
        Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    ],
)
def test_rope_is_the_targets_after_a_round_trip(config, tokenizer, tmp_path):
    made = drafter_config(config, tokenizer, TrainConfig())
    made.save_pretrained(tmp_path)
    loaded = Qwen3Config.from_pretrained(tmp_path)
    assert loaded.rope_parameters == config.rope_parameters
    assert json.loads((tmp_path / "config.json").read_text())["rope_theta"] == config.rope_parameters["rope_theta"]


def test_rope_of_an_old_config_is_found():
    class Old:
        rope_theta = 123.0
        rope_scaling = {"rope_type": "linear", "factor": 2.0}  # noqa: RUF012

    assert rope_parameters(Old()) == {"rope_type": "linear", "factor": 2.0, "rope_theta": 123.0}


def test_softcap_and_embedding_scale_reach_the_drafter(tokenizer):
    made = drafter_config(Gemma2Config(final_logit_softcapping=30.0), tokenizer, TrainConfig(), embedding_scale=48.0)
    assert made.dflash_config["final_logit_softcapping"] == 30.0
    assert made.dflash_config["input_embedding_scale"] == 48.0


@pytest.mark.parametrize("ids", [[0, 3], [-1, 0], [1, 0], [1, 1], []])
def test_layer_taps_out_of_range_or_order_name_the_range(ids):
    with pytest.raises(UsageError, match="ascend from 0 to 2"):
        target_layer_ids(4, TrainConfig(target_layer_ids=ids))


def test_small_targets_get_taps_that_exist():
    for layers in range(1, 8):
        for draft in range(1, 5):
            ids = target_layer_ids(layers, TrainConfig(num_draft_layers=draft))
            assert ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= max(layers - 2, 0)


def test_mask_token_order_and_checks(tokenizer):
    named = tokenizer.convert_tokens_to_ids("<|mask|>")
    rows = len(tokenizer)
    assert mask_token_id(tokenizer, rows, None) == named
    assert mask_token_id(tokenizer, rows, 7) == 7
    with pytest.raises(UsageError, match="rows 0 to"):
        mask_token_id(tokenizer, rows, rows)
    with pytest.raises(UsageError, match="im_end"):
        mask_token_id(tokenizer, rows, tokenizer.eos_token_id)


def test_the_same_seed_gives_the_same_drafter(target):
    config = drafter_config(target.config, target.tokenizer, TrainConfig(num_draft_layers=1))
    one, two, other = (build_drafter(config, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


# --- checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def drafter(target):
    return build_drafter(drafter_config(target.config, target.tokenizer, TrainConfig(num_draft_layers=2)), 0)


def outputs(drafter) -> torch.Tensor:
    torch.manual_seed(0)
    noise, states = torch.randn(1, 16, 32), torch.randn(1, 5, len(drafter.target_layer_ids) * 32)
    return drafter(position_ids=torch.arange(21)[None], noise_embedding=noise, target_hidden=states)


def test_a_checkpoint_loads_in_dflash_and_specforge_with_the_same_outputs(drafter, tmp_path):
    from specforge.modeling.draft.dflash import DFlashDraftModel as SpecForgeDrafter

    save_checkpoint(tmp_path / "step-000001", drafter)
    expected = outputs(drafter.eval())
    assert torch.equal(outputs(load_drafter(tmp_path / "step-000001")), expected)
    theirs = DFlashDraftModel.from_pretrained(tmp_path / "step-000001", dtype=torch.float32)
    assert torch.equal(outputs(theirs.eval()), expected)
    assert (theirs.mask_token_id, theirs.block_size) == (drafter.mask_token_id, 16)
    specforge = SpecForgeDrafter.from_pretrained(tmp_path / "step-000001", dtype=torch.float32)
    assert torch.allclose(outputs(specforge.eval()), expected, atol=1e-6)
    assert specforge.block_size == 16 and specforge.mask_token_id == drafter.mask_token_id


def test_what_is_not_a_dflash_checkpoint_is_said(tiny_target, drafter, tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        load_drafter(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="mask_token_id"):
        load_drafter(tiny_target)
    save_checkpoint(tmp_path / "step-000001", drafter)
    weights = tmp_path / "step-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UsageError, match="cannot load the drafter"):
        load_drafter(tmp_path / "step-000001")


@pytest.mark.parametrize("file", ["model.safetensors", "trainer_state.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(drafter, tmp_path, file):
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step:06d}", drafter, {"step": step}, {"x": torch.ones(50)})
    damaged = tmp_path / "step-000002" / file
    damaged.write_bytes(damaged.read_bytes()[:-9])
    said = []
    assert newest_whole(tmp_path, said.append).step == 1
    assert "step-000002" in said[0]


def test_a_failed_write_leaves_nothing_and_says_why(drafter, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        save_checkpoint(tmp_path / "file" / "step-000001", drafter)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_last_checkpoints_and_the_best_are_kept(drafter, tmp_path):
    for step in range(1, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
    prune(tmp_path, keep_last=2, best="step-000002")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_a_missing_target_is_a_clear_error(tmp_path):
    with pytest.raises(UsageError, match="not a folder"):
        load_target(TargetConfig(path=str(tmp_path / "missing")))
    with pytest.raises(UsageError, match="cannot load target some/model"):
        load_tokenizer(TargetConfig(path="some/model"))


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_states_read_ahead_are_those_that_were_asked_for_in_their_order(target, kept, in_thread):
    states = States(target, ROWS, [0, 2], last=False)
    if kept:
        states.keep_in_memory(lambda _: None)
    asked = [[0], [3, 1], [2], [1, 0, 2]]
    for indices, (found, _) in zip(asked, states.ahead(iter(asked), in_thread), strict=True):
        assert torch.equal(found, states.batch(indices)[0])
    unread = states.ahead(iter(asked), in_thread)
    next(unread)
    unread.close()  # a training that stops waits for no reader


def test_an_error_of_a_reader_ahead_is_raised_where_its_states_are_used(target):
    states = States(target, ROWS, [0, 2], last=False)
    states.keep_in_memory(lambda _: None)
    read = states.ahead(iter([[0], [99], [1]]), in_thread=True)
    next(read)
    with pytest.raises(KeyError):
        next(read)


def test_a_config_that_is_no_object_is_said(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="holds a list"):
        load_drafter(tmp_path)
