"""Draft heads: they say what plain torch says of the same files, whatever happens to requests, and
results are the same with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.draft_heads import ReferenceHead, Tensors, random_head, write_head
from helpers.speculation import engine, plain, results, run
from helpers.tiny import write_tiny_llama, write_wide_llama
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill.contracts.request import SchedulerStats
from tokenmill.kernels import native
from tokenmill.worker.graphs.cpu import RecordedForward
from tokenmill.worker.graphs.decode import NativeDecodeSteps

NUM_DRAFTS = 3
AUX_LAYERS = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle": {"method": "eagle"},
    "eagle with an embedding": {"method": "eagle", "has_embedding": True, "has_biases": True},
    "eagle3": {"method": "eagle3", "own_vocab": 150},
    "eagle3 with biases": {
        "method": "eagle3",
        "has_biases": True,
        "layout": "eagle3 with a prefix",
    },
    "eagle3 of speculators": {
        "method": "eagle3",
        "own_vocab": 200,
        "has_embedding": True,
        "norm_before_residual": True,
        "layout": "eagle3 of speculators",
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("heads")
    write_wide_llama(path / "target", num_hidden_layers=5)
    return path


def config_of(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "target" / "config.json").read_text())
    return config


def settings_of(model: str, method: str, **more: Any) -> dict[str, Any]:
    return {
        "method": method,
        "model": model,
        "num_speculative_tokens": NUM_DRAFTS,
        "adaptive": False,
        **more,
    }


def head(directory: Path, variant: str) -> tuple[dict[str, Any], ReferenceHead]:
    """A written head as `speculative_config`, and what says what it should say."""
    made = dict(VARIANTS[variant])
    method, layout = made.pop("method"), made.pop("layout", None)
    is_before = made.pop("norm_before_residual", False)
    target = config_of(directory)
    tensors = random_head(method, target, **made)
    written: dict[str, Any] = {"norm_before_residual": True} if is_before else {}
    if method == "eagle3":
        written["eagle_aux_hidden_state_layer_ids"] = list(AUX_LAYERS)
    path = write_head(directory / variant, method, tensors, target, layout=layout, **written)
    reference = ReferenceHead(
        str(directory / "target"),
        method,
        tensors,
        aux_layers=AUX_LAYERS,
        norm_before_residual=is_before,
    )
    return settings_of(path, method), reference


@contextmanager
def overheard(llm: LLM) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """What is drafted behind which texts."""
    drafter = llm.llm_engine._client.core._executor._worker.runner._drafter
    heard: dict[tuple[int, ...], list[int]] = {}
    propose = drafter.propose

    def listening(req_ids: Any, rows: Any, num_tokens: Any, token_ids: Any) -> dict[str, list[int]]:
        drafts: dict[str, list[int]] = propose(req_ids, rows, num_tokens, token_ids)
        for req_id, row, count in zip(req_ids, rows, num_tokens, strict=True):
            if req_id in drafts:
                heard[tuple(token_ids[row, :count].tolist())] = drafts[req_id]
        return drafts

    drafter.propose = listening
    yield heard


def generate(llm: LLM, num_tokens: int = 18) -> list[RequestOutput]:
    """Greedy answers to prompts of 1 to 74 tokens, two of which begin alike: two blocks, and the
    token behind them, which the last entry of the second block has.
    """
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 380, (n,), generator=draw).tolist() for n in (1, 2, 9, 33, 70)]
    prompts.append(prompts[-1][:65] + prompts[2])
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(wrapped, params, use_tqdm=False)


def check(
    heard: dict[tuple[int, ...], list[int]],
    reference: ReferenceHead,
    outputs: list[RequestOutput],
    every: int = 1,
) -> None:
    """What was drafted is what the reference drafts; one text in `every` is compared."""
    num_compared = 0
    for output in outputs:
        text = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
        begun = {len(each): each for each in heard if list(each) == text[: len(each)]}
        lengths = sorted(begun)[::every]
        due = reference.drafts(text, lengths, NUM_DRAFTS)
        for length in lengths:
            found = heard[begun[length]]
            assert found == due[length][0][: len(found)], (length, text)
            num_compared += len(found)
    assert num_compared > 120 // every


def stats_of(llm: LLM) -> SchedulerStats:
    return llm.llm_engine._client.core.scheduler.make_stats()


@pytest.mark.parametrize(
    "variant",
    [
        "eagle",
        "eagle3",
        "eagle3 of speculators",
        pytest.param("eagle with an embedding", marks=pytest.mark.slow),
        pytest.param("eagle3 with biases", marks=pytest.mark.slow),
    ],
)
def test_it_says_what_plain_torch_says(directory: Path, variant: str) -> None:
    settings, reference = head(directory, variant)
    with (
        engine(str(directory / "target"), dtype="float32", speculative_config=settings) as llm,
        overheard(llm) as heard,
    ):
        check(heard, reference, generate(llm))
        fed = llm.llm_engine._client.core._executor._worker.runner._drafter._feed
        state = fed._head.states_out[0]
        asked = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        llm.generate({"prompt_token_ids": [5, 6, 7, 8]}, asked, use_tqdm=False)
        text, drafts = list(heard.items())[-1]
        due_drafts, due = reference.drafts(text, [len(text)], NUM_DRAFTS)[len(text)]
        assert drafts == due_drafts
        torch.testing.assert_close(state, due, rtol=1e-3, atol=1e-2)


PIECES = {"max_num_batched_tokens": 24, "max_num_seqs": 20}
PREEMPTED = {"num_kv_blocks": 14, "max_model_len": 128}
CHECKED = {"check_graphs": True, "block_size": 16}


def names_of(settings: Any) -> str | None:
    if not isinstance(settings, dict):
        return None
    return ",".join(f"{name}={settings[name]}" for name in settings) or "default"


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("eagle3", {"block_size": 16, **PIECES, **PREEMPTED}),
        pytest.param("eagle", CHECKED, marks=pytest.mark.slow),
        pytest.param("eagle", {"block_size": 16, **PREEMPTED}, marks=pytest.mark.slow),
        pytest.param("eagle3", CHECKED, marks=pytest.mark.slow),
        pytest.param("eagle", {"enforce_eager": True}, marks=pytest.mark.slow),
        pytest.param("eagle3", {"async_scheduling": True}, marks=pytest.mark.slow),
    ],
    ids=names_of,
)
def test_it_does_in_pieces_after_preemption_and_from_the_cache(
    directory: Path, variant: str, settings: dict[str, Any]
) -> None:
    speculation, reference = head(directory, variant)
    settings = {"dtype": "float32", "speculative_config": speculation, **settings}
    with engine(str(directory / "target"), **settings) as llm, overheard(llm) as heard:
        outputs = generate(llm)
        check(heard, reference, outputs, every=3)
        heard.clear()
        generate(llm)
        check(heard, reference, outputs, every=3)
        stats = stats_of(llm)
    assert stats.prefix_cache_hits > 0
    if "num_kv_blocks" in settings:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("eagle", {}),
        ("eagle3", PIECES | PREEMPTED),
        pytest.param("eagle3", {}, marks=pytest.mark.slow),
        pytest.param("eagle", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=names_of,
)
def test_results_have_the_same_bits(
    directory: Path, variant: str, settings: dict[str, Any]
) -> None:
    speculation, _ = head(directory, variant)
    path = str(directory / "target")
    speculation |= {"quantization": "int8"} if native.is_available() and not settings else {}
    with engine(path, speculative_config=speculation, **settings) as llm:
        outputs = run(llm)
        again = run(llm)  # prefixes are cached now
        stats = stats_of(llm)
    same = {key: settings[key] for key in ("kv_cache_dtype",) if key in settings}
    assert results(outputs) == results(again) == plain(path, **same)
    assert stats.num_draft_tokens > stats.num_accepted_tokens >= 0
    told = sum(output.metrics.num_draft_tokens for output in [*outputs, *again])
    assert told == stats.num_draft_tokens > 200
    if "num_kv_blocks" in settings:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize(
    ("adaptive", "settings"),
    [(False, {}), (False, PIECES), (True, {})],
    ids=["default", "in pieces", "adaptive"],
)
def test_every_draft_holds_that_hidden_states_tell(
    tmp_path: Path, method: str, adaptive: bool, settings: dict[str, Any]
) -> None:
    """A model whose next token follows from its last one, and a head that sees no token: only the
    right state behind the right token tells it the second next.
    """
    target = write_cycle(tmp_path / "target")
    tensors = zero_layer(random_head(method, target))
    same, nothing = torch.eye(SIZE), torch.zeros(SIZE, SIZE)
    parts = [nothing, successor()] if method == "eagle" else [nothing, same, nothing]
    tensors["fc.weight"] = torch.cat(parts, 1)
    if method == "eagle3":
        move_states(tensors)
    path = write_head(
        tmp_path / "head", method, tensors, target, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    speculation = settings_of(path, method, adaptive=adaptive)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [{"prompt_token_ids": [seed % 60, *range(5, 5 + seed)]} for seed in (0, 1, 7, 30, 50)]
    with engine(str(tmp_path / "target"), speculative_config=speculation, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = stats_of(llm)
    for prompt, output in zip(prompts, outputs, strict=True):
        last = prompt["prompt_token_ids"][-1]
        due = [(last + 1 + index) % target["vocab_size"] for index in range(30)]
        assert list(output.outputs[0].token_ids) == due
    assert stats.num_draft_tokens == stats.num_accepted_tokens >= (0 if adaptive else 181)


def test_drafts_share_the_noise_of_their_places(tmp_path: Path) -> None:
    """A head that sees the last token as the model does draws what the model draws, whatever the
    temperature, seed and parameters.
    """
    target = write_cycle(tmp_path / "target", sharpness=0.3)
    tensors = zero_layer(random_head("eagle", target))
    tensors["fc.weight"] = torch.cat([torch.eye(SIZE), torch.zeros(SIZE, SIZE)], 1)
    speculation = settings_of(write_head(tmp_path / "head", "eagle", tensors, target), "eagle")
    asked = [
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 20},
        {"temperature": 1.3, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 4, "min_tokens": 10, "logit_bias": {7: 2.0}},
    ]
    params = [SamplingParams(max_tokens=60, ignore_eos=True, **each) for each in asked]
    prompts = [{"prompt_token_ids": [1, 2, 3, 4 + place]} for place in range(len(params))]
    with engine(str(tmp_path / "target"), dtype="float32", speculative_config=speculation) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        stats = stats_of(llm)
    # But for a penalty of the prompt's first token, which the head does not see.
    assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens > 150


@pytest.mark.skipif(not native.is_available(), reason="the native kernels are not here")
@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_steps_of_model_and_head_stay_recorded(directory: Path, variant: str) -> None:
    speculation, _ = head(directory, variant)
    speculation["num_speculative_tokens"] = 1
    with engine(str(directory / "target"), speculative_config=speculation) as llm:
        runner = llm.llm_engine._client.core._executor._worker.runner
        assert isinstance(runner._decode_steps, NativeDecodeSteps)
        assert isinstance(runner._drafter.runner._forward_pass, RecordedForward)
        before = sum(runner._decode_steps.kernel_seconds)
        asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        for _ in range(2):  # the second one's prompt is cached but for its last token
            llm.generate({"prompt_token_ids": [*range(10, 43)]}, asked, use_tqdm=False)
        assert sum(runner._decode_steps.kernel_seconds) > before
        assert runner.graph_stats.num_direct == 0
        assert runner._drafter.runner.graph_stats.num_direct == 0


SIZE = 128
"""Of the vocabulary, and of hidden states, so that each token has a direction of its own."""


def write_cycle(path: Path, sharpness: float = 8.0) -> dict[str, Any]:
    """A model that counts, whose layers add nothing to the stream: token t is unit vector t, times
    the root of their number. Its config.
    """
    write_tiny_llama(
        path,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        vocab_size=SIZE,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
    )
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"] = torch.eye(SIZE) * SIZE**0.5
    tensors["lm_head.weight"] = sharpness * successor()
    save_file(tensors, file, metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def successor() -> torch.Tensor:
    """What maps unit vector t to t + 1, and the last to the first."""
    return torch.eye(SIZE).roll(1, 0)


def zero_layer(tensors: Tensors) -> Tensors:
    """A head whose layer adds nothing, and whose norms are plain."""
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
    return tensors


def move_states(tensors: Tensors) -> None:
    """Have the layer's MLP put the next token's state in place of each: of a normalised unit vector
    it makes the difference.
    """
    tensors["layer.mlp.gate_proj.weight"] = torch.eye(SIZE)
    tensors["layer.mlp.up_proj.weight"] = torch.eye(SIZE)
    tensors["layer.mlp.down_proj.weight"] = (successor() - torch.eye(SIZE)) * SIZE**-0.5
    tensors["lm_head.weight"] = 8 * successor()
