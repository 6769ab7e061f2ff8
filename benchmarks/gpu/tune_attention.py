"""Which tiles attention should use on the card at hand.

    PYTHONPATH=src python3 benchmarks/gpu/tune_attention.py [--seconds 90] [--json results.json]
                                                            [--only decode] [--head-size 64]

bits      whether a token has the same bits in a prompt, in pieces of it and decoded, for the tiles
          of `choose_config` and for the others
decode    requests of one token, as a fraction of the bytes that the card reads in a second
prompts   prompts and pieces of prompts, in TFLOP/s, beside torch's attention without a paged cache

Heads are those of Llama 3, of 128 values as with 8 billion parameters or of 64 as with 1. Kernels
are compiled beforehand, in processes that fill Triton's cache. To try the script without a card:
TRITON_INTERPRET=1 and --device cpu, at small sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch
from gpucheck.timing import median_milliseconds, synchronize

from tokenmill.kernels.gpu.attention import paged_attention
from tokenmill.kernels.gpu.attention_config import AttentionConfig, TileConfig, choose_config
from tokenmill.kernels.gpu.attention_launch import plan_attention, workspace_size

NUM_HEADS, NUM_KV_HEADS = 32, 8
HEAD_SIZE = int(os.environ.get("TUNED_HEAD_SIZE", "128"))
"""Set by --head-size, for the processes that compile, too."""
BLOCK_SIZE = 64
SPLITS = {
    True: [
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 2),
        TileConfig(64, 64, 4, 4),
        TileConfig(64, 64, 8, 3),
        TileConfig(64, 128, 8, 2),
        TileConfig(64, 32, 4, 4),
    ],
    False: [
        TileConfig(16, 64, 4, 3, 168),
        TileConfig(16, 64, 4, 3),
        TileConfig(16, 64, 4, 4),
        TileConfig(16, 64, 4, 2, 128),
        TileConfig(16, 64, 2, 3),
        TileConfig(16, 128, 4, 2),
        TileConfig(16, 128, 8, 3),
        TileConfig(16, 32, 4, 4, 128),
        TileConfig(64, 64, 4, 3),
    ],
}
"""By whether they are exact."""
PREFILLS = {
    True: [
        TileConfig(128, 64, 8, 3),
        TileConfig(128, 64, 8, 2),
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 2),
        TileConfig(128, 128, 8, 2),
        TileConfig(128, 32, 8, 4),
    ],
    False: [
        TileConfig(128, 64, 8, 3),
        TileConfig(128, 64, 8, 2),
        TileConfig(128, 128, 8, 2),
        TileConfig(128, 128, 8, 3),
        TileConfig(128, 64, 4, 3),
        TileConfig(64, 64, 4, 3),
        TileConfig(64, 64, 4, 2),
        TileConfig(64, 128, 4, 2),
    ],
}
PROGRAMS_PER_SM = (2, 3, 4, 6, 8)
PARTITIONS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Batch:
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def num_bytes(self) -> float:
        return 4.0 * sum(self.seq_lens) * NUM_KV_HEADS * HEAD_SIZE

    @property
    def num_flops(self) -> float:
        pairs = (
            q * (s - q) + q * (q + 1) / 2
            for q, s in zip(self.query_lens, self.seq_lens, strict=True)
        )
        return 4.0 * sum(pairs) * NUM_HEADS * HEAD_SIZE


def decoding(num_reqs: int, shortest: int, longest: int) -> Batch:
    """Lengths spread evenly, in no order."""
    lens = [
        shortest + (longest - shortest) * (37 * i % num_reqs) // num_reqs for i in range(num_reqs)
    ]
    return Batch([1] * num_reqs, lens)


DECODES = {
    "1 x 550": decoding(1, 550, 550),
    "64 x 550": decoding(64, 520, 580),
    "64 x 1k-4k": decoding(64, 1024, 4096),
    "256 x 200-2k": decoding(256, 200, 2048),
    "8 x 4k": decoding(8, 3900, 4096),
    "1 x 32k": decoding(1, 32768, 32768),
}
PROMPTS = {
    "8192": Batch([8192], [8192]),
    "4 x 2048": Batch([2048] * 4, [2048] * 4),
    "2048 at 16384": Batch([2048], [16384]),
}
SMALL_DECODES = {"2 x 100": decoding(2, 90, 100)}
SMALL_PROMPTS = {"40": Batch([40], [40])}


class Step:
    """A batch on the device, ready to be attended to."""

    def __init__(self, batch: Batch, device: str) -> None:
        self.batch, self.device = batch, device
        used = [-(-n // BLOCK_SIZE) for n in batch.seq_lens]
        blocks = torch.randperm(sum(used), device=device).int() + 1
        shape = (sum(used) + 1, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
        self.table = torch.zeros(len(used), max(used), dtype=torch.int32, device=device)
        for row, own in zip(self.table, blocks.split(used), strict=True):
            row[: len(own)] = own
        self.lens = torch.tensor(batch.seq_lens, dtype=torch.int32, device=device)
        self.starts = torch.tensor([0, *batch.query_lens], device=device).cumsum(0).int()
        size = (sum(batch.query_lens), NUM_HEADS * HEAD_SIZE)
        self.query = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()

    def prepare(self, config: AttentionConfig) -> torch.Tensor:
        """A workspace with the plan in it."""
        longest = max(self.batch.seq_lens)
        heads = (NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE)
        size = workspace_size(len(self.lens), *heads, longest, partition=config.partition)
        workspace = torch.empty(size, device=self.device)
        plan_attention(
            self.starts,
            self.lens,
            workspace,
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            head_size=HEAD_SIZE,
            config=config,
        )
        return workspace

    def attend(self, config: AttentionConfig, workspace: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self.query)
        paged_attention(
            self.query,
            self.cache,
            self.table,
            self.lens,
            self.starts,
            out,
            workspace=workspace,
            max_query_len=max(self.batch.query_lens),
            max_seq_len=max(self.batch.seq_lens),
            scale=HEAD_SIZE**-0.5,
            config=config,
            planned=True,
        )
        return out

    def milliseconds(self, config: AttentionConfig) -> float:
        workspace = self.prepare(config)
        return median_milliseconds(lambda _: self.attend(config, workspace), self.device)

    def part(self, start: int, end: int) -> Step:
        """The step that computes tokens start to end of the only request."""
        part = object.__new__(Step)
        part.__dict__ = self.__dict__ | {
            "batch": Batch([end - start], [end]),
            "query": self.query[start:end],
            "starts": torch.tensor([0, end - start], dtype=torch.int32, device=self.device),
            "lens": torch.tensor([end], dtype=torch.int32, device=self.device),
        }
        return part


def default(exact: bool) -> AttentionConfig:
    return choose_config(NUM_HEADS // NUM_KV_HEADS, HEAD_SIZE, torch.bfloat16, exact=exact)


def split_configs(exact: bool) -> Iterator[AttentionConfig]:
    """Every tile at every number of programs, and the table's at every size of partitions."""
    base = default(exact)
    for split, programs in itertools.product(SPLITS[exact], PROGRAMS_PER_SM):
        prefill = replace(base.prefill, block_n=split.block_n) if exact else base.prefill
        yield replace(base, split=split, prefill=prefill, programs_per_sm=programs)
    for partition, programs, one_loop in itertools.product(
        PARTITIONS, PROGRAMS_PER_SM[2:], (False, True)
    ):
        yield replace(base, partition=partition, programs_per_sm=programs, one_loop=one_loop)


def prefill_configs(exact: bool) -> Iterator[AttentionConfig]:
    base = default(exact)
    for prefill in PREFILLS[exact]:
        split = replace(base.split, block_n=prefill.block_n) if exact else base.split
        yield replace(base, split=split, prefill=prefill)


def all_configs() -> list[AttentionConfig]:
    """One of each pair of kernels; the number of programs compiles nothing new."""
    found = {}
    for exact in (True, False):
        for config in itertools.chain(split_configs(exact), prefill_configs(exact)):
            found[replace(config, programs_per_sm=1)] = None
    return list(found)


def compile_ahead(device: str, num_workers: int) -> None:
    if device != "cuda":
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        for failure in pool.map(compile_one, all_configs()):
            if failure:
                print("does not run:", failure)


def compile_one(config: AttentionConfig) -> str | None:
    """Launch both kernels and the merge; what went wrong, if anything did."""
    try:
        step = Step(Batch([1, 100], [600, 700]), "cuda")
        step.attend(config, step.prepare(config))
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  reported, and the others are to be measured
        return f"{config}: {error!r}"[:400]
    return None


def check_bits(device: str) -> None:
    """Print which exact tiles give the bits of the table's."""
    print("\nbits of a prompt, of pieces and of single tokens, beside the prompt by the table")
    length, cuts = (1100, (0, 1, 255, 256, 257, 700, 1099, 1100))
    configs = [default(True), *split_configs(True), *prefill_configs(True)]
    if device == "cpu":
        length, cuts, configs = 40, (0, 1, 39, 40), configs[:1]
    whole = Step(Batch([length], [length]), device)
    wanted = whole.attend(default(True), whole.prepare(default(True)))
    for config in dict.fromkeys(replace(c, programs_per_sm=4) for c in configs):
        if config.partition != default(True).partition:
            continue
        try:
            pieces = [whole.part(a, b) for a, b in itertools.pairwise(cuts)]
            found = torch.cat([p.attend(config, p.prepare(config)) for p in pieces])
            same = "equal" if torch.equal(found, wanted) else "DIFFER"
        except Exception as error:  # noqa: BLE001  as above
            same = repr(error)[:200]
        print(f"  {describe(config.split)}  {describe(config.prefill)}  {same}", flush=True)


def describe(tile: TileConfig) -> str:
    registers = f" r{tile.max_registers}" if tile.max_registers else ""
    return f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}{registers}"


class Bench:
    """Measures until the time is up."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.deadline = device, time.monotonic() + seconds
        data = torch.randn(1 << (30 if device == "cuda" else 20), device=device)
        out = torch.empty((), device=device)
        milliseconds = median_milliseconds(lambda _: torch.amax(data, dim=0, out=out), device)
        self.bandwidth = data.nbytes / milliseconds * 1e3
        print(f"read: {self.bandwidth / 1e12:.2f} TB/s")
        self.results: list[dict] = []

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    def decode(self, batches: dict[str, Batch]) -> None:
        for (name, batch), exact in itertools.product(batches.items(), (True, False)):
            step = Step(batch, self.device)
            print(f"\ndecode {name}{', exact' * exact}: fraction of reading, microseconds")
            limit = batch.num_bytes / self.bandwidth * 1e3
            self._sweep("decode", name, step, list(split_configs(exact)), limit)

    def prompts(self, batches: dict[str, Batch]) -> None:
        for (name, batch), exact in itertools.product(batches.items(), (True, False)):
            step = Step(batch, self.device)
            print(f"\nprompts {name}{', exact' * exact}: TFLOP/s, microseconds")
            if not exact and len(set(batch.query_lens)) == 1 and batch.query_lens == batch.seq_lens:
                milliseconds = self._torch(batch)
                print(f"  torch {batch.num_flops / milliseconds / 1e9:6.0f}")
            limit = batch.num_flops / 1e9
            self._sweep("prompts", name, step, list(prefill_configs(exact)), limit)

    def _sweep(
        self, part: str, name: str, step: Step, configs: list[AttentionConfig], limit: float
    ) -> None:
        found = []
        for config in configs:
            if self.is_over():
                break
            try:
                milliseconds = step.milliseconds(config)
            except Exception as error:  # noqa: BLE001  as above
                print(f"  {config}: {error!r}"[:300])
                continue
            found.append((limit / milliseconds, milliseconds * 1e3, config))
            figures = {"part": part, "batch": name, "milliseconds": milliseconds}
            self.results.append(figures | {"rate": limit / milliseconds, "config": asdict(config)})
        for rate, microseconds, config in sorted(found, key=lambda row: -row[0])[:10]:
            print(
                f"  {rate:7.2f} {microseconds:9.1f}  split {describe(config.split):<22}"
                f" prefill {describe(config.prefill):<16} partition {config.partition}"
                f" programs {config.programs_per_sm}{' one loop' * config.one_loop}",
                flush=True,
            )

    def _torch(self, batch: Batch) -> float:
        shape = (len(batch.query_lens), NUM_HEADS, batch.query_lens[0], HEAD_SIZE)
        q, k, v = (
            torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_() for _ in range(3)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return median_milliseconds(lambda _: attend(q, k, v, is_causal=True), self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=90.0, help="stop measuring after these")
    parser.add_argument("--json", help="where to write all that was measured")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=["bits", "prompts", "decode"], help="one part")
    parser.add_argument("--head-size", type=int, choices=[64, 128], default=HEAD_SIZE)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.head_size != HEAD_SIZE:
        environment = os.environ | {"TUNED_HEAD_SIZE": str(options.head_size)}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    begin = time.monotonic()
    torch.manual_seed(0)
    compile_ahead(options.device, options.workers)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    bench = Bench(options.device, options.seconds)
    small = options.device == "cpu"
    if options.only in (None, "bits"):
        check_bits(options.device)
    if options.only in (None, "prompts"):
        bench.prompts(SMALL_PROMPTS if small else PROMPTS)
    if options.only in (None, "decode"):
        bench.decode(SMALL_DECODES if small else DECODES)
    synchronize(options.device)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(bench.results, file, indent=1)


if __name__ == "__main__":
    main()
