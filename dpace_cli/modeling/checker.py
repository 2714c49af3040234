"""What a drafter checkpoint must hold for each program that reads it, found by field names, without loading it.

Read off dflash 0.1.0 (`dflash.model`), SpecForge 0.2.0 (`modeling/draft/dflash.py`, `training/model_loading.py`),
SGLang 0.5.14 (`models/dflash.py`, `speculative/dflash_utils.py`, `speculative/dflash_worker_v2.py`) and vLLM
(`models/qwen3_dflash.py` at commit 036a00d1f5d0, its helper `get_eagle3_aux_layers_from_config`). Only
`config.json` and the headers of the safetensors files are read.

Shapes: H width, Q = heads x head width, KV the same for key and value heads, I width of the MLP, T tapped layers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dpace_cli.checks import Check, error, warning
from dpace_cli.errors import UsageError
from dpace_cli.modeling.drafter import rope_parameters
from dpace_cli.records import read_json

READERS = ("dflash", "specforge", "sglang", "vllm")
"""Programs that a checkpoint is checked for."""

SGLANG_MASK_TOKEN = "<|MASK|>"
"""Token that SGLang takes for the mask where the config names none."""

_MAX_HEADER = 100 << 20
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class ReaderReport:
    """What one program finds in a checkpoint.

    Attributes:
        reader: one of READERS.
        problems: what it would stumble over, or read otherwise than meant; empty where it has all it reads.
        launch: the command that uses the checkpoint with this program.
    """

    reader: str
    problems: list[Check]
    launch: str


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a safetensors header describes it."""

    dtype: str
    shape: tuple[int, ...]


# --- safetensors, without their tensors ------------------------------------------------------------------


def tensor_index(folder: Path) -> dict[str, TensorInfo]:
    """Names, types and shapes of the tensors of a model folder, from the headers of its safetensors files.

    Raises:
        UsageError: there is no such file, one that the index names is missing, or one is cut off or damaged.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        placed = read_json(index).get("weight_map") or {}
        files = sorted({folder / name for name in placed.values()})
    else:
        placed, files = {}, [folder / "model.safetensors"]
    found: dict[str, TensorInfo] = {}
    for file in files:
        if not file.is_file():
            named = f"{index.name} names it" if placed else "only safetensors are read"
            raise UsageError(f"{folder} has no {file.name} ({named})", "download or copy the model folder again")
        found |= safetensors_header(file)
    lacking = sorted(set(placed) - set(found))
    if lacking:
        raise UsageError(f"{folder} lacks tensor {lacking[0]}, which {index.name} names", "copy the folder again")
    return found


def safetensors_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file, from its header alone.

    Raises:
        UsageError: it is not a safetensors file, or it is shorter or longer than its header says.
    """
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header has no sensible length")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {name: TensorInfo(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as reason:
        raise UsageError(f"{file} is not a safetensors file: {reason}", "copy or download it again") from None
    whole = 8 + length + end
    if size != whole:
        raise UsageError(f"{file} has {size:,} bytes; its header says {whole:,}", "copy or download it again")
    return tensors


def parameter_count(tensors: Mapping[str, TensorInfo]) -> int:
    """Numbers in all tensors together."""
    total = 0
    for tensor in tensors.values():
        count = 1
        for extent in tensor.shape:
            count *= extent
        total += count
    return total


def stored_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Size of all tensors together."""
    return sum(parameter_count({name: t}) * _ITEM_BYTES.get(t.dtype, 1) for name, t in tensors.items())


def expected_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a DFlash drafter; it has no embedding and no head, both are the target's.

    Raises:
        KeyError: the config lacks a field that decides a shape.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    q, kv, mlp = heads * head, (config.get("num_key_value_heads") or heads) * head, config["intermediate_size"]
    taps = len(layer_ids(config) or range(config["num_hidden_layers"]))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * width), "hidden_norm.weight": (width,), "norm.weight": (width,)
    }  # fmt: skip
    layer = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (q, width), "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width), "self_attn.o_proj.weight": (width, q),
        "self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (mlp, width), "mlp.up_proj.weight": (mlp, width),
        "mlp.down_proj.weight": (width, mlp),
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


# --- fields, where each program looks for them -------------------------------------------------------------


def layer_ids(config: Mapping[str, Any]) -> list[int] | None:
    """The tapped layers, where DFlash looks for them."""
    return _nested(config).get("target_layer_ids", config.get("target_layer_ids"))


def block_size(config: Mapping[str, Any]) -> int:
    """Positions in a block, as DFlash and SGLang read it."""
    size = _nested(config).get("block_size", config.get("block_size"))
    return size if _is_id(size) else 16


def mask_token(config: Mapping[str, Any]) -> int | None:
    """The mask token's id, as DFlash reads it."""
    return _nested(config).get("mask_token_id", config.get("mask_token_id"))


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a drafter's or target's config, from new and old field names.

    Raises:
        UsageError: there are none.
    """
    return rope_parameters(SimpleNamespace(**config))


def check_checkpoint(path: Path, target: str, target_config: Any = None, tokenizer: Any = None) -> list[ReaderReport]:
    """Does a drafter checkpoint hold what each program reads?

    Args:
        path: a folder with config.json and safetensors.
        target: hub id or folder of the target, for the launch lines.
        target_config: the target's Transformers text config, where it is known.
        tokenizer: the target's, where it is known.
    Raises:
        UsageError: the folder has no readable config.json.
    """
    config = read_json(path / "config.json")
    if not isinstance(config, dict):
        raise UsageError(f"{path / 'config.json'} holds a {type(config).__name__}, not an object")
    shared = [*_of_right_types(_fields(config)), *_of_right_types(_weights(path, config))]
    own = {
        "dflash": _dflash(config), "specforge": _specforge(config),
        "sglang": _sglang(config, target_config, tokenizer), "vllm": _vllm(config, target_config),
    }  # fmt: skip
    lines = launch_lines(path, target, block_size(config))
    return [ReaderReport(reader, [*_of_right_types(own[reader]), *shared], lines[reader]) for reader in READERS]


def is_drafter(path: Path) -> bool:
    """Does the folder's config.json describe a DFlash drafter, however well?"""
    try:
        config = read_json(path / "config.json")
    except UsageError:
        return False
    if not isinstance(config, dict):
        return False
    return "dflash_config" in config or any("DFlash" in str(kind) for kind in config.get("architectures") or [])


def _of_right_types(checks: Iterator[Check]) -> Iterator[Check]:
    """The checks, and one that says so where a field holds something of another kind than any reader takes."""
    try:
        yield from checks
    except (TypeError, ValueError, AttributeError, ArithmeticError) as reason:
        yield error("config", f"a field of config.json is of the wrong kind: {' '.join(str(reason).split())[:120]}")


def launch_lines(path: Path | str, target: str, block: int) -> dict[str, str]:
    """The command that uses a checkpoint, by reader. SGLang takes K where vLLM takes K - 1."""
    speculative = json.dumps({"method": "dflash", "model": str(path), "num_speculative_tokens": block - 1})
    path, target = shlex.quote(str(path)), shlex.quote(target)
    return {
        "dflash": f"dflash benchmark transformers --model {target} --draft {path} --dataset gsm8k",
        "specforge": f"specforge train --config RUN.yaml model.target_model_path={target} "
        f"model.draft_checkpoint_path={path}",
        "sglang": f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path {path} --speculative-num-draft-tokens {block}",
        "vllm": f"vllm serve {target} --speculative-config {shlex.quote(speculative)}",
    }


# --- the checks ------------------------------------------------------------------------------------------

_SHAPE_FIELDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def _nested(config: Mapping[str, Any]) -> Mapping[str, Any]:
    own = config.get("dflash_config")
    return own if isinstance(own, Mapping) else {}


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fields(config: Mapping[str, Any]) -> Iterator[Check]:
    """What every reader would stumble over in the config."""
    for name in _SHAPE_FIELDS:
        if not _is_id(config.get(name)):
            yield error(name, f"config.json has no {name}", "copy it from the target's config")
    if config.get("hidden_act", "silu") != "silu":
        yield error("hidden_act", f"hidden_act is {config['hidden_act']!r}; every reader computes silu")
    try:
        rope_of(config)
    except UsageError:
        missing = "config.json has neither rope_parameters nor rope_theta; each reader takes a default of its own"
        yield error("rope", missing, "copy both from the target's config")
    new, old = (config.get("rope_parameters") or {}).get("rope_theta"), config.get("rope_theta")
    if new is not None and old is not None and new != old:
        two = f"rope_parameters.rope_theta is {new:g} and rope_theta is {old:g}; readers differ in which they take"
        yield error("rope", two, "write the target's value in both")
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if types is not None and len(types) != layers:
        yield error("layer_types", f"layer_types has {len(types)} entries for {layers} layers")


def _weights(path: Path, config: Mapping[str, Any]) -> Iterator[Check]:
    """What every reader would stumble over in the tensors."""
    try:
        tensors, expected = tensor_index(path), expected_tensors(config)
    except UsageError as reason:
        yield error("weights", reason.message, reason.hint)
        return
    except KeyError:
        return  # the field that is missing is reported already
    missing = sorted(set(expected) - set(tensors))
    if missing:
        prefixed = any(name.endswith(f".{missing[0]}") for name in tensors)
        hint = "rename the tensors: names begin with layers, fc, hidden_norm and norm" if prefixed else ""
        yield error("weights", f"{len(missing)} of {len(expected)} tensors are missing, {missing[0]} first", hint)
    for name, shape in expected.items():
        if name in tensors and tensors[name].shape != shape:
            found = list(tensors[name].shape)
            hint = "its input is one target width for each tapped layer" if name == "fc.weight" else ""
            yield error("weights", f"{name} is {found}, and the config makes it {list(shape)}", hint)
    said = str(config.get("dtype") or config.get("torch_dtype") or "")
    stored = {_DTYPES.get(tensors[name].dtype, tensors[name].dtype) for name in expected if name in tensors}
    if said and stored and stored != {said}:
        two = f"config.json says dtype {said}, and the tensors are {', '.join(sorted(stored))}"
        yield warning("weights", two, "a reader that trusts the config rounds them as it loads")
    for code in {str(value).split("--")[-1].split(".")[0] for value in (config.get("auto_map") or {}).values()}:
        if not (path / f"{code}.py").is_file():
            yield warning("auto_map", f"auto_map names {code}.py, which is not in {path}", "remove auto_map")


def _architecture(config: Mapping[str, Any], reader: str, alone: bool = False) -> Iterator[Check]:
    given = config.get("architectures") or []
    if "DFlashDraftModel" not in given or (alone and len(given) > 1):
        wanted = f"{reader} looks for DFlashDraftModel{' alone' if alone else ''}"
        yield error(
            "architectures", f"architectures is {given}; {wanted}", 'write "architectures": ["DFlashDraftModel"]'
        )


def _dflash(config: Mapping[str, Any]) -> Iterator[Check]:
    if not _is_id(config.get("num_target_layers")):
        # DFlash works its rule out before it looks at target_layer_ids.
        missing = "config.json has no num_target_layers; DFlashDraftModel cannot be built"
        yield error("num_target_layers", missing, "set it to the target's num_hidden_layers")
    if layer_ids(config) is None:
        yield warning("target_layer_ids", "target_layer_ids is missing; DFlash takes the layers of its rule")
    if not _is_id(mask_token(config)):
        yield error("mask_token_id", "mask_token_id is missing", "write dflash_config.mask_token_id")
    if "block_size" not in _nested(config) and "block_size" not in config:
        yield warning("block_size", "block_size is missing; DFlash takes 16", "write it in both places")
    if "DFlash2DraftModel" in (config.get("architectures") or []):
        yield error("architectures", "architectures names DFlash2DraftModel, whose tensors are not here")


def _specforge(config: Mapping[str, Any]) -> Iterator[Check]:
    yield from _architecture(config, "SpecForge", alone=True)
    size = config.get("block_size")
    if not _is_id(size) or size < 2:
        hint = f"write block_size: {block_size(config)} beside dflash_config"
        yield error("block_size", "block_size is not at the top level, the only place where SpecForge looks", hint)
    for name in ("mask_token_id", "target_layer_ids"):
        if _nested(config).get(name) is None:
            yield error(name, f"dflash_config has no {name}, the only place where SpecForge looks")
    if not _is_id(config.get("num_target_layers")):
        yield error("num_target_layers", "config.json has no num_target_layers; the model cannot be built")


def _sglang(config: Mapping[str, Any], target: Any, tokenizer: Any) -> Iterator[Check]:
    yield from _architecture(config, "SGLang")
    nested = _nested(config)
    mask, token = nested.get("mask_token_id"), nested.get("mask_token") or SGLANG_MASK_TOKEN
    if not _is_id(mask):
        missing = "dflash_config has no mask_token_id, the only place where SGLang looks"
        yield error("mask_token_id", f"{missing}; it would add {token} to the tokenizer")
    elif tokenizer is not None:
        named = tokenizer.get_vocab().get(token, mask)
        if named != mask:
            two = f"mask_token_id is {mask}, and {token} is {named} in the target's tokenizer; SGLang refuses the two"
            yield error("mask_token_id", two, f"train with train.mask_token_id={named}")
    if layer_ids(config) is None:
        yield warning("target_layer_ids", "target_layer_ids is missing; SGLang takes the layers of DFlash's rule")
    yield from _within_target(config, target, "SGLang")


def _vllm(config: Mapping[str, Any], target: Any) -> Iterator[Check]:
    yield from _architecture(config, "vLLM")
    if not (config.get("eagle_aux_hidden_state_layer_ids") or layer_ids(config)):
        missing = "target_layer_ids is missing; vLLM takes EAGLE-3's layers, and only the acceptance tells"
        yield error("target_layer_ids", missing)
    if not _is_id(mask_token(config)):
        yield error("mask_token_id", "mask_token_id is missing; vLLM does not start", "write it in dflash_config")
    vocabulary = config.get("draft_vocab_size") or config.get("vocab_size")
    if target is not None and vocabulary != target.vocab_size:
        two = f"the vocabulary is {vocabulary}, the target's {target.vocab_size}; vLLM then wants a map of token ids"
        yield error("vocab_size", two, "set vocab_size to the target's")
    if _nested(config).get("input_embedding_scale", 1.0) != 1.0:
        unread = "dflash_config.input_embedding_scale is not read by vLLM's Qwen3 drafter"
        yield warning("input_embedding_scale", unread, "compare the acceptance with `dpace bench --engine local`")
    yield from _within_target(config, target, "vLLM")


def _within_target(config: Mapping[str, Any], target: Any, reader: str) -> Iterator[Check]:
    """Servers index the target's layers and embedding with the drafter's ids."""
    if target is None:
        return
    mask, rows, layers = mask_token(config), target.vocab_size, target.num_hidden_layers
    if _is_id(mask) and mask >= rows:
        beyond = f"mask_token_id is {mask}; the target's embedding has {rows} rows, and {reader} adds none"
        yield error("mask_token_id", beyond)
    outside = [i for i in layer_ids(config) or [] if not 0 <= i < layers]
    if outside:
        yield error("target_layer_ids", f"target_layer_ids {outside} are not among the target's {layers} layers")
