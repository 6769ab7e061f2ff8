"""What adapters cost: the same requests without them and beside them, in one run.

Two engines, one without `enable_lora` and one with it, take turns, round after round. The second
runs a batch with none, one, and four adapters among its requests (every request has one then). The
ratio is that of output tokens per second to the engine without adapters, of medians; likewise for a
prompt, alone. Adapters change all linear layers and have random weights.

    python benchmarks/lora.py --model smollm2-135m --batch 16 --rank 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COUNTS = (0, 1, 4)


def write_adapter(path: Path, shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> Path:
    """An adapter for every matrix of the layers among tensors of these shapes."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and any(part.isdigit() for part in module.split(".")):
            prefix = f"base_model.model.{module}"
            a = torch.randn(rank, shape[1], generator=generator) / shape[1] ** 0.5
            tensors[f"{prefix}.lora_A.weight"] = a.bfloat16()
            b = torch.randn(shape[0], rank, generator=generator) / 100
            tensors[f"{prefix}.lora_B.weight"] = b.bfloat16()
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def decoding(llm: Any, adapters: list[Any], options: argparse.Namespace) -> float:
    """Output tokens a second of the batch, which has an adapter for each request in turn."""
    from tokenmill import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=options.tokens, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": [5 + number, 7, 11]} for number in range(options.batch)]
    chosen = [adapters[number % len(adapters)] for number in range(options.batch)]
    given = {"lora_request": chosen} if any(chosen) else {}
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False, **given)
    return float(options.batch * options.tokens / (time.perf_counter() - begin))


def prefill(llm: Any, adapters: list[Any], options: argparse.Namespace) -> float:
    """Prompt tokens a second of one prompt."""
    from tokenmill import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    given = {"lora_request": adapters[0]} if adapters[0] else {}
    ids = [3 + number % 1000 for number in range(options.prompt)]
    begin = time.perf_counter()
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False, **given)
    return options.prompt / (time.perf_counter() - begin)


def measure(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Medians of the rounds, and their ratios."""
    from tokenmill import LLM, LoRARequest
    from tokenmill.checkpoint.names import resolve_model
    from tokenmill.checkpoint.open import open_checkpoint

    shapes = open_checkpoint(resolve_model(options.model)).tensor_shapes
    paths = [write_adapter(root / str(i), shapes, options.rank, i) for i in range(max(COUNTS))]
    settings: dict[str, Any] = {
        "model": options.model,
        "device": "cpu",
        "max_model_len": max(options.tokens, options.prompt) + 16,
        "max_num_seqs": options.batch,
        "enable_prefix_caching": False,
        "kv_cache_memory_fraction": 0.2,
        **({"quantization": options.quantization} if options.quantization else {}),
    }
    plain = LLM(**settings)
    adapted = LLM(**settings, enable_lora=True, max_loras=max(COUNTS), max_lora_rank=options.rank)
    cases: dict[str, tuple[Any, list[Any]]] = {"without": (plain, [None])}
    for count in COUNTS:
        requests = [LoRARequest(str(i), str(path)) for i, path in enumerate(paths[:count])]
        cases[f"{count} adapters"] = (adapted, requests or [None])
    kinds = {"decoding": decoding, "prefill": prefill}
    found: dict[str, dict[str, list[float]]] = {
        kind: {case: [] for case in cases} for kind in kinds
    }
    for number in range(options.rounds + 1):
        for case, (llm, adapters) in cases.items():
            for kind, run in kinds.items():
                speed = run(llm, adapters, options)
                if number:  # the first round loads adapters and touches memory
                    found[kind][case].append(speed)
    medians = {
        kind: {case: statistics.median(speeds) for case, speeds in by_case.items()}
        for kind, by_case in found.items()
    }
    ratios = {
        kind: {case: speed / by_case["without"] for case, speed in by_case.items()}
        for kind, by_case in medians.items()
    }
    return {"tokens_per_second": medians, "ratio": ratios, "options": vars(options)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-lora-") as root:
        result = measure(options, Path(root))
    if options.json:
        print(json.dumps(result))
        return
    print(f"{options.model}, batch of {options.batch}, rank {options.rank}")
    for kind, by_case in result["tokens_per_second"].items():
        for case, speed in by_case.items():
            print(f"{kind:<9} {case:<11} {speed:8.0f} tokens/s  {result['ratio'][kind][case]:.3f}")


if __name__ == "__main__":
    main()
