"""Several processes for one model: which rank has what, and on which machine.

rank      0        1        2        3        tensor_parallel_size=2, pipeline_parallel_size=2
stage     0        0        1        1        layers of the first half, of the second half
heads     first    second   first    second
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one process stands among those of a model."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    local_rank: int
    """Among the ranks of its machine."""
    num_local: int

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layers(self, num_layers: int) -> range:
        """Layers of the rank's stage."""
        return stage_layers(num_layers, self.pp_rank, self.pp_size)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is divided. Ranks of a stage are neighbours, and so are those of a machine."""

    tensor_parallel_size: int = 1
    """Ranks that have parts of the same layers."""
    pipeline_parallel_size: int = 1
    """Stages, each with layers of its own."""
    num_nodes: int = 1
    """Machines."""
    node_rank: int = 0
    """Which of them this is; the engine runs on the first."""
    master_addr: str = "127.0.0.1"
    """Of the first machine, as the others reach it."""
    master_port: int = 29_501

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local(self) -> int:
        """Processes of a machine."""
        return self.world_size // self.num_nodes

    @property
    def output_rank(self) -> int:
        """The rank whose results count: the first one of the last stage."""
        return self.world_size - self.tensor_parallel_size

    def place(self, rank: int) -> RankPlace:
        """Where a rank stands."""
        return RankPlace(
            rank=rank,
            tp_rank=rank % self.tensor_parallel_size,
            tp_size=self.tensor_parallel_size,
            pp_rank=rank // self.tensor_parallel_size,
            pp_size=self.pipeline_parallel_size,
            local_rank=rank % self.num_local,
            num_local=self.num_local,
        )

    def ranks_of_node(self, node: int) -> range:
        """The ranks on one of the machines."""
        return range(node * self.num_local, (node + 1) * self.num_local)

    @property
    def groups_share_memory(self) -> bool:
        """Whether the ranks of each stage are on one machine."""
        return self.num_local % self.tensor_parallel_size == 0

    def uses_process_group(self, has_native_kernels: bool) -> bool:
        """Whether ranks send each other something that does not go through shared memory."""
        if self.pipeline_parallel_size > 1:
            return True
        return self.world_size > 1 and not (self.groups_share_memory and has_native_kernels)


def stage_layers(num_layers: int, stage: int, num_stages: int) -> range:
    """Layers of a stage; numbers of layers differ by one at most."""
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)
