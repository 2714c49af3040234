"""Ask a server what it is: which model it serves, whether it speculates, and with which drafter.

SGLang tells in `/server_info` (`/get_server_info` in older versions). vLLM tells by its Prometheus counters
`vllm:spec_decode_*` at `/metrics`, which are there from the start where speculation is on, and nowhere else.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any, Literal

TIMEOUT_S = 5.0
"""Seconds that a server has for each answer."""

_MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class ServerFacts:
    """What a server says about itself.

    Attributes:
        url: as it was asked for.
        error: why it could not be asked; None where it answered.
        models: names that a request can give.
        software: "sglang", "vllm" or "other".
        speculation: null where the server does not tell.
        algorithm: SGLang's name for the kind of speculation.
        model_path: what it loaded as the target, where it tells.
        draft_model_path: what it loaded as the drafter, where it tells.
        draft_tokens: SGLang's `speculative_num_draft_tokens`, the block size.
    """

    url: str
    error: str | None = None
    models: tuple[str, ...] = ()
    software: Literal["sglang", "vllm", "other"] = "other"
    speculation: bool | None = None
    algorithm: str | None = None
    model_path: str | None = None
    draft_model_path: str | None = None
    draft_tokens: int | None = None


def probe(url: str, api_key: str | None = None, timeout_s: float = TIMEOUT_S) -> ServerFacts:
    """Ask a server; its failure is part of the answer and raises nothing.

    Args:
        url: with or without `/v1` at its end.
    """
    root = url.rstrip("/").removesuffix("/v1")
    try:
        listed = json.loads(_get(f"{root}/v1/models", api_key, timeout_s))
        models = tuple(str(entry["id"]) for entry in listed["data"])
    except (urllib.error.URLError, OSError, ValueError, KeyError, TypeError) as error:
        return ServerFacts(url, error=_reason(error))
    info = _server_info(root, api_key, timeout_s)
    if info is not None:
        algorithm = info.get("speculative_algorithm")
        return ServerFacts(
            url, models=models, software="sglang", speculation=bool(algorithm), algorithm=algorithm,
            model_path=info.get("model_path"), draft_model_path=info.get("speculative_draft_model_path"),
            draft_tokens=info.get("speculative_num_draft_tokens"),
        )  # fmt: skip
    try:
        metrics = _get(f"{root}/metrics", api_key, timeout_s).decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError):
        return ServerFacts(url, models=models)
    if "vllm:" in metrics:
        return ServerFacts(url, models=models, software="vllm", speculation="vllm:spec_decode_" in metrics)
    return ServerFacts(url, models=models)


def _server_info(root: str, api_key: str | None, timeout_s: float) -> dict[str, Any] | None:
    """SGLang's description of itself, or None where the server is no SGLang."""
    for path in ("/server_info", "/get_server_info"):
        try:
            info = json.loads(_get(root + path, api_key, timeout_s))
        except (urllib.error.URLError, OSError, ValueError):
            continue
        if isinstance(info, dict) and "speculative_algorithm" in info:
            return info
    return None


def _get(url: str, api_key: str | None, timeout_s: float) -> bytes:
    if not url.startswith(("http://", "https://")):
        raise ValueError("a server's address begins with http:// or https://")
    request = urllib.request.Request(url)
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return response.read(_MOST_BYTES)


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} ({error.reason}) at {error.url}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    if isinstance(error, json.JSONDecodeError | KeyError | TypeError):
        return "what it sends at /v1/models is not a list of models"
    return str(error) or type(error).__name__
