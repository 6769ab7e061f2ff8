"""Engine cores for tests of serving: on a fake device that checks every step, and fails on demand.

Built in the core's process, without torch. What goes wrong there is written into the prompts: the
ids in `Fault` make a step fail that computes a request with such an id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from helpers.core import create_kv_cache_config
from helpers.fake_executor import FakeExecutor, FakeStep
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.contracts.plan import SchedulerOutput
from tokenmill.core.scheduler import Scheduler
from tokenmill.engine.core import EngineCore
from tokenmill.engine.operations import CoreOperations
from tokenmill.errors import CheckpointError, ConfigError
from tokenmill.structured_output.manager import StructuredOutputManager
from tokenmill.structured_outputs import StructuredOutputsParams

READER_FILE = "TOKENMILL_TEST_READER_FILE"
STEP_SECONDS = "TOKENMILL_TEST_STEP_SECONDS"
"""Environment variable: how long a step of the fake device takes."""
MARKER = "TOKENMILL_TEST_MARKER"
"""Environment variable: a path at which `starts_once` leaves a file."""
SMALL_POOL_BLOCKS = 17

Progress = Callable[[str, int, int], None]


class Fault:
    """Prompt ids that make the core fail."""

    KILL = 390
    """Dies in the request's first step."""
    KILL_LATER = 391
    """Dies in the step that would bring the request's sixth token."""
    KILL_IN_COMPANY = 392
    """Dies in every step that computes another request with this id as well."""
    RAISE = 393
    HANG = 394
    FREEZE = 395
    """The process stops itself."""


NUM_ORDINARY_IDS = 390


def next_token(digest: int) -> int:
    """Any ordinary id, but no end token."""
    return 3 + digest % (NUM_ORDINARY_IDS - 3)


def expected_ids(prompt: list[int], count: int) -> list[int]:
    """What the fake device brings for a prompt, whatever happens to it."""
    digest = 0
    for token_id in prompt:
        digest = hash((digest, token_id))
    output: list[int] = []
    for _ in range(count):
        output.append(next_token(digest))
        digest = hash((digest, output[-1]))
    return output


@dataclass
class FaultyExecutor:
    """A fake device that takes its time, and fails on some prompts."""

    device: FakeExecutor
    step_seconds: float
    _plan: SchedulerOutput | None = field(default=None)

    def execute_model(self, plan: SchedulerOutput) -> None:
        self._plan = plan
        self.device.execute_model(plan)

    def sample_tokens(self, grammar_output: None) -> FakeStep:
        assert self._plan is not None
        time.sleep(self.step_seconds)
        rows = [self.device.rows[row] for row in self._plan.rows]
        prompts = [set(row.data.token_ids[: row.data.num_prompt_tokens]) for row in rows]
        num_outputs = [len(row.token_ids) - row.data.num_prompt_tokens for row in rows]
        for prompt, count in zip(prompts, num_outputs, strict=True):
            if Fault.KILL in prompt or (Fault.KILL_LATER in prompt and count >= 6):
                os.kill(os.getpid(), signal.SIGKILL)
            if Fault.RAISE in prompt:
                raise RuntimeError("the device is on fire")
            if Fault.HANG in prompt:
                time.sleep(1000)
            if Fault.FREEZE in prompt:
                os.kill(os.getpid(), signal.SIGSTOP)
        if sum(Fault.KILL_IN_COMPANY in prompt for prompt in prompts) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.device.sample_tokens(grammar_output)

    def shutdown(self) -> None:
        self.device.shutdown()


def fake_core(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core for the settings, on the fake device."""
    on_progress("load", 1, 1)
    return _on_fake_device(config, config.cache.num_blocks)


DEADLY_WEIGHTS = "deadly"
"""Weights of this name take the process with them."""
REFUSED_ONCE = "refused"
"""A file of this name beside weights has whoever finds it first refuse them; it is gone then."""


class LoggedMemory:
    """Memory that writes to a file what it is asked for. Weights that are no file fail."""

    has_weights = True

    def sleep(self, level: int) -> int:
        self._log(f"sleep {level}")
        return 0

    def wake_up(self) -> None:
        self._log("wake up")

    def update_weights(self, path: str, tensors: object) -> None:
        self._log("update")
        if Path(path).name == DEADLY_WEIGHTS:
            os.kill(os.getpid(), signal.SIGKILL)
        if not os.path.exists(path):
            raise CheckpointError(f"{path} is not there")
        with contextlib.suppress(FileNotFoundError):
            Path(path).with_name(REFUSED_ONCE).unlink()
            raise CheckpointError(f"{path} cannot be read")

    def _log(self, line: str) -> None:
        with open(os.environ[MARKER], "a") as file:
            file.write(f"{line}\n")


def sleeping_core(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core with memory."""
    core = fake_core(args, config, on_progress)
    core.operations = CoreOperations(core.scheduler, LoggedMemory())
    return core


def small_core(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core whose pool is smaller than the front end knows."""
    return _on_fake_device(config, SMALL_POOL_BLOCKS)


def deadly_grammars(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core whose grammar library takes the process with it for the regex `deadly`."""
    return _on_fake_device(config, config.cache.num_blocks, _manager(config))


class _DeadlyBackend:
    """Compiles anything to a grammar that allows every token."""

    name = "deadly"
    eos_token_ids = (2,)

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def compile(self, params: StructuredOutputsParams) -> _DeadlyBackend:
        time.sleep(0.05)
        if params.source == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return self

    def make_matcher(self) -> _Anything:
        return _Anything()

    def fill_bitmasks(self, matchers: object, bitmask: Any) -> None:
        bitmask[:] = -1


class _Anything:
    """A matcher of any text."""

    def accept(self, token_ids: object) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        """There is no state."""

    def count_valid(self, token_ids: list[int]) -> int:
        return len(token_ids)

    def is_accepting(self) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False

    def error(self) -> str:
        return ""

    def forced_tokens(self) -> list[int]:
        return []


def _manager(config: EngineConfig) -> StructuredOutputManager:
    vocab_size = config.model.vocab_size
    return StructuredOutputManager(
        config.structured_outputs, lambda: _DeadlyBackend(vocab_size), vocab_size=vocab_size
    )


def _on_fake_device(
    config: EngineConfig, num_blocks: int, grammars: StructuredOutputManager | None = None
) -> EngineCore:
    kv_cache_config = create_kv_cache_config(num_blocks, config.cache.block_size)
    scheduler = Scheduler(
        config.scheduler,
        kv_cache_config,
        vocab_size=config.model.vocab_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        verify_prefix_hits=True,
        grammars=grammars,
    )
    device = FakeExecutor(
        block_size=config.cache.block_size,
        max_slots=min(config.scheduler.max_model_len, scheduler.kv.num_usable_tokens),
        next_token=next_token,
    )
    step_seconds = float(os.environ.get(STEP_SECONDS, "0.002"))
    return EngineCore(
        scheduler,
        FaultyExecutor(device, step_seconds),
        config.scheduler.max_steps_in_flight,
        grammars,
    )


def starts_once(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core that dies before it is ready, from the second time on."""
    marker = os.environ[MARKER]
    if os.path.exists(marker):
        os.kill(os.getpid(), signal.SIGKILL)
    with open(marker, "w"):
        return fake_core(args, config, on_progress)


def starts_twice(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core that dies before it is ready, from the third time on that one is built."""
    with open(os.environ[MARKER], "ab") as marker:
        marker.write(b".")
        if marker.tell() > 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return fake_core(args, config, on_progress)


def talkative(args: EngineArgs, config: EngineConfig, on_progress: Progress) -> EngineCore:
    """A core that logs while it is built, also from another thread."""
    logger = logging.getLogger("tokenmill.test")
    logger.warning("built with %d%% care", 100)
    logger.debug("not worth telling")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logger.exception("something failed")
    thread = threading.Thread(target=logger.info, args=("from a thread",))
    thread.start()
    thread.join()
    return fake_core(args, config, on_progress)


def waits_for_its_reader(args: EngineArgs, config: EngineConfig, progress: Progress) -> EngineCore:
    """A core that says what it waits for, and waits for it: the file of that name."""
    file = Path(os.environ[READER_FILE])
    logging.getLogger("tokenmill.test").warning("waiting for %s", file)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, "nobody has read it"
        time.sleep(0.01)
    return fake_core(args, config, progress)


def never_ready(*args: Any) -> EngineCore:
    """A core that takes longer to be built than anybody waits."""
    time.sleep(1000)
    raise AssertionError("unreachable")


def bad_config(*args: Any) -> EngineCore:
    raise ConfigError("there is no such thing.")


def bug(*args: Any) -> EngineCore:
    raise ZeroDivisionError("division by zero")


def killed(*args: Any) -> EngineCore:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")
