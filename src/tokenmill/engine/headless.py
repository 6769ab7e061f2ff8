"""The ranks of a machine on which there is no server: `tokenmill serve --headless`."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType

from tokenmill.checkpoint.names import resolve_model
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.ranks import parallel_config
from tokenmill.errors import ConfigError
from tokenmill.executor.launch import LocalRank, end_ranks, start_ranks

logger = logging.getLogger(__name__)

_LOOK_INTERVAL = 0.2
"""Seconds between two looks at the ranks."""
_RESTART_PAUSE = 1.0
"""Seconds before ranks are started again: they end when the engine ends that they belong to."""


def run_headless(args: EngineArgs) -> int:
    """Be the ranks of machine `node_rank` for engine after engine on machine 0, until SIGTERM or
    Ctrl-C; the exit status.

    Raises `ConfigError` for settings that name no such machine, and `ModelNotFoundError`.
    """
    parallel = parallel_config(args)
    if not 0 < parallel.node_rank < parallel.num_nodes:
        raise ConfigError(
            f"headless needs nnodes of at least 2, and a node_rank from 1 to nnodes - 1, but"
            f" nnodes={parallel.num_nodes} and node_rank={parallel.node_rank}; the server is on"
            f" machine 0."
        )
    path = str(resolve_model(args.model, args.revision))
    address = f"{parallel.master_addr}:{parallel.master_port}"
    over = threading.Event()

    def end(signum: int, frame: FrameType | None) -> None:
        over.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    ranks: list[LocalRank] = []
    while not over.is_set():
        numbers = ", ".join(map(str, parallel.ranks_of_node(parallel.node_rank)))
        logger.warning("ranks %s wait for an engine at %s", numbers, address)
        ranks = start_ranks(parallel, parallel.node_rank, lambda rank: address, model_path=path)
        while not over.wait(_LOOK_INTERVAL):
            if any(each.process.poll() is not None for each in ranks):
                break
        if not over.is_set():
            endings = "; ".join(f"rank {each.rank} {each.how_it_ended()}" for each in ranks)
            logger.warning("%s: they are started again", endings)
            over.wait(_RESTART_PAUSE)
        end_ranks(ranks, grace=0.0)
    return 0
