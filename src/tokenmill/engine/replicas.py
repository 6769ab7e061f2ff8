"""All cores of a served engine, and which of them takes a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from tokenmill.config.engine_config import CacheConfig
from tokenmill.contracts.request import AdapterInfo, EngineCoreRequest
from tokenmill.engine.replica import Replica
from tokenmill.engine.replica_balancer import ReplicaBalancer
from tokenmill.errors import EngineDeadError, InvalidRequestError


class Replicas(Sequence[Replica]):
    """By rank."""

    def __init__(self, replicas: Sequence[Replica], cache: CacheConfig) -> None:
        self._replicas = tuple(replicas)
        self._balancer = ReplicaBalancer(len(replicas), cache)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, rank: int) -> Replica:  # type: ignore[override]
        return self._replicas[rank]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    @property
    def alive(self) -> list[Replica]:
        """Those that have a core, or will have one again."""
        return [each for each in self if not each.supervisor.has_given_up]

    def check_rank(self, rank: int | None) -> None:
        """Raise `InvalidRequestError` for a replica that there is not, `EngineDeadError` for one
        that will not come back.
        """
        if rank is None:
            return
        if not 0 <= rank < len(self):
            raise InvalidRequestError(
                f"data_parallel_rank={rank} must be from 0 to {len(self) - 1}: the engine has"
                f" data_parallel_size={len(self)}. Leave it out to let the engine choose.",
                parameter="data_parallel_rank",
            )
        if self[rank].supervisor.has_given_up:
            raise EngineDeadError(
                f"The replica data_parallel_rank={rank} is dead; leave it out to use another one."
            )

    def choose(self, request: EngineCoreRequest, among: Sequence[Replica] | None = None) -> Replica:
        """The replica that is to have a request: of `among` that live, or of all that do; one that
        takes requests now, if there is one.
        """
        if len(self) == 1:
            return self[0]
        able = [each for each in self.alive if among is None or each in among] or self.alive
        able = [each for each in able if each.client is not None] or able
        return self[self._balancer.assign(request, {each.rank: each.load for each in able})]

    def forget_prefixes(self, replica: Replica) -> None:
        """The replica's cache is empty."""
        self._balancer.forget(replica.rank)

    async def reset_prefix_caches(self) -> bool:
        """Have all forget all prefixes; False if requests are running in one of them.

        Raises `EngineDeadError` if one dies over it.
        """
        done = []
        for replica in self:
            self.forget_prefixes(replica)
            if replica.client is not None:  # else the next core starts with an empty cache
                done.append(asyncio.wrap_future(replica.client.reset_prefix_cache()))
                replica.supervisor.after_send()
        return all(await asyncio.gather(*done))

    async def read_adapter(self, directory: str) -> AdapterInfo:
        """Have all read an adapter; one that is being started again will when it is needed.

        Raises `AdapterError`, and `EngineDeadError` while there is no core to ask.
        """
        reading = []
        for replica in self:
            if replica.client is not None:
                reading.append(asyncio.wrap_future(replica.client.load_adapter(directory)))
                replica.supervisor.after_send()
        answers = await asyncio.gather(*reading, return_exceptions=True)
        good = [each for each in answers if isinstance(each, AdapterInfo)]
        errors = [each for each in answers if isinstance(each, BaseException)]
        for error in errors:
            if not (good and isinstance(error, EngineDeadError)):  # that one reads it later
                raise error
        if not good:
            raise EngineDeadError("The engine core is being started again; try again soon.")
        return good[0]
