"""The Llama family against transformers, with small random weights."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from helpers.models import PagedRun, model_from_tensors
from tokenmill.errors import ConfigError
from tokenmill.layers.plain import PlainKernels
from tokenmill.models.llama import LlamaForCausalLM as OurLlama
from tokenmill.models.registry import get_model_class

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
ROPE = {"rope_theta": 1000.0}
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "linear": {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 2.0}},
    "llama3": {
        "rope_parameters": ROPE
        | {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn": {
        "rope_parameters": ROPE
        | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    },
}


def reference(architecture: str = "llama", **overrides):
    """A transformers model with random weights everywhere, biases and norms included."""
    torch.manual_seed(0)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
    }[architecture]
    config = config_class(**(SMALL | overrides), attn_implementation="eager")
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    hf_config = config.to_dict() | {"architectures": [model_class.__name__]}
    return model, hf_config


def ours(model, hf_config, dtype="float32", kernels=None):
    tensors = dict(model.state_dict())
    if hf_config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return model_from_tensors(hf_config, tensors, dtype, kernels=kernels)


def prompt(length: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SMALL["vocab_size"], (length,), generator=generator).tolist()


def reference_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("kernels", [PlainKernels(), None], ids=["torch", "best"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant, kernels):
    theirs, hf_config = reference(**VARIANTS[variant])
    model = ours(theirs, hf_config, kernels=kernels)
    ids = prompt(300)
    logits = model.compute_logits(PagedRun(model, "float32").prefill("a", ids))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, reference_logits(theirs, ids), atol=1e-4, rtol=0)


def test_mistral_sees_its_window_only():
    theirs, hf_config = reference("mistral", sliding_window=19)
    model = ours(theirs, hf_config)
    ids = prompt(290)
    logits = model.compute_logits(PagedRun(model, "float32").prefill("a", ids, chunk=37))
    torch.testing.assert_close(logits, reference_logits(theirs, ids), atol=1e-4, rtol=0)


def test_greedy_ids_equal_transformers():
    theirs, hf_config = reference()
    model = ours(theirs, hf_config)
    run = PagedRun(model, "float32")
    ids = prompt(21)
    expected = theirs.generate(
        torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, 21:].tolist()
    hidden = run.prefill("a", ids)
    found = []
    while len(found) < 24:
        found.append(int(model.compute_logits(hidden[-1:]).argmax()))
        hidden = run.step([("a", found[-1:])])[0]
    assert found == expected


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16", "float32 on torch"])
def exact_case(request):
    """A model, and the hidden states of three prompts, each computed alone and at once."""
    dtype, _, kernels = request.param.partition(" on ")
    theirs, hf_config = reference(attention_bias=True, head_dim=12)
    model = ours(theirs, hf_config, dtype, PlainKernels() if kernels else None)
    prompts = {"a": prompt(291, 2), "b": prompt(40, 3), "c": prompt(131, 4)}
    alone = {name: PagedRun(model, dtype).prefill(name, ids) for name, ids in prompts.items()}
    assert all(torch.isfinite(hidden).all() for hidden in alone.values())
    return model, dtype, prompts, alone


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunks_have_the_same_bits(exact_case, chunk):
    model, dtype, prompts, alone = exact_case
    name = "c" if chunk == 1 else "a"
    hidden = PagedRun(model, dtype, seed=chunk, block_size=8).prefill(name, prompts[name], chunk)
    assert torch.equal(hidden, alone[name])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_batch_has_the_same_bits(exact_case, num_threads):
    """Three requests at different places of their prompts, in one flat batch each step."""
    model, dtype, prompts, alone = exact_case
    chunks = {"a": 50, "b": 3, "c": 29}
    run = PagedRun(model, dtype, seed=5)
    parts = {name: [] for name in prompts}
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    while True:
        done = {name: sum(map(len, parts[name])) for name in prompts}
        batch = [
            (name, prompts[name][done[name] : done[name] + chunks[name]])
            for name in prompts
            if done[name] < len(prompts[name])
        ]
        if not batch:
            break
        for (name, _), hidden in zip(batch, run.step(batch), strict=True):
            parts[name].append(hidden)
    torch.set_num_threads(before)
    for name in prompts:
        hidden = torch.cat(parts[name])
        assert torch.equal(hidden, alone[name])
        logits = model.compute_logits(hidden)
        assert torch.equal(logits[-1:], model.compute_logits(hidden[-1:]))


def test_freed_blocks_leave_no_trace(exact_case):
    """Blocks that another request wrote before, and NaN behind the end."""
    model, dtype, prompts, alone = exact_case
    run = PagedRun(model, dtype, num_blocks=24)
    run.prefill("a", prompts["a"])
    run.free("a")
    assert torch.equal(run.prefill("c", prompts["c"], chunk=60), alone["c"])


def test_pipeline_ranks_compose():
    theirs, hf_config = reference()
    kernels = PlainKernels()  # whose weights a rank can take over
    whole = ours(theirs, hf_config, kernels=kernels)
    ids = torch.tensor(prompt(9), dtype=torch.int32)
    ranks = [
        OurLlama(hf_config, dtype=torch.float32, max_model_len=512, layers=layers, kernels=kernels)
        for layers in (range(1), range(1, 2))
    ]
    for rank in ranks:
        rank.load_state_dict(whole.state_dict(), strict=False)
    first, second = (PagedRun(rank, "float32") for rank in ranks)
    embeds = whole.embed_input_ids(ids)
    handed_on = first.forward([("a", ids.tolist())], inputs_embeds=embeds)
    assert set(handed_on) == {"hidden_states", "residual"}
    hidden = second.forward([("a", ids.tolist())], intermediate_tensors=handed_on)
    assert torch.equal(hidden, PagedRun(whole, "float32").prefill("a", ids.tolist()))


def test_a_forward_without_context_says_what_is_missing():
    theirs, hf_config = reference()
    model = ours(theirs, hf_config)
    ids, positions = torch.tensor([1]), torch.tensor([0])
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.self_attn\.attn.*bind"):
        model.forward(ids, positions)
    PagedRun(model, "float32")
    with pytest.raises(RuntimeError, match="set_forward_context"):
        model.forward(ids, positions)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"type": "spiral"}}, "'spiral'.*llama3"),
    ],
)
def test_a_config_we_cannot_serve_is_refused(override, message):
    config = SMALL | {"architectures": ["LlamaForCausalLM"]} | override
    with pytest.raises(ConfigError, match=message):
        OurLlama(config, dtype=torch.float32, max_model_len=16)


def test_registry_offers_the_nearest_architecture():
    assert get_model_class("MistralForCausalLM") is OurLlama
    with pytest.raises(ConfigError, match="Did you mean 'LlamaForCausalLM'"):
        get_model_class("LamaForCausalLM")
