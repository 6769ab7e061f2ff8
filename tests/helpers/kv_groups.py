"""Requests that compute by the KV cache manager alone, without a scheduler."""

from __future__ import annotations

from helpers.core import create_request
from tokenmill.core.request import Request


def make(prompt):
    return Request(create_request(prompt), max_total_tokens=10_000)


def compute(kv, request, count, computed=None):
    """Allocate slots for the next `count` tokens and settle them."""
    hits = {} if computed is None else {"computed": computed}
    assert kv.allocate_slots(request, count, **hits) is not None
    request.num_computed_tokens += count + (0 if computed is None else computed.num_tokens)
    kv.cache_blocks(request, request.num_computed_tokens)
    assert kv.audit() == []
