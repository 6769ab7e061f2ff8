"""Who starts first, and who gives way when blocks run out.

The rule against starvation: a request is never preempted while one that ranks behind it runs, and
a preempted request waits in front of all that rank behind it. So the first in rank always makes
progress, ends, and hands its place to the next. Under `fcfs` the rank is the order of admission:
every request ends. Under `priority` it is (priority, arrival time, id): requests of one priority
serve each other in turn, while a steady stream of more urgent ones may hold up less urgent ones
for as long as it lasts; a deadline bounds their wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.config.argument_types import one_of
from tokenmill.core.queues import FCFSRequestQueue, PriorityRequestQueue, RequestQueue
from tokenmill.core.request import Request


@dataclass(frozen=True, slots=True)
class SchedulingPolicy:
    """The two choices that differ between policies."""

    make_queue: Callable[[], RequestQueue]
    choose_victim: Callable[[dict[str, Request]], Request]
    """Of the running requests, by id in the order of admission, the one to preempt."""


def _last_admitted(running: dict[str, Request]) -> Request:
    return next(reversed(running.values()))


def _worst_rank(running: dict[str, Request]) -> Request:
    return max(running.values(), key=lambda request: request.sort_key)


POLICIES = {
    "fcfs": SchedulingPolicy(FCFSRequestQueue, _last_admitted),
    "priority": SchedulingPolicy(PriorityRequestQueue, _worst_rank),
}


def get_policy(name: str) -> SchedulingPolicy:
    """The policy called `name`; raises `ConfigError` if there is none."""
    return POLICIES[one_of("scheduling_policy", name, POLICIES)]
