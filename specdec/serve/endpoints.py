"""Endpoints: each handles an HTTP request from its body to the answer's last byte, or until the client disconnects."""

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
    "x-accel-buffering": "no",  # without it, nginx would buffer events
}


class Endpoint:
    """An ASGI application that answers a JSON body with JSON.

    Every error is answered as OpenAI's JSON; in a stream, it is an event. When the client disconnects, or the request
    exceeds its time limit, the work is cancelled.

    Args:
        service: the service that does the work.
        answer: makes the answer's JSON value from the body; None in a subclass that sends its own answer.
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
            if told.status >= 500 and not isinstance(error, ApiError):  # those errors are in the log already
                _log.exception("%s failed", scope["path"])
            await reply.fail(told)
        finally:
            _log.info("%s %s %.3f s %s", scope["path"], reply.status or "-", perf_counter() - began, reply.note)

    async def reply(self, body: bytes, reply: _Reply) -> None:
        """Answer a request's body."""
        assert self._answer is not None
        await reply.json(await self._answer(body))


class GenerationEndpoint(Endpoint):
    """Answers with generated text, as a whole or as a stream of events.

    Args:
        service: the service that decodes.
        plan: makes a plan from a body; runs in the service's thread for tokenizing.
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
    """A plan that is being decoded, and the answer that is sent."""

    def __init__(self, service: Service, plan: Plan) -> None:
        self._service, self._plan = service, plan
        self._answer = Answer(
            plan, service.name, service.engine.tokenizer, service.engine.max_rows, marks_calls=service.marks_calls
        )
        self._inbox = Inbox()
        self._arrived = perf_counter()
        self._submitted: list[Submitted] = []

    async def run(self, reply: _Reply) -> None:
        """Decode the plan and send its answer."""
        plan, answer = self._plan, self._answer
        self._submitted = self._service.submit(plan, self._inbox)
        streams = bool(plan.fields.stream)
        first = await self._inbox.take()  # so that an error at admission gets an HTTP status of its own
        if streams:
            self._raise_errors(first[:1])
            await reply.begin_stream(plan.headers)
            await reply.events(answer.opening())
        updates = first
        while True:
            pieces: list[dict[str, Any]] = []
            for index, update in updates:
                try:
                    pieces += self._take(index, update, streams)
                except ApiError:
                    await reply.events(pieces)  # the pieces of other choices that came before the error
                    raise
            await reply.events(pieces)
            if answer.done:
                break
            updates = await self._inbox.take()
        if not streams:
            await reply.json(answer.whole(), headers=plan.headers)
            return
        options = plan.fields.stream_options
        if options is not None and options.include_usage:
            await reply.events([answer.closing()])
        await reply.end_stream()

    def _take(self, index: int, update: Update, streams: bool) -> list[dict[str, Any]]:
        """Add an update to its choice; returns the chunks that it adds to the stream."""
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
                raise told_to_client(update.error)  # the engine's thread has logged its traceback

    def end(self) -> None:
        """Cancel all sequences that still run."""
        for sequence in self._submitted:
            if self._service.thread.cancel(sequence):
                self._service.metrics.ended("abort")

    def note(self) -> str:
        """The log line of this request; it holds prompts and texts only where the server's options ask for that."""
        choices = self._answer.choices
        new = sum(len(choice.tokens) for choice in choices)
        note = f"{sum(map(len, self._plan.prompts))} prompt tokens, {new} new tokens"
        if self._plan.form.dropped:
            note += f", not followed: {self._plan.form.dropped_line}"
        if self._service.config.log_prompts:
            said = [choice.text for choice in choices]
            note = f"{note}, asked {self._plan.fields.model_dump(exclude_none=True)!r}, answered {said!r}"
        return note


class _Reply:
    """Sends an answer to the client, and keeps how much of it was sent.

    Attributes:
        status: the HTTP status that was sent.
        note: text for the log.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.note = 0, ""
        self._streams = self._done = False

    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer as JSON."""
        self._done = True
        body = to_json(value)
        sizes = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**sizes, **(headers or {})})
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self, headers: dict[str, str]) -> None:
        """Send the headers of an event stream."""
        self._streams = True
        await self._start(200, {**_STREAM, **headers})

    async def events(self, values: list[dict[str, Any]]) -> None:
        """Send JSON values as events."""
        if values:
            await self._body(b"".join(b"data: " + to_json(value) + b"\n\n" for value in values), more=True)

    async def end_stream(self) -> None:
        """Send the event that ends a stream."""
        self._done = True
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        """Send an error, as an answer or as an event; nothing where the answer has already ended."""
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
    """Await work; a client that disconnects first cancels it and raises ClientDisconnect."""
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
