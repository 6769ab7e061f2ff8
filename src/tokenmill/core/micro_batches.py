"""Who may be in the next step of a pipeline of several stages.

    stage 0    A B    C D    A B    C D
    stage 1           A B    C D    A B
                             ^ their tokens are known from here on

A request that samples waits until its token is known. So steps share the requests among them: each
has a part of those that run, and there are as many steps in flight as stages.
"""

from __future__ import annotations

from tokenmill.core.request import Request


def next_micro_batch(running: list[Request], num_stages: int) -> list[Request]:
    """Of the requests that run, in their order, the ones that the next step may compute."""
    if num_stages == 1:
        return running
    most = -(-len(running) // num_stages)
    return [request for request in running if not request.num_output_placeholders][:most]
