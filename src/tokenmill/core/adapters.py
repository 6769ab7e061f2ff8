"""Low-rank adapters as the scheduler sees them: a rule that lets requests wait for a slot."""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.core.request import Request
from tokenmill.features.lora.slots import AdapterSlots


class AdapterReady:
    """A request starts once its adapter runs, or there is a slot for it. The last rule of all."""

    def __init__(self, max_loras: int) -> None:
        self._slots = AdapterSlots(max_loras)

    def begin_pass(self, running: Mapping[str, Request]) -> None:
        self._slots.begin_pass(request.data.adapter for request in running.values())

    def wait_reason(self, request: Request) -> str | None:
        return self._slots.wait_reason(request.data.adapter)
