"""Models that were cut into several GGUF files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import gguf
import pytest
import torch

from helpers.gguf import tiny_llama, write_llama_gguf
from tokenmill.checkpoint.gguf_checkpoint import GGUFCheckpoint
from tokenmill.checkpoint.gguf_parts import first_parts, part_names
from tokenmill.checkpoint.names import resolve_model
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import CheckpointError

COUNT = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return write_llama_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", tiny_llama())


def name_of(part: int, count: int = COUNT) -> str:
    return f"tiny-{part + 1:05}-of-{count:05}.gguf"


def cut(whole: Path, directory: Path, **changes: int) -> list[Path]:
    """The model in three files as llama.cpp's tool cuts it: the first has no tensors.

    `changes` are other values of the first file's keys, such as split_count.
    """
    reader = gguf.GGUFReader(whole)
    shares = [[], reader.tensors[:7], reader.tensors[7:]]
    paths = []
    for part, tensors in enumerate(shares):
        path = directory / name_of(part)
        writer = gguf.GGUFWriter(path, "llama")
        keys = {"split.no": part, "split.count": COUNT, "split.tensors.count": len(reader.tensors)}
        if part == 0:
            _copy_metadata(reader, writer)
            keys |= {key.replace("_", "."): value for key, value in changes.items()}
        for key, value in keys.items():
            (writer.add_int32 if key == "split.tensors.count" else writer.add_uint16)(key, value)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=sub_type)


@pytest.mark.parametrize("part", range(COUNT))
def test_any_part_stands_for_the_model(whole, tmp_path, part):
    paths = cut(whole, tmp_path)
    expected, found = GGUFCheckpoint.open(whole), GGUFCheckpoint.open(paths[part])
    assert found.path == paths[0]
    assert found.config == expected.config
    assert found.tokenizer_data == expected.tokenizer_data
    assert found.tensor_shapes == expected.tensor_shapes
    assert found.num_bytes == expected.num_bytes
    for name in expected.tensor_shapes:
        assert torch.equal(found.read(name).data, expected.read(name).data), name


def test_a_directory_of_parts_is_one_model(whole, tmp_path):
    paths = cut(whole, tmp_path)
    assert resolve_model(str(tmp_path)) == paths[0]
    assert open_checkpoint(tmp_path).path == paths[0]
    shutil.copy(whole, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"2 GGUF files.*other\.gguf"):
        resolve_model(str(tmp_path))


def test_names_of_parts():
    assert part_names("a.gguf") == ["a.gguf"]
    assert part_names("q4/a-00002-of-00003.gguf") == [
        f"q4/a-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]
    assert part_names("a-00004-of-00003.gguf") == ["a-00004-of-00003.gguf"]
    names = ["a-00002-of-00002.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf", "c.gguf"]
    assert first_parts(names) == ["a-00002-of-00002.gguf", "b-00001-of-00002.gguf", "c.gguf"]


def test_b104_a_missing_part_is_named(whole, tmp_path):
    paths = cut(whole, tmp_path)
    paths[1].unlink()
    for path in (paths[0], paths[2]):
        with pytest.raises(CheckpointError, match=rf"3 parts.*{re.escape(name_of(1))}"):
            GGUFCheckpoint.open(path)


def test_b104_a_part_cut_short_is_named(whole, tmp_path):
    paths = cut(whole, tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(name_of(2))):
        GGUFCheckpoint.open(paths[0])


def test_a_part_under_another_name_is_refused(whole, tmp_path):
    paths = cut(whole, tmp_path)
    renamed = paths[1].rename(tmp_path / "tiny.gguf")
    with pytest.raises(CheckpointError, match=r"part 2 of 3.*-00002-of-00003\.gguf"):
        GGUFCheckpoint.open(renamed)


def test_parts_in_each_others_places_are_refused(whole, tmp_path):
    paths = cut(whole, tmp_path)
    shutil.copy(paths[1], paths[2])
    with pytest.raises(CheckpointError, match=r"says that it is part 2 of 3.*part 3 of 3"):
        GGUFCheckpoint.open(paths[0])


def test_a_repeated_tensor_is_refused(whole, tmp_path):
    paths = cut(whole, tmp_path)
    content = bytearray(paths[1].read_bytes())
    at = content.index(b"split.no") + len("split.no") + 4
    assert int.from_bytes(content[at : at + 2], "little") == 1
    content[at : at + 2] = (2).to_bytes(2, "little")
    paths[2].write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensor '.*' is in tiny-00002-of-00003\.gguf"):
        GGUFCheckpoint.open(paths[0])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("split_tensors_count", 5, r"'split\.tensors\.count' is 5.*hold \d+ tensors"),
        ("split_no", 7, r"'split\.no' is 7; .* 0 to 2"),
        ("split_count", 4, r"must end in -00001-of-00004\.gguf"),
    ],
)
def test_b106_keys_that_lie_are_named(whole, tmp_path, key, value, words):
    first = cut(whole, tmp_path, **{key: value})[0]
    with pytest.raises(CheckpointError, match=words):
        GGUFCheckpoint.open(first)
