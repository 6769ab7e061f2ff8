"""Hub ids are fetched from a server on this machine that speaks as much of the hub as is asked."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
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


PARTS = {f"q4/tiny-0000{number}-of-00002.gguf": bytes(number) for number in (1, 2)}
"""Of `owner/parts`, beside a file that nobody asks for."""
LARGE = random.Random(1).randbytes(12 << 20)
"""A file that later processes go on with."""
STALL_AFTER = 5 << 20


class Hub(BaseHTTPRequestHandler):
    """One model, `owner/name`, with `FILES`; `owner/gated` is gated. The weights of `owner/large`
    stop in the middle, once, without an end of the connection.
    """

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
        elif path.startswith("/api/models/owner/large"):
            is_tree = "/tree/" in path
            self.answer(json.dumps(self.large_tree() if is_tree else self.large_info()).encode())
        elif path.startswith("/api/models/owner/parts"):
            files = {**PARTS, "q8/tiny.gguf": b"other"}
            self.answer(json.dumps(tree(files) if "/tree/" in path else info(files)).encode())
        elif path.startswith("/owner/parts/resolve/"):
            self.answer(PARTS["/".join(path.split("/")[-2:])])
        elif path.endswith("/config.json"):
            self.answer(b"{}")
        elif path.startswith("/owner/large/resolve/"):
            self.answer_large()
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

    def large_info(self):
        names = ["config.json", "model.safetensors"]
        return {"id": "owner/large", "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]}

    def large_tree(self):
        files = {"config.json": b"{}", "model.safetensors": LARGE}
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]

    def answer_large(self):
        wanted = self.headers.get("Range")
        begin = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(len(LARGE) - begin))
        if wanted:
            self.send_header("Content-Range", f"bytes {begin}-{len(LARGE) - 1}/{len(LARGE)}")
        self.send_header("ETag", f'"{hashlib.sha256(LARGE).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "GET":
            return
        self.server.ranges.append(wanted)
        if self.server.stalls:
            self.server.stalls = False
            self.wfile.write(LARGE[begin:STALL_AFTER])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.may_end.wait(60)
        else:
            self.wfile.write(LARGE[begin:])
        self.close_connection = True

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


def info(files):
    return {"id": "owner/parts", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}


def tree(files):
    return [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in files.items()
    ]


@contextmanager
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    server.ranges = []
    server.stalls = True
    server.stalled, server.may_end = threading.Event(), threading.Event()
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
    process = start(server, tmp_path, name, *flags)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def start(server, tmp_path, name, *flags):
    code = "from tokenmill.entrypoints.cli.main import main; main()"
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
    return subprocess.Popen(
        [sys.executable, "-c", code, "models", "get", name, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
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


def test_all_parts_of_a_split_file_are_fetched(tmp_path):
    with hub() as server:
        done = get(server, tmp_path, "owner/parts:q4/tiny-00002-of-00002.gguf")
    assert done.returncode == 0, done.stderr
    snapshot = tmp_path / "hub/models--owner--parts/snapshots" / COMMIT
    assert done.stdout == f"{snapshot}/q4/tiny-00002-of-00002.gguf\n"
    found = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*.gguf")}
    assert found == PARTS.keys()


def test_weights_go_on_where_a_killed_process_stopped(tmp_path):
    blobs = tmp_path / "hub/models--owner--large/blobs"
    digest = hashlib.sha256(LARGE).hexdigest()
    with hub() as server:
        process = start(server, tmp_path, "owner/large")
        assert server.stalled.wait(60)
        wait_for_bytes(blobs / f"{digest}.partial", STALL_AFTER - (1 << 20))
        process.kill()
        process.communicate()
        server.may_end.set()
        kept = (blobs / f"{digest}.partial").stat().st_size
        assert not (blobs / digest).exists()
        done = get(server, tmp_path, "owner/large")
    assert done.returncode == 0, done.stderr
    assert server.ranges == [None, f"bytes={kept}-"]
    assert done.stdout == f"{tmp_path}/hub/models--owner--large/snapshots/{COMMIT}\n"
    snapshot = tmp_path / "hub/models--owner--large/snapshots" / COMMIT
    assert (snapshot / "model.safetensors").read_bytes() == LARGE
    assert (snapshot / "config.json").read_bytes() == b"{}"
    assert not list(blobs.glob("*.partial*"))
    assert "download: 12.6 MB" in done.stderr


def wait_for_bytes(path, num_bytes):
    deadline = time.monotonic() + 60
    while not path.is_file() or path.stat().st_size < num_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
