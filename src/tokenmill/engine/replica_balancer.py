"""Which of several cores takes a request: where most of its prefix is, unless others hold it up."""

from __future__ import annotations

from array import array

from tokenmill.config.engine_config import CacheConfig
from tokenmill.contracts.request import EngineCoreRequest
from tokenmill.engine.prefix_index import PrefixBalancer, prefix_keys

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


class ReplicaBalancer:
    """A `PrefixBalancer` of engine cores: blocks as their KV caches have them."""

    def __init__(self, num_replicas: int, cache: CacheConfig) -> None:
        self._block_size = cache.block_size
        self._max_blocks = cache.num_blocks if cache.enable_prefix_caching else 0
        self._balancer = PrefixBalancer(
            num_replicas,
            max_blocks=self._max_blocks,
            blocks_per_load=_TOKENS_PER_LOAD / cache.block_size,
        )

    def assign(self, request: EngineCoreRequest, loads: dict[int, float]) -> int:
        """The rank, of those in `loads`, that is to have a request; it is taken to get it."""
        keys = request_keys(request, self._block_size, self._max_blocks)
        rank = self._balancer.choose(keys, loads).owner
        self._balancer.record(rank, keys)
        return rank

    def forget(self, rank: int) -> None:
        """The replica's cache is empty."""
        self._balancer.index.forget(rank)
