"""Writes `models.md` from the table that the tests run over: `python docs/generate_models.py`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TARGET = Path(__file__).with_name("models.md")

HEAD = """\
# Models

Made by `make docs` from `tests/helpers/families.py`; do not edit.

Every family below is native: a file in `src/tokenmill/models/`, on our own layers. `tests/models/test_contract.py` runs over all of them, on small random weights that transformers has saved:

- logits in float32 are within 1e-4 of transformers', on the native kernels and on torch's;
- greedy tokens are transformers', in a batch, with prompts cut into pieces, and with prefixes from the cache;
- a request has the same bits alone, in a batch, in pieces, from the cache and after preemption, in float32 and bfloat16.

| family | models | architecture | weights tested | GGUF | on a GPU | steps | not supported |
|---|---|---|---|---|---|---|---|
"""

TAIL = """
*Steps* are **recorded** (one native call without the interpreter, see [architecture](architecture.md)) where every layer has a native kernel; a **direct** step computes what has none in torch. On a GPU, layers that have no kernel there are refused when the model is loaded.

Weights are read from safetensors (one file or several) in float32, float16 or bfloat16 (gpt-oss: MXFP4, too), and from GGUF files with the types F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS and MXFP4 ([formats.md](formats.md)). `--load-format dummy` draws random weights for any of these architectures from a config.json alone. `tokenmill inspect MODEL` says what a model is and whether it fits the machine.

RoPE scaling: `default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope`. What depends on a length depends on `max_model_len`, so that a cached key stays right while its text grows.

State-space layers: those of Mamba-2, beside attention (Bamba) or alone; other models with such layers are not here yet ([record 22](adr/0022-state-layers-as-a-third-kind-of-group.md)). A model without attention has a KV cache of states only: `num_kv_blocks` counts these, a sequence of any length holds three, and as it knows no positions, its context is 32,768 tokens unless `max_position_embeddings` says otherwise. To add a family, see [add a model](add-a-model.md).
"""

BACKEND = """
## Every other decoder

A decoder without a native family runs on the code that transformers has for it: `pip install "tokenmill[transformers]"`, and nothing else to set. `--model-impl transformers` asks for it where there is a native family, too, and `--model-impl tokenmill` refuses it. Ours are attention and the paged cache, matrices (packed, so `--quantization`, `tokenmill quantize` and quantised checkpoints work), experts, embedding, head and sampling; the rest is transformers' modules. `tests/models/test_transformers_backend.py` and `..._bits.py` compare the models below as the native families are compared, on small random weights: logits, greedy tokens, and bits.

| family | models | architecture | special about it |
|---|---|---|---|
"""

BACKEND_TAIL = """
The list is what is tested, not what is let in. Before a weight is read, a pass over four tokens finds out what the model's code asks of attention: windows are read off the masks that it makes, scales, soft caps and sinks off its calls. What ours would not compute as transformers does is refused there, with the reason:

- attention that does not go through transformers' attention interface (Falcon, MPT, BLOOM), or changes its mask (ALiBi and other biases), or whose mask is no window (chunked attention);
- layers that keep something else than keys and values (state-space, linear and convolutional ones), or run several times in a pass;
- products, convolutions and shifts that mix the tokens of a batch outside attention;
- encoder-decoders, attention in both directions, models that take images or sound, and code from a model's repository, which is never run.

When the weights are there, 37 tokens are computed together, backwards and alone, each attending to itself only: rows that differ by more than roundings are refused, and roundings are logged, since then texts may depend on load. None of the families above has any.

Steps are direct, and the residual stream has the model's dtype, so a native family is faster and rounds less. It runs on a CPU; on a GPU it is refused. RoPE follows `max_model_len` as it does in native families. See [record 20](adr/0020-other-decoders-through-transformers.md).
"""


VISION = """
## Models that take images

A tower makes embeddings of an image, and a decoder, one of the families above, reads them in the place of tokens. [images.md](images.md) says how to send images. The table is made from `tests/helpers/vision_families.py`; `tests/models/test_vision.py`, `test_vision_engine.py` and `tests/unit/multimodal/test_processors.py` run over it, on small random weights that transformers has saved:

- the pixels that a tower sees and the tokens around them are those of transformers' processors (on pillow), bit by bit;
- embeddings in float32 are within 5e-5 of transformers', on the native kernels and on torch's, and tensors are found under the names of hubs' older files as well as of newer ones;
- greedy tokens of prompts with images are transformers', in a batch, with prompts and images cut into pieces, and from the cache; a request has the same bits however it is run, in float32 and bfloat16.

| family | models | architecture | an image becomes | decoders | not supported |
|---|---|---|---|---|---|
"""

VISION_TAIL = """
Text alone runs as on the decoder alone, at its speed: steps are recorded, and `--quantization`, quantised checkpoints, `tokenmill quantize` and adapters change the decoder. The tower keeps the model's dtype. An image is encoded by itself, when a step first reaches it, so its embeddings depend on nothing else; the tower's matrices and attention run on the native kernels. On a GPU the tower runs in torch, which no real GPU has tried yet ([images.md](images.md#in-the-engine)). In several processes, every rank of the first stage has the whole tower ([parallel.md](parallel.md#what-is-divided)). Where an image's tokens see each other in both directions (Gemma 3), a step has all of them ([record 34](adr/0034-images-that-see-themselves.md)).
"""


POOLING = """
## Models that pool

Every family above also embeds (`--runner pooling`), with its head or saved without, and scores as `...ForSequenceClassification` where transformers has that class: `tests/models/test_pooling_decoders.py` compares with it. Encoders, which attend in both directions, are made by `tests/helpers/pooling_families.py`; `tests/models/test_pooling_encoders.py` runs over them: vectors and scores within 1e-4 of transformers', and the same bits alone and in a batch. Both run on a GPU, too (`tests/e2e/test_gpu_pooling.py`, by Triton's interpreter). [pooling.md](pooling.md) says how to use them.

| family | models | embeddings | scores | weights tested | not supported |
|---|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    encoders = _listed("pooling_families.py", "ENCODER_FAMILIES")
    return (
        HEAD
        + "".join(map(row, _listed("families.py", "FAMILIES")))
        + TAIL
        + BACKEND
        + "".join(map(library_row, _listed("transformers_families.py", "LIBRARY_FAMILIES")))
        + BACKEND_TAIL
        + VISION
        + "".join(vision_row(each) for each in _listed("vision_families.py", "VISION_FAMILIES"))
        + VISION_TAIL
        + POOLING
        + "".join(map(encoder_row, encoders))
    )


def _listed(file: str, name: str) -> list[Any]:
    tests = str(ROOT / "tests")  # where one table may import another
    sys.path.insert(0, tests)
    try:
        found: list[Any] = runpy.run_path(f"{tests}/helpers/{file}")[name]
    finally:
        sys.path.remove(tests)
    return found


def library_row(family: Any) -> str:
    """One line of the table of models on transformers' code."""
    models = family.models or "native; on request"
    return f"| {family.name} | {models} | `{family.architecture}` | {family.tests} |\n"


def vision_row(family: Any) -> str:
    """One line of the table of models that take images; nothing for a variant of another."""
    if not family.models:
        return ""
    columns = [
        family.name,
        family.models,
        f"`{family.architecture}`",
        family.images,
        family.decoders,
        family.not_supported,
    ]
    return f"| {' | '.join(columns)} |\n"


def encoder_row(family: Any) -> str:
    """One line of the second table."""
    weights = f"real ({family.real_weights}), random" if family.real_weights else "random"
    columns = [
        family.name,
        family.models,
        f"`{family.body}`",
        f"`{family.classifier}`",
        weights,
        family.not_supported,
    ]
    return f"| {' | '.join(columns)} |\n"


def row(family: Any) -> str:
    """One line of the table."""
    weights = f"real (`{family.real_weights}`), random" if family.real_weights else "random"
    columns = [
        family.name,
        family.models,
        f"`{family.architecture}`",
        weights,
        f"`{family.gguf}`" if family.gguf else "",
        "yes" if family.runs_on_gpu else "refused",
        "recorded" if family.is_recorded else "direct",
        family.not_supported,
    ]
    return f"| {' | '.join(columns)} |\n"


if __name__ == "__main__":
    TARGET.write_text(render())
