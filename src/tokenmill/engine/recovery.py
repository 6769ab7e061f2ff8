"""What is done about a core that has died: when another one starts, and who may enter it first.

A request that was in the step that failed is a suspect. In the next core suspects are on trial, one
at a time with nothing beside them, until each has brought a few tokens; then all go on together.
Results are exact, so whatever broke the core will most likely break it again, this time alone. A
request that does so twice is condemned. One that passes, and is a suspect again later, has to stay
alone for longer, so that a fault which needs its time is pinned down as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.engine.serve_options import ServeOptions

_FIRST_PAUSE = 0.5
"""Seconds before the second restart."""
_FIRST_TRIAL_TOKENS = 2
"""Enough for the end of the prompt and one decoding step."""
_LONGER_TRIAL = 4
"""How many times longer each further trial of a request is."""
_MAX_DEATHS_ALONE = 2


class RestartPolicy:
    """Pauses that grow with the number of restarts in the window, and an end to it."""

    def __init__(self, options: ServeOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._restarts: deque[float] = deque()

    def next_pause(self) -> float | None:
        """Seconds to wait before the restart that is due now; None if there were too many."""
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - self._options.restart_window:
            self._restarts.popleft()
        count = len(self._restarts)
        if count >= self._options.max_restarts:
            return None
        self._restarts.append(now)
        pause = _FIRST_PAUSE * 2.0 ** (count - 1) if count else 0.0
        return min(pause, self._options.max_restart_delay)


@dataclass(slots=True)
class Entry:
    """An unfinished request, and what it has been through."""

    request: EngineCoreRequest
    submission: str | None = None
    """Its id in the core; None while it is held back here."""
    num_submissions: int = 0
    is_suspect: bool = False
    """Whether it is to be tried."""
    num_suspected: int = 0
    num_deaths_alone: int = 0


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that is to enter the core now, under an id that no other submission has, so that
    outputs of an earlier one are told apart.
    """

    request: EngineCoreRequest
    submission_id: str

    @property
    def is_first(self) -> bool:
        """Whether it has never been in a core."""
        return self.submission_id == self.request.request_id


class Roster:
    """Every unfinished request, and whether it is in the core."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._request_ids: dict[str, str] = {}
        """By submission id."""
        self._held_back: dict[str, None] = {}
        """Ids of requests that are not in the core, in their order."""
        self._on_trial: str | None = None
        self._trial_tokens_left = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_submitted(self) -> int:
        """Requests in the core."""
        return len(self._request_ids)

    @property
    def suspects(self) -> list[str]:
        """Requests that wait for their trial; whoever has died alone comes last."""
        waiting = [each for each in self._held_back if self._entries[each].is_suspect]
        return sorted(waiting, key=lambda each: self._entries[each].num_deaths_alone)

    def add(self, request: EngineCoreRequest) -> None:
        """A new request; `take_due` says when it enters the core."""
        self._entries[request.request_id] = Entry(request)
        self._held_back[request.request_id] = None

    def remove(self, request_id: str) -> str | None:
        """A request has ended; its id in the core, if it is there."""
        entry = self._entries.pop(request_id)
        self._held_back.pop(request_id, None)
        if request_id == self._on_trial:
            self._on_trial = None
        return self._withdraw(entry)

    @property
    def held_back(self) -> list[str]:
        """Requests that are not in the core."""
        return list(self._held_back)

    @property
    def innocents(self) -> list[str]:
        """Requests that are not in the core, and were not in a step that failed."""
        return [each for each in self._held_back if not self._entries[each].is_suspect]

    def take_out(self, request_ids: Iterable[str]) -> list[Entry]:
        """Requests that are not in the core leave for another roster, with their past."""
        entries = []
        for request_id in request_ids:
            del self._held_back[request_id]
            entries.append(self._entries.pop(request_id))
        return entries

    def put_in(self, entry: Entry) -> None:
        """A request comes from another roster. A suspect is tried beside whoever is in the core."""
        assert entry.submission is None, "it is in a core"
        self._entries[entry.request.request_id] = entry
        self._held_back[entry.request.request_id] = None

    def request_id(self, submission_id: str) -> str | None:
        """Whose submission it is; None if it is over."""
        return self._request_ids.get(submission_id)

    def take_due(self) -> list[Submission]:
        """The requests that are to enter the core now; they count as being there from here on."""
        if self._on_trial is not None or not self._held_back:
            return []
        if suspects := self.suspects:
            self._on_trial = suspects[0]
            self._entries[self._on_trial].is_suspect = False
            self._trial_tokens_left = self._trial_length(self._entries[self._on_trial])
            return [self._submit(self._on_trial)]
        return [self._submit(request_id) for request_id in list(self._held_back)]

    def took_tokens(self, request_id: str, count: int) -> str | None:
        """A request has brought tokens and goes on.

        Returns the id in the core of one that has stood its trial and is to leave the core until
        the others have: it is held back from here on.
        """
        if request_id != self._on_trial:
            return None
        self._trial_tokens_left -= count
        if self._trial_tokens_left > 0:
            return None
        self._on_trial = None
        if not self.suspects:
            return None
        self._held_back[request_id] = None
        return self._withdraw(self._entries[request_id])

    def core_died(self, submission_ids: Iterable[str]) -> list[str]:
        """The core has died while it worked on these: the ids of those that are condemned.

        Everyone is held back from here on, in the order of arrival.
        """
        suspected = {self._request_ids[i] for i in submission_ids if i in self._request_ids}
        for request_id in suspected:
            self._entries[request_id].num_suspected += 1
        if self._on_trial in suspected and self.num_submitted == 1:
            self._entries[self._on_trial].num_deaths_alone += 1
        for request_id, entry in self._entries.items():
            entry.is_suspect |= request_id in suspected or request_id == self._on_trial
            self._withdraw(entry)
        self._on_trial = None
        self._held_back = dict.fromkeys(self._entries)
        return [
            request_id
            for request_id, entry in self._entries.items()
            if entry.num_deaths_alone >= _MAX_DEATHS_ALONE
        ]

    def _submit(self, request_id: str) -> Submission:
        entry = self._entries[request_id]
        del self._held_back[request_id]
        count = entry.num_submissions
        entry.submission = f"{request_id}.{count}" if count else request_id
        entry.num_submissions += 1
        self._request_ids[entry.submission] = request_id
        return Submission(entry.request, entry.submission)

    def _withdraw(self, entry: Entry) -> str | None:
        submission, entry.submission = entry.submission, None
        if submission is not None:
            del self._request_ids[submission]
        return submission

    @staticmethod
    def _trial_length(entry: Entry) -> int:
        length = _FIRST_TRIAL_TOKENS
        for _ in range(1, entry.num_suspected):
            length *= _LONGER_TRIAL
        return length
