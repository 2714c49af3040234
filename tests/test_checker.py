"""Which programs can read a checkpoint; DFlash and SpecForge themselves are the oracle where they can be asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dpace_cli.checks import worst
from dpace_cli.config import TargetConfig, TrainConfig
from dpace_cli.errors import UsageError
from dpace_cli.modeling.checker import (
    READERS,
    check_checkpoint,
    expected_tensors,
    parameter_count,
    safetensors_header,
    stored_bytes,
    tensor_index,
)
from dpace_cli.modeling.checkpoint import save_checkpoint
from dpace_cli.modeling.decode import decode
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import Target, load_target


@pytest.fixture(scope="module")
def target(tiny_target) -> Target:
    return load_target(TargetConfig(path=str(tiny_target)))


@pytest.fixture(scope="module")
def whole(target, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("drafter") / "step-000001"
    config = drafter_config(target.config, target.tokenizer, TrainConfig(block_size=8, num_draft_layers=2))
    save_checkpoint(path, build_drafter(config, seed=0))
    return path


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    shutil.copytree(whole, tmp_path / "drafter")
    return tmp_path / "drafter"


def problems(path: Path, target: Target | None = None) -> dict[str, list[str]]:
    """What each reader finds, as messages."""
    known = (target.config, target.tokenizer) if target else (None, None)
    return {r.reader: [p.message for p in r.problems] for r in check_checkpoint(path, "lab/model", *known)}


def edit(path: Path, nested: dict[str, Any] | None = None, **changes: Any) -> None:
    """Change fields of a checkpoint's config; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for node, wanted in ((config, changes), (config.get("dflash_config"), nested or {})):
        for key, value in wanted.items():
            node.pop(key, None)
            if value is not None:
                node[key] = value
    file.write_text(json.dumps(config))


def test_every_reader_has_what_it_reads_in_a_checkpoint_of_ours(whole, target):
    assert problems(whole, target) == {reader: [] for reader in READERS}


def test_expected_tensors_are_those_of_the_model(target):
    for layers in (1, 2, 3):
        config = drafter_config(target.config, target.tokenizer, TrainConfig(num_draft_layers=layers))
        made = {name: tuple(tensor.shape) for name, tensor in DFlashDraftModel(config).state_dict().items()}
        assert expected_tensors(config.to_dict()) == made


# --- DFlash and SpecForge as oracles ---------------------------------------------------------------------


def dflash_reads(path: Path, target: Target) -> bool:
    """Does DFlash itself load the checkpoint completely and generate with it?"""
    try:
        drafter, info = DFlashDraftModel.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"] or info["mismatched_keys"]:
            return False
        decode(drafter.eval(), target.model, [5, 6, 7], max_new_tokens=10, stop_token_ids=[])
    except Exception:
        return False
    return True


def specforge_reads(path: Path) -> bool:
    """Does SpecForge itself take the config for DFlash training, and the weights?"""
    from specforge.algorithms.model_providers import _validate_dflash_block_size, resolve_dflash_capture_layers
    from specforge.modeling.draft.dflash import DFlashDraftModel as Theirs
    from specforge.training.model_loading import load_draft_config_source

    try:
        config = load_draft_config_source(str(path))
        _validate_dflash_block_size(config)
        resolve_dflash_capture_layers(None, config, None)
        if list(config.architectures or []) != ["DFlashDraftModel"]:  # resolve_draft_config compares them so
            return False
        drafter, info = Theirs.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    except Exception:
        return False
    return not info["missing_keys"] and not info["mismatched_keys"] and drafter.mask_token_id is not None


def _without(name: str) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        tensors.pop(name)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return cut


BREAKS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda p: None,
    "num_target_layers": lambda p: edit(p, num_target_layers=None),
    "block_size at the top": lambda p: edit(p, block_size=None),
    "block_size inside": lambda p: edit(p, {"block_size": None}),
    "mask_token_id": lambda p: edit(p, {"mask_token_id": None}),
    "mask_token_id at the top instead": lambda p: edit(p, {"mask_token_id": None}, mask_token_id=259),
    "target_layer_ids": lambda p: edit(p, {"target_layer_ids": None}),
    "dflash_config": lambda p: edit(p, dflash_config=None),
    "architectures": lambda p: edit(p, architectures=["Qwen3ForCausalLM"]),
    "two architectures": lambda p: edit(p, architectures=["DFlashDraftModel", "Qwen3ForCausalLM"]),
    "one layer id too few": lambda p: edit(p, {"target_layer_ids": [1]}),
    "one layer id too many": lambda p: edit(p, {"target_layer_ids": [0, 1, 2]}),
    "another width": lambda p: edit(p, intermediate_size=48),
    "layer_types too short": lambda p: edit(p, layer_types=["full_attention"]),
    "fc": _without("fc.weight"),
    "a norm": _without("layers.1.self_attn.q_norm.weight"),
    "weights": lambda p: (p / "model.safetensors").unlink(),
    "half of the weights": lambda p: (p / "model.safetensors").write_bytes(
        (p / "model.safetensors").read_bytes()[:999]
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_dflash_and_specforge_stumble_where_it_is_said(folder, target, name):
    BREAKS[name](folder)
    found = {report.reader: worst(report.problems) for report in check_checkpoint(folder, "lab/model")}
    assert (found["dflash"] != "error") == dflash_reads(folder, target), found
    assert (found["specforge"] != "error") == specforge_reads(folder), found


# --- SGLang and vLLM, by the rules that their sources have -----------------------------------------------


def test_sglang_looks_for_the_mask_in_dflash_config_alone(folder):
    edit(folder, {"mask_token_id": None}, mask_token_id=259)
    found = problems(folder)
    assert "the only place where SGLang looks" in found["sglang"][0]
    assert found["vllm"] == [] and found["dflash"] == []


def test_sglang_refuses_a_mask_that_is_not_the_tokenizers(folder, target):
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"<|MASK|>": 7}

    found = {r.reader: r.problems for r in check_checkpoint(folder, "lab/model", target.config, Tokenizer())}
    assert "SGLang refuses the two" in found["sglang"][0].message
    assert "train.mask_token_id=7" in found["sglang"][0].hint
    assert not found["vllm"]


def test_vllm_would_tap_other_layers(folder):
    edit(folder, {"target_layer_ids": None})
    assert any("EAGLE-3's layers" in message for message in problems(folder)["vllm"])
    edit(folder, target_layer_ids=[0, 1])
    assert not any("EAGLE-3's layers" in message for message in problems(folder)["vllm"])


def test_servers_index_the_target_with_the_drafters_ids(folder, target):
    edit(folder, {"mask_token_id": 260, "target_layer_ids": [1, 9]})
    found = problems(folder, target)
    for reader in ("sglang", "vllm"):
        assert any("the target's embedding has 260 rows" in message for message in found[reader])
        assert any("[9] are not among the target's 4 layers" in message for message in found[reader])


def test_vllm_wants_the_targets_vocabulary(folder, target):
    edit(folder, vocab_size=100)
    found = problems(folder, target)
    assert any("the vocabulary is 100, the target's 260" in message for message in found["vllm"])
    assert not any("vocabulary" in message for message in found["sglang"])


def test_rope_in_two_ways_is_found_by_all(folder):
    edit(folder, rope_theta=5.0)
    assert all("rope_theta is 5" in messages[0] for messages in problems(folder).values())
    edit(folder, rope_theta=None, rope_parameters=None)
    assert all("neither rope_parameters nor rope_theta" in messages[0] for messages in problems(folder).values())


def test_what_a_config_says_of_its_tensors_and_code(folder):
    edit(folder, dtype="bfloat16", auto_map={"AutoModel": "modeling_dflash.DFlashDraftModel"})
    messages = problems(folder)["dflash"]
    assert any("says dtype bfloat16, and the tensors are float32" in message for message in messages)
    assert any("modeling_dflash.py, which is not in" in message for message in messages)


def test_prefixed_tensor_names_are_named_as_such(folder):
    tensors = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    report = check_checkpoint(folder, "lab/model")[0]
    assert "names begin with layers" in report.problems[0].hint


# --- safetensors without their tensors -------------------------------------------------------------------


def test_headers_say_what_is_stored(tmp_path):
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = tensor_index(tmp_path)
    assert {name: info.shape for name, info in found.items()} == {"a": (3, 5), "b": (7,)}
    assert parameter_count(found) == 22 and stored_bytes(found) == 60 + 14


def test_shards_are_followed_by_their_index(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert set(tensor_index(tmp_path)) == {"a", "b"}
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "c": "two.safetensors"}}))
    with pytest.raises(UsageError, match="lacks tensor c"):
        tensor_index(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no two.safetensors \(model.safetensors.index.json names it\)"):
        tensor_index(tmp_path)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_no_safetensors_or_whole(tmp_path, content):
    file = tmp_path / "junk.safetensors"
    file.write_bytes(content)
    try:
        tensors = safetensors_header(file)
    except UsageError:
        return
    assert isinstance(tensors, dict)


FIELDS = (
    "architectures", "block_size", "num_target_layers", "hidden_size", "num_hidden_layers", "vocab_size", "head_dim",
    "num_attention_heads", "intermediate_size", "rope_parameters", "rope_theta", "layer_types", "dtype", "auto_map",
    "dflash_config", "draft_vocab_size", "hidden_act", "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
NESTED = ("mask_token_id", "target_layer_ids", "block_size", "mask_token", "input_embedding_scale")
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=False), st.text(max_size=3),
    st.lists(st.one_of(st.integers(-3, 9), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from(FIELDS), JUNK, max_size=4),
    st.dictionaries(st.sampled_from(NESTED), JUNK, max_size=3),
)
def test_no_content_of_the_config_is_a_traceback(whole, target, tmp_path, changes, nested):
    path = tmp_path / "drafter"
    path.mkdir(exist_ok=True)
    config = json.loads((whole / "config.json").read_text())
    config["dflash_config"].update(nested)
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    if not (path / "model.safetensors").exists():
        shutil.copy(whole / "model.safetensors", path)
    for report in check_checkpoint(path, "lab/model", target.config, target.tokenizer):
        assert report.launch
