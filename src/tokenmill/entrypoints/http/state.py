"""What all requests of a server share."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from tokenmill.config.serve_args import ServeArgs
from tokenmill.contracts.request import AdapterRef
from tokenmill.engine.serve_options import ServeOptions
from tokenmill.entrypoints.chat.templates import read_template
from tokenmill.entrypoints.http.admission import Admission
from tokenmill.entrypoints.http.answer_settings import AnswerSettings, answer_settings
from tokenmill.entrypoints.http.auth import ApiKeys, api_keys
from tokenmill.entrypoints.http.engine import Engine
from tokenmill.entrypoints.http.errors import UnavailableError
from tokenmill.entrypoints.http.metrics import ServerMetrics
from tokenmill.entrypoints.http.record import RequestRecord
from tokenmill.entrypoints.http.responses.store import ResponseStore
from tokenmill.entrypoints.http.traces import Traces, make_traces
from tokenmill.errors import ConfigError, ModelNotFoundError, shown
from tokenmill.tokenizer.tokenizer import Tokenizer

_TEXT_THREADS = 2
"""Threads that render and tokenize; the tokenizer releases the interpreter lock."""
_MEDIA_THREADS = 8
"""Threads that fetch images, most of the time waiting; few of them decode at the same time."""
_SHOWN_NAMES = 5

_Result = TypeVar("_Result")


@dataclass(slots=True)
class ServerState:
    """One server's engine, settings and counts. Changed by the event loop only."""

    engine: Engine
    tokenizer: Tokenizer
    args: ServeArgs
    keys: ApiKeys
    metrics: ServerMetrics
    traces: Traces
    admission: Admission
    model_names: tuple[str, ...]
    answers: AnswerSettings
    chat_template: str | None
    """Source, or name of one of the model's; None for the model's default."""
    responses: ResponseStore
    """Responses that later requests may continue."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Unix time."""
    draining: bool = False
    """No request is taken any more; those that run may finish."""
    stopping: bool = False
    """Those that run are ended, too."""
    dead: bool = False
    """The engine has given up."""
    active: set[asyncio.Task[None]] = field(default_factory=set)
    """Work on requests that generate."""
    background: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """Work on responses that nobody waits for, by their ids."""
    text_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="text")
    )
    media_threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(_MEDIA_THREADS, thread_name_prefix="media")
    )
    _names: itertools.count[int] = field(default_factory=itertools.count)
    _name_root: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def check_open(self) -> None:
        """Raise `UnavailableError` if no request is taken any more. While the core starts again,
        requests are taken and wait.
        """
        if self.dead:
            raise UnavailableError("the engine is dead, and the server ends.")
        if self.draining or self.stopping:
            raise UnavailableError("the server is stopping and takes no more requests.")

    def check_ready(self) -> None:
        """Raise `UnavailableError` if requests are not taken, or would have to wait."""
        self.check_open()
        if not self.engine.is_ready:
            raise UnavailableError("the engine is not ready; try again soon.")

    def model_name(self, asked: str | None) -> str:
        """The name to answer with. Raises `ModelNotFoundError` for a model that is not served."""
        if not asked:
            return self.model_names[0]
        if asked in self.model_names or asked in self.engine.adapters:
            return asked
        names = ", ".join(map(repr, (*self.model_names, *self.engine.adapters)[:_SHOWN_NAMES]))
        raise ModelNotFoundError(f"model {shown(asked)} is not served here; there is {names}.")

    def adapter(self, model_name: str) -> AdapterRef | None:
        """What a request for this name runs with; None is the model itself."""
        if model_name not in self.engine.adapters:
            return None
        return self.engine.adapters.get(model_name).ref

    def new_name(self) -> str:
        """A name for a request inside the engine; no client chooses it."""
        return f"{self._name_root}{next(self._names):x}"

    def stop_active(self) -> None:
        """End all work on requests; their clients get an error."""
        self.stopping = self.draining = True
        for task in list(self.active):
            task.cancel()

    async def in_text_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run what takes time on text beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.text_threads, work)

    async def in_media_thread(self, work: Callable[[], _Result]) -> _Result:
        """Run what fetches or decodes beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.media_threads, work)


def make_state(
    engine: Engine,
    args: ServeArgs,
    options: ServeOptions | None = None,
    *,
    chat_template: str | None = None,
) -> ServerState:
    """`chat_template` is the engine's setting. Raises `ConfigError` for settings that do not fit
    the engine or this machine.
    """
    if engine.tokenizer is None:
        raise ConfigError("a server needs a tokenizer; leave out skip_tokenizer_init.")
    config = engine.config
    names = tuple(dict.fromkeys(args.served_model_name or [config.model.name]))
    admission = Admission(
        max_running=config.data_parallel_size * config.scheduler.max_num_seqs,
        max_queue=(options or ServeOptions()).max_queue,
    )
    template = read_template(chat_template)
    responses = ResponseStore(
        args.response_store, max_bytes=args.response_store_bytes, ttl=args.response_ttl
    )
    responses.check()
    return ServerState(
        engine=engine,
        tokenizer=engine.tokenizer,
        args=args,
        keys=api_keys(args),
        metrics=ServerMetrics(engine, admission, names[0]),
        traces=make_traces(args, names[0]),
        admission=admission,
        model_names=names,
        answers=answer_settings(args, config.reasoning_parser, engine.tokenizer, template),
        chat_template=template,
        responses=responses,
    )


def state_of(request: Request) -> ServerState:
    """The state of the server that a request has reached."""
    state: ServerState = request.app.state.server
    return state


def record_of(request: Request) -> RequestRecord:
    """What is noted about a request."""
    record: RequestRecord = request.scope["tokenmill.record"]
    return record
