"""Images by URL, from where the operator allows it, and from nowhere else.

Whoever writes a URL chooses whom this process talks to, from inside its network. So a host must be
on the operator's list; its name is resolved once, every address must be a public one, and the
connection goes to the address that was checked. Every hop of a redirect is checked in the same way.
No proxy is asked. A file must lie below the operator's directory, links resolved.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import ipaddress
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import quote, unquote, urljoin

from tokenmill.errors import InvalidRequestError, shown
from tokenmill.features.multimodal.decoding import MAX_FILE_BYTES, check_file_size, refused

FETCH_SECONDS = 10.0
"""For all hops of one image, from the first connection on."""
MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16
_MAX_HEAD = 1024
"""Characters of a `data:` URL before its data."""
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NO_CASE = re.IGNORECASE | re.ASCII
"""Of ASCII: elsewhere are letters that count as small forms of the ones here."""
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", _NO_CASE)
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
"""Host and port; no name of a user, in which a host may hide."""
_UNSAFE = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")
_DATA_URL = re.compile(r"data:([^;,]*)((?:;[^;,]*)*),", _NO_CASE)
_FILE_URL = re.compile(r"file://(?:localhost)?(/.*)", _NO_CASE)
_IN_IPV6 = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""Networks whose last 32 bits are an IPv4 address that somebody translates to."""
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_INSIDE = tuple(map(ipaddress.IPv4Network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24")))
"""Networks that look public; providers of machines have services of their own there."""

Resolve = Callable[[str, int], list[str]]
Connect = Callable[[tuple[str, int], float], socket.socket]


@dataclass(frozen=True, slots=True)
class _Target:
    scheme: str
    host: str
    """In small letters, without a dot at the end; an IPv6 address without brackets."""
    port: int
    path: str


class Fetcher:
    """Reads what URLs of the operator's hosts name. Used by several threads at once."""

    def __init__(
        self,
        domains: tuple[str, ...],
        *,
        resolve: Resolve | None = None,
        connect: Connect = socket.create_connection,
        seconds: float = FETCH_SECONDS,
    ) -> None:
        """`domains` is `MultiModalConfig.domains`; `resolve` gives the addresses of a host, and
        `connect` a connection to one of them within some seconds.
        """
        self._domains = frozenset(domains)
        self._resolve = resolve or _addresses
        self._connect = connect
        self._seconds = seconds

    def fetch(self, url: str, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """What is at an http(s) URL.

        Raises `InvalidRequestError`, which tells nothing about hosts that are not public.
        """
        deadline: float | None = None
        for _ in range(MAX_REDIRECTS + 1):
            target = parse_url(url)
            self._check_allowed(target)
            addresses = self._checked_addresses(target)
            deadline = deadline or time.monotonic() + self._seconds
            try:
                found = self._get(target, addresses, deadline, max_bytes)
            except TimeoutError:
                raise refused(f"fetching it took longer than {self._seconds:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                why = type(error).__name__
                raise refused(f"it could not be fetched from {target.host} ({why})") from error
            if isinstance(found, bytes):
                return found
            url = _redirected(url, found)
        raise refused(f"the URL is redirected more than {MAX_REDIRECTS} times")

    def _check_allowed(self, target: _Target) -> None:
        if not self._domains:
            raise refused(
                "nothing is fetched here (allowed_media_domains); send the image itself as a"
                " data: URL"
            )
        suffix = f":{target.port}" if target.port != _DEFAULT_PORTS[target.scheme] else ""
        labels = target.host.split(".")
        parents = [".".join(labels[i:]) for i in range(1, len(labels))]
        names = ["*", target.host, *(f"*.{parent}" for parent in parents)]
        if not any(name + suffix in self._domains for name in names):
            raise refused(
                f"nothing is fetched from {shown(target.host + suffix)} (allowed_media_domains);"
                f" send the image itself as a data: URL"
            )

    def _checked_addresses(self, target: _Target) -> list[str]:
        try:
            addresses = self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses or not all(map(is_public, addresses)):
            raise refused(f"{shown(target.host)} is no host with a public address")
        return addresses

    def _get(
        self, target: _Target, addresses: list[str], deadline: float, max_bytes: int
    ) -> bytes | str:
        """The body, or the place where the server says that it is."""
        sock = self._connected(target, addresses, deadline)
        try:
            if target.scheme == "https":
                sock.settimeout(_left(deadline))
                context = ssl.create_default_context()
                sock = context.wrap_socket(sock, server_hostname=target.host)
            return _exchange(_TimedSocket(sock, deadline), target, max_bytes)
        finally:
            sock.close()

    def _connected(self, target: _Target, addresses: list[str], deadline: float) -> socket.socket:
        for i, address in enumerate(addresses):
            last = i == len(addresses) - 1
            try:
                seconds = _left(deadline) / (len(addresses) - i)
                return self._connect((address, target.port), seconds)
            except OSError:
                if last:
                    raise
        raise AssertionError("a host has at least one address")


def _exchange(sock: _TimedSocket, target: _Target, max_bytes: int) -> bytes | str:
    default = target.port == _DEFAULT_PORTS[target.scheme]
    host = f"[{target.host}]" if ":" in target.host else target.host
    connection = http.client.HTTPConnection(host, target.port)
    connection.sock = cast(socket.socket, sock)
    connection.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
    connection.putheader("Host", host if default else f"{host}:{target.port}")
    connection.putheader("User-Agent", "tokenmill")
    connection.putheader("Accept", "image/*")
    connection.putheader("Accept-Encoding", "identity")
    connection.putheader("Connection", "close")
    connection.endheaders()
    with connection.getresponse() as response:
        if response.status in _REDIRECTS and (location := response.getheader("Location")):
            return location
        if response.status != 200:
            raise refused(f"{target.host} answered with status {response.status}")
        if response.getheader("Content-Encoding", "identity") != "identity":
            raise refused(f"{target.host} sent it compressed, which was not asked for")
        if response.length is not None and response.length > max_bytes:
            raise _too_long(max_bytes)
        body = bytearray()  # pieces of a byte or two would take many times their size
        while piece := response.read1(_PIECE):
            body += piece
            if len(body) > max_bytes:
                raise _too_long(max_bytes)
        return bytes(body)


def parse_url(url: str) -> _Target:
    """An http(s) URL in its parts, if there is one way only to read it.

    Raises `InvalidRequestError`.
    """
    if len(url) > MAX_URL_CHARS:
        raise refused(f"the URL has {len(url)} characters; at most {MAX_URL_CHARS} are read")
    found = _URL.fullmatch(url)
    if found is None or _UNSAFE.search(url):
        raise refused(
            f"{shown(url)} is no URL of an image; it must begin with data:, http:// or https://,"
            f" and hold neither blanks nor backslashes"
        )
    authority = _AUTHORITY.fullmatch(found[2])
    if authority is None:
        raise refused(f"the URL has the host {shown(found[2])}; it must be a plain name or address")
    scheme, host = found[1].lower(), authority[1].lower().strip("[]").removesuffix(".")
    port = int(authority[2] or _DEFAULT_PORTS[scheme])
    if not host or not 0 < port < 1 << 16:
        raise refused(f"the URL has the host {shown(found[2])}; it must be a plain name or address")
    path = quote(found[3], safe="/?:@!$&'()*+,;=%-._~[]")
    return _Target(scheme, host, port, path if path.startswith("/") else f"/{path}")


def _redirected(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise refused("the URL is redirected to one that cannot be read") from None


def is_public(address: str) -> bool:
    """Whether an address is one of the internet, and nobody's inside: neither loopback, link-local,
    private, shared, multicast nor reserved, and not such a one in IPv6's clothes.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # with a zone, for example
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if inner is None and any(parsed in network for network in _IN_IPV6):
            inner = ipaddress.IPv4Address(int(parsed) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(str(inner))
        return parsed in _GLOBAL_IPV6 and parsed.is_global and parsed.teredo is None
    inside = parsed.is_multicast or any(parsed in network for network in _INSIDE)
    return parsed.is_global and not inside


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:` URL in base64. Raises `InvalidRequestError`."""
    check_file_size((len(url) - _MAX_HEAD) // 4 * 3)  # before memory is taken for it
    found = _DATA_URL.match(url[:_MAX_HEAD])
    kind = "" if found is None else found[1].strip().lower()
    if found is None or "base64" not in found[2].lower().split(";"):
        raise refused("the data: URL must read data:image/png;base64,...")
    if kind and not kind.startswith("image/") and kind != "application/octet-stream":
        raise refused(f"the data: URL has type {shown(kind)}; it must be one of image/...")
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(f"the data: URL is not valid base64 ({error})") from None


def read_local(url: str, root: str | None) -> bytes:
    """The file that a `file:` URL names, below the directory `root`.

    Raises `InvalidRequestError`, the same for files that are not there and those elsewhere.
    """
    if root is None:
        raise refused("no files are read here by URL (allowed_local_media_path)")
    found = _FILE_URL.fullmatch(url)
    if found is None:
        raise refused(f"{shown(url)} must be file:// and a whole path")
    denied = refused(f"{shown(url)} names no file that may be read (allowed_local_media_path)")
    try:
        path = os.path.realpath(unquote(found[1], errors="strict"), strict=True)
        inside = os.path.commonpath([root, path]) == root
    except (OSError, ValueError):
        raise denied from None
    if not inside:
        raise denied
    try:
        return read_file(path)
    except OSError:
        raise denied from None


def read_file(path: str | os.PathLike[str]) -> bytes:
    """A plain file, if it is not too large; nothing that blocks, such as a pipe.

    Raises `OSError`, and `InvalidRequestError` for what is too large.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no plain file")
        check_file_size(status.st_size)
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    check_file_size(len(data))
    return data


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _too_long(max_bytes: int) -> InvalidRequestError:
    return refused(f"the file has more than {max_bytes} bytes, which is all that is read here")


def _left(deadline: float) -> float:
    """Seconds until the deadline. Raises `TimeoutError` if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


class _TimedSocket:
    """A socket as `http.client` uses one, whose reads together end at a deadline: a server that
    sends a byte now and then holds a thread no longer than one that sends nothing.
    """

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_left(self._deadline))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_TimedReader(self._sock, self._deadline))

    def close(self) -> None:
        """Nothing: what is left of the answer is still to be read."""


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._sock.settimeout(_left(self._deadline))
        return self._sock.recv_into(buffer)
