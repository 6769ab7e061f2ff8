"""The CUDA path on the card at hand: is it right, and how near is it to the card's limits?

    PYTHONPATH=src python3 benchmarks/gpu/check.py --json results.json
    PYTHONPATH=src python3 benchmarks/gpu/check.py --only decode --shape 8b --profile
    python3 benchmarks/gpu/check.py --markdown results.json

limits    what the card copies and multiplies in a second
kernels   every kernel beside its reference, and its time beside the limits
exact     logits beside float32; the same bits alone, batched, in pieces, preempted
decode    tokens a second at 1 to 256 requests, greedy and sampled
prefill   tokens a second of prompts, time to the first token
families  GPT-2, gpt-oss and models that embed: beside float32, the same bits in a batch

Needs no installation and no model: weights are random (`load_format="dummy"`). Each part runs in a
process of its own, because a kernel that fails leaves a process without a usable GPU, and for a
limited time; what was found until then is kept. Ends with 1 if a check does not hold.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpucheck.models import LATENTS, SHAPES
from gpucheck.report import Budget, OutOfTime, PartState, Report, Row, markdown, print_table

SECONDS = {
    "limits": 25.0,
    "kernels": 170.0,
    "exact": 140.0,
    "decode": 130.0,
    "prefill": 60.0,
    "families": 45.0,
}
"""The parts in their order, and how long each may take: together, and with what the last may take
beyond that, no more than the total.
"""
COMPARED = {"kernels", "decode", "prefill"}
"""Parts that show how near they are to the limits: those are measured first, unless given."""
TOTAL_SECONDS = 590.0
"""Of a run, whatever its parts do."""
GRACE_SECONDS = 20.0
"""A part ends by itself between two of its rows; one that has not so much later is ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.markdown:
        print(markdown(Report.load(options.markdown)))
        return 0
    report = Report(path=options.json)
    if options.limits_of:
        report.rows += [row for row in Report.load(options.limits_of).rows if row.part == "limits"]
    elif "limits" not in options.only and set(options.only) & COMPARED:
        options.only.insert(0, "limits")
    if options.isolate:
        run_isolated(options, report)
    else:
        report.machine = describe_machine(options.device)
        for part in options.only:
            run_part(part, options, report)
    if not options.quiet:
        print_table(report)
    return 1 if report.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=names_of(SECONDS), help="parts, with commas; default: all")
    parser.add_argument("--shape", type=names_of(SHAPES), help="1b, 8b, tiny; default: 1b,8b")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], help="default: cuda where there is one"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument(
        "--profile", action="store_true", help="kernels of a decoding step, by time"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results here, as they come"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="PATH", help="print such a file as Markdown"
    )
    parser.add_argument(
        "--seconds", type=float, metavar="N", help="time of each part, in place of its own"
    )
    parser.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        help="each part in a process of its own; default: on a GPU",
    )
    parser.add_argument(
        "--limits-of", type=Path, metavar="PATH", help="take the limits from an earlier run's JSON"
    )
    parser.add_argument("--quiet", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.markdown:
        options.device = options.device or default_device()
    if options.isolate is None:
        options.isolate = options.device == "cuda"
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    options.shape = options.shape or (["1b", "8b"] if options.device == "cuda" else ["tiny"])
    options.only = options.only or list(SECONDS)
    return options


def names_of(known: dict[str, Any]) -> Any:
    """A converter of lists with commas."""

    def convert(text: str) -> list[str]:
        names = text.split(",")
        if not set(names) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}")
        return names

    return convert


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def run_isolated(options: argparse.Namespace, report: Report) -> None:
    """Every part in a process of its own."""
    total = Budget(TOTAL_SECONDS)
    with tempfile.TemporaryDirectory(prefix="gpucheck-") as directory:
        for part in options.only:
            seconds = min(options.seconds or SECONDS[part], total.left - GRACE_SECONDS)
            if seconds < GRACE_SECONDS:
                report.parts[part] = PartState("out of time")
                continue
            found, limits = Path(directory, f"{part}.json"), Path(directory, "so far.json")
            limits.write_text(json.dumps(report.as_json()))
            command = [
                *(sys.executable, str(Path(__file__)), "--no-isolate", "--quiet"),
                *("--only", part, "--shape", ",".join(options.shape), "--device", options.device),
                *("--json", str(found), "--seconds", str(seconds - GRACE_SECONDS / 2)),
                *(["--quick"] if options.quick else []),
                *(["--profile"] if options.profile else []),
                *(["--limits-of", str(limits)] if part != "limits" else []),
            ]
            print(f"{part}: {seconds:.0f} s at most", flush=True)
            ended = end_of(command, seconds + GRACE_SECONDS)
            take(report, part, found, ended)


def end_of(command: list[str], seconds: float) -> str:
    """Run a command: how it ended, nothing if by itself and as parts end."""
    try:
        code = subprocess.run(command, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"failed: had not ended after {seconds:.0f} s"
    return "" if code in (0, 1) else f"failed: exit code {code}"


def take(report: Report, part: str, found: Path, ended: str) -> None:
    """Add what a part's process has written."""
    other = Report.load(found) if found.exists() else Report()
    other.rows = [row for row in other.rows if row.part == part]
    state = other.parts.setdefault(part, PartState("failed: wrote nothing"))
    if ended:
        state.status = ended
    report.take(other)


def run_part(part: str, options: argparse.Namespace, report: Report) -> None:
    """One part in this process; whatever it raises, its rows stay."""
    state = report.parts[part] = PartState()
    budget = Budget(options.seconds or SECONDS[part])
    try:
        for row in rows_of(part, options, report, budget):
            report.add(row)
            print(f"  {row.part}: {row.case}{'  FAILED' if row.ok is False else ''}", flush=True)
        state.status = "done"
    except OutOfTime:
        state.status = "out of time"
    except Exception as error:  # noqa: BLE001 - the other parts are to run
        traceback.print_exc()
        state.status = f"failed: {type(error).__name__}: {str(error)[:300]}"
    state.seconds = budget.used
    report.save()


def rows_of(
    part: str, options: argparse.Namespace, report: Report, budget: Budget
) -> Iterator[Row]:
    """The results of a part, as they come."""
    device, quick = options.device, options.quick
    if part == "limits":
        from gpucheck import limits

        yield from limits.run(device, budget, quick=quick)
        return
    if part == "kernels":
        from gpucheck import kernels

        yield from kernels.run(device, report, budget, quick=quick)
        return
    if part == "families":
        from gpucheck import families

        yield from families.run(device, budget)
        return
    shapes = [SHAPES[name] for name in options.shape]
    if part == "exact":
        shapes.append(LATENTS[device])
    for shape in shapes:
        if part == "exact":
            from gpucheck import exactness

            yield from exactness.run(shape, device, budget, quick=quick)
        elif part == "decode":
            from gpucheck import decode

            yield from decode.run(
                shape, device, report, budget, quick=quick, with_profile=options.profile
            )
        else:
            from gpucheck import prefill

            yield from prefill.run(shape, device, report, budget, quick=quick)


def describe_machine(device: str) -> dict[str, Any]:
    import torch

    import tokenmill

    machine: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tokenmill": tokenmill.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    try:
        import triton
    except ImportError:
        pass
    else:
        machine["triton"] = triton.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        machine |= {
            "device": properties.name,
            "memory GiB": round(properties.total_memory / (1 << 30)),
            "multiprocessors": properties.multi_processor_count,
        }
    else:
        machine["device"] = f"CPU, {len(os.sched_getaffinity(0))} processors"
    return machine


if __name__ == "__main__":
    sys.exit(main())
