"""Responses that are kept for later requests: in memory, or in a file of SQLite's.

A response belongs to the API key that asked for it, and nobody else sees it. Its last use is when
it was made, or when it or one that continues it was continued. It is kept for `ttl` seconds from
then on; and if all of them have more than `max_bytes`, those go whose last use is longest ago.

All work is done in one thread of the store's own, whose connection nobody else uses.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill.errors import ConfigError

_VERSION = 1
_SCHEMA = f"""
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, status TEXT NOT NULL,
    used REAL NOT NULL, size INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE INDEX responses_used ON responses (used);
CREATE TABLE items (
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    place INTEGER NOT NULL, is_output INTEGER NOT NULL, id TEXT NOT NULL, body BLOB NOT NULL,
    PRIMARY KEY (response, place)
);
CREATE INDEX items_id ON items (id);
PRAGMA user_version = {_VERSION};
"""
_LONGEST_CHAIN = 10_000
"""Responses that one may continue, one after the other."""

Item = dict[str, Any]
_Result = TypeVar("_Result")


class TooMuchKeptError(Exception):
    """What was asked for together has more bytes than are wanted."""


@dataclass(slots=True)
class KeptResponse:
    """A response as it is kept."""

    id: str
    owner: str
    status: str
    body: bytes
    """The response, as JSON."""
    previous: str | None = None
    """The response that it continues."""
    input: list[Item] = field(default_factory=list)
    output: list[Item] = field(default_factory=list)


class ResponseStore:
    """Opened when it is first used. Methods raise `sqlite3.Error` where the file fails."""

    def __init__(
        self,
        path: str | None,
        *,
        max_bytes: int,
        ttl: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`path` is the file, None for memory; `ttl` is in seconds; `clock` tells Unix time."""
        self._path = path
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._clock = clock
        self._size = 0
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    def check(self) -> None:
        """Open a file now. Raises `ConfigError` if that does not work."""
        if self._path is not None:
            self._thread.submit(self._open).result()

    async def put(self, response: KeptResponse) -> bool:
        """Keep a response, in place of one with its id. False if it is larger than all may be."""
        return await self._run(lambda: self._put(response))

    async def get(self, id: str, owner: str) -> KeptResponse | None:
        """A response without its items; None if there is none."""
        return await self._run(lambda: self._get(id, owner))

    async def history(self, id: str, owner: str, max_bytes: int) -> tuple[str, list[Item]] | None:
        """(status, the items up to the end of a response, with those of all that it continues);
        None if it or one of those is not there.

        Raises `TooMuchKeptError` if they have more than `max_bytes`.
        """
        return await self._run(lambda: self._history(id, owner, max_bytes))

    async def input_items(self, id: str) -> list[Item]:
        """The input of a response."""
        return await self._run(lambda: self._items(id, "AND NOT is_output"))

    async def items(self, ids: Sequence[str], owner: str, max_bytes: int) -> list[Item | None]:
        """The latest item with each id. Raises `TooMuchKeptError` if all have over `max_bytes`."""
        return await self._run(lambda: self._items_of(ids, owner, max_bytes))

    async def delete(self, id: str, owner: str) -> bool:
        """Forget a response; whether there was one."""
        return await self._run(lambda: self._delete(id, owner))

    async def close(self) -> None:
        """End the thread, when all work is done."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        try:
            connection = self._connect()
            self._end_unfinished(connection)
            query = "SELECT COALESCE(SUM(size), 0) FROM responses"
            (self._size,) = connection.execute(query).fetchone()
        except (sqlite3.Error, OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"response_store={self._path!r} cannot be opened as a store of responses: {error}."
                f" It must be a file of one server's own."
            ) from error
        self._connection = connection
        return connection

    def _connect(self) -> sqlite3.Connection:
        if self._path is None:
            connection = sqlite3.connect(":memory:", isolation_level=None)
        else:
            path = Path(self._path).expanduser()
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it will hold prompts
            connection = sqlite3.connect(path, isolation_level=None, timeout=1)
            connection.execute("PRAGMA auto_vacuum = FULL")  # before anything is written
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA secure_delete = ON")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(_SCHEMA)
        elif version != _VERSION:
            connection.close()
            raise sqlite3.DatabaseError(f"its version is {version}, and {_VERSION} is needed")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _end_unfinished(self, connection: sqlite3.Connection) -> None:
        """Responses that a server was computing when it ended have failed."""
        query = "SELECT id, body FROM responses WHERE status = 'in_progress'"
        for id, body in connection.execute(query).fetchall():
            response = msgspec.json.decode(body)
            response["status"] = "failed"
            response["error"] = {"code": "server_error", "message": "the server was stopped."}
            connection.execute(
                "UPDATE responses SET status = 'failed', body = ? WHERE id = ?",
                (msgspec.json.encode(response), id),
            )

    def _put(self, response: KeptResponse) -> bool:
        connection = self._open()
        items = [(0, each) for each in response.input] + [(1, each) for each in response.output]
        rows = [
            (response.id, place, is_output, item["id"], msgspec.json.encode(item))
            for place, (is_output, item) in enumerate(items)
        ]
        size = len(response.body) + sum(len(row[-1]) + len(row[-2]) for row in rows)
        size_before = self._size
        try:
            with connection:
                connection.execute("BEGIN")
                self._forget(connection, "id = ?", response.id)
                if size > self._max_bytes:
                    return False
                values = (response.id, response.owner, response.previous, response.status)
                connection.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (*values, self._clock(), size, response.body),
                )
                connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
                self._size += size
                self._make_room(connection)
        except sqlite3.Error:
            self._size = size_before  # all of it was rolled back
            raise
        return True

    def _make_room(self, connection: sqlite3.Connection) -> None:
        self._forget(connection, "used < ?", self._clock() - self._ttl)
        while self._size > self._max_bytes:
            # The newest is not among them: its use is now, and it fits.
            (id,) = connection.execute(
                "SELECT id FROM responses ORDER BY used, rowid LIMIT 1"
            ).fetchone()
            self._forget(connection, "id = ?", id)

    def _forget(self, connection: sqlite3.Connection, which: str, value: object) -> int:
        """Delete responses; how many there were."""
        query = f"DELETE FROM responses WHERE {which} RETURNING size"
        sizes = connection.execute(query, (value,)).fetchall()
        self._size -= sum(size for (size,) in sizes)
        return len(sizes)

    def _get(self, id: str, owner: str) -> KeptResponse | None:
        row = (
            self._open()
            .execute(
                "SELECT previous, status, body FROM responses"
                " WHERE id = ? AND owner = ? AND used >= ?",
                (id, owner, self._clock() - self._ttl),
            )
            .fetchone()
        )
        if row is None:
            return None
        previous, status, body = row
        return KeptResponse(id, owner, status, body, previous)

    def _history(self, id: str, owner: str, max_bytes: int) -> tuple[str, list[Item]] | None:
        connection = self._open()
        chain: list[str] = []
        status = ""
        link: str | None = id
        while link is not None:
            found = self._get(link, owner)
            if found is None or len(chain) == _LONGEST_CHAIN:
                return None
            status = status or found.status
            chain.append(link)
            max_bytes -= self._num_item_bytes(link)
            if max_bytes < 0:
                raise TooMuchKeptError
            link = found.previous
        now = self._clock()
        with connection:
            connection.execute("BEGIN")
            uses = [(now, each) for each in chain]
            connection.executemany("UPDATE responses SET used = ? WHERE id = ?", uses)
        return status, [item for each in reversed(chain) for item in self._items(each)]

    def _items(self, id: str, condition: str = "") -> list[Item]:
        query = f"SELECT body FROM items WHERE response = ? {condition} ORDER BY place"
        return [msgspec.json.decode(body) for (body,) in self._open().execute(query, (id,))]

    def _num_item_bytes(self, id: str) -> int:
        query = "SELECT COALESCE(SUM(LENGTH(body)), 0) FROM items WHERE response = ?"
        (size,) = self._open().execute(query, (id,)).fetchone()
        return int(size)

    def _items_of(self, ids: Sequence[str], owner: str, max_bytes: int) -> list[Item | None]:
        connection, since = self._open(), self._clock() - self._ttl
        found: list[Item | None] = []
        for id in ids:
            row = connection.execute(
                "SELECT items.body FROM items JOIN responses ON responses.id = items.response"
                " WHERE items.id = ? AND owner = ? AND used >= ?"
                " ORDER BY items.rowid DESC LIMIT 1",
                (id, owner, since),
            ).fetchone()
            max_bytes -= 0 if row is None else len(row[0])
            if max_bytes < 0:
                raise TooMuchKeptError
            found.append(None if row is None else msgspec.json.decode(row[0]))
        return found

    def _delete(self, id: str, owner: str) -> bool:
        connection = self._open()
        if self._get(id, owner) is None:
            return False
        with connection:
            connection.execute("BEGIN")
            self._forget(connection, "id = ?", id)
        return True
