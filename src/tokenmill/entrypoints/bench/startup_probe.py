"""The measured process of `startup.py`: its argument is `EngineArgs` as JSON, it prints a `Sample`.

torch is imported first, so that its import can be told from the rest. Otherwise the engine imports
it while the tokenizer is built in another thread.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

PROMPT = [1, 2, 3]


def main(text: str) -> None:
    """Measure the start of this process."""
    begin = time.perf_counter()
    import torch  # noqa: F401

    torch_imported = time.perf_counter()
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.entrypoints.bench.limits import limits_of
    from tokenmill.entrypoints.bench.startup import IMPORT_TORCH, Sample
    from tokenmill.entrypoints.llm import LLM
    from tokenmill.observe.stage_times import StageTimes
    from tokenmill.sampling_params import SamplingParams

    settings = msgspec.json.decode(text, type=dict[str, Any])
    with StageTimes() as times:
        _watch(times)
        all_imported = time.perf_counter()
        llm = LLM(**settings)
        built = time.perf_counter()
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        done, done_time = time.perf_counter(), time.monotonic()
        anonymous_bytes = _anonymous_bytes()
        watched = {name: stage.seconds for name, stage in times.take().items()}
    config = llm.llm_engine.config
    checkpoint_bytes = _checkpoint_bytes(EngineArgs(**settings))
    sample = Sample(
        stages={
            IMPORT_TORCH: torch_imported - begin,
            "import the rest": all_imported - torch_imported,
            **watched,
            "other building": built - all_imported - sum(watched.values()),
            "first token": done - built,
        },
        to_first_token=done - torch_imported,
        first_token_time=done_time,
        anonymous_bytes=anonymous_bytes,
        weight_bytes=config.ledger.weights,
        kv_pool_bytes=config.ledger.kv_pool,
        on_host=config.device == "cpu",
        checkpoint_bytes=checkpoint_bytes,
        read_bandwidth=limits_of("cpu", config.model.dtype).read_bandwidth(checkpoint_bytes),
    )
    llm.close()
    print(msgspec.json.encode(sample).decode())


def _watch(times: Any) -> None:
    """Stages of building an engine that follow one another."""
    import torch

    from tokenmill.engine import build as engine_build
    from tokenmill.worker import build as worker_build
    from tokenmill.worker.model_runner import ModelRunner

    times.watch(engine_build, "open_model", "open the model")
    times.watch(engine_build, "settle_config", "settle the settings")
    builders: list[ModuleType] = [worker_build]
    if torch.cuda.is_available():
        from tokenmill.worker import gpu as gpu_build

        builders.append(gpu_build)
    for builder in builders:
        times.watch(builder, "load_model", "load the weights")
        times.watch(builder, "bind_attention", "make the KV cache")
    times.watch(ModelRunner, "capture", "record the step")


def _checkpoint_bytes(args: Any) -> int:
    from tokenmill.engine.build import open_model

    checkpoint = open_model(args, lambda stage, done, total: None)
    try:
        return checkpoint.num_bytes
    finally:
        checkpoint.close()


def _anonymous_bytes() -> int:
    """Bytes of this process that are no file, in memory or swapped out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return (int(kib["RssAnon"]) + int(kib["VmSwap"])) << 10


if __name__ == "__main__":
    main(sys.argv[1])
