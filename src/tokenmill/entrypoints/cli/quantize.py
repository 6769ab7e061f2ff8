"""`tokenmill quantize`: weights in fewer bits, packed once, and what they cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tokenmill.entrypoints.cli.flags import Quiet
from tokenmill.entrypoints.cli.progress import loading_progress
from tokenmill.entrypoints.cli.session import open_console
from tokenmill.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from tokenmill.checkpoint.packed_directory import Manifest
    from tokenmill.engine.build import Progress

FORMATS = ("int8", "int4")

MODEL = Parameter(alias="-m", help="A directory with safetensors, an alias, owner/name at the hub.")
OUT = Parameter(help="Directory to be written; later it is the model. Left out: only --check.")
FORMAT = Parameter(help="int8 or int4; vocabularies are int8 in both.")
CHECK = Parameter(negative=(), help="Print the perplexity on a short text, before and after.")
OVERWRITE = Parameter(negative=(), help="Replace packed weights of another source or format.")
REVISION = Parameter(help="Branch, tag or commit of a hub id.")
THREADS = Parameter(help="Compute threads.")


def quantize_command(
    model: Annotated[str, MODEL],
    out: Annotated[Path | None, OUT] = None,
    *,
    format: Annotated[str, FORMAT] = "int8",
    check: Annotated[bool, CHECK] = False,
    overwrite: Annotated[bool, OVERWRITE] = False,
    revision: Annotated[str | None, REVISION] = None,
    num_threads: Annotated[int | None, THREADS] = None,
    quiet: Quiet = False,
) -> int:
    """Quantise the matrices of a model and write them as the CPU's kernels read them.

    The next start maps the result instead of packing. With --check, also print what the format
    costs: the perplexity on a short built-in text, of the model as it is and quantised.
    """
    if format not in FORMATS:
        raise ConfigError(
            f"--format {format} is not one of: {', '.join(FORMATS)}.{did_you_mean(format, FORMATS)}"
        )
    if out is None and not check:
        raise ConfigError("Nothing to do: give a directory to write, or --check.")
    settings = {"model": model, "revision": revision, "num_threads": num_threads, "device": "cpu"}
    with loading_progress(open_console(), shown=not quiet) as on_progress:
        if out is not None:
            print(_write(settings, out, format, overwrite, on_progress))
    if check:
        print(_quality(settings, out, format))
    return 0


def _write(
    settings: dict[str, Any], out: Path, format_: str, overwrite: bool, on_progress: Progress
) -> str:
    from tokenmill.config.memory import format_bytes
    from tokenmill.quantization.pack_checkpoint import existing_manifest

    present = existing_manifest(out, read=not overwrite)
    manifest, is_new = _packed(settings, out, format_, present, on_progress)
    verb = "written to" if is_new else "up to date in"
    return (
        f"{format_} weights of {manifest.source} {verb} {out}:"
        f" {format_bytes(manifest.num_bytes)}, {len(manifest.tensors)} matrices,"
        f" source {manifest.source_digest[:16]}"
    )


def _packed(
    settings: dict[str, Any],
    out: Path,
    format_: str,
    present: Manifest | None,
    on_progress: Progress,
) -> tuple[Manifest, bool]:
    """The manifest, and whether it was written now."""
    from typing import cast

    from tokenmill.config.engine_args import EngineArgs
    from tokenmill.config.machine import read_machine
    from tokenmill.engine.build import open_model, settle_implementation
    from tokenmill.kernels import native
    from tokenmill.models.loader import tensor_shapes
    from tokenmill.quantization.pack_checkpoint import pack_checkpoint, tensors_digest
    from tokenmill.quantization.packed_blocks import Quantization

    native.module()  # refuses where the kernels that packing is for cannot be used
    native.set_num_threads(settings["num_threads"] or read_machine().num_cpus)
    args = EngineArgs(**settings)
    checkpoint = open_model(args, on_progress)
    try:
        if present is not None:
            if present.format == format_ and present.source_digest == tensors_digest(checkpoint):
                return present, False
            raise ConfigError(
                f"{out}: holds {present.format} weights of {present.source} (source"
                f" {present.source_digest[:16]}), which are not {format_} weights of this model."
                f" Add --overwrite to replace them."
            )
        manifest = pack_checkpoint(
            checkpoint,
            out,
            cast(Quantization, format_),
            source=settings["model"],
            order=tensor_shapes(
                checkpoint.config, settle_implementation(args, checkpoint.config)[0]
            ),
            on_progress=lambda done, total: on_progress("load", done, total),
        )
        return manifest, True
    finally:
        checkpoint.close()


def _quality(settings: dict[str, Any], out: Path | None, format_: str) -> str:
    from tokenmill.entrypoints.perplexity import perplexity

    settings = {**settings, "kv_cache_dtype": "bfloat16"}  # only weights differ
    plain = perplexity(**settings)
    changed = (
        perplexity(**{**settings, "model": str(out), "revision": None})
        if out is not None
        else perplexity(**settings, quantization=format_)
    )
    return (
        f"perplexity on a short text: {plain:.3f} as it is, {changed:.3f} in {format_}"
        f" ({changed / plain - 1:+.2%})"
    )
