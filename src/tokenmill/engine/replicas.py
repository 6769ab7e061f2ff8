"""All cores of a served engine, and which of them takes a request."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence

from tokenmill.config.engine_config import CacheConfig
from tokenmill.contracts.request import AdapterInfo, EngineCoreRequest
from tokenmill.engine.prefix_index import PrefixBalancer, prefix_keys
from tokenmill.engine.replica import Replica
from tokenmill.errors import EngineDeadError, InvalidRequestError

_TOKENS_PER_LOAD = 256
"""A request is sent to a replica with one more request than another has, if it finds so many more
tokens of its prompt there."""


def request_keys(request: EngineCoreRequest, block_size: int, most: int) -> list[bytes]:
    """Keys of the full blocks of a prompt, up to `most`: of what its KV depends on."""
    adapter = "" if request.adapter is None else request.adapter.load_id
    root = f"{request.cache_salt or ''}/{adapter}".encode()
    extras: dict[int, bytes] = {}
    for feature in request.mm_features:  # an image is the same few ids whatever it shows
        block = feature.offset // block_size
        extras[block] = extras.get(block, b"") + feature.content_hash.encode()
    ids = array("i", request.prompt_token_ids[: block_size * most])
    return prefix_keys(
        ids.tobytes(), ids.itemsize * block_size, root=root, extras=extras, most=most
    )


class PrefixPlacement:
    """A `PrefixBalancer` of engine cores: blocks as their KV caches have them."""

    def __init__(self, num_replicas: int, cache: CacheConfig) -> None:
        self._block_size = cache.block_size
        self._max_blocks = cache.num_blocks if cache.enable_prefix_caching else 0
        self._balancer = PrefixBalancer(
            num_replicas,
            max_blocks=self._max_blocks,
            blocks_per_load=_TOKENS_PER_LOAD / cache.block_size,
        )

    def place(self, request: EngineCoreRequest, loads: dict[int, float]) -> int:
        """The rank, of those in `loads`, that is to have a request; it is taken to get it."""
        keys = request_keys(request, self._block_size, self._max_blocks)
        rank = self._balancer.choose(keys, loads).owner
        self._balancer.record(rank, keys)
        return rank

    def forget(self, rank: int) -> None:
        """The replica's cache is empty."""
        self._balancer.index.forget(rank)


class Replicas(Sequence[Replica]):
    """By rank."""

    def __init__(self, replicas: Sequence[Replica], cache: CacheConfig) -> None:
        self._replicas = tuple(replicas)
        self._placement = PrefixPlacement(len(replicas), cache)

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
        """The replica that is to have a request: of `among`, or of all that live; one that takes
        requests now, if there is one.
        """
        able = self.alive if among is None else among
        able = [each for each in able if each.client is not None] or able
        if len(able) == 1 == len(self):
            return able[0]
        return self[self._placement.place(request, {each.rank: each.load for each in able})]

    def forget_prefixes(self, replica: Replica) -> None:
        """The replica's cache is empty."""
        self._placement.forget(replica.rank)

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
