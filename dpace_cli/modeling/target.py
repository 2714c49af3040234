"""The target model: loading it, its stop tokens, its embedding and head, and what it lends the drafter."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dpace_cli.config import DEMO_TARGET, TargetConfig
from dpace_cli.demo import target_path
from dpace_cli.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A loaded target, in evaluation mode and without gradients.

    Attributes:
        path: the hub id or folder it came from, as written in the config ("demo" for the embedded one).
        model: a Transformers causal language model.
        tokenizer: its tokenizer.
    """

    path: str
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def config(self) -> Any:
        """The text model's config, also where the checkpoint is multimodal."""
        return self.model.config.get_text_config()

    @property
    def embedding(self) -> Tensor:
        """[vocabulary, width] input embedding."""
        return self.model.get_input_embeddings().weight

    @property
    def head(self) -> Tensor:
        """[vocabulary, width] output projection; the embedding itself where the target ties them."""
        return self.model.get_output_embeddings().weight

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an answer, as DFlash's benchmark reads them."""
        ids = self.model.generation_config.eos_token_id or self.tokenizer.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def target_location(config: TargetConfig) -> str:
    """Hub id or folder of the target."""
    return str(target_path()) if config.path == DEMO_TARGET else config.path


def load_tokenizer(config: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        UsageError: it cannot be found, or has no chat template.
    """
    tokenizer = _load(AutoTokenizer, config)
    if not tokenizer.chat_template:
        raise UsageError(f"the tokenizer of {config.path} has no chat template", "use the instruction-tuned model")
    return tokenizer


def load_target_config(config: TargetConfig) -> Any:
    """The target's Transformers config, without its weights."""
    return _load(AutoConfig, config)


def load_target(config: TargetConfig) -> Target:
    """Load target and tokenizer on the configured device.

    Raises:
        UsageError: the model, the device or the hub is not there.
    """
    device = resolve_device(config.device)
    tokenizer = load_tokenizer(config)
    model = _load(
        AutoModelForCausalLM, config, dtype=resolve_dtype(config.dtype, device), attn_implementation="sdpa"
    )  # fmt: skip
    model = model.to(device).eval().requires_grad_(False)
    return Target(config.path, model, tokenizer)


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; under torchrun, the process's own GPU."""
    if name == "auto":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"target.device {name} is not usable: {str(error).splitlines()[0]}") from None
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: float32 on a CPU, where half precision is slow and less exact, bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides which ids a text becomes: vocabulary, merges, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{text}\0{tokenizer.chat_template}".encode()).hexdigest()


def _load(kind: Any, config: TargetConfig, **options: Any) -> Any:
    location = target_location(config)
    looks_local = location.startswith((".", "/", "~")) or location.count("/") != 1
    if looks_local and not Path(location).expanduser().is_dir():
        raise UsageError(
            f"target.path {config.path} is not a folder", "give a model folder or a hub id such as Qwen/Qwen3-4B"
        )
    try:
        return kind.from_pretrained(
            str(Path(location).expanduser()) if looks_local else location,
            revision=config.revision or "main",
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"cannot load target {config.path}: {reason}",
            "check target.path, and that the hub is reachable (HF_ENDPOINT, HF_HUB_OFFLINE)",
        ) from None
