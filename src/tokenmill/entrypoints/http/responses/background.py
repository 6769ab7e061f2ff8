"""Responses that are computed while nobody waits for them."""

from __future__ import annotations

import asyncio

from tokenmill.entrypoints.http.errors import UnavailableError
from tokenmill.entrypoints.http.middleware import log_unforeseen
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.responses.job import ResponsesJob
from tokenmill.entrypoints.http.responses.protocol import ResponseReply
from tokenmill.entrypoints.http.state import ServerState
from tokenmill.errors import TokenmillError

_MOMENT = 0.05
"""Seconds in which the engine has refused what it refuses."""


async def start(state: ServerState, record: RequestRecord, job: ResponsesJob) -> ResponseReply:
    """Begin to compute a response; what it is as yet.

    Raises what the request would be refused with if its client waited.
    """
    taken_on = asyncio.Event()
    task = asyncio.create_task(_compute(state, record, job, taken_on))
    begun = asyncio.create_task(job.begun.wait())
    try:
        await asyncio.wait({task, begun}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task}, timeout=_MOMENT)
    except asyncio.CancelledError:  # the client has left before it knew of the response
        task.cancel()
        raise
    finally:
        begun.cancel()
    if task.done():
        task.result()
        return job.so_far
    id = job.so_far.id
    taken_on.set()
    state.active.add(task)
    state.background[id] = task
    task.add_done_callback(state.active.discard)
    task.add_done_callback(lambda _: state.background.pop(id, None))
    await job.keep()
    return job.so_far


async def cancel(state: ServerState, id: str) -> None:
    """Break off a response, if it is under way, and wait until that is kept."""
    task = state.background.get(id)
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


async def _compute(
    state: ServerState, record: RequestRecord, job: ResponsesJob, taken_on: asyncio.Event
) -> None:
    """Compute a response and keep what becomes of it. What it is refused with is raised."""
    try:
        await job.answer()
    except asyncio.CancelledError:
        if not taken_on.is_set():
            raise
        if state.stopping:
            await job.fail(UnavailableError("the server was stopped."))
        else:
            await job.cancel()
    except Exception as error:
        if not taken_on.is_set():
            raise
        if not isinstance(error, TokenmillError):
            log_unforeseen(error, record)
        await job.fail(error)
