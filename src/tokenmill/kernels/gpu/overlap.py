"""Kernels that start while the one in front of them still runs (programmatic dependent launch).

At a batch of one a kernel works for a few microseconds, of which its start is a good part. With
these a kernel's programs are in place, and its weights on their way to the L2, when the results
that it needs are there:

    product   [ weights ...................... ]
    norm         [ start | waits               | works ]
    product          [ start | first weights to L2     | multiplies ...

The rules that keep it right:

- every program of such a kernel waits before it reads or writes anything that another kernel
  touches, and before it may return: a kernel that has ended has seen the end of the one in front
  of it, and so the end of all before that one;
- in front of the wait stand addresses and weights, which are written before the first step only;
- other kernels are launched as ever, and start when everything before them has ended.

What is computed stays the same to the bit. To be asked for by `TOKENMILL_GPU_OVERLAP=1`, until
it has been measured on a card.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmill.observe.environment import wants_gpu_overlap

_FIRST_CAPABILITY = (9, 0)


@lru_cache(maxsize=16)
def overlaps(device: torch.device) -> bool:
    """Whether kernels on a device may start early; what `launch_pdl` and OVERLAPS are set to."""
    return (
        device.type == "cuda"
        and wants_gpu_overlap()
        and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
    )


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr) -> None:
    """Let the next kernel's programs take their places as soon as all of this one have theirs."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr) -> None:
    """Wait for the kernel in front of this one to have ended, its writes in view."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def fetch_to_l2(pointers: tl.tensor, num_bytes: tl.tensor) -> None:
    """Start to bring num_bytes from each pointer on to the L2 cache; none if not positive.

    Pointers and numbers are multiples of 16; all of it must lie inside a tensor. Not for the
    interpreter.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred any;
            setp.gt.s32 any, $2, 0;
            @any cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [pointers.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
