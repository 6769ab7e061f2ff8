"""Files are read ahead of a loader, within a window, and let go of behind it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.gguf import tiny_llama, write_llama_gguf
from helpers.models import TensorCheckpoint
from tokenmill.checkpoint import mapped_file, read_ahead
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.checkpoint.mapped_file import MappedFile
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.read_ahead import ReadAhead
from tokenmill.errors import CheckpointError
from tokenmill.layers.pack_parts import pack_parts

PAGE = 4096


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.manual_seed(5))


def directory(path: Path, tensors: dict[str, torch.Tensor]) -> HFDirectory:
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return HFDirectory.open(path)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(read_ahead, "WINDOW_BYTES", 4 * PAGE)


@pytest.mark.usefixtures("small_chunks")
def test_every_tensor_comes_whole_in_any_order(tmp_path):
    tensors = {f"t{i}": random_bytes(1 + 3000 * i) for i in range(12)} | {"none": random_bytes(0)}
    checkpoint = directory(tmp_path, tensors)
    for order in (list(tensors), list(tensors)[::-1]):
        with ReadAhead(checkpoint, list(tensors)) as ahead:
            for name in order:
                raw = ahead.read(name)
                raw.need()
                assert torch.equal(raw.data, tensors[name])
                raw.release()
                assert torch.equal(raw.data, tensors[name])  # again from the file


@pytest.mark.usefixtures("small_chunks")
def test_reading_stays_within_the_window(tmp_path, monkeypatch):
    checkpoint = directory(tmp_path, {f"t{i}": random_bytes(4 * PAGE) for i in range(8)})
    read: list[int] = []
    populate = MappedFile.populate

    def noted(self, begin, end):
        populate(self, begin, end)
        read.append(end - begin)

    monkeypatch.setattr(MappedFile, "populate", noted)
    with ReadAhead(checkpoint, [f"t{i}" for i in range(8)]) as ahead:
        wait_until(lambda: sum(read) == 4 * PAGE)
        time.sleep(0.05)
        assert sum(read) == 4 * PAGE
        ahead.read("t2").need()
        wait_until(lambda: sum(read) >= 3 * 4 * PAGE)
        time.sleep(0.05)
        assert sum(read) == 3 * 4 * PAGE
    assert not [t for t in threading.enumerate() if t.name == "read-ahead"]


@pytest.mark.usefixtures("small_chunks")
def test_of_a_tensor_that_is_divided_only_its_part_is_read(tmp_path, monkeypatch):
    tensors = {name: random_bytes(64, PAGE) for name in ("a", "b", "c")}
    checkpoint = directory(tmp_path, tensors)
    read: list[tuple[int, int]] = []
    populate = MappedFile.populate

    def noted(self, begin, end):
        populate(self, begin, end)
        read.append((begin, end))

    monkeypatch.setattr(MappedFile, "populate", noted)
    rows = {"a": range(32, 64), "b": range(8)}
    with ReadAhead(checkpoint, list(tensors), rows) as ahead:
        for name, tensor in tensors.items():
            raw = ahead.read(name)
            part = rows.get(name, range(64))
            raw.pages.need(part.start * PAGE, part.stop * PAGE)
            assert torch.equal(raw.data, tensor.view(-1))  # the rest, too, when it is touched
    assert sum(end - begin for begin, end in read) == (32 + 8 + 64) * PAGE
    (source,) = checkpoint.file_ranges("a")
    assert min(begin for begin, _ in read) == source.begin + 32 * PAGE


def wait_until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_file_cut_short_while_it_is_open_is_an_error_not_a_crash(tmp_path):
    checkpoint = directory(tmp_path, {"w": random_bytes(64 * PAGE)})
    checkpoint.file_ranges("w")  # maps it
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(8 * PAGE)
    with (
        ReadAhead(checkpoint, ["w"]) as ahead,
        pytest.raises(CheckpointError, match=r"model\.safetensors: bytes .* cut short"),
    ):
        ahead.read("w").need()


def test_systems_without_the_advice_read_when_pages_are_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_file, "_system_call", lambda: None)
    expected = random_bytes(10 * PAGE)
    with ReadAhead(directory(tmp_path, {"w": expected}), ["w"]) as ahead:
        raw = ahead.read("w")
        raw.need()
        raw.release()
        assert torch.equal(raw.data, expected)


def test_tensors_in_memory_need_no_file():
    tensors = {"w": torch.ones(3, 4)}
    with ReadAhead(TensorCheckpoint({}, tensors), ["w"]) as ahead:
        assert ahead.read("w").pages is None


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_every_format_says_where_its_tensors_lie(tmp_path, kind):
    if kind == "gguf":
        path = write_llama_gguf(tmp_path / "tiny.gguf", tiny_llama())
    else:
        tiny_llama().save_pretrained(tmp_path)
        path = tmp_path
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensor_shapes:
        (where,) = checkpoint.file_ranges(name)
        content = where.file.path.read_bytes()[where.begin : where.end]
        assert bytes(checkpoint.read(name).data.numpy()) == content
    checkpoint.close()


@pytest.mark.parametrize("packed_format", ["bfloat16", "float32", "int8", "int4"])
def test_parts_packed_in_slabs_are_the_matrix_packed_at_once(tmp_path, monkeypatch, packed_format):
    """Parts of whole panels go in slab by slab, others are joined first."""
    from tokenmill.layers import pack_parts as module

    monkeypatch.setattr(module, "SLAB_BYTES", 40 * 64 * 2)
    weight = torch.randn(200, 64, generator=torch.manual_seed(1)).bfloat16()
    for cuts in ((96, 64, 40), (100, 60, 40)):
        parts = {f"p{i}": part.clone() for i, part in enumerate(weight.split(cuts))}
        (tmp_path / str(cuts)).mkdir()
        checkpoint = directory(tmp_path / str(cuts), parts)
        with ReadAhead(checkpoint, list(parts)) as ahead:
            packed = pack_parts(packed_format, [ahead.read(name) for name in parts])
        (tmp_path / f"whole {cuts}").mkdir()
        whole = directory(tmp_path / f"whole {cuts}", {"w": weight})
        monkeypatch.setattr(module, "SLAB_BYTES", 1 << 20)
        expected = pack_parts(packed_format, [whole.read("w")])
        assert torch.equal(packed.buffer, expected.buffer)
        assert packed.out_features == 200
