"""A small setup in which nothing is wrong, for the doctor's tests to break."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import write_rows

from dpace_cli import doctor
from dpace_cli.config import Config
from dpace_cli.doctor import DoctorResult
from dpace_cli.modeling.checkpoint import save_checkpoint
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import load_target_config, load_tokenizer, tokenizer_fingerprint
from dpace_cli.records import RunFolder


@dataclass
class Place:
    """A target, a run with answers and a checkpoint, and the config that fits them; tests change what they like."""

    target: Path
    run: RunFolder
    checkpoint: Path
    values: dict[str, Any]

    def set(self, **changes: Any) -> None:
        """Change config values, such as `train__max_length=64`."""
        for key, value in changes.items():
            *sections, name = key.split("__")
            node = self.values
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value

    def copy(self, root: Path) -> Place:
        """The same setup under another folder."""
        before = self.target.parent
        shutil.copytree(before, root)
        values = json.loads(json.dumps(self.values).replace(str(before), str(root)))
        checkpoint = root / self.checkpoint.relative_to(before)
        return Place(root / "target", RunFolder(root / "run"), checkpoint, values)

    @property
    def config(self) -> Config:
        return Config.model_validate(self.values)

    def doctor(self, estimate: bool = False, checkpoint: bool = True) -> DoctorResult:
        return doctor.run(self.config, self.run, [self.checkpoint] if checkpoint else [], estimate=estimate)

    def edit_json(self, path: Path, **changes: Any) -> None:
        """Change fields of a JSON file; None removes one."""
        content = json.loads(path.read_text())
        for key, value in changes.items():
            content.pop(key, None)
            if value is not None:
                content[key] = value
        path.write_text(json.dumps(content))

    def edit_rows(self, path: Path, change: Any) -> None:
        """Apply a function to every row of a JSONL file."""
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(change(row)) + "\n" for row in rows))


def make_place(root: Path, tiny_target: Path) -> Place:
    """Lay a good setup out under `root`."""
    target = root / "target"
    shutil.copytree(tiny_target, target)
    values = {
        "name": "good",
        "target": {"path": str(target)},
        "regen": {"max_new_tokens": 128},
        "train": {"max_length": 256, "num_anchors": 24, "block_size": 8, "num_draft_layers": 2, "batch_size": 4},
        "bench": {"datasets": ["demo-math", "gsm8k"], "data_dir": str(root / "data"), "num_prompts": 2},
    }
    place = Place(target, RunFolder(root / "run"), root / "run" / "train" / "dpace-seed0" / "step-000001", values)
    place.run.answers.parent.mkdir(parents=True)
    write_rows(place.run.answers, 40)
    (root / "data").mkdir()
    questions = [{"question": f"What is {n} and {n}?", "answer": f"#### {2 * n}"} for n in range(3)]
    (root / "data" / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    section = place.config.target
    tokenizer, config = load_tokenizer(section), load_target_config(section)
    _store_tokens(place, tokenizer)
    save_checkpoint(place.checkpoint, build_drafter(drafter_config(config, tokenizer, place.config.train), seed=0))
    return place


def _store_tokens(place: Place, tokenizer: Any) -> None:
    """What `dpace regen` stores beside the answers, by the ChatML template's own words."""
    fingerprint = tokenizer_fingerprint(tokenizer)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    with open(place.run.answers.with_name("tokens.jsonl"), "w") as file:
        for line in place.run.answers.read_text().splitlines():
            row = json.loads(line)
            question, answer = (message["content"] for message in row["conversations"])
            turn = {
                "prompt_ids": ids(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"),
                "answer_ids": ids(f"{answer}<|im_end|>"),
                "finish_reason": "stop",
            }
            file.write(json.dumps({"id": row["id"], "fingerprint": fingerprint, "turns": [turn]}) + "\n")


@contextmanager
def server(pages: Mapping[str, Any]) -> Iterator[str]:
    """A loopback server with the given pages (JSON, or text); everything else is 404. Yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path)
            body = page.encode() if isinstance(page, str) else json.dumps(page).encode()
            self.send_response(404 if page is None else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/v1"
    finally:
        listening.shutdown()
        listening.server_close()


def models(*names: str) -> dict[str, Any]:
    """The answer of `/v1/models`."""
    return {"object": "list", "data": [{"id": name} for name in names]}


def sglang(model: str, drafter: str | None = None, **more: Any) -> dict[str, Any]:
    """Pages of an SGLang server."""
    info = {
        "model_path": model,
        "version": "0.5.14",
        "speculative_algorithm": "DFLASH" if drafter else None,
        "speculative_draft_model_path": drafter,
        "speculative_num_draft_tokens": 8 if drafter else None,
    }
    return {"/v1/models": models(model), "/server_info": {**info, **more}}


def vllm(model: str, speculates: bool) -> dict[str, Any]:
    """Pages of a vLLM server; only one that speculates has the counters."""
    counters = "vllm:spec_decode_num_drafts_total 0.0\nvllm:spec_decode_num_accepted_tokens_total 0.0\n"
    return {"/v1/models": models(model), "/metrics": "vllm:num_requests_running 0.0\n" + counters * speculates}
