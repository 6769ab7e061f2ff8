"""Kernels that start early touch nothing before the kernel in front of them has ended."""

from __future__ import annotations

import pytest
import torch

from tokenmill.kernels.gpu.activation import gated_activation
from tokenmill.kernels.gpu.compile import accesses_before_wait
from tokenmill.kernels.gpu.gemm_bf16 import matmul_exact
from tokenmill.kernels.gpu.gemm_config import SplitWorkspace
from tokenmill.kernels.gpu.norm import add_rms_norm
from tokenmill.kernels.gpu.overlap import overlaps

START = "\tgriddepcontrol.launch_dependents; // dummy %r1\n"
WAIT = "\tgriddepcontrol.wait; // dummy %r2\n"
PREFETCH = "\t@any cp.async.bulk.prefetch.L2.global [%rd1], %r3;\n"
LOAD = "\t@%p1 ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd2 + 0 ];\n"
STORE = "\tst.global.b32 [ %rd3 + 0 ], { %r4 };\n"
COPY = "\tcp.async.cg.shared.global [ %r8 + 0 ], [ %rd4 + 0 ], 0x10, %r9;\n"
TILE = "\t@%p2 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1];\n"
ADD = "\tatom.global.gpu.acq_rel.add.u32 %r10, [ %rd5 + 0 ], 1;\n"
RETURN = "\t@%p3 ret;\n"
END = "\tret;\n"


@pytest.mark.parametrize("early", [LOAD, STORE, COPY, TILE, ADD, RETURN])
def test_an_access_before_the_wait_is_found(early: str) -> None:
    assert accesses_before_wait(START + early + WAIT + STORE + END) == [early.strip()]
    assert accesses_before_wait(early + START + WAIT + STORE + END) == [early.strip()]


def test_what_stands_behind_the_wait_is_right() -> None:
    behind = LOAD + COPY + TILE + ADD + STORE + RETURN + END
    assert accesses_before_wait(START + PREFETCH + WAIT + behind) == []


def test_weights_may_be_loaded_early() -> None:
    assert accesses_before_wait(START + LOAD + WAIT + STORE + END, reads_weights_early=True) == []
    early = START + LOAD + STORE + WAIT + END
    assert accesses_before_wait(early, reads_weights_early=True) == [STORE.strip()]


def test_a_kernel_that_lets_others_start_must_wait() -> None:
    assert accesses_before_wait(START + LOAD + STORE + END) == ["it never waits"]
    assert accesses_before_wait(LOAD + STORE + END) == [], "a kernel launched as ever"


def layer_chain(device: str, num_rows: int) -> torch.Tensor:
    """What a norm, a product, an activation and a product make of each other's results, twice."""
    torch.manual_seed(1)
    workspace = SplitWorkspace.allocate(device, num_values=1 << 20, num_tiles=256)
    weights = [
        (torch.randn(n, k) / k**0.5).bfloat16().to(device) for n, k in ((512, 256), (256, 256))
    ]
    residual = torch.randn(num_rows, 256).to(device)
    scale = torch.rand(256).to(device)
    x = torch.randn(num_rows, 256).bfloat16().to(device)
    normed, gated = torch.empty_like(x), torch.empty_like(x)
    gate_up = torch.empty(num_rows, 512, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        add_rms_norm(x, residual, scale, 1e-5, normed)
        matmul_exact(normed, weights[0], None, gate_up, workspace)
        gated_activation(gate_up, "silu", gated)
        matmul_exact(gated, weights[1], None, x, workspace)
    return torch.cat([x.float(), residual])


@pytest.mark.parametrize("num_rows", [1, 20])
def test_a_chain_has_the_same_bits_started_early(
    num_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = layer_chain(device, num_rows)
    assert expected.isfinite().all()
    monkeypatch.setenv("TOKENMILL_GPU_OVERLAP", "1")
    overlaps.cache_clear()
    try:
        assert overlaps(torch.device(device)) == (device == "cuda" and capability() >= (9, 0))
        for _ in range(3):
            assert torch.equal(layer_chain(device, num_rows), expected)
    finally:
        overlaps.cache_clear()


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()
