"""An HTTP server on this machine whose connections can be cut."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path, with ranges and an ETag."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.types: dict[str, str] = {}
        """Content types by path."""
        self.etags: dict[str, str] = {}
        self.cuts: list[int] = []
        """After how many bytes of a body the next connections are cut."""
        self.statuses: list[int] = []
        """What the next requests are answered instead."""
        self.knows_ranges = True
        self.asked: list[tuple[str, str | None]] = []
        """(path, Range) of each request with a body, in order."""
        self.sent = 0
        """Bytes of bodies."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:
        path, wanted = self.path, self.headers.get("Range")
        self.server.asked.append((path, wanted))
        if self.server.statuses:
            self._answer_empty(self.server.statuses.pop(0))
            return
        body = self.server.files.get(path)
        if body is None:
            self._answer_empty(404)
            return
        etag = self.server.etags.get(path)
        same = self.headers.get("If-Range") in (None, etag)
        begin = 0
        if wanted and self.server.knows_ranges and same:
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
            if begin >= len(body):
                self._answer_empty(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("Content-Type", self.server.types.get(path, "application/octet-stream"))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        part = body[begin:]
        if self.server.cuts:
            part = part[: self.server.cuts.pop(0)]
        self.server.sent += len(part)
        self.wfile.write(part)
        self.close_connection = True

    def _answer_empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def file_server() -> Iterator[FileServer]:
    server = FileServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
