"""Endpoints: an HTTP request, from its body to the last byte of its answer, or until its client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from specdec.serve.answers import Answer, to_json
from specdec.serve.engine_thread import Inbox, Submitted, Update
from specdec.serve.errors import ApiError, told_to_client
from specdec.serve.plan import Plan
from specdec.serve.service import Service

__all__ = ["Endpoint", "GenerationEndpoint"]

_log = logging.getLogger("specdec.serve")

_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx would hold events back
}


class Endpoint:
    """An ASGI application that answers a body with JSON.

    Whatever goes wrong is answered as OpenAI's JSON, in a stream as an event. Where the client goes away, or the
    request takes longer than it may, the work is cancelled.

    Args:
        service: what answers.
        answer: makes the JSON value of an answer from the body; None in a subclass that sends it by itself.
    """

    def __init__(self, service: Service, answer: Callable[[bytes], Awaitable[Any]] | None = None) -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, began = _Reply(send), perf_counter()
        seconds = self._service.config.request_timeout
        try:
            async with asyncio.timeout(seconds or None):
                body = await Request(scope, receive).body()
                await _while_connected(receive, self.reply(body, reply))
        except ClientDisconnect:
            reply.note += " (the client went away)"
        except TimeoutError:
            error = ApiError(
                f"the request took longer than {seconds:g} s; ask for fewer tokens, or start the server with a larger "
                "--request-timeout",
                status=504,
                kind="server_error",
                code="timeout",
            )
            await reply.fail(error)
        except Exception as error:
            told = told_to_client(error)
            if told.status >= 500 and not isinstance(error, ApiError):  # else the log has it
                _log.exception("%s failed", scope["path"])
            await reply.fail(told)
        finally:
            _log.info("%s %s %.3f s %s", scope["path"], reply.status or "-", perf_counter() - began, reply.note)

    async def reply(self, body: bytes, reply: _Reply) -> None:
        """Answer a body."""
        assert self._answer is not None
        await reply.json(await self._answer(body))


class GenerationEndpoint(Endpoint):
    """Answers with what is generated, at once or as a stream of events.

    Args:
        service: what answers.
        plan: makes a plan of a body; in the thread for such.
    """

    def __init__(self, service: Service, plan: Callable[[bytes], Plan]) -> None:
        super().__init__(service)
        self._plan = plan

    async def reply(self, body: bytes, reply: _Reply) -> None:
        service = self._service
        service.check_ready()
        plan = await service.apart(self._plan, body)
        work = _Generation(service, plan)
        try:
            await work.run(reply)
        finally:
            work.end()
            reply.note = work.note()


class _Generation:
    """A plan under way."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service, self._plan = service, plan
        self._answer = Answer(
            plan, service.name, service.engine.tokenizer, service.engine.max_rows, marks_calls=service.marks_calls
        )
        self._inbox = Inbox()
        self._arrived = perf_counter()
        self._submitted: list[Submitted] = []

    async def run(self, reply: _Reply) -> None:
        """Decode, and send what comes."""
        plan, answer = self._plan, self._answer
        self._submitted = self._service.submit(plan, self._inbox)
        streams = bool(plan.fields.stream)
        first = await self._inbox.take()  # an error at its admission is an answer with a status of its own
        if streams:
            self._raise_errors(first[:1])
            await reply.begin_stream()
            await reply.events(answer.opening())
        updates = first
        while True:
            pieces: list[dict[str, Any]] = []
            for index, update in updates:
                try:
                    pieces += self._take(index, update, streams)
                except ApiError:
                    await reply.events(pieces)  # what the other answers have until then
                    raise
            await reply.events(pieces)
            if answer.done:
                break
            updates = await self._inbox.take()
        if not streams:
            await reply.json(answer.whole())
            return
        options = plan.fields.stream_options
        if options is not None and options.include_usage:
            await reply.events([answer.closing()])
        await reply.end_stream()

    def _take(self, index: int, update: Update, streams: bool) -> list[dict[str, Any]]:
        """Take an update; the pieces of the stream that it makes."""
        self._raise_errors([(index, update)])
        choice, metrics = self._answer.choices[index], self._service.metrics
        if choice.first is not None:
            metrics.between(update.at - choice.last)
        choice.add(update)
        if choice.finish_reason is not None:
            assert choice.stats is not None
            assert choice.first is not None
            metrics.ended(choice.finish_reason)
            metrics.finished(choice.stats, choice.first - self._arrived, choice.last - self._arrived)
        return self._answer.pieces(choice, update) if streams else []

    def _raise_errors(self, updates: list[tuple[int, Update]]) -> None:
        for _, update in updates:
            if update.error is not None:
                self._service.metrics.ended("error")
                raise told_to_client(update.error)  # whose traceback the engine's thread has logged

    def end(self) -> None:
        """Have nothing of it decoded any more."""
        for sequence in self._submitted:
            if self._service.thread.cancel(sequence):
                self._service.metrics.ended("abort")

    def note(self) -> str:
        """What the log says of it; prompts and texts only where that was asked for."""
        choices = self._answer.choices
        new = sum(len(choice.tokens) for choice in choices)
        note = f"{sum(map(len, self._plan.prompts))} prompt tokens, {new} new tokens"
        if self._service.config.log_prompts:
            said = [choice.text for choice in choices]
            note = f"{note}, asked {self._plan.fields.model_dump(exclude_none=True)!r}, answered {said!r}"
        return note


class _Reply:
    """What is sent to a client, and how far that went.

    Attributes:
        status: that was sent.
        note: for the log.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.note = 0, ""
        self._streams = self._done = False

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        self._done = True
        body = to_json(value)
        sizes = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**sizes, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self) -> None:
        """Begin a stream of events."""
        self._streams = True
        await self._start(200, _STREAM)

    async def events(self, values: list[dict[str, Any]]) -> None:
        """Send events."""
        if values:
            await self._body(b"".join(b"data: " + to_json(value) + b"\n\n" for value in values), more=True)

    async def end_stream(self) -> None:
        """Send the last event."""
        self._done = True
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        """Say what went wrong, if there is still somewhere to say it."""
        if self._done:
            return
        if self._streams:
            self._done = True
            await self._body(b"data: " + to_json(error.body) + b"\n\n", more=False)
        else:
            await self.json(error.body, error.status, error.headers)

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _body(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})


async def _while_connected(receive: Receive, work: Awaitable[None]) -> None:
    """Wait for work; raises ClientDisconnect, and cancels it, where the client goes away first."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(gone, task, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
