"""Generation by OpenAI-compatible servers: many at once, each with many requests in flight.

The caller's thread hands out requests and takes completions; an event loop in a thread of its own talks to the
servers, so that a signal stops the caller at once and never lands inside a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import openai

from dpace_cli import console
from dpace_cli.config import Config, RegenConfig
from dpace_cli.engines.base import Completion, Message, Request, split_reasoning
from dpace_cli.errors import RunError, UsageError

FIRST_IN_FLIGHT = 4
"""Requests at a server before its first answer, so that one that refuses everything is found out soon."""

GIVE_UP_AFTER = 20
"""Failed rows in a row, without an answer between them, that end the run."""

GIVE_UP_AT_START = 5
"""The same, for rows that are refused for good while nothing has been answered yet."""

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
PROBE_TIMEOUT_S = 30.0

_OF_THE_ROW = {400, 413, 422}  # the request is at fault: the next row may do better
_NO_ENTRY = {401, 403}
_OVERLOADED = {429, 502, 503, 504}
_TRANSIENT = {408, 409, 425, 429}


class _Retry(Exception):
    """The request may do better another time.

    Args:
        wait_s: how long the whole server wants to be left alone; None: only this request failed.
        lost: the server could not be reached at all, which is no fault of the request.
    """

    def __init__(self, reason: str, wait_s: float | None = None, lost: bool = False) -> None:
        super().__init__(reason)
        self.wait_s, self.lost = wait_s, lost


class _RefusedRow(Exception):
    """The server will refuse this request however often it is sent."""


class _UselessServer(Exception):
    """The server refuses everything: a wrong key, model or address."""


@dataclass
class _Server:
    url: str
    client: openai.AsyncOpenAI
    limit: float
    running: int = 0
    failures: int = 0
    not_before: float = 0.0
    reachable: bool = True
    useless: str | None = None
    models: list[str] = field(default_factory=list)
    answered: int = 0
    overloaded: bool = False

    def free(self, now: float) -> bool:
        return self.reachable and self.useless is None and now >= self.not_before and self.running < int(self.limit)


class HttpEngine:
    """One or many servers of the same model.

    Raises:
        UsageError: the key is not in the environment or refused, or the model's name is not clear.
        RunError: no server answers.
    """

    name = "http"
    group_rows: int | None = None

    def __init__(self, config: Config) -> None:
        self.options: RegenConfig = config.regen
        self.fingerprint: str | None = _fingerprint(config) if config.regen.return_token_ids else None
        self._template_options = config.target.template_options()
        self._fatal: RunError | None = None
        self._answered = False
        self._last_answer = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dpace-http", daemon=True)
        self._thread.start()
        try:
            self._changed = asyncio.Condition()
            self._servers = [self._server(url) for url in dict.fromkeys(self.options.base_urls)]
            self._model = self._call(self._find_model())
        except BaseException:
            self.close()
            raise

    def facts(self) -> dict[str, Any]:
        """The servers, and the model's name on them."""
        return {"served_model": self._model, "answers": {server.url: server.answered for server in self._servers}}

    def close(self) -> None:
        """Break off what is in flight and end the loop's thread."""
        if self._loop.is_closed():
            return
        self._call(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def complete(self, requests: Iterable[Request | None]) -> Iterator[Completion]:
        """Keep every server busy; completions come as they finish.

        Raises:
            RunError: no server is left, or nothing but failures comes back.
        """
        source = iter(requests)
        finished: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        in_flight: dict[str, Request] = {}
        failed = 0
        capacity = self.options.concurrency * len(self._servers)
        while True:
            while len(in_flight) < capacity and (request := next(source, None)) is not None:
                in_flight[request.id] = request
                asyncio.run_coroutine_threadsafe(self._deliver(request, finished), self._loop)
            if not in_flight:
                return
            completion = finished.get()
            if isinstance(completion, BaseException):
                raise completion
            request = in_flight.pop(completion.id)
            if completion.error is None:
                self._answered, failed = True, 0
            elif not request.retried:
                failed += 1
            yield completion
            if failed >= (GIVE_UP_AFTER if self._answered or not completion.permanent else GIVE_UP_AT_START):
                raise RunError(
                    f"{failed} rows in a row failed; the last error: {completion.error}",
                    "mend the server or the settings, then run the same command again: it goes on where this stopped",
                )

    # --- everything below runs on the loop ---------------------------------------------------------------

    async def _deliver(self, request: Request, finished: queue.SimpleQueue) -> None:
        try:
            finished.put(await self._answer(request))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            finished.put(error)

    async def _answer(self, request: Request) -> Completion:
        """Try until there is an answer, or no sense in trying."""
        attempts = 0
        draw = random.Random(request.seed)
        while True:
            server = await self._acquire()
            try:
                completion = await self._ask(server, request)
            except _RefusedRow as error:
                return Completion(request.id, error=f"{server.url}: {error}", permanent=True)
            except _UselessServer as error:
                self._leave_out(server, str(error))
            except _Retry as error:
                if error.lost:
                    self._lose(server, str(error))
                else:
                    attempts += 1
                    if attempts > self.options.max_retries:
                        return Completion(request.id, error=f"{server.url}: {error} (tried {attempts} times)")
                    self._slow_down(server, error.wait_s)
            else:
                self._last_answer = time.monotonic()
                self._speed_up(server)
                return completion
            finally:
                server.running -= 1
                await self._notify()
            # Half of the wait is drawn, so that rows that failed together do not come back together.
            await asyncio.sleep(_wait(attempts) * (0.5 + draw.random() / 2) if attempts else 0)

    async def _acquire(self) -> _Server:
        """A slot at the least busy server that takes requests.

        Raises:
            RunError: no server will ever take one.
        """
        async with self._changed:
            while True:
                if self._fatal is not None:
                    raise self._fatal
                now = self._loop.time()
                if free := [server for server in self._servers if server.free(now)]:
                    server = min(free, key=lambda server: server.running / server.limit)
                    server.running += 1
                    return server
                await self._changed.wait()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _ask(self, server: _Server, request: Request) -> Completion:
        """One request to one server; every way to fail is one of the three exceptions above."""
        options = self.options
        extra: dict[str, Any] = {}
        if options.top_k > 0:
            extra["top_k"] = options.top_k
        if options.repetition_penalty != 1:
            extra["repetition_penalty"] = options.repetition_penalty
        if self._template_options:
            extra["chat_template_kwargs"] = self._template_options
        if options.return_token_ids:
            extra["return_token_ids"] = True
        try:
            response = await asyncio.wait_for(
                server.client.chat.completions.create(
                    model=self._model,
                    messages=[_for_server(message) for message in request.messages],
                    tools=request.tools or openai.omit,
                    temperature=options.temperature,
                    top_p=options.top_p if options.temperature > 0 else openai.omit,
                    seed=request.seed if options.temperature > 0 else openai.omit,
                    max_tokens=options.max_new_tokens,
                    extra_body=extra or None,
                ),
                options.timeout_s,
            )
        except (openai.APIError, TimeoutError, ValueError) as error:
            raise _classify(error) from None
        return _read(request.id, response)

    def _speed_up(self, server: _Server) -> None:
        most = self.options.concurrency
        # After an overload the way back is slow: one more request for each round of answers.
        server.limit = min(most, server.limit + 1 / server.limit) if server.overloaded else most
        server.failures = 0
        server.answered += 1

    def _slow_down(self, server: _Server, wait_s: float | None) -> None:
        """Leave an overloaded server alone for a while, and send it half as much afterwards."""
        now = self._loop.time()
        if wait_s is None or now < server.not_before:
            return  # the others that were in flight tell the same overload
        server.failures += 1
        server.overloaded = True
        server.limit = max(1.0, server.limit / 2)
        pause = max(wait_s, _wait(server.failures))
        server.not_before = now + pause
        self._loop.call_later(pause + 0.01, lambda: self._loop.create_task(self._notify()))

    def _lose(self, server: _Server, reason: str) -> None:
        """Leave a server out that cannot be reached, until it answers again."""
        if server.reachable:
            server.reachable = False
            console.warn(f"{server.url} cannot be reached ({reason}); it is left out until it answers")
            self._loop.create_task(self._wait_for(server, reason))

    async def _wait_for(self, server: _Server, reason: str) -> None:
        lost = time.monotonic()
        tries = 0
        while not server.reachable:
            tries += 1
            await asyncio.sleep(_wait(tries))
            try:
                await self._list_models(server)
            except _UselessServer as error:
                self._leave_out(server, str(error))
                await self._notify()
                return
            except _Retry:
                usable = [other for other in self._servers if other.reachable and other.useless is None]
                if not usable and time.monotonic() - max(lost, self._last_answer) > self.options.timeout_s:
                    self._fatal = RunError(
                        f"no server can be reached any more; {server.url}: {reason}",
                        "start the servers, then run the same command again: it goes on where this stopped",
                    )
                    await self._notify()
                    return
            else:
                server.reachable = True
                console.note(f"{server.url} answers again")
                await self._notify()

    def _leave_out(self, server: _Server, reason: str) -> None:
        if server.useless is None:
            server.useless = reason
            console.warn(f"{server.url} is left out: {reason}")
        if all(other.useless is not None for other in self._servers):
            self._fatal = RunError(
                f"no server takes requests; {server.url}: {reason}",
                "check regen.base_urls, regen.served_model and regen.api_key_env",
            )

    async def _find_model(self) -> str:
        """The model to ask for; servers that serve another one, or none, are left out."""
        found = await asyncio.gather(*(self._list_models(server) for server in self._servers), return_exceptions=True)
        reasons: dict[str, str] = {}
        for server, error in zip(self._servers, found):
            if isinstance(error, _Retry | _UselessServer):
                reasons[server.url] = str(error)
            elif error is not None:
                raise error
        if len(reasons) == len(self._servers):
            told = "; ".join(f"{url}: {reason}" for url, reason in reasons.items())
            refused = any(isinstance(error, _UselessServer) for error in found)  # a wrong key, or a wrong address
            raise (UsageError if refused else RunError)(
                f"no server answers; {told}", "check regen.base_urls; each ends in /v1"
            )
        for server, error in zip(self._servers, found):
            if isinstance(error, _Retry):
                self._lose(server, str(error))
            elif server.url in reasons:
                self._leave_out(server, str(error))
        if self.options.served_model:
            return self.options.served_model
        names = sorted({name for server in self._servers for name in server.models})
        if len(names) != 1:
            listed = f" ({', '.join(names[:10])})" if names else ""
            raise UsageError(f"the servers list {len(names)} models{listed}", "name one with regen.served_model")
        return names[0]

    async def _list_models(self, server: _Server) -> None:
        """See whether a server is there; one that is there may have no list of its models."""
        try:
            listed = await asyncio.wait_for(server.client.models.list(), min(PROBE_TIMEOUT_S, self.options.timeout_s))
            server.models = [model.id for model in listed.data]
        except openai.APIStatusError as error:
            if error.status_code in _NO_ENTRY | _OVERLOADED:
                raise _classify(error) from None
        except (openai.APIError, TimeoutError) as error:
            raise _classify(error) from None
        except (ValueError, TypeError, AttributeError):
            pass  # it sent no list

    def _server(self, url: str) -> _Server:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"regen.base_urls has {url!r}, which is no address", "write http://HOST:PORT/v1")
        name = self.options.api_key_env
        if name and not os.environ.get(name):
            raise UsageError(f"the environment has no {name}, which regen.api_key_env names", f"export {name}=...")
        client = openai.AsyncOpenAI(
            base_url=url,
            api_key=os.environ[name] if name else "none",
            max_retries=0,  # retried here, so that the next try may go to another server
            timeout=openai.Timeout(self.options.timeout_s, connect=min(PROBE_TIMEOUT_S, self.options.timeout_s)),
            # Of the library that the client itself is built on: httpx, or httpx2 since 3.57.
            http_client=openai.DefaultAsyncHttpxClient(
                trust_env=parts.hostname not in ("localhost", "127.0.0.1", "::1")  # no proxy to this machine
            ),
        )
        return _Server(url, client, min(FIRST_IN_FLIGHT, self.options.concurrency))

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in getattr(self, "_servers", []):
            with contextlib.suppress(Exception):
                await server.client.close()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run on the loop and wait."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _wait(tries: int) -> float:
    return min(LONGEST_WAIT_S, SHORTEST_WAIT_S * 2 ** (tries - 1))


def _classify(error: BaseException) -> Exception:
    """Which of the three kinds a failed request is."""
    if isinstance(error, openai.APIStatusError):
        code, reason = error.status_code, f"{error.status_code}: {_message(error)}"
        if code in _OF_THE_ROW:
            return _RefusedRow(reason)
        if code in _TRANSIENT or code >= 500:
            return _Retry(reason, _retry_after(error) if code in _OVERLOADED else None)
        return _UselessServer(reason)
    chain = list(_causes(error))
    # The client has one class for all failures of a connection. That there never was one, only the library below
    # tells, and which library that is depends on the client's version: so by name.
    if {"ConnectError", "ConnectTimeout"} & {type(link).__name__ for link in chain}:
        return _Retry(str(chain[-1]) or "it does not answer", lost=True)
    if isinstance(error, openai.APITimeoutError | TimeoutError):
        return _Retry("timed out")
    if isinstance(error, openai.APIConnectionError):
        return _Retry(f"the connection broke off ({str(chain[-1]) or type(chain[-1]).__name__})")
    return _Retry(f"it sent something that is no completion ({' '.join(str(error).split())[:200]})")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it was raised from, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _message(error: openai.APIStatusError) -> str:
    """The server's own words."""
    body = error.body
    if isinstance(body, dict):
        body = body.get("message") or body.get("detail") or body.get("error") or body
    return " ".join(str(body or error.message).split())[:300]


def _retry_after(error: openai.APIStatusError) -> float:
    """Seconds that the server asks for; 0 where it does not say."""
    with contextlib.suppress(ValueError):
        return min(float(error.response.headers.get("retry-after", "0")), 10 * LONGEST_WAIT_S)
    return 0.0


def _read(request_id: str, response: Any) -> Completion:
    """A response as a completion; what is missing or of a wrong type makes it garbage."""
    try:
        choice = response.choices[0]
        message, reason = choice.message, choice.finish_reason
        text = message.content or ""
        calls = [_plain_call(call) for call in message.tool_calls or []]
        if not isinstance(text, str) or (message.content is None and not calls and not _extra(message)):
            raise TypeError("no content")
        tokens = response.usage.completion_tokens if response.usage else 0
    except (AttributeError, IndexError, TypeError, KeyError) as error:
        raise _Retry(f"it sent something that is no completion ({error})") from None
    if reason == "content_filter":
        raise _RefusedRow("the server's content filter withheld the answer")
    if reason not in ("stop", "length", "tool_calls"):
        raise _Retry(f"the answer ended with finish_reason {reason!r}")
    reasoning = _extra(message)
    if reasoning is None:
        text, reasoning = split_reasoning(text, opened=False)
    return Completion(
        request_id,
        text=text,
        reasoning=reasoning,
        prompt_ids=getattr(response, "prompt_token_ids", None),
        answer_ids=getattr(choice, "token_ids", None),
        finish_reason=reason,
        tokens=tokens or 0,
        tool_calls=calls or None,
    )


def _extra(message: Any) -> str | None:
    """Reasoning, under the names that SGLang and older vLLM, and newer vLLM, give it."""
    return getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or None


def _plain_call(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _for_server(message: Message) -> Message:
    """A message with the arguments of its tool calls as text, which is what OpenAI's interface takes."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if not isinstance(function.get("arguments", ""), str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _fingerprint(config: Config) -> str:
    from dpace_cli.modeling.target import load_tokenizer, tokenizer_fingerprint

    return tokenizer_fingerprint(load_tokenizer(config.target))
