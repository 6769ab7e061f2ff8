"""OpenVINO GenAI: python run_openvino.py DIRECTORY KV_DTYPE WORKLOADS REPEATS

DIRECTORY is a model that optimum-intel has exported; KV_DTYPE is a KV_CACHE_PRECISION or `default`.
"""

from __future__ import annotations

import sys
import time

from workloads import chosen, measure, report


def main(directory: str, kv_dtype: str, workloads: str, repeats: str) -> None:
    begin = time.perf_counter()
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    properties = {} if kv_dtype == "default" else {"KV_CACHE_PRECISION": kv_dtype}
    pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
    start_seconds = time.perf_counter() - begin

    def generate(prompts: list[list[int]], output_len: int) -> int:
        config = genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.do_sample = False
        config.ignore_eos = True
        inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(inputs))
        return sum(len(result.m_generation_ids[0]) for result in results)

    found = measure(generate, chosen(workloads), int(repeats))
    report(f"OpenVINO GenAI {genai.get_version()}", start_seconds, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
