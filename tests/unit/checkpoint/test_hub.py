"""Hub ids are fetched from a server on this machine that speaks as much of the hub as is asked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "c0ffee" + "0" * 34
FILES = {
    "config.json": b"{}",
    "model.safetensors": bytes(3_000_000),
    "pytorch_model.bin": b"pickled",
    "tokenizer.json": b"{}",
}


class Hub(BaseHTTPRequestHandler):
    """One model, `owner/name`, with `FILES`; `owner/gated` is gated."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        if path.startswith("/api/models/owner/name/revision/"):
            self.answer(json.dumps(self.info()).encode())
        elif path.startswith("/api/models/owner/name/tree/"):
            self.answer(json.dumps(self.tree()).encode())
        elif path.startswith("/api/models/owner/gated"):
            self.refuse(403, "GatedRepo")
        elif path.startswith("/owner/name/resolve/"):
            self.answer(FILES[path.split("/")[-1]])
        else:
            self.refuse(404, "RepoNotFound")

    def info(self):
        return {
            "id": "owner/name",
            "sha": COMMIT,
            "siblings": [{"rfilename": name} for name in FILES],
        }

    def tree(self):
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in FILES.items()
        ]

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@contextmanager
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def get(server, tmp_path, name, *flags):
    """`tokenmill models get`, in a process of its own: the library reads its variables once."""
    code = "from tokenmill.entrypoints.cli.main import main; main()"
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    return subprocess.run(
        [sys.executable, "-c", code, "models", "get", name, *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )


def test_what_a_model_needs_is_fetched_and_pickles_are_not(tmp_path):
    with hub() as server:
        done = get(server, tmp_path, "owner/name")
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "hub/models--owner--name/snapshots" / COMMIT
    assert done.stdout == f"{snapshot}\n"
    assert {path.name for path in snapshot.iterdir()} == FILES.keys() - {"pytorch_model.bin"}
    assert "download: 3.0 MB" in done.stderr
    assert not [path for path in server.asked if path.endswith(".bin")]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("owner/nothing", "Check the spelling"), ("owner/gated", "accept its terms")],
)
def test_what_the_hub_refuses_is_one_line_with_a_remedy(tmp_path, name, remedy):
    with hub() as server:
        done = get(server, tmp_path, name, "--quiet")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: The hub did not give '{name}'")
    assert remedy in done.stderr
    assert done.stderr.count("\n") == 1
