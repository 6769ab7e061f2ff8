"""Which backend has kept a response (`/v1/responses`): later requests that name it go there."""

from __future__ import annotations

import re
from collections import OrderedDict

PATH = "/v1/responses"
_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,200})"')
_REFERENCE = re.compile(
    rb'\{\s*(?:"type"\s*:\s*"item_reference"\s*,\s*)?"id"\s*:\s*"[a-z]{1,8}_([0-9a-f]{32})_\d+"\s*'
    rb'(?:,\s*"type"\s*:\s*"item_reference"\s*)?\}'
)
"""To an item of a response of tokenmill's servers, which name items after the response."""
_MOST_BYTES = 1 << 13
"""Of an answer that are looked through: its id is among the first fields."""
_MOST_RESPONSES = 100_000


def id_in_path(path: str) -> str | None:
    """The response that `/v1/responses/{id}` and the paths below it are about."""
    if not path.startswith(f"{PATH}/"):
        return None
    return path.removeprefix(f"{PATH}/").partition("/")[0] or None


def id_in_references(items: bytes) -> str | None:
    """The response whose item the JSON of an input refers to, the first if there are several."""
    found = _REFERENCE.search(items)
    return None if found is None else f"resp_{found[1].decode('ascii')}"


class ResponseOwners:
    """Places of backends by the ids of their responses; the oldest are forgotten."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, int] = OrderedDict()

    def owner(self, response_id: str | None) -> int | None:
        """Who has it, if that is known."""
        return None if response_id is None else self._owners.get(response_id)

    def note(self, response_id: str, owner: int) -> None:
        """A backend has answered with this id."""
        self._owners[response_id] = owner
        if len(self._owners) > _MOST_RESPONSES:
            self._owners.popitem(last=False)


class IdReader:
    """Finds the id of a response in its first bytes, while they go by."""

    def __init__(self) -> None:
        self._head = b""
        self._is_over = False

    def read(self, piece: bytes) -> str | None:
        """The id, once."""
        if self._is_over:
            return None
        self._head += piece[: _MOST_BYTES - len(self._head)]
        found = _ID.search(self._head)
        self._is_over = found is not None or len(self._head) >= _MOST_BYTES
        return None if found is None else found[1].decode("ascii")
