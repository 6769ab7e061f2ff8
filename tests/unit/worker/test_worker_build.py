"""From a model's layers to KV groups, caches and a worker that serves."""

from __future__ import annotations

import numpy as np
import torch
from transformers import LlamaForCausalLM

from helpers.tiny import tiny_llama
from helpers.worker import Host
from tokenmill.attention.backend import AttentionSpec
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config.engine_args import EngineArgs
from tokenmill.config.engine_config import EngineConfig
from tokenmill.config.machine import read_machine
from tokenmill.config.resolve import resolve
from tokenmill.contracts.kv_cache import KVCacheKind
from tokenmill.layers.attention import Attention
from tokenmill.worker.bind import bind_attention
from tokenmill.worker.build import build_worker
from tokenmill.worker.kv_cache import kv_cache_config


class Layers:
    """A model, as far as its attention layers go."""

    def __init__(self, *layers):
        self._layers = {layer.layer_name: layer for layer in layers}

    def attention_layers(self):
        return self._layers


def attention(name, *, num_kv_heads=2, sliding_window=None):
    return Attention(
        name,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_size=8,
        scale=1.0,
        rotary=None,
        sliding_window=sliding_window,
    )


def tiny_config() -> EngineConfig:
    args = EngineArgs(
        model=str(tiny_llama()),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        num_kv_blocks=64,
        num_threads=1,
    )
    checkpoint = open_checkpoint(tiny_llama())
    return resolve(
        args,
        path=args.model,
        config=checkpoint.config,
        tensor_shapes=checkpoint.tensor_shapes,
        tensor_formats=checkpoint.tensor_formats,
        machine=read_machine(),
    )


def test_layers_that_keep_the_same_form_one_group():
    config = tiny_config()
    model = Layers(attention("a"), attention("b"), attention("c"))
    cache = kv_cache_config(config, model)
    assert [group.layer_names for group in cache.groups] == [("a", "b", "c")]
    assert (cache.num_blocks, cache.block_size) == (
        config.cache.num_blocks,
        config.cache.block_size,
    )
    assert cache.bytes_per_block == cache.block_size * 3 * 2 * 2 * 8 * 4


def test_windowed_layers_have_groups_of_their_own_in_the_same_memory():
    config = tiny_config()
    layers = [attention("a"), attention("b", sliding_window=4), attention("c")]
    model = Layers(*layers)
    cache = kv_cache_config(config, model)
    assert [group.layer_names for group in cache.groups] == [("a",), ("c",), ("b",)]
    assert [group.spec.kind for group in cache.groups] == [
        *(KVCacheKind.FULL, KVCacheKind.FULL, KVCacheKind.SLIDING_WINDOW)
    ]
    assert cache.num_blocks == 3 * config.cache.num_blocks
    groups = bind_attention(config, model, cache)
    assert [group.kv_group for group in groups] == [0, 1, 2]
    assert len({layer._kv_cache.data_ptr() for layer in layers}) == 1


def test_a_window_as_long_as_the_context_keeps_everything_but_has_metadata_of_its_own():
    config = tiny_config()
    window = config.scheduler.max_model_len
    model = Layers(attention("a"), attention("b", sliding_window=window), attention("c"))
    cache = kv_cache_config(config, model)
    assert [group.layer_names for group in cache.groups] == [("a", "b", "c")]
    assert cache.groups[0].spec.kind is KVCacheKind.FULL
    groups = bind_attention(config, model, cache)
    assert [(group.kv_group, group.layer_names) for group in groups] == [
        (0, ("a", "c")),
        (0, ("b",)),
    ]


def test_layers_of_other_sizes_get_a_group_of_their_own():
    config = tiny_config()
    model = Layers(attention("a"), attention("b", num_kv_heads=1))
    cache = kv_cache_config(config, model)
    assert [group.layer_names for group in cache.groups] == [("a",), ("b",)]
    assert [group.kv_group for group in bind_attention(config, model, cache)] == [0, 1]


def test_every_layer_has_a_cache_of_its_own():
    config = tiny_config()
    layers = [attention("a"), attention("b")]
    model = Layers(*layers)
    bind_attention(config, model, kv_cache_config(config, model))
    caches = [layer._kv_cache for layer in layers]
    assert caches[0].data_ptr() != caches[1].data_ptr()
    assert layers[0].spec("float32", 16) == AttentionSpec(4, 2, 8, 1.0, "float32", 16)


def test_a_built_worker_generates_what_transformers_does():
    config = tiny_config()

    progress = []
    before = torch.get_num_threads()
    worker = build_worker(
        config, open_checkpoint(tiny_llama()), lambda done, total: progress.append((done, total))
    )
    assert progress[-1][0] == progress[-1][1] > 0
    host = Host(worker)
    rng = np.random.default_rng(0)
    prompts = {"a": rng.integers(0, 300, 40).tolist(), "b": rng.integers(0, 300, 7).tolist()}
    for req_id, prompt in prompts.items():
        host.add(req_id, prompt, temperature=0.0)
    host.step({"a": 33})
    for _ in range(8):
        host.step()
    torch.set_num_threads(before)
    reference = LlamaForCausalLM.from_pretrained(tiny_llama(), dtype=torch.float32).eval()
    for req_id, prompt in prompts.items():
        tokens = list(prompt)
        with torch.no_grad():
            for _ in range(8):
                tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert host.requests[req_id].output == tokens[len(prompt) :]
