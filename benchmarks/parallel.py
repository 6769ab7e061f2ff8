"""One model in several processes beside one process with as many threads, in one run.

    python benchmarks/parallel.py [--models default billion] [--repeats 3] [--json]

The first line is one process with two threads; the others have two processes with one thread each:
the layers divided (`tensor_parallel_size=2`), the layers among two stages
(`pipeline_parallel_size=2`), and two replicas (`data_parallel_size=2`). Decoding of 1 and of 16
requests with hardly a prompt, and a prompt of 1,024 tokens: tokens per second of one process, and
what the others reach of it. Settings take turns, and the best of all turns counts.

`default` is SmolLM2-135M, whose nine heads no two ranks can share: it is not divided by heads.
`billion` has the shape of Llama 3.2 1B and random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from one_billion_shape import write_config

from tokenmill import LLM, SamplingParams
from tokenmill.config.engine_args import EngineArgs
from tokenmill.errors import ConfigError

ONE = "one process"
SETTINGS: dict[str, dict[str, int]] = {
    ONE: {"num_threads": 2},
    "tensor parallel": {"tensor_parallel_size": 2, "num_threads": 1},
    "pipeline parallel": {"pipeline_parallel_size": 2, "num_threads": 1},
    "replicas": {"data_parallel_size": 2, "num_threads": 1},
}
NO_FIGURE = "-"


@dataclass(frozen=True)
class Workload:
    """Requests that are alike."""

    num_requests: int
    input_len: int
    output_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that count: of prompts where hardly anything is generated."""
        return self.num_requests * (self.output_len if self.output_len > 1 else self.input_len)

    def seconds(self, llm: LLM) -> float:
        """How long the engine takes for it."""
        prompts = [
            {"prompt_token_ids": [3 + (i * 977 + j * 131) % 250 for j in range(self.input_len)]}
            for i in range(self.num_requests)
        ]
        params = SamplingParams(temperature=0, max_tokens=self.output_len, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin


def workloads(input_len: int, output_len: int) -> dict[str, Workload]:
    """By name; `input_len` is that of the prompt, `output_len` what is decoded."""
    return {
        "decode 1": Workload(1, 8, output_len),
        "decode 16": Workload(16, 8, output_len),
        "prompt": Workload(1, input_len, 1),
    }


def measure(
    model: str, works: dict[str, Workload], repeats: int, **common: Any
) -> dict[str, dict[str, float] | str]:
    """By setting: most tokens per second of each workload, or why there can be none."""
    rates: dict[str, dict[str, float] | str] = {}
    for _ in range(repeats):
        for name, setting in SETTINGS.items():
            if isinstance(rates.get(name), str):
                continue
            try:
                with LLM(model, device="cpu", **common, **setting) as llm:
                    of_turn = {}
                    for work_name, work in works.items():
                        work.seconds(llm)  # pages are touched, and threads awake
                        of_turn[work_name] = work.num_tokens / work.seconds(llm)
            except ConfigError as error:
                rates[name] = str(error)
                continue
            best = rates.setdefault(name, of_turn)
            assert isinstance(best, dict)
            rates[name] = {each: max(best[each], of_turn[each]) for each in works}
    return rates


def table(rates: dict[str, dict[str, float] | str], works: Sequence[str]) -> list[list[str]]:
    """Rows of text: tokens per second of one process, and the others in parts of it."""
    one = rates[ONE]
    assert isinstance(one, dict), one
    rows = [["", *works]]
    for name, found in rates.items():
        if name == ONE:
            rows.append([f"{name}, tokens/s", *(f"{one[work]:.1f}" for work in works)])
        elif isinstance(found, str):
            rows.append([name, *[NO_FIGURE] * len(works)])
        else:
            rows.append([name, *(f"{found[work] / one[work]:.2f}" for work in works)])
    return rows


def print_table(title: str, rows: list[list[str]], notes: Sequence[str]) -> None:
    print(title)
    for row in rows:
        print("".join(f"{cell:<24}" if i == 0 else f"{cell:>12}" for i, cell in enumerate(row)))
    for note in notes:
        print(f"{NO_FIGURE} {note}")
    print()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=["default", "billion"], help="default, billion, or paths"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    works = workloads(options.input_len, options.output_len)
    common: dict[str, Any] = {
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 1 << 29,
        "max_model_len": options.input_len + options.output_len + 8,
    }
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory))
        for model in options.models:
            more = {"load_format": "dummy"} if model == "billion" else {}
            path = {"default": EngineArgs.model, "billion": directory}.get(model, model)
            results[model] = measure(path, works, options.repeats, **common, **more)
    if options.json:
        print(json.dumps(results))
        return
    for model, rates in results.items():
        notes = [each for each in rates.values() if isinstance(each, str)]
        print_table(model, table(rates, list(works)), notes)


if __name__ == "__main__":
    main()
