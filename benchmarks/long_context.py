"""Long prompts on a model of the shape of Llama 3.2 1B: attention, decoding, and who waits for it.

    python benchmarks/long_context.py [--cases 8192x16 32768x4] [--kv bfloat16 int8]
                                      [--quantization int4] [--threads N] [--json]

A case is a prompt's length and the number of the model's layers: 32,768 tokens through all 16 take
minutes, and a layer is like the other. Weights are random, which no kernel notices. One request
decodes; then the long prompt comes, and both run until it is computed; then it decodes alone.

    attention   operations of the long prompt's attention over the time in that kernel, in TFLOP/s,
                and beside the processor's peak with bfloat16 and with int8 operands
    decode      tokens per second behind the prompt, and the time that reading weights, keys and
                values once takes at the memory's rate, in parts of the time that it took
    gap         between two tokens of the other request, while the prompt is computed
    chunk       tokens of the prompt in a step, at its beginning and at its end
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from one_billion_shape import write_config
from rich.console import Console
from rich.table import Table

from tokenmill import LLM, SamplingParams
from tokenmill.config.engine_args import EngineArgs
from tokenmill.entrypoints.bench.cost import Cost, ModelCost
from tokenmill.entrypoints.bench.limits import NativeLimits
from tokenmill.entrypoints.bench.recorder import StepRecord, StepRecorder
from tokenmill.entrypoints.bench.serving import cost_of, held_weights, random_prompts

CASES = ("8192x16", "32768x4")
KV_DTYPES = ("bfloat16", "int8")
DECODE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case with one type of cache."""

    prompt_len: int
    num_layers: int
    kv_dtype: str
    prompt_tokens_per_second: float
    attention_flops: float
    """Per second."""
    share_of_bf16_peak: float
    share_of_int8_peak: float
    decode_tokens_per_second: float
    share_of_read_limit: float
    gap_median: float
    """Seconds."""
    gap_longest: float
    first_chunk: int
    last_chunk: int


def run(llm: LLM, prompt_len: int) -> list[StepRecord]:
    """A request that decodes, the prompt beside it, and what follows the prompt."""
    engine = llm.llm_engine
    endless = SamplingParams(temperature=0, max_tokens=prompt_len, ignore_eos=True)
    short, long = random_prompts(2, prompt_len, engine.config.model.vocab_size)
    with StepRecorder(llm, profile=True) as recorder:
        engine.add_request("short", short[:32], endless)
        for _ in range(3):
            recorder.step()
        recorder.steps.clear()
        engine.add_request("long", long, endless)
        while not any(output.request_id == "long" for output in recorder.step()):
            pass
        engine.abort_request(["short"])
        for _ in range(DECODE_STEPS):
            recorder.step()
        engine.abort_request(["long"])
        return recorder.steps


def attention_rate(steps: Sequence[StepRecord], cost: ModelCost) -> float:
    """Operations per second in the kernel."""
    flops = sum(
        layer.of(work).flops for layer in cost.attention for step in steps for work in step.work
    )
    return flops / sum(step.kernels["attention"][1] for step in steps)


def figures(
    llm: LLM, cost: ModelCost, prompt_len: int, peaks: tuple[float, float], limits: NativeLimits
) -> Figures:
    """Run the case and look at its steps."""
    steps = run(llm, prompt_len)
    beside = [step for step in steps if not step.is_decode]
    alone = [step for step in steps if step.is_decode and len(step.work) == 1]
    rate = attention_rate(beside, cost)
    num_bytes = sum((cost.of(step.work) for step in alone), Cost()).num_bytes / len(alone)
    seconds = median(step.seconds for step in alone)
    gaps = [step.seconds for step in beside]
    config = llm.llm_engine.config
    chunks = [step.num_tokens - (len(step.work) - 1) for step in beside]
    return Figures(
        prompt_len=prompt_len,
        num_layers=len(cost.attention),
        kv_dtype=config.cache.dtype,
        prompt_tokens_per_second=prompt_len / sum(gaps),
        attention_flops=rate,
        share_of_bf16_peak=rate / peaks[0],
        share_of_int8_peak=rate / peaks[1],
        decode_tokens_per_second=1 / seconds,
        share_of_read_limit=num_bytes / limits.read_bandwidth(int(num_bytes)) / seconds,
        gap_median=median(gaps),
        gap_longest=max(gaps),
        first_chunk=chunks[0],
        last_chunk=chunks[-2:][0],  # behind it comes what was left
    )


def measure(case: str, kv_dtype: str, options: argparse.Namespace, directory: Path) -> Figures:
    """One case, by an engine of its own."""
    prompt_len, num_layers = (int(part) for part in case.split("x"))
    room = prompt_len + 1024
    settings: dict[str, Any] = {
        "model": str(directory),
        "load_format": "dummy",
        "device": "cpu",
        "quantization": options.quantization,
        "kv_cache_dtype": kv_dtype,
        "num_threads": options.threads,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 2,
        "max_model_len": room,
        "kv_cache_memory_fraction": 0.8,
        "hf_overrides": {"num_hidden_layers": num_layers, "max_position_embeddings": room},
    }
    with LLM(**settings) as llm:
        config = llm.llm_engine.config
        cost = cost_of(llm, held_weights(EngineArgs(**settings), config))
        limits = NativeLimits(config.model.dtype)
        peaks = limits.peak(blocks=False).flops, limits.peak(blocks=True).flops
        return figures(llm, cost, prompt_len, peaks, limits)


def show(rows: Sequence[Figures]) -> None:
    """One line a case and type of cache."""
    table = Table(title="long prompts, 1B shape")
    headings = ("prompt", "layers", "KV", "tok/s", "TFLOP/s", "of bf16", "of int8")
    for heading in (*headings, "decode", "of reading", "gap ms", "longest", "chunk"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.prompt_len:,}",
            str(row.num_layers),
            row.kv_dtype,
            f"{row.prompt_tokens_per_second:,.0f}",
            f"{row.attention_flops / 1e12:.3f}",
            f"{row.share_of_bf16_peak:.0%}",
            f"{row.share_of_int8_peak:.0%}",
            f"{row.decode_tokens_per_second:.1f}",
            f"{row.share_of_read_limit:.0%}",
            f"{1e3 * row.gap_median:.0f}",
            f"{1e3 * row.gap_longest:.0f}",
            f"{row.first_chunk}-{row.last_chunk}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help="prompt's length x layers")
    parser.add_argument("--kv", nargs="+", default=KV_DTYPES, help="types of KV cache")
    parser.add_argument("--quantization", default="int4", help="of the weights: int4, int8")
    parser.add_argument("--threads", type=int, help="default: what the process may use")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory))
        rows = [
            measure(case, kv_dtype, options, Path(directory))
            for case in options.cases
            for kv_dtype in options.kv
        ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        show(rows)


if __name__ == "__main__":
    main()
