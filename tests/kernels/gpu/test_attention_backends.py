"""Backends for NVIDIA GPUs: each against dense attention in float64, and their reasons to refuse.

The libraries are not installed where tests run: stand-ins take exactly the documented arguments,
insist on documented shapes, dtypes and alignment, and compute with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from tokenmill.attention import cuda
from tokenmill.attention.backend import (
    AttentionSpec,
    CacheLimits,
    CommonAttentionMetadata,
    Rotation,
)
from tokenmill.attention.flash import FlashBackend
from tokenmill.attention.flashinfer import FlashInferBackend
from tokenmill.attention.reference import ReferenceBackend
from tokenmill.attention.sdpa import SdpaBackend
from tokenmill.attention.selection import ORDER, select_backend
from tokenmill.attention.triton import TritonBackend
from tokenmill.errors import ConfigError
from tokenmill.kernels.gpu.attention_reference import paged_attention_reference
from tokenmill.kernels.rotary import apply_rotary

NAN = float("nan")
SPEC = AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    scale=0.2,
    dtype="bfloat16",
    block_size=256,
    device="cuda",
    exact=False,
)
MIXED = [(3, 3), (1, 20), (0, 5), (10, 14)]
DECODE = [(1, 2), (1, 17)]
"""(tokens of this step, length with them) of each request."""


def attend_paged(query, key, value, block_table, seq_lens, starts, out, **options):
    kv_cache = torch.stack([key, value], 1)
    paged_attention_reference(query, kv_cache, block_table, seq_lens, starts, out, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Version 2.6 to 2.8, with the checks of its C++ side."""
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    check_flash_inputs(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    assert k.shape[1] % 256 == 0
    query_lens, seq_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(query_lens.max()) <= max_seqlen_q
    assert int(seq_lens.max()) <= max_seqlen_k
    assert max_seqlen_q > 1 or bool((query_lens == 1).all()), "q is reshaped to [batch_size, ...]"
    return flash(
        q, k, v, block_table, seq_lens, cu_seqlens_q, softmax_scale, causal, window_size, softcap
    )


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Version 3, of the folder `hopper`."""
    assert k is v is qv is rotary_cos is q_descale is None
    check_flash_inputs(q, k_cache, v_cache, page_table, cu_seqlens_q)
    assert cache_seqlens.dtype == torch.int32
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    return flash(
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        softmax_scale,
        causal,
        window_size,
        softcap,
    )


def check_flash_inputs(q, k, v, block_table, *starts):
    num_kv_heads, head_size = k.shape[2:]
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == block_table.stride(-1) == 1
    assert q.shape == (len(q), q.shape[1], head_size)
    assert q.shape[1] % num_kv_heads == 0
    assert v.shape == k.shape
    assert head_size % 8 == 0
    assert block_table.dtype == torch.int32
    for start in starts:
        assert start.dtype == torch.int32
        assert start.is_contiguous()
        assert start.shape == (len(block_table) + 1,)


def flash(q, k, v, table, seq_lens, starts, scale, causal, window, softcap):
    assert window[1] == (0 if causal else -1)
    out = torch.empty_like(q).flatten(1)
    attend_paged(
        q.flatten(1),
        k,
        v,
        table,
        seq_lens,
        starts,
        out,
        scale=scale,
        causal=causal,
        sliding_window=None if window[0] < 0 else window[0] + 1,
        logits_soft_cap=softcap or None,
    )
    return out.view(q.shape)


class Wrapper:
    """What FlashInfer's two classes have in common."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def _plan(self, starts, indptr, indices, last_page_len, sizes, options):
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert indptr.shape == starts.shape == (len(last_page_len) + 1,)
        assert indices.shape == (int(indptr[-1]),)
        self.sizes, self.options = sizes, options
        self.starts, self.num_blocks = starts.cpu(), indptr.diff().cpu()
        self.table = torch.nn.utils.rnn.pad_sequence(
            indices.cpu().split(self.num_blocks.tolist()), batch_first=True
        )
        assert bool((last_page_len >= 1).all())
        assert bool((last_page_len <= sizes[3]).all())
        self.seq_lens = (self.num_blocks - 1) * sizes[3] + last_page_len.cpu()

    def run(
        self, q, paged_kv_cache, *, q_scale=None, k_scale=None, v_scale=None, out=None, sinks=None
    ):
        num_heads, num_kv_heads, head_size, page_size = self.sizes
        assert q.is_contiguous()
        assert q.shape == (int(self.starts[-1]), num_heads, head_size)
        assert q.dtype == self.options["q_data_type"]
        assert paged_kv_cache.dtype == self.options["kv_data_type"]
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_size)
        window = self.options["window_left"]
        result = torch.empty_like(q).flatten(1)
        paged_attention_reference(
            q.flatten(1),
            paged_kv_cache,
            self.table.to(q.device),
            self.seq_lens,
            self.starts,
            result,
            scale=self.options["sm_scale"],
            causal=self.options["causal"],
            sliding_window=None if window < 0 else window + 1,
            logits_soft_cap=self.options["logits_soft_cap"] or None,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return result.view(q.shape)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        options = {"causal": causal, "sm_scale": sm_scale, "window_left": window_left}
        options |= {"logits_soft_cap": logits_soft_cap}
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        self._plan(
            qo_indptr,
            paged_kv_indptr,
            paged_kv_indices,
            paged_kv_last_page_len,
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            options,
        )


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        data_type=None,
        sm_scale=None,
    ):
        options = {"causal": True, "sm_scale": sm_scale, "window_left": window_left}
        options |= {"logits_soft_cap": logits_soft_cap}
        options |= {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        starts = torch.arange(len(indptr))
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self._plan(starts, indptr, indices, last_page_len, sizes, options)


def stand_in(monkeypatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def install_flash_2(monkeypatch, version: str = "2.8.3") -> None:
    stand_in(
        monkeypatch,
        "flash_attn",
        flash_attn_varlen_func=flash_attn_varlen_func,
        __version__=version,
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)  # cannot be imported


def install_flash_3(monkeypatch) -> None:
    stand_in(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=flash_attn_with_kvcache)


def install_flashinfer(monkeypatch) -> None:
    stand_in(
        monkeypatch,
        "flashinfer",
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    )


def install_nothing(monkeypatch) -> None:
    for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)


SUBJECTS = {
    "triton": (TritonBackend, install_nothing),
    "triton exact": (TritonBackend, install_nothing),
    "flash_attn 2": (FlashBackend, install_flash_2),
    "flash_attn 3": (FlashBackend, install_flash_3),
    "flashinfer": (FlashInferBackend, install_flashinfer),
    "sdpa": (SdpaBackend, install_nothing),
}
CHANGES = {
    "plain": {},
    "window": {"sliding_window": 7},
    "soft cap": {"logits_soft_cap": 2.0},
    "float16, small blocks": {"dtype": "float16", "block_size": 16},
    "float8 cache": {"kv_dtype": "float8_e4m3fn", "block_size": 16},
}
TOLERANCE = {"float16": 3e-3, "bfloat16": 2e-2}


def run(backend, spec, batch, device, rotates, causal=True):
    """(found, expected) of one step whose earlier tokens another step has written."""
    generator = torch.Generator().manual_seed(0)
    dtype, size = getattr(torch, spec.dtype), spec.block_size
    kv_dtype = getattr(torch, spec.kv_dtype or spec.dtype)
    used = [-(-length // size) for _, length in batch]
    num_blocks = sum(used) + 1
    table = torch.full((len(batch), max(used) + 1), num_blocks - 1, dtype=torch.int32)
    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).int().split(used)
    for req, own in enumerate(blocks):
        table[req, : len(own)] = own
    cache_shape = backend.get_kv_cache_shape(spec, num_blocks)
    cache = torch.full(cache_shape, NAN).to(kv_dtype).to(device)
    limits = CacheLimits(num_blocks, 8, 64, 300)
    builder, impl = backend.make_metadata_builder(spec, limits), backend.make_impl(spec)
    if spec.kv_dtype is not None:
        impl.k_scale, impl.v_scale = 0.5, 0.25
    angles = torch.rand(64, spec.head_size // 4, generator=generator)
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    qkv = {
        req: torch.randn(length, (heads + 2 * kv_heads) * spec.head_size, generator=generator)
        for req, (_, length) in enumerate(batch)
    }

    def step(spans):
        """Run positions start to end of requests."""
        at = [torch.arange(start, end) for start, end in spans.values()]
        slots = [
            table[req, p // size].long() * size + p % size for req, p in zip(spans, at, strict=True)
        ]
        lens = [end - start for start, end in spans.values()]
        ends = [end for _, end in spans.values()]
        common = CommonAttentionMetadata(
            num_reqs=len(spans),
            num_tokens=sum(lens),
            max_query_len=max(lens),
            max_seq_len=max(ends),
            query_start_loc=torch.tensor([0, *lens]).cumsum(0).int().to(device),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_table=table[list(spans)].to(device),
            slot_mapping=torch.cat(slots).to(device),
            causal=causal,
        )
        flat = torch.cat([qkv[req][start:end] for req, (start, end) in spans.items()])
        q, k, v = (
            flat.to(dtype)
            .to(device)
            .split([n * spec.head_size for n in (heads, kv_heads, kv_heads)], 1)
        )
        rotation = Rotation(torch.cat(at).to(device), cos, sin) if rotates else None
        out = impl.forward(q, k, v, rotation, cache, builder.build(common))
        if rotates:
            q = apply_rotary(q.unflatten(1, (-1, spec.head_size)), *at_positions(rotation))
            q = q.flatten(1)
        return out, q, common

    # FlashInfer has no requests without tokens.
    least = 1 if backend.name == "flashinfer" else 0
    spans = {req: (length - n, length) for req, (n, length) in enumerate(batch) if n >= least}
    earlier = {req: (0, start) for req, (start, _) in spans.items() if start >= least}
    step(earlier)
    found, query, common = step(spans)
    expected = torch.full(query.shape, NAN, dtype=torch.float64, device=device)
    scales = {} if spec.kv_dtype is None else {"k_scale": 0.5, "v_scale": 0.25}
    paged_attention_reference(
        query,
        cache,
        common.block_table,
        common.seq_lens,
        common.query_start_loc,
        expected,
        scale=spec.scale,
        sliding_window=spec.sliding_window,
        logits_soft_cap=spec.logits_soft_cap,
        causal=causal,
        **scales,
    )
    return found, expected


def at_positions(rotation):
    return rotation.cos[rotation.positions], rotation.sin[rotation.positions]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_equals_dense_attention(name, change, device, monkeypatch):
    make, install = SUBJECTS[name]
    install(monkeypatch)
    backend = make()
    spec = replace(SPEC, exact=name == "triton exact", **CHANGES[change])
    if reasons := backend.unsupported_reasons(spec):
        with pytest.raises(ConfigError, match=name.split()[0]):
            select_backend(name.split()[0], spec)
        # What is refused is in this table, and nothing else is.
        assert (name, change) in REFUSED, reasons
        return
    assert (name, change) not in REFUSED
    for steps in (MIXED, DECODE) if change == "plain" else (MIXED,):
        found, expected = run(backend, spec, steps, device, rotates=steps is not DECODE)
        tolerance = TOLERANCE[spec.dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


REFUSED = {
    ("flash_attn 2", "float16, small blocks"),
    ("flash_attn 2", "float8 cache"),
    ("flash_attn 3", "float8 cache"),
    ("sdpa", "soft cap"),
}


@pytest.mark.parametrize("name", SUBJECTS)
def test_not_causal(name, device, monkeypatch):
    make, install = SUBJECTS[name]
    install(monkeypatch)
    spec = replace(SPEC, exact=name == "triton exact")
    found, expected = run(make(), spec, MIXED[:2], device, rotates=False, causal=False)
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=2e-2)


def test_sinks_of_a_layer(device):
    spec = replace(SPEC, has_sinks=True, block_size=16)
    backend = TritonBackend()
    builder = backend.make_metadata_builder(spec, CacheLimits(4, 2, 8, 64))
    impl = backend.make_impl(spec)
    impl.sinks = torch.full((4,), 50.0, device=device)
    common = CommonAttentionMetadata(
        num_reqs=1,
        num_tokens=2,
        max_query_len=2,
        max_seq_len=2,
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([2], dtype=torch.int32, device=device),
        block_table=torch.tensor([[1]], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor([16, 17], device=device),
    )
    rows = [torch.randn(2, n * 64, dtype=torch.bfloat16, device=device) for n in (4, 2, 2)]
    cache = torch.zeros(backend.get_kv_cache_shape(spec, 4), dtype=torch.bfloat16, device=device)
    out = impl.forward(*rows, None, cache, builder.build(common))
    assert out.abs().max() < 1e-6, "a large sink takes all the weight"


def refusals(backend, **changes: object) -> str:
    return "; ".join(backend.unsupported_reasons(replace(SPEC, **changes)))


EVERY = [TritonBackend, FlashBackend, FlashInferBackend, SdpaBackend, ReferenceBackend]


@pytest.mark.parametrize("make", EVERY)
def test_common_reasons(make, monkeypatch):
    install_flash_3(monkeypatch)
    install_flashinfer(monkeypatch)
    backend = make()
    assert "dtype 'float64' is not one of" in refusals(backend, dtype="float64")
    assert "KV dtype int8 is not dtype bfloat16" in refusals(backend, kv_dtype="int8")
    assert "7 heads cannot be shared among 2 KV heads" in refusals(backend, num_heads=7)
    if make in (FlashBackend, FlashInferBackend, SdpaBackend):
        assert "attention sinks" in refusals(backend, has_sinks=True)
        assert "needs exact=False" in refusals(backend, exact=True)
    if make is TritonBackend:
        assert "layers of latents have 1 KV head, not 2" in refusals(backend, value_offset=16)
    elif make is not ReferenceBackend:
        assert "values are parts of its keys" in refusals(backend, value_offset=16)
    if make is not ReferenceBackend:
        assert not refusals(backend)


@pytest.mark.parametrize("make", [TritonBackend, FlashBackend, FlashInferBackend])
def test_reasons_of_the_device(make, monkeypatch):
    install_flash_2(monkeypatch)
    install_flashinfer(monkeypatch)
    backend = make()
    assert "CUDA devices, not on cpu" in refusals(backend, device="cpu")
    assert "head size 320 is above 256" in refusals(backend, head_size=320)
    monkeypatch.setattr(cuda, "compute_capability", lambda: (7, 5))
    assert "compute capability is 7.5, below 8.0" in refusals(backend)
    monkeypatch.setattr(cuda, "compute_capability", lambda: (8, 0))
    assert not refusals(backend)
    if make is not FlashBackend:
        assert "8.0, below 8.9" in refusals(backend, kv_dtype="float8_e4m3fn")
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in refusals(backend)


def test_reasons_of_the_libraries(monkeypatch):
    install_nothing(monkeypatch)
    assert "flash_attn cannot be imported" in refusals(FlashBackend())
    assert "flashinfer cannot be imported" in refusals(FlashInferBackend())
    install_flash_2(monkeypatch, version="2.5.9.post1")
    assert "flash_attn 2.5.9.post1 is older than 2.6" in refusals(FlashBackend())
    install_flash_2(monkeypatch)
    assert "blocks of multiples of 256 tokens" in refusals(FlashBackend(), block_size=64)
    assert "head size 60 is not a multiple of 8" in refusals(FlashBackend(), head_size=60)
    install_flashinfer(monkeypatch)
    assert "head size 96 is not one of 64, 128, 256" in refusals(FlashInferBackend(), head_size=96)
    assert "not on cuda" in refusals(ReferenceBackend())


def test_version_3_is_for_hopper(monkeypatch):
    install_flash_2(monkeypatch)
    install_flash_3(monkeypatch)
    small: Callable[[], str] = lambda: refusals(FlashBackend(), block_size=16)  # noqa: E731
    flash_module = sys.modules["tokenmill.attention.flash"]
    for capability, is_refused in (((9, 0), False), ((8, 0), True), ((10, 0), True)):
        monkeypatch.setattr(flash_module, "compute_capability", lambda found=capability: found)
        assert bool(small()) == is_refused


def test_auto_takes_the_best_that_can(monkeypatch):
    install_nothing(monkeypatch)
    assert select_backend("auto", SPEC)[0].name == ORDER["cuda"][0] == "triton"
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    backend, reasons = select_backend("auto", SPEC)
    assert backend.name == "sdpa"
    assert len(reasons) == 4
    with pytest.raises(ConfigError, match=r"triton is not installed.*needs exact=False"):
        select_backend("auto", replace(SPEC, exact=True))


def test_a_backend_that_plans_on_the_host_refuses_to_be_recorded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ConfigError, match="graphs='off'"):
        cuda.refuse_recording("sdpa")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda.refuse_recording("sdpa")
