"""An OpenAI-compatible chat server for the tests, which answers by a fixed rule and fails on purpose."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRANSIENT_FAULTS = ("429", "500", "503", "slow", "drop", "html", "half", "empty", "nothing", "abort")


def reply(messages: list[dict[str, Any]]) -> str:
    """What the server answers: a function of the whole history, so that a wrong history shows."""
    told = json.dumps([[m["role"], m.get("content")] for m in messages])
    return f"answer {hashlib.sha256(told.encode()).hexdigest()[:12]}"


class ChatServer:
    """Serves `/v1` on a free port of this machine until closed.

    Args:
        fault: asked before each answer with the request's body and how often this prompt was asked before;
            returns the name of a fault, or None. Names: a status code, or one of TRANSIENT_FAULTS.
        delay_s: time that an answer takes.
        slow_s: time that the fault "slow" takes, to be longer than the client's patience.
        edit: changes a good answer before it is sent.
        models: names that it lists; a number: it answers /models with that status.
    """

    def __init__(
        self,
        fault: Callable[[dict[str, Any], int], str | None] = lambda body, earlier: None,
        *,
        delay_s: float = 0.0,
        slow_s: float = 2.0,
        edit: Callable[[dict[str, Any], dict[str, Any]], None] = lambda body, answer: None,
        models: tuple[str, ...] | int = ("tiny",),
        port: int = 0,
    ) -> None:
        self.fault, self.delay_s, self.slow_s, self.edit, self.models = fault, delay_s, slow_s, edit, models
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        self._start(port)

    def _start(self, port: int) -> None:
        server = self

        class Handler(_Handler):
            owner = server

        self.down = False
        self._http = _Server(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def close(self) -> None:
        self.down = True  # connections that are open die with it
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def restart(self) -> None:
        """Come back at the same address."""
        self._start(self.port)

    def __enter__(self) -> ChatServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    owner: ChatServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        models = self.owner.models
        if isinstance(models, int):
            self._send(models, {"error": {"message": f"refused with {models}"}})
        else:
            self._send(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in models]})

    def do_POST(self) -> None:
        owner = self.owner
        if owner.down:
            self._hang_up()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][-1]["content"]
        with owner.lock:
            earlier = owner.asked[prompt]
            owner.asked[prompt] += 1
            owner.bodies.append(body)
            owner.headers.append({name.lower(): value for name, value in self.headers.items()})
            owner.in_flight += 1
            owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
        try:
            fault = owner.fault(body, earlier)
            if fault is not None:
                with owner.lock:
                    owner.faults[fault] += 1
            time.sleep(owner.delay_s)
            self._answer(fault, body, prompt)
        finally:
            with owner.lock:
                owner.in_flight -= 1

    def _answer(self, fault: str | None, body: dict[str, Any], prompt: str) -> None:
        message = {"role": "assistant", "content": reply(body["messages"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        good = {"id": "x", "object": "chat.completion", "created": 0, "model": "tiny", "choices": [choice],
                "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}}  # fmt: skip
        if fault is None:
            self.owner.edit(body, good)
            with self.owner.lock:
                self.owner.answered[prompt] += 1
            self._send(200, good)
        elif fault.isdigit():
            self._send(int(fault), {"error": {"message": f"refused with {fault}"}})
        elif fault == "slow":
            time.sleep(self.owner.slow_s)
            self._send(200, good)
        elif fault == "drop":
            self._hang_up()
        elif fault == "html":
            self._send(200, b"<html>gateway</html>", "text/html")
        elif fault == "half":
            self._send(200, json.dumps(good).encode()[:40])
        elif fault == "empty":
            self._send(200, {**good, "choices": []})
        elif fault == "nothing":
            self._send(200, b"null")
        elif fault == "abort":
            self._send(200, {**good, "choices": [{**choice, "finish_reason": "abort"}]})
        else:
            raise AssertionError(fault)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, code: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
