"""The reference attention against a naive one in float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tokenmill.attention.backend import AttentionSpec, CacheLimits, CommonAttentionMetadata
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.attention.selection import select_backend
from tokenmill.errors import ConfigError
from tokenmill.kernels import native

SPEC = AttentionSpec(
    num_heads=6, num_kv_heads=2, head_size=24, scale=0.3, dtype="float32", block_size=16
)
SPECS = {
    "grouped": SPEC,
    "one head each": replace(SPEC, num_kv_heads=6, head_size=7),
    "one KV head": replace(SPEC, num_heads=5, num_kv_heads=1, head_size=64, block_size=32),
    "many heads per KV head": replace(SPEC, num_heads=40, num_kv_heads=1, head_size=8),
    "window": replace(SPEC, sliding_window=33, block_size=8),
    "window of one": replace(SPEC, sliding_window=1, block_size=1),
    "soft cap": replace(SPEC, logits_soft_cap=1.5, block_size=256),
    "large scores": replace(SPEC, scale=40.0),
    "sinks": replace(SPEC, has_sinks=True, sliding_window=40),
    "values in keys": replace(SPEC, num_kv_heads=1, value_offset=9, has_sinks=True),
    "values that are keys": replace(SPEC, value_offset=0, sliding_window=20, block_size=8),
    "bfloat16": replace(SPEC, dtype="bfloat16"),
    "float16": replace(SPEC, dtype="float16"),
}
BATCHES = [
    [(1, 1)],
    [(300, 300)],
    [(1, 700), (1, 3), (1, 256), (1, 257)],
    [(5, 5), (37, 261), (1, 513), (0, 40), (255, 511), (90, 700)],
]
"""(tokens of this step, length with them) of each request."""
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}


def sinks_of(spec):
    """Scores without a value, some above all others: float32 [num_heads]."""
    return torch.arange(spec.num_heads).float() - 2


def naive(spec, query, keys, values, causal):
    """One request: query [n, heads, size], keys and values [length, kv heads, size]."""
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * spec.scale
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    length = len(keys)
    at = torch.arange(length - len(query), length)[:, None]
    key_at = torch.arange(length)
    hidden = torch.zeros(len(query), length, dtype=torch.bool)
    if causal:
        hidden |= key_at > at
    if spec.sliding_window is not None:
        hidden |= key_at <= at - spec.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if spec.has_sinks:
        sinks = sinks_of(spec).double()[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def run_backend(spec, batch, causal, seed=0):
    """Backend's and naive results of a batch whose earlier tokens are in the cache."""
    generator = torch.Generator().manual_seed(seed)
    shuffler = random.Random(seed)
    dtype = getattr(torch, spec.dtype)
    size = spec.block_size
    used = [-(-length // size) for _, length in batch]
    num_blocks = sum(used) + 3
    free = list(range(1, num_blocks))
    shuffler.shuffle(free)
    width = max(used) + 1
    tables = [[free.pop() for _ in range(n)] for n in used]
    backend = ReferenceBackend()
    impl = backend.make_impl(spec)
    if spec.has_sinks:
        impl.sinks = sinks_of(spec)
    builder = backend.make_metadata_builder(spec, CacheLimits(num_blocks, 64, 4096, 4096))
    shape = backend.get_kv_cache_shape(spec, num_blocks)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    kv = [
        torch.randn(2, length, spec.num_kv_heads, spec.head_size, generator=generator).to(dtype)
        for _, length in batch
    ]

    def common(query_lens, seq_lens):
        slots = [
            tables[req][at // size] * size + at % size
            for req, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True))
            for at in range(length - n, length)
        ]
        return CommonAttentionMetadata(
            num_reqs=len(batch),
            num_tokens=sum(query_lens),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
            block_table=torch.tensor(
                [t + [num_blocks - 1] * (width - len(t)) for t in tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=causal,
        )

    query_lens = [n for n, _ in batch]
    seq_lens = [length for _, length in batch]
    earlier = [length - n for n, length in batch]
    heads = spec.num_heads
    if sum(earlier):
        key, value = (
            torch.cat([x[i][:n] for x, n in zip(kv, earlier, strict=True)]).flatten(1)
            for i in (0, 1)
        )
        nothing = torch.zeros(sum(earlier), heads * spec.head_size, dtype=dtype)
        impl.forward(nothing, key, value, None, cache, builder.build(common(earlier, earlier)))
    key, value = (
        torch.cat([x[i][n:] for x, n in zip(kv, earlier, strict=True)]).flatten(1) for i in (0, 1)
    )
    query = torch.randn(sum(query_lens), heads, spec.head_size, generator=generator)
    query = query.to(dtype)
    metadata = builder.build(common(query_lens, seq_lens))
    found = impl.forward(query.flatten(1), key, value, None, cache, metadata)
    found = found.view(-1, heads, spec.value_size)
    if spec.value_offset is not None:
        kv = [(x[0], x[0][..., spec.value_offset :]) for x in kv]
    expected = [
        naive(spec, q, x[0], x[1], causal) for q, x in zip(query.split(query_lens), kv, strict=True)
    ]
    return found, torch.cat(expected)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_equals_naive_attention(name, batch):
    found, expected = run_backend(SPECS[name], batch, causal=True)
    tolerance = TOLERANCE[SPECS[name].dtype] * max(1.0, SPECS[name].scale)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def test_not_causal_sees_the_whole_length():
    found, expected = run_backend(SPEC, BATCHES[-1], causal=False)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    chooser = random.Random(seed)
    lengths = [chooser.randint(1, 600) for _ in range(chooser.randint(1, 9))]
    batch = [(chooser.choice([1, chooser.randint(1, n)]), n) for n in lengths]
    spec = replace(
        SPEC, sliding_window=chooser.choice([None, 5, 300]), block_size=chooser.choice([4, 64])
    )
    found, expected = run_backend(spec, batch, causal=True, seed=seed)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_native_kernels_attend_where_they_know_the_type(dtype):
    spec = replace(SPEC, dtype=dtype, head_size=64, block_size=32)
    is_native = native.is_available() and dtype != "float16"
    assert select_backend("auto", spec)[0].name == ("cpu" if is_native else "reference")


def test_selection_says_why():
    backend, reasons = select_backend("auto", SPEC)
    assert backend.name in reasons[-1]
    assert select_backend("reference", SPEC)[0].name == "reference"
    with pytest.raises(ConfigError, match="Did you mean 'reference'"):
        select_backend("referense", SPEC)
    with pytest.raises(ConfigError, match="reference: block_size 24 does not divide 256"):
        select_backend("auto", replace(SPEC, block_size=24))
