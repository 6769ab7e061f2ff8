"""`tokenmill inspect`: what a model is, what it needs, and whether it fits this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from tokenmill.entrypoints.cli.flags import Quiet
from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.entrypoints.cli.session import open_console

if TYPE_CHECKING:
    from tokenmill.engine.inspection import ModelReport

MODEL = Parameter(alias="-m", help="A directory, a GGUF file, an alias, owner/name at the hub.")
REVISION = Parameter(help="Branch, tag or commit of a hub id.")
LOAD_FORMAT = Parameter(help="dummy: a directory with a config.json is enough.")
DTYPE = Parameter(help="Type of activations: auto, bfloat16, float16 or float32.")
KV_CACHE_DTYPE = Parameter(help="Type of the KV cache: auto, bfloat16, float16, float32 or int8.")
DEVICE = Parameter(help="auto, cuda or cpu.")
JSON = Parameter(name="--json", negative=(), help="One JSON object.")


def inspect_command(
    model: Annotated[str, MODEL],
    *,
    revision: Annotated[str | None, REVISION] = None,
    load_format: Annotated[str, LOAD_FORMAT] = "auto",
    dtype: Annotated[str, DTYPE] = "auto",
    kv_cache_dtype: Annotated[str, KV_CACHE_DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
    as_json: Annotated[bool, JSON] = False,
    quiet: Quiet = False,
) -> int:
    """Print architecture, parameters, formats, and the memory that one request takes by length."""
    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.engine.inspection import inspect_model

    args = EngineArgs(
        model=model,
        revision=revision,
        load_format=load_format,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
    )
    with loading_progress(open_console(), shown=not quiet) as on_progress:
        report = inspect_model(args, on_progress)
    if as_json:
        import json

        print(json.dumps(asdict(report)))
    else:
        print("\n".join(lines(report)))
    return 0


def lines(report: ModelReport) -> list[str]:
    """The report as text."""
    from tokenmill.config.memory import format_bytes
    from tokenmill.features.multimodal.processing import takes_images

    sizes = report.parameters
    takes = " (takes images)" if takes_images(sizes.architecture) else ""
    notes = {"": " (not supported)", "transformers": " (runs on transformers' code)"}
    formats = ", ".join(f"{name} {_millions(n)}" for name, n in report.formats.items())
    head = [
        ("model", f"{report.model} ({report.path})"),
        ("architecture", f"{sizes.architecture}{notes.get(report.implementation, takes)}"),
        (
            "shape",
            f"{sizes.num_layers} layers, hidden size {sizes.hidden_size:,}, {sizes.num_heads} heads"
            f" of {sizes.head_size} ({sizes.num_kv_heads} KV heads), vocabulary"
            f" {sizes.vocab_size:,}, context {sizes.max_context:,}",
        ),
        ("parameters", f"{_millions(report.num_parameters)}: {formats}"),
        ("on disk", format_bytes(report.file_bytes)),
        (
            "in memory",
            f"{format_bytes(report.weight_bytes)}, with {report.dtype} activations on the"
            f" {report.kernels} kernels",
        ),
    ]
    if report.why_not:
        head.insert(2, ("because", report.why_not))
    table = [
        f"  {need.context:>12,}{format_bytes(need.kv_cache):>14}{format_bytes(need.total):>14}"
        f"  {'fits' if need.fits else 'does not fit'}"
        for need in report.needs
    ]
    return [
        *(f"{name:<14}{text}" for name, text in head),
        f"one request, of the {format_bytes(report.available_bytes)} available here, with KV in"
        f" {report.kv_dtype}:",
        f"  {'context':>12}{'KV cache':>14}{'in all':>14}",
        *table,
    ]


def _millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"
