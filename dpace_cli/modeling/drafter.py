"""Build a DFlash drafter for a target: its config, its mask token, its initial weights.

The drafter borrows the target's embedding and head, so its width is the target's; its layers are DFlash's.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from dflash.model import DFlashDraftModel, build_target_layer_ids
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

from dpace_cli.config import TrainConfig
from dpace_cli.errors import UsageError

_MASK_NAMES = ("<|mask|>", "<mask>", "[MASK]", "<|MASK|>")
_RESERVED = re.compile(r"reserved|unused|extra_\d|placeholder|dummy", re.IGNORECASE)


def drafter_config(
    target_config: Any, tokenizer: PreTrainedTokenizerBase, train: TrainConfig, embedding_scale: float = 1.0
) -> Qwen3Config:
    """Config of a DFlash drafter for a target, with everything that DFlash, SpecForge and servers read.

    Args:
        target_config: the target's Transformers (text) config.
        embedding_scale: factor on the target's input embedding (Gemma); DFlash's `input_embedding_scale`.
    Raises:
        UsageError: a tapped layer or the mask token is out of range, or RoPE is of a kind that DFlash lacks.
    """
    heads = target_config.num_attention_heads
    layer_ids = target_layer_ids(target_config.num_hidden_layers, train)
    dflash = {
        "mask_token_id": mask_token_id(tokenizer, target_config.vocab_size, train.mask_token_id),
        "target_layer_ids": layer_ids,
        "block_size": train.block_size,
    }
    if embedding_scale != 1.0:
        dflash["input_embedding_scale"] = embedding_scale
    softcap = getattr(target_config, "final_logit_softcapping", None)
    if softcap:
        dflash["final_logit_softcapping"] = softcap
    rope = rope_parameters(target_config)
    config = Qwen3Config(
        vocab_size=target_config.vocab_size,
        hidden_size=target_config.hidden_size,
        intermediate_size=train.intermediate_size or target_config.intermediate_size,
        num_hidden_layers=train.num_draft_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(target_config, "num_key_value_heads", None) or heads,
        head_dim=getattr(target_config, "head_dim", None) or target_config.hidden_size // heads,
        hidden_act="silu",
        max_position_embeddings=target_config.max_position_embeddings,
        # 0.02, the usual constant, is this at Qwen3-4B's width; narrower drafters learn faster from larger weights.
        initializer_range=target_config.hidden_size**-0.5,
        rms_norm_eps=getattr(target_config, "rms_norm_eps", 1e-6),
        rope_parameters=rope,
        attention_bias=False,
        attention_dropout=0.0,
        use_sliding_window=False,
        tie_word_embeddings=False,
        bos_token_id=target_config.bos_token_id,
        eos_token_id=target_config.eos_token_id,
        pad_token_id=target_config.pad_token_id,
        layer_types=["full_attention"] * train.num_draft_layers,
    )
    config.architectures = ["DFlashDraftModel"]
    config.num_target_layers = target_config.num_hidden_layers
    config.block_size = train.block_size  # SpecForge reads it here, DFlash in either place
    config.dflash_config = dflash
    config.rope_theta = rope["rope_theta"]  # the field's name before Transformers 5, which servers still read
    return config


def build_drafter(config: Qwen3Config, seed: int) -> DFlashDraftModel:
    """A drafter with float32 initial weights that depend on the seed and the config's shapes alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DFlashDraftModel(config).float()


def embedding_scale(target_model: nn.Module) -> float:
    """Factor that the target's embedding module puts on its weight (Gemma); 1 elsewhere."""
    return float(getattr(target_model.get_input_embeddings(), "embed_scale", 1.0))


def weights_hash(drafter: nn.Module) -> str:
    """Hex SHA-256 of all weights by name, to show that two drafters begin alike."""
    digest = hashlib.sha256()
    for name, tensor in drafter.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def target_layer_ids(num_target_layers: int, train: TrainConfig) -> list[int]:
    """The tapped layers, ascending; id k means the output of decoder layer k.

    Raises:
        UsageError: an id that no layer has, or the last layer (its output is only known after the final norm).
    """
    if train.target_layer_ids is None:
        # DFlash's rule spans layers 1 to n - 3; small targets have fewer layers than that needs.
        rule = build_target_layer_ids(num_target_layers, train.num_draft_layers)
        return sorted({min(max(layer, 0), max(num_target_layers - 2, 0)) for layer in rule})
    ids = train.target_layer_ids
    highest = num_target_layers - 2
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] > highest:
        raise UsageError(
            f"train.target_layer_ids is {ids}; ids must ascend from 0 to {highest}",
            f"the target has {num_target_layers} layers, and the last one is not tapped",
        )
    return ids


def mask_token_id(tokenizer: PreTrainedTokenizerBase, embedding_rows: int, given: int | None) -> int:
    """The token that stands at the drafted positions of a block.

    In this order: `train.mask_token_id`; the tokenizer's mask token; a token named as one; a row of the
    embedding beyond the tokenizer (what DFlash uses for Qwen3); a reserved token; a special token that no
    chat template writes.

    Raises:
        UsageError: none is there, or the given one is out of range or already means something.
    """
    taken = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id} - {None}
    if given is not None:
        if given >= embedding_rows:
            raise UsageError(
                f"train.mask_token_id is {given}; the target's embedding has rows 0 to {embedding_rows - 1}"
            )
        if given in taken:
            raise UsageError(
                f"train.mask_token_id is {given}, which is {tokenizer.convert_ids_to_tokens(given)!r}",
                "choose a token that never occurs in text: not the padding, begin or end token",
            )
        return given
    vocabulary = tokenizer.get_vocab()
    special = sorted(tokenizer.added_tokens_decoder.items())
    template = str(tokenizer.chat_template)
    candidates = [
        getattr(tokenizer, "mask_token_id", None),
        *(vocabulary.get(name) for name in _MASK_NAMES),
        len(tokenizer),
        *(index for index, token in special if _RESERVED.search(token.content)),
        *(index for index, token in reversed(special) if token.special and token.content not in template),
    ]
    unknown = getattr(tokenizer, "unk_token_id", None)
    for candidate in candidates:
        if candidate is not None and candidate < embedding_rows and candidate not in {*taken, unknown}:
            return candidate
    raise UsageError(
        f"no mask token found: the tokenizer spares no token, and all {embedding_rows} rows of the embedding are used",
        "set train.mask_token_id to a token that never occurs in your data",
    )


def rope_parameters(target_config: Any) -> dict[str, Any]:
    """The target's RoPE parameters, from the new field or the two old ones.

    Raises:
        UsageError: none there, or one set per layer type, or a part of each head alone is rotated.
    """
    rope = getattr(target_config, "rope_parameters", None)
    if not rope:
        theta = getattr(target_config, "rope_theta", None)
        if theta is None:
            raise UsageError("the target's config has no RoPE parameters; DFlash drafters need them")
        rope = {"rope_type": "default", **(getattr(target_config, "rope_scaling", None) or {}), "rope_theta": theta}
    if "rope_theta" not in rope and "full_attention" in rope:
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        raise UsageError(f"the target's RoPE parameters have no rope_theta: {rope}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError("the target rotates a part of each head alone; DFlash drafters rotate all of it")
    return dict(rope)
