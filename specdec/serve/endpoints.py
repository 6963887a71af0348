"""Endpoints: each handles an HTTP request from its body to the answer's last byte, or until the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import perf_counter
from typing import Any, cast

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from specdec.engine.prediction import appeared
from specdec.errors import shown
from specdec.serve.engine_thread import Inbox, Submitted, Update
from specdec.serve.errors import ApiError, told_to_client
from specdec.serve.lanes import Lane
from specdec.serve.plan import Plan
from specdec.serve.reply import Reply
from specdec.serve.service import Service

__all__ = ["Endpoint", "GenerationEndpoint"]

_log = logging.getLogger("specdec.serve")


class Endpoint:
    """An ASGI application that answers a JSON body with JSON.

    Every error is answered as OpenAI's JSON; in a stream, it is an event. When the client disconnects, or the request
    exceeds its time limit, the work is cancelled.

    Args:
        service: the service that does the work.
        answer: makes the answer's JSON value from the body, in a lane; None in a subclass that sends its own answer.
    """

    def __init__(self, service: Service, answer: Callable[[Lane, bytes], Any] | None = None) -> None:
        self._service, self._answer = service, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply, began = Reply(send, scope["path"], scope.get("specdec.owner", "")), perf_counter()
        seconds = self._service.config.request_timeout
        try:
            async with asyncio.timeout(seconds or None):
                body = await Request(scope, receive).body()
                self._service.check_ready()
                self._service.answering += 1
                try:
                    await _while_connected(receive, self.reply(body, reply))
                finally:
                    self._service.answering -= 1
        except ClientDisconnect:
            reply.note += " (the client went away)"
        except TimeoutError:
            error = ApiError(
                f"the request took longer than {seconds:g} s; ask for fewer tokens, or start the server with a larger "
                "--request-timeout",
                status=504,
                code="timeout",
            )
            await reply.fail(error)
        except Exception as error:
            told = told_to_client(error)
            if told.status >= 500 and not isinstance(error, ApiError):  # those errors are in the log already
                _log.exception("%s failed (%s)", scope["path"], scope.get("specdec.request_id", "-"))
            await reply.fail(told)
        finally:
            taken, named = perf_counter() - began, scope.get("specdec.request_id", "-")
            _log.info("%s %s %.3f s %s %s", scope["path"], reply.status or "-", taken, named, reply.note)

    async def reply(self, body: bytes, reply: Reply) -> None:
        """Answer a request's body."""
        assert self._answer is not None
        await reply.json(await self._service.lane(body).call(self._answer, body))


class GenerationEndpoint(Endpoint):
    """Answers with generated text, as a whole or as a stream of events.

    Args:
        service: the service that decodes.
        plan: makes a plan from a body and its owner, in a lane.
    """

    def __init__(self, service: Service, plan: Callable[[Lane, bytes, str], Plan]) -> None:
        super().__init__(service)
        self._plan = plan

    async def reply(self, body: bytes, reply: Reply) -> None:
        service = self._service
        plan = await service.lane(body).call(self._plan, body, reply.owner)
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
        self._answer = service.answer(plan)
        self._inbox = Inbox()
        self._arrived = perf_counter()
        self._submitted: list[Submitted] = []

    async def run(self, reply: Reply) -> None:
        """Decode the plan and send its answer."""
        reply.stream_headers = self._plan.headers
        self._submitted = self._service.submit(self._plan, self._inbox)
        if not self._plan.fields.stream:
            while not self._answer.done:
                for index, update in await self._inbox.take():
                    self._take(index, update)
            await self._count_predicted()
            await reply.json(self._answer.whole(), headers=self._plan.headers)
            return
        waiting = asyncio.ensure_future(reply.keep_open())
        try:
            await self._stream(reply)
        finally:
            waiting.cancel()

    async def _stream(self, reply: Reply) -> None:
        """Send the answer as events. An error that comes before the first has a status of its own."""
        answer, begun = self._answer, False
        while not (begun and answer.done):
            updates = await self._inbox.take() if self._submitted else []
            pieces: list[dict[str, Any]] = []
            if not begun:
                self._raise_errors(updates[:1])
                await reply.begin_stream()
                pieces, begun = answer.opening(), True
            try:
                for index, update in updates:
                    self._take(index, update)
                    choice = answer.choices[index]
                    pieces += answer.chunks(choice, choice.piece(update))
            finally:
                await reply.events(pieces)  # also those of other choices that came before an error
        await self._count_predicted()
        await reply.events(answer.ending())
        await reply.end_stream()

    async def _count_predicted(self) -> None:
        """Count which tokens of a prediction the answers have. It takes long for a long one, and so has a thread."""

        def count(lane: Lane) -> None:
            for request, choice in zip(self._plan.requests, self._answer.choices, strict=True):
                predicted, stats = cast(Sequence[int], request.prediction), choice.stats
                assert stats is not None
                stats.accepted_prediction_tokens = accepted = appeared(predicted, choice.tokens)
                stats.rejected_prediction_tokens = len(predicted) - accepted

        if self._plan.fields.prediction is not None and any(request.prediction for request in self._plan.requests):
            await self._service.lanes[-1].call(count)

    def _take(self, index: int, update: Update) -> None:
        """Add an update to its choice."""
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
        if self._plan.ignored:
            note += f", ignored {shown(sorted(set(self._plan.ignored)))[1:-1]}"
        if self._plan.form.dropped:
            note += f", not followed: {self._plan.form.dropped_line}"
        if self._service.config.log_prompts:
            said = [choice.text for choice in choices]
            note = f"{note}, asked {self._plan.fields.model_dump(exclude_none=True)!r}, answered {said!r}"
        return note


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
