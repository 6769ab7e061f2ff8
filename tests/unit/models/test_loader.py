"""Weights find their places, and what does not fit is listed."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from helpers.models import PagedRun, TensorCheckpoint, model_config, model_from_tensors
from tokenmill.errors import CheckpointError
from tokenmill.models.loader import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def tensors() -> dict[str, torch.Tensor]:
    shapes = {EMBEDDING: (31, 16), HEAD: (31, 16), "model.norm.weight": (16,)}
    for layer in range(3):
        parts = {
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
        }
        shapes |= {f"model.layers.{layer}.{part}.weight": s for part, s in parts.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def logits(model):
    return model.compute_logits(PagedRun(model, "float32").prefill("a", [3, 1, 4, 1, 5]))


def expected_logits(given):
    """transformers' logits with this head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False)).eval()
    theirs.load_state_dict(given)
    with torch.no_grad():
        return theirs(torch.tensor([[3, 1, 4, 1, 5]])).logits[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", ["equal", "different", "missing"])
def test_the_checkpoint_decides_about_the_head(tied, head, caplog):
    """B103."""
    given = tensors()
    if head != "different":
        given[HEAD] = given[EMBEDDING].clone()
    expected = expected_logits(given)
    if head == "missing":
        del given[HEAD]
    with caplog.at_level(logging.WARNING):
        model = model_from_tensors(CONFIG | {"tie_word_embeddings": tied}, given)
    torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-5)
    contradicts = (tied and head == "different") or (not tied and head == "missing")
    assert bool(caplog.records) == contradicts
    assert (HEAD in caplog.text) == contradicts


def test_equal_heads_of_other_dtypes_are_tied():
    given = tensors()
    given[EMBEDDING] = given[EMBEDDING].bfloat16()
    given[HEAD] = given[EMBEDDING].float()
    model = model_from_tensors(CONFIG | {"tie_word_embeddings": True}, given)
    assert model.lm_head is model.model.embed_tokens


def test_all_faults_are_listed_at_once():
    given = tensors()
    del given["model.norm.weight"]
    for layer in range(3):
        for part in ("gate", "up"):
            del given[f"model.layers.{layer}.mlp.{part}_proj.weight"]
        given[f"model.layers.{layer}.self_attn.q_proj.bias"] = torch.zeros(16)
    given["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    for index in range(20):
        given[f"extra.{index}"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        model_from_tensors(CONFIG, given)
    message = str(caught.value)
    assert "7 missing: " in message
    assert "model.layers.2.mlp.up_proj.weight" in message
    assert "23 unexpected: " in message
    assert "and 15 more" in message
    assert "k_proj.weight (16, 16) for (8, 16)" in message
    assert len(message) < 2_000


def test_derived_tensors_of_old_checkpoints_are_skipped():
    given = tensors()
    plain = model_from_tensors(CONFIG, given)
    given["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    given["model.position_ids"] = torch.zeros(1, 64)
    assert torch.equal(logits(model_from_tensors(CONFIG, given)), logits(plain))


def test_progress_ends_at_the_total():
    calls = []
    checkpoint = TensorCheckpoint(CONFIG, tensors())
    load_model(model_config(CONFIG), checkpoint, lambda done, total: calls.append((done, total)))
    assert {total for _, total in calls} == {checkpoint.num_bytes}
    assert calls[0][0] == 0
    assert calls[-1][0] == checkpoint.num_bytes
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_parameters_have_the_dtype_asked_for_and_no_gradient():
    model = model_from_tensors(CONFIG, tensors(), "bfloat16")
    assert not model.training
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad
        assert parameter.dtype == (torch.float32 if "norm" in name else torch.bfloat16)


def test_loading_is_logged_with_its_rate(caplog):
    with caplog.at_level(logging.INFO, logger="tokenmill.models.loader"):
        load_model(model_config(CONFIG), TensorCheckpoint(CONFIG, tensors()))
    (line,) = [record.getMessage() for record in caplog.records if "loaded" in record.msg]
    assert re.fullmatch(r"loaded in-memory: [0-9.]+ MB in [0-9.]+ s \([0-9.]+ [MG]B/s\)", line)
