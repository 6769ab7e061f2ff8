"""Where the user's package index keeps a wheel, so that its download can be resumed.

pip cannot go on with a wheel that an earlier process has begun. So the index that pip is set up for
is asked for the wheel's address and digest, as pip asks it (PEP 503 and 691). What pip alone can
do, it is left: settings beyond an index's address, an index that does not answer.
"""

from __future__ import annotations

import ast
import html.parser
import json
import logging
import re
import subprocess
import sys
import urllib.error
import urllib.parse
from http.client import HTTPException

from tokenmill.checkpoint.aliases import Piece
from tokenmill.checkpoint.resumable import RemoteFile, open_url

logger = logging.getLogger(__name__)

DEFAULT_INDEX = "https://pypi.org/simple"
_LEFT_TO_PIP = {"find-links", "no-index", "cert", "client-cert", "proxy", "trusted-host"}
"""Settings that say how or where to get packages otherwise."""
_SECTIONS = ("global", "download", ":env:")
"""Of pip's configuration, the later ones first in rank."""
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_MAX_PAGE_BYTES = 64 << 20


def find_wheels(pieces: tuple[Piece, ...]) -> list[RemoteFile] | None:
    """The wheel of each piece's package; None where this is left to pip."""
    indexes = _indexes()
    if indexes is None:
        return None
    found = [_find(piece, indexes) for piece in pieces]
    known = [wheel for wheel in found if wheel is not None]
    return known if len(known) == len(found) else None


def _indexes() -> list[str] | None:
    """Addresses of the indexes that pip would ask; None if more than that is set."""
    command = [sys.executable, "-P", "-m", "pip", "config", "list", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if listed.returncode != 0:
        return None
    settings: dict[str, str] = {}
    lines = [re.fullmatch(r"(.+?)\.([a-z-]+)='?(.*)", line) for line in listed.stdout.splitlines()]
    for section in _SECTIONS:
        for match in lines:
            if match is not None and match[1] == section:
                settings[match[2]] = str(ast.literal_eval(match[0].partition("=")[2]))
    if _LEFT_TO_PIP & settings.keys():
        return None
    extra = settings.get("extra-index-url", "").split()
    return [settings.get("index-url", DEFAULT_INDEX), *extra]


def _find(piece: Piece, indexes: list[str]) -> RemoteFile | None:
    name = re.sub(r"[-_.]+", "-", piece.package).lower()
    for index in indexes:
        page = f"{index.rstrip('/')}/{name}/"
        try:
            with open_url(RemoteFile(page, {"Accept": _ACCEPT}), {}) as response:
                content = response.read(_MAX_PAGE_BYTES)
                is_json = "json" in response.headers.get("Content-Type", "")
                address = response.geturl()
            files = _of_json(content) if is_json else _of_html(content)
        except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
            logger.info("%s: %s; left to pip", page, error)
            continue
        for file_name, url, sha256 in files:
            if sha256 and _is_wheel_of(piece, file_name):
                wheel = urllib.parse.urljoin(_with_user(address, page), url)
                return RemoteFile(wheel, sha256=sha256)
    return None


def _is_wheel_of(piece: Piece, file_name: str) -> bool:
    distribution, _, rest = file_name.partition("-")
    same = (
        re.sub(r"[-_.]+", "-", distribution).lower()
        == re.sub(r"[-_.]+", "-", piece.package).lower()
    )
    return same and rest == f"{piece.version}-py3-none-any.whl"


def _with_user(address: str, page: str) -> str:
    """`address`, to which `page` led, with the user of `page` if it is at the same host."""
    here, there = urllib.parse.urlsplit(page), urllib.parse.urlsplit(address)
    if here.netloc.rpartition("@")[2] != there.netloc:
        return address
    return urllib.parse.urlunsplit(there._replace(netloc=here.netloc))


def _of_json(content: bytes) -> list[tuple[str, str, str]]:
    """(file name, address, SHA-256 or nothing) of a page's files."""
    files = json.loads(content).get("files", [])
    return [(each["filename"], each["url"], each["hashes"].get("sha256", "")) for each in files]


def _of_html(content: bytes) -> list[tuple[str, str, str]]:
    links = _Links()
    links.feed(content.decode("utf-8", "replace"))
    return links.files


class _Links(html.parser.HTMLParser):
    """Every link of a page, with the digest behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get("href") if tag == "a" else None
        if address:
            url, _, fragment = address.partition("#")
            name = urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])
            self.files.append((name, url, fragment.removeprefix("sha256=")))
