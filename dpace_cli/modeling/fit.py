"""A target and a drafter held against each other: what decides whether the one can serve the other.

The drafter is a checkpoint's config.json, or the config that a training would make. No weights are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpace_cli.checks import Check, error, ok, warning
from dpace_cli.errors import UsageError
from dpace_cli.modeling.checker import TensorInfo, block_size, layer_ids, mask_token, rope_of, tensor_index
from dpace_cli.modeling.drafter import rope_parameters

_WEIGHT_FORMATS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def compare(
    drafter: Mapping[str, Any], target: Any, tokenizer: Any, stop_token_ids: Sequence[int], source: str
) -> Iterator[Check]:
    """Findings about mask token, layer taps, RoPE, block size, vocabulary and end tokens.

    Args:
        drafter: its config, as in config.json.
        target: the target's Transformers text config.
        tokenizer: the target's.
        stop_token_ids: tokens that end an answer.
        source: where the drafter's config is from, for the messages.
    """
    yield _mask(drafter, target, tokenizer, stop_token_ids, source)
    yield _taps(drafter, target, source)
    yield _rope(drafter, target, source)
    yield _block(drafter, source)
    yield _vocabulary(drafter, target, tokenizer, source)
    yield _end_tokens(drafter, target, stop_token_ids, source)


def _mask(drafter: Mapping[str, Any], target: Any, tokenizer: Any, stops: Sequence[int], source: str) -> Check:
    name, mask = "mask token", mask_token(drafter)
    hint = "set train.mask_token_id to a token that never occurs in text, and train again"
    if mask is None:
        return error(name, f"{source} has no mask_token_id", hint)
    if not 0 <= mask < target.vocab_size:
        return error(name, f"{source}: mask_token_id {mask} is beyond the embedding's {target.vocab_size} rows", hint)
    taken = {"padding": tokenizer.pad_token_id, "begin": tokenizer.bos_token_id, "end": tokenizer.eos_token_id}
    used = [role for role, token in taken.items() if token == mask] + ["end"] * (mask in stops)
    if used:
        return error(name, f"{source}: mask_token_id {mask} is the {used[0]} token", hint)
    text = tokenizer.convert_ids_to_tokens(mask) if mask < len(tokenizer) else "a row beyond the tokenizer"
    return ok(name, f"{mask} ({text})")


def _taps(drafter: Mapping[str, Any], target: Any, source: str) -> Check:
    name, ids, layers = "layer taps", layer_ids(drafter), target.num_hidden_layers
    highest = layers - 2
    hint = f"ids ascend from 0 to {highest}; id k is the output of layer k, and the last layer is not tapped"
    trained = drafter.get("num_target_layers")
    if not ids:
        return error(name, f"{source} has no target_layer_ids", hint)
    if ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > highest:
        return error(name, f"{source} taps layers {ids} of a target with {layers}", hint)
    if trained is not None and trained != layers:
        made = f"{source} was made for a target with {trained} layers; this one has {layers}"
        return error(name, made, "a drafter works with the target that it was trained for alone")
    return ok(name, f"layers {', '.join(map(str, ids))} of {layers}")


def _rope(drafter: Mapping[str, Any], target: Any, source: str) -> Check:
    name = "RoPE"
    try:
        own, theirs = rope_of(drafter), rope_parameters(target)
    except UsageError as reason:
        return error(name, f"{source}: {reason.message}", reason.hint)
    differing = sorted(
        k for k in {*own, *theirs} if own.get(k, _ROPE_DEFAULTS.get(k)) != theirs.get(k, _ROPE_DEFAULTS.get(k))
    )
    if differing:
        two = ", ".join(f"{k} {own.get(k)} (target {theirs.get(k)})" for k in differing)
        return error(
            name, f"{source}: {two}", "copy rope_parameters and rope_theta from the target's config, train again"
        )
    return ok(name, f"{own.get('rope_type', 'default')}, theta {own['rope_theta']:g}")


_ROPE_DEFAULTS = {"rope_type": "default", "partial_rotary_factor": 1.0}


def _block(drafter: Mapping[str, Any], source: str) -> Check:
    name, size = "block size", block_size(drafter)
    nested, top = (drafter.get("dflash_config") or {}).get("block_size"), drafter.get("block_size")
    if nested is not None and top is not None and nested != top:
        two = f"{source}: SpecForge reads block_size {top}, and DFlash reads dflash_config.block_size {nested}"
        return error(name, two, "write the size that it was trained with in both places")
    if size < 2:
        return error(name, f"{source}: a block of {size} drafts nothing", "block_size counts the anchor: 2 or more")
    return ok(name, f"{size} positions, {size - 1} of them drafted")


def _vocabulary(drafter: Mapping[str, Any], target: Any, tokenizer: Any, source: str) -> Check:
    name, rows = "vocabulary", target.vocab_size
    if len(tokenizer) > rows:
        more = f"the tokenizer has {len(tokenizer)} tokens, and the target's embedding {rows} rows"
        return error(name, more, "tokenizer and model are of different versions; take both from one place")
    if drafter.get("vocab_size") != rows:
        return error(name, f"{source}: vocab_size is {drafter.get('vocab_size')}, the target's is {rows}",
                     "a drafter works with the target that it was trained for alone")  # fmt: skip
    if drafter.get("hidden_size") != target.hidden_size:
        return error(name, f"{source}: it is {drafter.get('hidden_size')} wide, the target {target.hidden_size}",
                     "a drafter works with the target that it was trained for alone")  # fmt: skip
    return ok(name, f"{rows} rows, {len(tokenizer)} tokens, width {target.hidden_size}")


def _end_tokens(drafter: Mapping[str, Any], target: Any, stops: Sequence[int], source: str) -> Check:
    name = "end tokens"
    if not stops:
        return error(
            name, "the target names no token that ends an answer", "set eos_token_id in generation_config.json"
        )
    outside = [token for token in stops if not 0 <= token < target.vocab_size]
    if outside:
        return error(name, f"the target's end tokens {outside} are beyond its embedding")
    own, theirs = _as_set(drafter.get("eos_token_id")), _as_set(target.eos_token_id)
    if own and theirs and own != theirs:
        two = f"{source}: eos_token_id is {sorted(own)}, the target's {sorted(theirs)}"
        return warning(name, two, "write the target's; some servers refuse two that differ")
    return ok(name, ", ".join(map(str, stops)))


def _as_set(value: Any) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def target_weights(folder: Path, config: Any) -> tuple[Check, Check, dict[str, TensorInfo] | None]:
    """Are a target's weights there and whole, and does its head fit its config?

    Returns:
        Findings about the weights and about the tied head, and the tensors where their headers can be read.
    """
    files = [file for pattern in _WEIGHT_FORMATS for file in sorted(folder.glob(pattern))]
    if not files:
        gone = error("target weights", f"{folder} has no weights", "download the whole model folder")
        return gone, warning("tied head", "not checked: the target has no weights"), None
    if files[0].suffix != ".safetensors":
        unread = f"only safetensors are looked into, and {folder} has {files[0].name}"
        return (
            ok("target weights", f"{files[0].name}, not looked into"),
            warning("tied head", f"not checked: {unread}"),
            None,
        )
    try:
        tensors = tensor_index(folder)
    except UsageError as reason:
        bad = error("target weights", reason.message, reason.hint)
        return bad, warning("tied head", "not checked: the target's weights are not whole"), None
    count = len(list(folder.glob("*.safetensors")))
    return ok("target weights", f"{len(tensors)} tensors in {count} files"), tied_head(tensors, config), tensors


def tied_head(tensors: Mapping[str, TensorInfo], config: Any) -> Check:
    """Does the target have the head that its config promises?"""
    name = "tied head"
    heads = [tensor for key, tensor in tensors.items() if key.endswith("lm_head.weight")]
    embeddings = [tensor for key, tensor in tensors.items() if key.endswith(("embed_tokens.weight", "wte.weight"))]
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if not embeddings:
        return warning(name, "not checked: no tensor is named as an input embedding")
    rows = embeddings[0].shape[0]
    if rows != config.vocab_size:
        two = f"the embedding has {rows} rows, and the target's config says vocab_size {config.vocab_size}"
        return error(name, two, "config.json and weights are of different versions; take both from one place")
    if not tied and not heads:
        untied = "tie_word_embeddings is false, and the weights hold no lm_head: the head would be random"
        return error(name, untied, "set tie_word_embeddings to true in the target's config.json, or get the lm_head")
    if heads and heads[0].shape != embeddings[0].shape:
        two = f"lm_head is {list(heads[0].shape)}, the embedding {list(embeddings[0].shape)}"
        return error(name, two, "a drafter needs a head over the whole vocabulary")
    return ok(name, "the embedding serves as the head" if tied else "a head of its own")
