"""regen over a real server: the answers are those of the local engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpace_cli import regen
from dpace_cli.config import Config
from dpace_cli.demo import target_path
from dpace_cli.demo.prompts import samples
from dpace_cli.records import RunFolder

READY_WITHIN_S = 240
"""Only a bound: the server is usually there within ten seconds."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `transformers serve` with the demo's target in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(target_path()),
               "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with open(tmp_path_factory.mktemp("server") / "log", "w+") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", Path(log.name))
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait()


def _wait(server: subprocess.Popen, url: str, log: Path) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end and server.poll() is None:
        try:
            direct.open(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-2000:]}")


def test_a_real_server_gives_the_answers_of_the_local_engine(tmp_path: Path, served: str) -> None:
    prompts = tmp_path / "p.jsonl"
    asked = [sample.prompt for sample in samples(None, 9, 5, "train")]
    rows: list[dict[str, Any]] = [
        {"id": f"row-{n}", "conversations": [{"role": "user", "content": text}]} for n, text in enumerate(asked)
    ]
    rows[4]["conversations"] += [{"role": "assistant", "content": "source"}, {"role": "user", "content": asked[0]}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"max_new_tokens": 100}
    remote = {**options, "engine": "http", "base_urls": [served], "served_model": str(target_path())}
    results = [
        regen.run(Config.model_validate({"regen": regen_options}), RunFolder(tmp_path / name), data=prompts)
        for name, regen_options in (("http", remote), ("local", options))
    ]
    assert [(r.done, r.errors) for r in results] == [(9, 0), (9, 0)]
    assert (results[0].tokens, results[0].truncated) == (results[1].tokens, results[1].truncated)
    over_http, here = ([json.loads(line) for line in r.output.read_text().splitlines()] for r in results)
    assert over_http == here
