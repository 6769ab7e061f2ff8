"""Our GGUF reader against the gguf library, and against files that lie."""

from __future__ import annotations

import random
import struct
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from helpers.gguf import assert_header_equals_library, tiny_llama, write_llama_gguf
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.checkpoint.gguf_reader import GGUFHeader, read_header
from tokenmill.checkpoint.gguf_types import SCALARS, TENSOR_TYPES
from tokenmill.errors import CheckpointError

U8, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 5, 6, 7, 8, 9, 10
LONG = 1 << 60


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(
    name: str = "t",
    dims: tuple[int, ...] = (32, 2),
    kind: int = 0,
    offset: int = 0,
    num_dims: int | None = None,
) -> bytes:
    packed = struct.pack(f"<I{len(dims)}Q", len(dims) if num_dims is None else num_dims, *dims)
    return text(name) + packed + struct.pack("<IQ", kind, offset)


def file_of(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    data_bytes: int = 256,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; the defaults are one sound key and one sound tensor."""
    keys = [key("general.name", STRING, text("sound"))] if keys is None else keys
    tensors = [tensor()] if tensors is None else tensors
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    padding = -len(header) % alignment
    return header + bytes(padding + data_bytes)


def read(content: bytes) -> GGUFHeader:
    return read_header(Path("some.gguf"), content)


def test_types_equal_those_of_the_library():
    assert {
        type_id: (entry.name, entry.block_size, entry.block_bytes)
        for type_id, entry in TENSOR_TYPES.items()
    } == {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    sizes = {
        kind: np.dtype(dtype).itemsize for kind, dtype in gguf.GGUFReader.gguf_scalar_to_np.items()
    }
    assert {kind: layout.size for kind, layout in SCALARS.items()} == sizes


@pytest.mark.parametrize("tensor_type", ["F32", "BF16", "Q4_1", "Q8_0"])
def test_header_equals_the_librarys(tmp_path, tensor_type):
    path = write_llama_gguf(tmp_path / "tiny.gguf", tiny_llama(), tensor_type)
    assert_header_equals_library(path)


def test_every_value_type_and_an_alignment(tmp_path):
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60_000)
    writer.add_int16("i16", -30_000)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "Größe 你好")
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("bools", [True, False])
    writer.add_array("texts", ["", "a", "🎉"])
    writer.add_tensor("one", np.ones((3, 5), np.float32))
    writer.add_tensor("two", np.ones(7, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_header_equals_library(path)


def test_a_sound_file_of_version_2_is_read():
    header = read(file_of(version=2))
    assert header.metadata == {"general.name": "sound"}
    assert header.tensors["t"].shape == (2, 32)
    assert header.tensors["t"].num_bytes == 256


def test_bytes_that_are_not_utf8_become_replacement_characters():
    items = text(b"a\xff") + text(b"\xc3\xa9")
    header = read(file_of([key("tokens", ARRAY, array(STRING, 2, items))]))
    assert header.metadata["tokens"] == ["a\ufffd", "é"]


LIES = {
    "magic": (file_of(magic=b"GGML"), ["magic", "GGML"]),
    "empty": (b"", ["magic"]),
    "version": (file_of(version=1), ["version is 1", "2 and 3"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(256), ["version", "big-endian"]),
    "kv_count": (file_of(num_keys=LONG), ["kv_count", str(LONG), "room for"]),
    "kv_count, one too many": (file_of(num_keys=2, tensors=[], num_tensors=1), ["key 1"]),
    "tensor_count": (file_of(num_tensors=LONG), ["tensor_count", str(LONG), "room for"]),
    "key length": (file_of([text("k", LONG) + bytes(8)]), ["length of key 0", str(LONG)]),
    "key too long": (file_of([key("k" * 2000, U8, b"1")]), ["length of key 0", "2000", "1024"]),
    "key empty": (file_of([key("", U8, b"1")]), ["key 0", "empty"]),
    "key not utf-8": (file_of([text(b"\xff") + bytes(8)]), ["key 0", "UTF-8"]),
    "key twice": (file_of([key("k", U8, b"1")] * 2), ["key 'k'", "duplicate"]),
    "value type": (file_of([key("k", 99, b"1")]), ["key 'k': type", "99"]),
    "string length": (file_of([key("k", STRING, text("v", LONG))]), ["key 'k'", str(LONG)]),
    "array type": (file_of([key("k", ARRAY, array(77, 1, b"1"))]), ["'k': element type", "77"]),
    "array nested": (
        file_of([key("k", ARRAY, array(ARRAY, 1, array(U8, 1, b"1")))]),
        ["'k': element type", "nested"],
    ),
    "array length": (
        file_of([key("k", ARRAY, array(I32, LONG, b""))]),
        ["'k': array length", str(LONG), "room for"],
    ),
    "array of strings, length": (
        file_of([key("k", ARRAY, array(STRING, LONG, b""))]),
        ["'k': array length", str(LONG), "room for"],
    ),
    "array of strings, string": (
        file_of([key("k", ARRAY, array(STRING, 2, text("a") + text("b", LONG)))]),
        ["'k': length of string 1", str(LONG)],
    ),
    "array above the limit": (
        file_of([key("k", ARRAY, array(U8, 1 << 23, bytes(1 << 23)))]),
        ["'k': array length", str(1 << 23), str(1 << 22)],
    ),
    "tensor name length": (
        file_of(tensors=[text("t", LONG) + bytes(64)]),
        ["length of name of tensor 0", str(LONG)],
    ),
    "tensor name not utf-8": (file_of(tensors=[text(b"\xff") + bytes(64)]), ["tensor 0", "UTF-8"]),
    "tensor twice": (
        file_of(tensors=[tensor(), tensor(offset=256)], data_bytes=512),
        ["tensor 't'", "duplicate"],
    ),
    "n_dims": (file_of(tensors=[tensor(num_dims=5)]), ["tensor 't': n_dims", "5", "4"]),
    "n_dims 0": (file_of(tensors=[tensor(dims=())]), ["tensor 't': n_dims", "0"]),
    "dimension 0": (file_of(tensors=[tensor(dims=(32, 0))]), ["tensor 't': dimension 1", "0"]),
    "dimensions overflow": (
        file_of(tensors=[tensor(dims=(1 << 32, 1 << 32, 1 << 32, 4))]),
        ["tensor 't'", "file ends at"],
    ),
    "dimension off a block": (
        file_of(tensors=[tensor(dims=(33, 2), kind=8)]),
        ["tensor 't': dimension 0", "33", "Q8_0", "32"],
    ),
    "tensor type": (file_of(tensors=[tensor(kind=4)]), ["tensor 't': type", "4"]),
    "offset unaligned": (file_of(tensors=[tensor(offset=8)]), ["'t': offset", "8", "32"]),
    "offset beyond": (file_of(tensors=[tensor(offset=1 << 63)]), ["'t'", str(1 << 63)]),
    "tensors overlap": (
        file_of(tensors=[tensor("a"), tensor("b", offset=128)], data_bytes=512),
        ["tensor 'b': offset", "tensor 'a'"],
    ),
    "alignment 0": (
        file_of([key("general.alignment", U32, struct.pack("<I", 0))]),
        ["general.alignment", "is 0"],
    ),
    "alignment 48": (
        file_of([key("general.alignment", U32, struct.pack("<I", 48))]),
        ["general.alignment", "48", "power of two"],
    ),
    "alignment huge": (
        file_of([key("general.alignment", U32, struct.pack("<I", 1 << 31))]),
        ["general.alignment", str(1 << 31)],
    ),
    "alignment a string": (
        file_of([key("general.alignment", STRING, text("32"))]),
        ["general.alignment", "'32'"],
    ),
    "data cut": (file_of(data_bytes=255), ["tensor 't'", "incomplete"]),
}


@pytest.mark.parametrize("name", LIES)
def test_b106_a_lie_is_refused_by_the_name_of_its_field(name):
    content, words = LIES[name]
    with pytest.raises(CheckpointError) as caught:
        read(content)
    for word in ["some.gguf", *words]:
        assert word in str(caught.value)


def test_b106_a_file_cut_anywhere_is_refused(tmp_path):
    content = write_llama_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0").read_bytes()
    end = max(t.offset + t.num_bytes for t in read(content).tensors.values())
    cuts = random.Random(1).sample(range(end), 200)
    for cut in cuts:
        with pytest.raises(CheckpointError):
            read(content[:cut])


def mutations(content: bytes, header_bytes: int, count: int) -> Iterator[bytes]:
    """Copies of `content` with one to three places of the header overwritten."""
    rng = random.Random(7)
    hard = [b"\xff" * 8, bytes(8), b"\xff" * 4, bytes(4), struct.pack("<Q", 1 << 40), b"\t\0\0\0"]
    for _ in range(count):
        copy = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(header_bytes)
            patch = rng.choice([*hard, bytes([rng.randrange(256)]), rng.randbytes(8)])
            copy[place : place + len(patch)] = patch
        yield bytes(copy[: rng.randrange(header_bytes)] if rng.random() < 0.1 else copy)


def test_b106_a_thousand_mutated_files(tmp_path):
    path = write_llama_gguf(tmp_path / "tiny.gguf", tiny_llama(num_hidden_layers=1), "Q4_0")
    content = path.read_bytes()
    header_bytes = min(t.offset for t in read(content).tensors.values())
    messages: list[str] = []
    slowest = 0.0
    tracemalloc.start()
    for mutated in mutations(content, header_bytes, 1000):
        path.write_bytes(mutated)
        start = time.thread_time()
        try:
            checkpoint = GGUFCheckpoint.open(path)
            for name, shape in checkpoint.tensor_shapes.items():
                assert checkpoint.read(name).shape == shape
        except CheckpointError as error:
            messages.append(str(error))
        slowest = max(slowest, time.thread_time() - start)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 100 < len(messages) < 1000
    assert all(str(path) in message for message in messages)
    assert slowest < 1.0
    assert peak < 20 << 20
