"""Servers that files of HTTP tests share; a file that needs others has its own of these names."""

from __future__ import annotations

import pytest

from helpers.live_server import LiveServer
from helpers.tool_chats import serving


@pytest.fixture(scope="module")
def server():
    """A scripted model with tools and reasoning."""
    with serving(engine={"reasoning_parser": "qwen3"}) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    """A model without tools and reasoning."""
    with LiveServer() as server:
        yield server
