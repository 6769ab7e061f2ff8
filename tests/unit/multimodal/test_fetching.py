"""Images by URL: from hosts and directories that are allowed, at public addresses."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.certificate import CERTIFICATE
from tokenmill.errors import InvalidRequestError
from tokenmill.features.multimodal.decoding import MAX_FILE_BYTES
from tokenmill.features.multimodal.fetching import (
    Fetcher,
    decode_data_url,
    is_public,
    parse_url,
    read_local,
)

PUBLIC = "93.184.215.14"
"""What the tests' hosts resolve to; connections to it end at a server of this process."""
BODY = b"an image"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.hits.append((self.headers["host"], self.path, dict(self.headers)))
        getattr(self, self.path.split("/")[1].split("?")[0], self.plain)()

    def send(self, status=200, body=BODY, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers and "Transfer_Encoding" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def plain(self):
        self.send()

    def to(self):
        self.send(302, b"", Location=self.path.split("?", 1)[1])

    def loop(self):
        self.send(307, b"", Location="/loop")

    def slow(self):
        time.sleep(0.1)
        self.send(302, b"", Location="/slow")

    def missing(self):
        self.send(404)

    def packed(self):
        self.send(Content_Encoding="gzip")

    def claims(self):
        self.send(Content_Length=str(MAX_FILE_BYTES + 1), body=b"")

    def chunked(self):
        self.send(Transfer_Encoding="chunked", body=b"8\r\nan image\r\n0\r\n\r\n")

    def closes(self):
        self.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n" + BODY)
        self.close_connection = True

    def endless(self):
        self.send(Transfer_Encoding="chunked", body=b"")
        while True:
            self.wfile.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")

    def drips(self):
        self.send(Content_Length="1000", body=b"")
        self.drip()

    def heads(self):
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        self.drip()

    def drip(self):
        for _ in range(600):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.02)

    def log_message(self, *_):
        pass

    def handle(self):
        with suppress(OSError):
            super().handle()


class Internet:
    """A server, a resolver and a dialer: the only host is `server`, whatever its names are."""

    def __init__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.hits = self.hits = []
        self.names = {}
        self.resolved = []
        self.dialed = []
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def resolve(self, host, port):
        self.resolved.append(host)
        addresses = self.names.get(host, [PUBLIC])
        return addresses.pop(0) if addresses and isinstance(addresses[0], list) else addresses

    def connect(self, address, timeout):
        self.dialed.append(address)
        return socket.create_connection(self.server.server_address, timeout)

    def fetcher(self, *domains, **more):
        return Fetcher(domains or ("*",), resolve=self.resolve, connect=self.connect, **more)


@pytest.fixture
def internet():
    internet = Internet()
    yield internet
    internet.server.shutdown()
    internet.server.server_close()


def test_what_is_there_is_fetched(internet):
    fetcher = internet.fetcher("images.example")
    assert fetcher.fetch("http://images.example/a%20b.png?x=1&y=ü#part") == BODY
    host, path, headers = internet.hits[0]
    assert (host, path) == ("images.example", "/a%20b.png?x=1&y=%C3%BC")
    assert internet.dialed == [(PUBLIC, 80)]
    assert headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in headers
    assert fetcher.fetch("HTTP://Images.Example./chunked") == BODY
    assert fetcher.fetch("http://images.example/closes") == BODY
    assert fetcher.fetch("http://images.example/plain", len(BODY)) == BODY
    assert fetcher.fetch("http://images.example") == BODY
    assert internet.hits[-1][1] == "/"


def test_b118_nothing_is_fetched_unless_it_is_allowed(internet):
    nothing = Fetcher((), resolve=internet.resolve, connect=internet.connect)
    with pytest.raises(InvalidRequestError, match="allowed_media_domains"):
        nothing.fetch("http://images.example/")
    fetcher = internet.fetcher("images.example", "*.cdn.example", "ports.example:8080")
    for allowed in (
        "http://images.example/",
        "http://a.b.cdn.example/",
        "http://ports.example:8080/",
    ):
        assert fetcher.fetch(allowed) == BODY
    assert internet.dialed[-1] == (PUBLIC, 8080)
    for other in (
        "http://example/",
        "http://xn.images.example/",
        "http://images.example.evil/",
        "http://evilimages.example/",
        "http://cdn.example/",
        "http://images.example:8080/",
        "http://images.example:443/",
        "http://ports.example/",
    ):
        with pytest.raises(InvalidRequestError, match="nothing is fetched from"):
            fetcher.fetch(other)
    assert len(internet.hits) == 3


INSIDE = [
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "198.18.0.1", "203.0.113.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1",
    "fd00:ec2::254", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::808:808", "2002:7f00:1::",
    "2001:0:808:808::1", "localhost", "",
]  # fmt: skip


@pytest.mark.parametrize("address", INSIDE)
def test_b118_addresses_that_are_not_public(internet, address):
    assert not is_public(address)
    for addresses in ([address], [PUBLIC, address], [address, PUBLIC]):
        internet.names["inside.example"] = addresses
        with pytest.raises(InvalidRequestError, match="no host with a public address") as caught:
            internet.fetcher().fetch("http://inside.example/")
        if address:
            assert f"{address} " not in str(caught.value)  # says nothing about the inside
    assert not internet.dialed


@pytest.mark.parametrize(
    "address", [PUBLIC, "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address):
    assert is_public(address)


def test_b118_a_name_is_resolved_once_and_the_checked_address_is_dialed(internet):
    internet.names["two-faced.example"] = [[PUBLIC], ["127.0.0.1"]]
    assert internet.fetcher().fetch("http://two-faced.example/") == BODY
    assert internet.resolved == ["two-faced.example"]
    assert internet.dialed == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://[::ffff:127.0.0.1]/",
        "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://127.1/",
        "http://0/", "http://localhost./",
    ],
)  # fmt: skip
def test_b118_the_system_s_own_resolver_knows_addresses_in_disguise(internet, url):
    fetcher = Fetcher(("*",), connect=internet.connect)
    with pytest.raises(InvalidRequestError, match="no host with a public address"):
        fetcher.fetch(url)
    assert not internet.dialed


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example@127.0.0.1/",
        "http://images.example:80@127.0.0.1/",
        "http://127.0.0.1\\@images.example/",
        "http://images.example\\.evil/",
        "http:\\\\images.example/",
        "http:/images.example/",
        "http:images.example/",
        "//images.example/",
        "http:///images.example/",
        "http://images.example:/",
        "http://images.example:0/",
        "http://images.example:65536/",
        "http://images.example:99999999999/",
        "http://images。example/",
        "http://ⓘmages.example/",
        "http\u017f://images.example/",
        "http://images.example:\uff18\uff10/",
        "http://images%2eexample/",
        "http://images.example%00.evil/",
        "http://[::1%25eth0]/",
        "http://images.example/a b",
        "http://images.example/\r\nHost: evil",
        " http://images.example/",
        "http://images.example/\ud800",
        "http://./",
        "ftp://images.example/",
        "gopher://images.example/",
        "jar:http://images.example!/",
        "javascript:alert(1)",
        "/etc/passwd",
        "images.example/a.png",
        "",
        "http://images.example/" + "a" * 5000,
    ],
)  # fmt: skip
def test_b118_urls_that_may_be_read_in_two_ways(internet, url):
    with pytest.raises(InvalidRequestError):
        internet.fetcher("*", "images.example").fetch(url)
    assert not internet.resolved
    assert not internet.dialed


def test_b118_every_hop_is_checked(internet):
    fetcher = internet.fetcher("images.example", "other.example")
    go = "http://images.example/to?"
    assert fetcher.fetch(go + "/plain") == BODY
    assert fetcher.fetch(go + "http://other.example/plain") == BODY
    assert [host for host, *_ in internet.hits] == ["images.example"] * 3 + ["other.example"]
    internet.hits.clear()
    internet.names["inside.example"] = ["10.0.0.1"]
    for target in (
        "http://evil.example/",
        "http://127.0.0.1/",
        "//evil.example/",
        "file:///etc/passwd",
        "ftp://images.example/",
        "http://images.example@evil.example/",
        "http://[broken/",
    ):
        with pytest.raises(InvalidRequestError):
            fetcher.fetch(go + target)
    with pytest.raises(InvalidRequestError, match="public"):
        internet.fetcher().fetch(go + "http://inside.example/")
    assert {host for host, *_ in internet.hits} == {"images.example"}
    with pytest.raises(InvalidRequestError, match="redirected more than 3 times"):
        fetcher.fetch("http://images.example/loop")
    assert [path for _, path, _ in internet.hits].count("/loop") == 4


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing", "status 404"),
        ("packed", "compressed"),
        ("claims", "bytes"),
        ("endless", "more than 1000000 bytes"),
        ("drips", "longer than 0.3 s"),
        ("heads", "longer than 0.3 s"),
        ("slow", "longer than 0.3 s"),
    ],
)
def test_b118_size_and_time_are_limited(internet, path, message):
    limit = MAX_FILE_BYTES if path == "claims" else 1_000_000
    fetcher = internet.fetcher(seconds=0.3 if path in ("drips", "heads", "slow") else 10)
    with pytest.raises(InvalidRequestError, match=message):
        fetcher.fetch(f"http://images.example/{path}", limit)


def test_a_host_that_does_not_answer(internet):
    def refuse(address, timeout):
        internet.dialed.append(address)
        raise ConnectionRefusedError

    internet.names["down.example"] = [PUBLIC, "8.8.8.8"]
    fetcher = Fetcher(("*",), resolve=internet.resolve, connect=refuse)
    with pytest.raises(InvalidRequestError, match=r"could not be fetched from down\.example"):
        fetcher.fetch("http://down.example/")
    assert [host for host, _ in internet.dialed] == [PUBLIC, "8.8.8.8"]


def test_https(internet, tmp_path, monkeypatch):
    pem = tmp_path / "server.pem"
    pem.write_text(CERTIFICATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    server = internet.server
    server.socket = context.wrap_socket(server.socket, server_side=True)
    fetcher = internet.fetcher()
    with pytest.raises(InvalidRequestError, match="could not be fetched"):
        fetcher.fetch("https://localhost/")  # nobody vouches for the certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    assert fetcher.fetch("https://localhost/") == BODY
    assert internet.hits[-1][0] == "localhost"
    with pytest.raises(InvalidRequestError, match="could not be fetched"):
        fetcher.fetch("https://images.example/")  # the certificate is for another host
    assert len(internet.hits) == 1


def test_https_to_a_server_of_plain_text(internet):
    with pytest.raises(InvalidRequestError, match=r"could not be fetched .*SSL"):
        internet.fetcher().fetch("https://images.example/")
    assert internet.dialed == [(PUBLIC, 443)]
    assert not internet.hits


def test_urls_in_their_parts():
    target = parse_url("https://[2606:4700::1111]:8443/a?b#c")
    assert (target.host, target.port, target.path) == ("2606:4700::1111", 8443, "/a?b")
    assert parse_url("http://a.example?b").path == "/?b"


def test_data_urls():
    assert decode_data_url("data:image/png;base64,YWJj") == b"abc"
    assert decode_data_url("DATA:image/PNG;name=a.png;BASE64,YWJj") == b"abc"
    assert decode_data_url("data:;base64,YWJj") == b"abc"


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png,abc",
        "data:text/html;base64,YWJj",
        "data:image/png;base64,YWJ",
        "data:image/png;base64,YW*j",
        "data:image/png;base64,YWJjü",
        "data:" + ";" * 2000 + "base64,YWJj",
    ],
    ids=lambda url: url[:40],
)
def test_broken_data_urls_are_refused(url):
    with pytest.raises(InvalidRequestError, match="data: URL"):
        decode_data_url(url)


def test_b116_a_large_data_url_is_not_decoded():
    with pytest.raises(InvalidRequestError, match="bytes"):
        decode_data_url("data:image/png;base64," + "A" * (MAX_FILE_BYTES // 3 * 4 + 4096))


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "media"
    (root / "deep").mkdir(parents=True)
    (root / "a b.png").write_bytes(BODY)
    (root / "deep" / "c.png").write_bytes(BODY)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "media2").mkdir()
    (tmp_path / "media2" / "near.png").write_bytes(b"secret")
    (root / "link.png").symlink_to(tmp_path / "secret.png")
    (root / "up").symlink_to(tmp_path)
    (root / "good.png").symlink_to(root / "deep" / "c.png")
    os.mkfifo(root / "pipe")
    return root


@pytest.mark.parametrize("name", ["a%20b.png", "deep/c.png", "deep/../a%20b.png", "good.png"])
def test_files_below_the_root(root, name):
    assert read_local(f"file://{root}/{name}", str(root)) == BODY
    assert read_local(f"FILE://localhost{root}/{name}", str(root)) == BODY


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "%2e%2e/secret.png",
        "deep/%2e%2e/../%2e./secret.png",
        "link.png",
        "up/secret.png",
        "../media2/near.png",
        "none.png",
        "pipe",
        "deep",
        "a%00b.png",
        "%ff.png",
        "",
    ],
)
def test_b118_files_elsewhere_are_as_good_as_not_there(root, name):
    url = f"file://{root}/{name}"
    with pytest.raises(InvalidRequestError, match="names no file that may be read") as caught:
        read_local(url, str(root))
    assert "secret" not in str(caught.value).replace(repr(url)[:80], "")


def test_b118_no_file_without_a_root(root):
    with pytest.raises(InvalidRequestError, match="allowed_local_media_path"):
        read_local(f"file://{root}/deep/c.png", None)
    for url in ("file:etc/passwd", "file://host/etc/passwd", "file:///etc/passwd"):
        with pytest.raises(InvalidRequestError):
            read_local(url, str(root))


def test_b116_a_large_file_is_not_read(root):
    with open(root / "large.png", "wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidRequestError, match="bytes"):
        read_local(f"file://{root}/large.png", str(root))


def test_a_reader_does_not_leave_descriptors(root):
    before = len(os.listdir("/proc/self/fd"))
    for name in ("deep", "pipe", "deep/c.png"):
        try:
            read_local(f"file://{root}/{name}", str(root))
        except InvalidRequestError:
            continue
    assert len(os.listdir("/proc/self/fd")) == before
    with closing(socket.socket()):
        assert len(os.listdir("/proc/self/fd")) == before + 1  # they are counted
