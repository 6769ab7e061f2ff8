"""Hugging Face directories as checkpoints, sound and broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.gguf import tiny_llama
from tokenmill.checkpoint.hf_directory import HFDirectory
from tokenmill.errors import CheckpointError
from tokenmill.quantization.dequantize import dequantize

INDEX = "model.safetensors.index.json"


def saved(path: Path, dtype: torch.dtype = torch.float32, *, sharded: bool = False) -> Path:
    size = "100KB" if sharded else "1GB"
    tiny_llama().to(dtype).save_pretrained(path, max_shard_size=size)
    return path


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("model-*.safetensors"))


def edit_index(path: Path, **weight_map: str) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].update(weight_map)
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_weight_is_read(tmp_path, dtype, sharded):
    path = saved(tmp_path, dtype, sharded=sharded)
    assert (len(shards(path)) > 1) == sharded
    checkpoint = HFDirectory.open(path)
    expected = tiny_llama().to(dtype).state_dict()
    assert dict(checkpoint.tensor_shapes) == {n: tuple(t.shape) for n, t in expected.items()}
    assert checkpoint.num_bytes == sum(t.nbytes for t in expected.values())
    for name, tensor in expected.items():
        assert torch.equal(dequantize(checkpoint.read(name), dtype), tensor), name


def test_config_is_left_as_it_is(tmp_path):
    checkpoint = HFDirectory.open(saved(tmp_path))
    assert checkpoint.config == json.loads((tmp_path / "config.json").read_text())
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.tokenizer_data.directory == tmp_path


def test_generation_config_may_be_missing(tmp_path):
    (saved(tmp_path) / "generation_config.json").unlink()
    assert HFDirectory.open(tmp_path).generation_config == {}


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path):
    checkpoint = HFDirectory.open(saved(tmp_path))
    before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint.read("model.norm.weight").data.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tensors_outlive_the_checkpoint(tmp_path):
    checkpoint = HFDirectory.open(saved(tmp_path))
    norm = checkpoint.read("model.norm.weight")
    checkpoint.close()
    del checkpoint
    assert dequantize(norm, torch.float32).tolist() == [1.0] * 64


def test_b104_the_index_decides_which_files_are_read(tmp_path):
    path = saved(tmp_path, sharded=True)
    (path / "model-extra.safetensors").write_bytes(b"not read")
    assert "lm_head.weight" in HFDirectory.open(path).tensor_shapes


def test_b104_pickled_weights_beside_safetensors_are_not_read(tmp_path):
    path = saved(tmp_path)
    (path / "pytorch_model.bin").write_bytes(b"not read")
    assert "lm_head.weight" in HFDirectory.open(path).tensor_shapes


def test_pickled_weights_alone_are_refused(tmp_path):
    path = saved(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        HFDirectory.open(path)


def test_a_directory_without_weights_says_what_was_looked_for(tmp_path):
    (saved(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"no weights; looked for {INDEX}"):
        HFDirectory.open(tmp_path)


def test_b104_a_missing_shard_is_named(tmp_path):
    path = saved(tmp_path, sharded=True)
    dropped = shards(path)[1]
    dropped.unlink()
    with pytest.raises(CheckpointError, match=dropped.name):
        HFDirectory.open(path)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.99])
def test_b104_a_truncated_shard_is_named(tmp_path, kept):
    path = saved(tmp_path, sharded=True)
    cut = shards(path)[1]
    content = cut.read_bytes()
    cut.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=rf"{cut.name}.*damaged or incomplete"):
        HFDirectory.open(path)


def test_b104_a_tensor_missing_from_its_shard_is_named(tmp_path):
    path = saved(tmp_path, sharded=True)
    edit_index(path, **{"model.extra.weight": shards(path)[0].name})
    with pytest.raises(CheckpointError, match=rf"{shards(path)[0].name}.*'model\.extra\.weight'"):
        HFDirectory.open(path)


def test_an_index_that_points_elsewhere_is_refused(tmp_path):
    path = saved(tmp_path, sharded=True)
    edit_index(path, **{"model.norm.weight": "../model.safetensors"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*same directory"):
        HFDirectory.open(path)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(tmp_path, content):
    path = saved(tmp_path, sharded=True)
    (path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="weight_map"):
        HFDirectory.open(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "list"),
        (b" " * ((64 << 20) + 1), "limit"),
    ],
    ids=["cut", "binary", "deep", "list", "large"],
)
def test_a_config_that_is_no_object_is_refused(tmp_path, content, words):
    path = saved(tmp_path)
    (path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{words}"):
        HFDirectory.open(path)


def test_a_missing_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json.*No such file"):
        HFDirectory.open(tmp_path)


def test_another_dtype_is_refused_when_it_is_read(tmp_path):
    weights = saved(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "position_ids": torch.arange(4)}, weights)
    checkpoint = HFDirectory.open(tmp_path)
    assert checkpoint.tensor_shapes["position_ids"] == (4,)
    with pytest.raises(CheckpointError, match=r"position_ids.*I64.*BF16"):
        checkpoint.read("position_ids")


def test_a_missing_tensor_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.wait'.*Did you mean"):
        HFDirectory.open(saved(tmp_path)).read("model.norm.wait")
