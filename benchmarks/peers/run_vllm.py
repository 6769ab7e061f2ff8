"""vLLM on a CPU: python run_vllm.py DIRECTORY [SETTINGS] WORKLOADS REPEATS

SETTINGS is a JSON object of more arguments of the engine.

Its environment (allocator, OpenMP, bound threads, KV space) is set by `compare.py`.
"""

from __future__ import annotations

import json
import sys
import time

from workloads import chosen, measure, report


def main(directory: str, *rest: str) -> None:
    *given, workloads, repeats = rest
    settings = json.loads("".join(given) or "{}")
    begin = time.perf_counter()
    import vllm

    llm = vllm.LLM(
        model=directory,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=2048,
        **settings,
    )
    start_seconds = time.perf_counter() - begin

    def generate(prompts: list[list[int]], output_len: int) -> int:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=not settings.get("skip_tokenizer_init", False),
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    found = measure(generate, chosen(workloads), int(repeats))
    report(f"vLLM {vllm.__version__}", start_seconds, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
