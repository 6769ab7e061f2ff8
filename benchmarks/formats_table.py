"""Every weight format on every instruction set: exactness, perplexity, and speed beside the limit.

    python benchmarks/formats_table.py [--formats Q4_1 BF16] [--isas avx512 avx2] [--threads N]
                                       [--seconds 0.3]

Prints the table of docs/formats.md. Each instruction set is measured in a process of its own.

    exact        whether a row of a product has the same bits alone, in batches of several sizes,
                 and with any number of threads
    perplexity   of the default model with its weights in that format, beside that of the same
                 weights in float32, on a short text; for int8 and int4 it is that of a bfloat16
                 checkpoint, so that quantising counts as well
    M = 1, ...   time that a product must take with M rows, by the bytes of its weights or by its
                 operations, whichever takes longer, in parts of the time that it took

Rows of the model's matrices have 576 values, except those of the down projections, 1,536: only
these can have super-blocks of 256, as in files of llama.cpp, and the others take the type that
comes nearest. Vocabularies keep eight bits among block types.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from block_types import SUPER_BLOCK, quantize
from gguf.quants import dequantize

from tokenmill.checkpoint.names import resolve_model
from tokenmill.entrypoints.bench.kernel_cases import product_cases
from tokenmill.entrypoints.bench.limits import NativeLimits, best_seconds
from tokenmill.entrypoints.perplexity import QUALITY_TEXT, perplexity
from tokenmill.kernels import gemm, native

MODEL = "smollm2-135m"
BLOCK_TYPES = (
    "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1"}
"""Formats that plain checkpoints take while they are loaded, and their layouts."""
FORMATS = ("F32", "BF16", *BLOCK_TYPES, *QUANTIZED)
NEAREST = {
    "Q2_K": "IQ4_NL", "Q3_K": "IQ4_NL", "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
}  # fmt: skip
"""What a matrix takes whose rows are no multiple of 256 values."""
OUTPUTS, INPUTS = 8192, 2048
"""Of the product: a half of the gates of a model of a billion parameters, 16.8 million values."""
ROWS = (1, 16, 64, 512)
LEVELS = (("amx", "avx512", "avx2", "portable"), ("i8mm", "dotprod", "neon"))
"""Instruction sets of a kind of processor, best first."""
SCORED = "float32 of the same weights"

Multiply = Callable[[torch.Tensor], torch.Tensor]


# ---- one instruction set, in a process of its own -----------------------------------------------


def multiplier(weights: str) -> Multiply:
    """Rows in bfloat16, or float32 for F32, times a matrix in the format."""
    values = np.random.default_rng(5).standard_normal((320, INPUTS), np.float32)
    if weights == "F32":
        floats = gemm.PackedFloat32.pack(torch.from_numpy(values))
        return lambda x: gemm.gemm_float32(x.float(), floats, out=torch.empty(len(x), 320))
    if weights == "BF16":
        packed = gemm.PackedBf16.pack(torch.from_numpy(values).bfloat16())
        return lambda x: gemm.gemm_bf16(x, packed, out=torch.empty(len(x), 320).bfloat16())
    raw = torch.from_numpy(quantize(values, weights).reshape(-1))
    blocks = gemm.PackedBlocks.pack(weights, raw, 320, INPUTS)
    return lambda x: gemm.gemm_blocks(
        gemm.quantize_rows(x.float()), blocks, out=torch.empty(len(x), 320).bfloat16()
    )


def is_exact(weights: str, threads: int) -> bool:
    """Whether all ways of computing a row give the same bits."""
    multiply = multiplier(QUANTIZED.get(weights, weights))
    x = torch.from_numpy(np.random.default_rng(6).standard_normal((70, INPUTS), np.float32))
    x = x.bfloat16()
    results = []
    for num_threads in sorted({1, threads, threads + 1}):
        native.set_num_threads(num_threads)
        for size in (1, 3, 16, 33, 70):
            batches = [multiply(x[begin : begin + size]) for begin in range(0, 70, size)]
            results.append(torch.cat(batches))
    native.set_num_threads(threads)
    return all(torch.equal(each, results[0]) for each in results[1:])


def shares_of_limit(weights: str, seconds: float) -> list[float]:
    """Of the product with each of `ROWS` rows."""
    kernel = {"F32": "f32", "BF16": "bf16"}.get(weights, QUANTIZED.get(weights, weights))
    limits = NativeLimits("float32" if weights == "F32" else "bfloat16")
    peak = limits.peak(blocks=kernel in gemm.BLOCK_TYPES).flops
    shares = []
    for case in product_cases("product", OUTPUTS, INPUTS, ROWS, kernel):
        reading = case.num_bytes / limits.read_bandwidth(case.working_set)
        shares.append(max(reading, case.flops / peak) / best_seconds(case.call, seconds))
    return shares


def measure_isa(options: argparse.Namespace) -> dict[str, Any]:
    """All formats on the instruction set of this process."""
    threads = options.threads or len(os.sched_getaffinity(0))
    native.set_num_threads(threads)
    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    for weights in options.formats:
        file, settings = Path(options.child) / f"{source_of(weights)}.gguf", {}
        if weights in QUANTIZED:
            settings = {"quantization": weights}
        if weights == "F32":
            settings = {"dtype": "float32"}
        found[weights] = {
            "exact": is_exact(weights, threads),
            "perplexity": score(file, threads, **settings),
            "shares": shares_of_limit(weights, options.seconds),
        }
        if options.with_reference:
            found[weights][SCORED] = score(file, threads, dtype="float32")
    return found


def score(file: Path, threads: int, **settings: Any) -> float:
    """Perplexity of a model file on as much text as `max_model_len` allows."""
    pages = sorted((Path(__file__).parents[1] / "docs" / "adr").glob("000[1-5]-*.md"))
    return perplexity(
        "\n".join([QUALITY_TEXT, *(page.read_text(encoding="utf-8") for page in pages)]),
        model=str(file),
        device="cpu",
        num_threads=threads,
        kv_cache_dtype="float32",
        kv_cache_memory_bytes=1 << 28,
        max_model_len=1536,
        **settings,
    )


# ---- model files --------------------------------------------------------------------------------


def source_of(weights: str) -> str:
    """The format of the file behind it."""
    return "BF16" if weights in QUANTIZED else weights


def write_models(directory: Path, formats: Sequence[str]) -> None:
    """The default model, once for each of the files' formats."""
    reader = gguf.GGUFReader(resolve_model(MODEL))
    tensors = {
        tensor.name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for tensor in reader.tensors
    }
    for weights in dict.fromkeys(map(source_of, formats)):
        _write_model(directory / f"{weights}.gguf", reader, tensors, weights)


def _write_model(
    path: Path, reader: gguf.GGUFReader, tensors: dict[str, np.ndarray], weights: str
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, part in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        sub_type = part.types[1] if len(part.types) > 1 else None
        writer.add_key_value(name, part.contents(), part.types[0], sub_type)
    for name, values in tensors.items():
        kind = tensor_type(name, values.shape, weights)
        writer.add_tensor(
            name,
            quantize(values, kind) if values.ndim > 1 else values,
            raw_dtype=gguf.GGMLQuantizationType[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_type(name: str, shape: tuple[int, ...], weights: str) -> str:
    """What a tensor is stored as."""
    if len(shape) == 1:
        return "F32"
    if weights in ("F32", "BF16"):
        return weights
    if name == "token_embd.weight":
        return "Q8_0"
    return NEAREST.get(weights, weights) if shape[-1] % SUPER_BLOCK else weights


# ---- the table ----------------------------------------------------------------------------------


def available_isas() -> list[str]:
    """From the best one on."""
    best = native.module().detected_isa()
    (levels,) = [each for each in LEVELS if best in each]
    return list(levels[levels.index(best) :])


def in_child(isa: str, directory: Path, options: argparse.Namespace, *, first: bool) -> Any:
    """What a process with this instruction set finds."""
    command = [sys.executable, __file__, "--child", str(directory)]
    command += ["--formats", *options.formats, "--seconds", str(options.seconds)]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--with-reference"] if first else []
    run = subprocess.run(
        command, env={**os.environ, "TOKENMILL_ISA": isa}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(run.stdout)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown, a line a format and instruction set."""
    heads = ["format", "instructions", "exact", "perplexity", *(f"M = {m}" for m in ROWS)]
    lines = [heads, ["---", "---", "---", *["---:"] * (1 + len(ROWS))]]
    first = next(iter(found.values()))
    for weights in first:
        reference = first[weights][SCORED]
        for isa, by_format in found.items():
            each = by_format[weights]
            cost = each["perplexity"] / reference - 1
            shares = [f"{share:.0%}" for share in each["shares"]]
            exact = "yes" if each["exact"] else "NO"
            lines.append([weights, isa, exact, f"{cost:+.2%}", *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--isas", nargs="+", help="default: all that this processor has")
    parser.add_argument("--threads", type=int, help="default: what the process may use")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each product")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--with-reference", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_isa(options)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        write_models(Path(directory), options.formats)
        for isa in options.isas or available_isas():
            found[isa] = in_child(isa, Path(directory), options, first=not found)
    print(table(found))
    if not all(
        math.isfinite(each["perplexity"]) for isa in found.values() for each in isa.values()
    ):
        raise SystemExit("A perplexity is not a number.")


if __name__ == "__main__":
    main()
