"""Where the time of a step goes, measured from outside.

    with StageTimes() as times:
        times.watch(runner, "_forward", "forward")
        times.watch_kernel(native_module, "gemm_bf16")
        engine.step()
        stages = times.take()

A watched method is replaced, on this one object, by one that reads the clock before and after; at
the end of the block everything is as before. What is not watched pays nothing, and the engine does
not know of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(slots=True)
class StageTime:
    """What one stage took since the last `take`."""

    seconds: float = 0.0
    """Wall time, kernels included."""
    kernel_seconds: float = 0.0
    """Of these, inside kernels."""
    num_calls: int = 0


class StageTimes:
    """A stop watch with a hand for each stage. Stages may contain kernels, and each other."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._kernel_seconds = 0.0
        self._stages: dict[str, StageTime] = {}
        self._undo: list[Callable[[], None]] = []

    def watch(self, owner: Any, method: str, stage: str) -> None:
        """Count the time of `owner.method` for `stage`; several methods may share a stage.

        `owner` is anything with attributes that can be set: an object, a module or a class. Raises
        `AttributeError` if there is no such method.
        """
        call, clock = getattr(owner, method), self._clock

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            kernels, begin = self._kernel_seconds, clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._add(stage, clock() - begin, self._kernel_seconds - kernels)

        self._replace(owner, method, watched)

    def watch_kernel(self, owner: Any, method: str) -> None:
        """Count the time of `owner.method` as kernel time of the stages that it runs in.

        A kernel calls no other kernel.
        """
        call, clock = getattr(owner, method), self._clock

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self._kernel_seconds += clock() - begin

        self._replace(owner, method, watched)

    def watch_native(
        self, owner: Any, method: str, rest: str, kernels: Callable[[], Mapping[str, float]]
    ) -> None:
        """Count the time of `owner.method`, whose kernels keep their own time, for several stages.

        `kernels` gives seconds since some beginning by stage, all in kernels. What the call takes
        beside them counts for the stage `rest`.
        """
        call, clock = getattr(owner, method), self._clock

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before, begin = kernels(), clock()
            try:
                return call(*args, **kwargs)
            finally:
                left = clock() - begin
                for stage, seconds in kernels().items():
                    mine = seconds - before[stage]
                    left -= mine
                    self._kernel_seconds += mine
                    self._add(stage, mine, mine)
                self._add(rest, left, 0.0)

        self._replace(owner, method, watched)

    def take(self) -> dict[str, StageTime]:
        """Stages since the last call, in the order in which they first ended; a new count begins.

        A stage whose call has not ended belongs to the next.
        """
        taken, self._stages = self._stages, {}
        return taken

    def __enter__(self) -> StageTimes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _add(self, stage: str, seconds: float, kernel_seconds: float) -> None:
        time_of = self._stages.setdefault(stage, StageTime())
        time_of.seconds += seconds
        time_of.kernel_seconds += kernel_seconds
        time_of.num_calls += 1

    def _replace(self, owner: Any, name: str, watched: Callable[..., Any]) -> None:
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, watched)
        if before is _MISSING:  # inherited, or of the object's class
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, before))
