"""A page of memory that the front end and the core's process share.

It says what no message can, since a dead or frozen process sends none: when each side last showed
a sign of life, and which requests the core was working on. Words are int64, and each is written by
one side only.

    word 0   core's last sign of life       nanoseconds, monotonic
    word 1   front end's last sign of life  nanoseconds, monotonic
    word 2   turns of the core's loop
    word 3   number of slots
    word 4   words in a slot

    slot     what may be under way at one time: a step, or (slot 0) a request being queued, and
             requests whose grammar is being compiled
             word 0   1 while it is under way
             word 1   bytes of ids that follow
             ids      separated by line feeds
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time

from tokenmill.contracts.plan import SchedulerOutput

_CORE_BEAT, _FRONT_BEAT, _TURNS, _NUM_SLOTS, _SLOT_WORDS = range(5)
_HEADER_WORDS = 8
_SLOT_HEADER_WORDS = 2
_WORD = 8
_ID_BYTES = 40
"""Room for one id and its line feed: an engine's ids have less than 32 characters."""
_MAX_PREPARED = 8
"""Requests that are told while they are prepared."""
_NANOSECONDS = 1e9


class StatusPage:
    """One process's view of the page. It is a `StepJournal`."""

    def __init__(self, fd: int) -> None:
        """Map the page behind a file descriptor, which this object closes at the end."""
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._bytes = memoryview(self._map)
        # Words of a cast view are stored whole, so that a reader never sees half of one.
        self._words = self._bytes.cast("q")

    @classmethod
    def create(cls, *, max_steps_in_flight: int, max_num_seqs: int) -> StatusPage:
        """A fresh page with room for so many steps of so many requests."""
        num_ids = max(max_num_seqs, _MAX_PREPARED)
        slot_words = _SLOT_HEADER_WORDS + -(-num_ids * _ID_BYTES // _WORD)
        num_slots = 1 + max_steps_in_flight
        fd = _anonymous_file((_HEADER_WORDS + num_slots * slot_words) * _WORD)
        page = cls(fd)
        page._words[_NUM_SLOTS] = num_slots
        page._words[_SLOT_WORDS] = slot_words
        page.beat_front_end()
        page.beat_core()  # its first sign of life: it is being started
        return page

    # ---- the core's side --------------------------------------------------------------------

    def beat_core(self) -> None:
        """The core lives."""
        self._words[_CORE_BEAT] = time.monotonic_ns()

    def turn(self) -> None:
        """The core's loop has made a turn."""
        self._words[_TURNS] += 1

    def front_end_silence(self) -> float:
        """Seconds since the front end's last sign of life."""
        return self._age(_FRONT_BEAT)

    def begin(self, plan: SchedulerOutput) -> None:
        """A step starts."""
        self._begin(self._step_slot(plan), plan.req_ids)

    def end(self, plan: SchedulerOutput) -> None:
        """A step has settled."""
        self._words[self._step_slot(plan)] = 0

    def begin_intake(self, request_id: str) -> None:
        """A request is about to be queued."""
        self._begin(_HEADER_WORDS, [request_id])

    def end_intake(self) -> None:
        """The requests that came are queued."""
        self._words[_HEADER_WORDS] = 0

    def prepare(self, request_ids: list[str]) -> None:
        """These are being made ready to start, beside the core's loop; nobody is, if empty."""
        if request_ids:
            self._begin(_HEADER_WORDS, request_ids[:_MAX_PREPARED])
        else:
            self.end_intake()

    # ---- the front end's side ---------------------------------------------------------------

    def beat_front_end(self) -> None:
        """The front end lives."""
        self._words[_FRONT_BEAT] = time.monotonic_ns()

    @property
    def core_beat(self) -> int:
        """When the core last showed that it lives: nanoseconds, monotonic."""
        return self._words[_CORE_BEAT]

    def core_silence(self) -> float:
        """Seconds since the core's last sign of life."""
        return self._age(_CORE_BEAT)

    @property
    def num_turns(self) -> int:
        """How many turns the core's loop has made."""
        return self._words[_TURNS]

    def under_way(self) -> list[str]:
        """Ids of the requests in steps under way, and of those being queued or prepared."""
        found: list[str] = []
        for index in range(self._words[_NUM_SLOTS]):
            slot = self._slot(index)
            if self._words[slot]:
                start = (slot + _SLOT_HEADER_WORDS) * _WORD
                ids = bytes(self._bytes[start : start + self._words[slot + 1]])
                found += ids.decode().split("\n")
        return found

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self.fd)

    def _age(self, word: int) -> float:
        return (time.monotonic_ns() - self._words[word]) / _NANOSECONDS

    def _slot(self, index: int) -> int:
        return _HEADER_WORDS + index * self._words[_SLOT_WORDS]

    def _step_slot(self, plan: SchedulerOutput) -> int:
        """First word of a step's slot; steps in flight at the same time have different ones."""
        return self._slot(1 + plan.step_id % (self._words[_NUM_SLOTS] - 1))

    def _begin(self, slot: int, ids: list[str]) -> None:
        """Fill a slot, and only then say that it counts."""
        text = "\n".join(ids).encode()
        start = (slot + _SLOT_HEADER_WORDS) * _WORD
        assert len(text) <= (self._words[_SLOT_WORDS] - _SLOT_HEADER_WORDS) * _WORD
        self._bytes[start : start + len(text)] = text
        self._words[slot + 1] = len(text)
        self._words[slot] = 1


def _anonymous_file(size: int) -> int:
    """A file descriptor for `size` zero bytes that no path leads to."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tokenmill-status", os.MFD_CLOEXEC)
    else:  # not Linux
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
