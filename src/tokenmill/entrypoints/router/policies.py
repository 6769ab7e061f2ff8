"""Which backend gets a request."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.config.route_args import RouteArgs
from tokenmill.engine.prefix_index import PrefixBalancer
from tokenmill.entrypoints.router.backend import Backend
from tokenmill.entrypoints.router.responses import ResponseOwners
from tokenmill.entrypoints.router.routing_keys import BLOCKS_PER_LOAD, RoutingKeys


@dataclass(frozen=True, slots=True)
class Pick:
    """A backend, and why it was chosen."""

    backend: Backend
    reason: str
    """`prefix`: it had some of the prompt; `load`: the least to do; `session`: it has the session;
    `turn`: it was its turn; `response`: it has kept the response that the request is about; `only`:
    there was no other one."""
    num_matched: int = 0
    """Pieces of the prompt that it was sent before."""


class Picker:
    """One policy over all backends, and the index of prefixes."""

    def __init__(self, args: RouteArgs, num_backends: int) -> None:
        self._policy = args.policy
        self._num_turns = 0
        self.responses = ResponseOwners()
        self._balancer = PrefixBalancer(
            num_backends,
            max_blocks=args.max_index_blocks if args.policy == "prefix" else 0,
            blocks_per_load=BLOCKS_PER_LOAD,
        )

    def pick(self, keys: RoutingKeys, candidates: Sequence[Backend]) -> Pick:
        """One of the candidates, of which there is at least one; it is taken to get the request.

        Those that have said that they have too much to do come last.
        """
        able = [each for each in candidates if not each.is_busy] or list(candidates)
        picked = self._pick(keys, able)
        self._balancer.record(picked.backend.index, keys.blocks)
        return picked

    def num_blocks(self, backend: Backend) -> int:
        """Pieces of prompts that are remembered of a backend."""
        return self._balancer.index.num_blocks(backend.index)

    def forget(self, backend: Backend) -> None:
        """The backend was started again, or has dropped its cache."""
        self._balancer.index.forget(backend.index)

    def _pick(self, keys: RoutingKeys, able: Sequence[Backend]) -> Pick:
        by_index = {each.index: each for each in able}
        keeper = self.responses.owner(keys.response)
        if keeper in by_index:
            return Pick(by_index[keeper], "response")
        if self._policy == "round_robin":
            turn, self._num_turns = self._num_turns, self._num_turns + 1
            return Pick(able[turn % len(able)], "turn")
        if self._policy == "session" and keys.session is not None:
            return Pick(max(able, key=lambda each: _weight(keys.session, each)), "session")
        loads = {each.index: float(each.in_flight) for each in able}
        choice = self._balancer.choose(keys.blocks, loads)
        reason = "prefix" if choice.num_matched else "only" if len(able) == 1 else "load"
        return Pick(by_index[choice.owner], reason, choice.num_matched)


def _weight(session: str | None, backend: Backend) -> bytes:
    """Rendezvous hashing: a session moves only if its backend goes, or a better one comes."""
    return hashlib.blake2b(f"{session}\0{backend.url}".encode("utf-8", "replace")).digest()
