"""Ranks that are on several machines, or have no native kernels: torch.distributed.

    device   backend
    cpu      gloo
    cuda     nccl      settings refuse a GPU until somebody has run it

A library's all-reduce chooses its order of summation by the size of what it sums, so that a row's
bits would depend on the others of its batch. Here all parts are gathered, and summed in the order
of ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional

from tokenmill.config.parallel import ParallelConfig, RankPlace
from tokenmill.kernels.shared_group import sum_in_order
from tokenmill.parallel.group import Gather

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_INTERFACE = "GLOO_SOCKET_IFNAME"
"""The environment variable that tells gloo its network."""
_SIOCGIFADDR = 0x8915
"""Asks Linux for the address of a network interface."""


def open_store(parallel: ParallelConfig) -> TCPStore:
    """A place on this machine where the ranks can meet; its port is a free one."""
    return TCPStore(parallel.master_addr, 0, is_master=True, wait_for_workers=False)


def find_store(address: str) -> TCPStore:
    """The place at `host:port`, which another rank has opened."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False)


def join_world(
    store: TCPStore, parallel: ParallelConfig, place: RankPlace, device: str = "cpu"
) -> dist.ProcessGroup | None:
    """Meet all ranks; those with parts of the same layers, if there are several."""
    if _INTERFACE not in os.environ:
        interface = interface_towards(parallel.master_addr)
        if interface is not None:
            os.environ[_INTERFACE] = interface
    dist.init_process_group(
        BACKENDS[device], store=store, rank=place.rank, world_size=parallel.world_size
    )
    if place.tp_size == 1:
        return None
    stages = [
        range(stage * place.tp_size, (stage + 1) * place.tp_size) for stage in range(place.pp_size)
    ]
    groups = [dist.new_group(list(ranks)) for ranks in stages]  # made by all ranks alike
    group = groups[place.pp_rank]
    assert isinstance(group, dist.ProcessGroup)
    return group


def interface_towards(host: str) -> str | None:
    """The network interface that leads to a host; None if that cannot be told."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        own = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode()[:15])
                if fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24] == own:
                    return name
    return None


class DistributedGroup:
    """Ranks that have parts of the same layers, as a `TensorGroup`.

    Its calls are no kernels of ours, so steps with it cannot be recorded.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.is_broken = False
        self._group = group
        self._mark = torch.zeros(2)
        """Step and attempt: sent with everything, and compared."""

    def partial_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_order(self._gather(x))

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        parts = self._gather(functional.pad(x, (0, widest - x.shape[1])))
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def lookup(self, ids: torch.Tensor, part: range, gather: Gather) -> torch.Tensor:
        local = ids - part.start
        is_here = (local >= 0) & (local < len(part))
        found = gather(torch.where(is_here, local, 0))
        rows = torch.where(is_here[:, None], found.float(), 0.0)
        return self.all_reduce(rows).to(found.dtype)

    def begin(self, step_id: int, attempt: int) -> None:
        self._mark = torch.tensor([float(step_id % (1 << 20)), float(attempt)])

    def _gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        sent = torch.cat((x.flatten(), self._mark))
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent, group=self._group)
        if not all(torch.equal(each[-2:], self._mark) for each in received):
            self.is_broken = True
            raise RuntimeError("the ranks of the group are in different steps: one has failed")
        return [each[:-2].view(x.shape) for each in received]
