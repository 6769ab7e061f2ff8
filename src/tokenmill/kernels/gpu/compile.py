"""Compile every kernel for a GPU that need not be there, and say what each takes of it.

    python -m tokenmill.kernels.gpu.compile [--arch 90] [--once] [module ...]

Takes the `compile_cases` of all modules of this package, or of those named; with --once only the
first of each kernel. Ends with 1 if a kernel does not compile or needs more shared memory than a
block may have.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.kernels import gpu
from tokenmill.kernels.gpu.launch import CompileCase

MAX_SHARED_BYTES = 227 * 1024
"""What one block can have on compute capability 9.0."""


@dataclass(frozen=True, slots=True)
class CompiledSize:
    """What a compiled kernel takes."""

    registers: int
    """Per thread."""
    stack_bytes: int
    """Local memory of a thread: spilled registers, or arrays indexed at run time."""
    shared_bytes: int
    cubin_bytes: int


def collect_cases(module_names: Sequence[str] = (), once: bool = False) -> Iterator[CompileCase]:
    """The cases of the package's modules, or of those named; all, or one of each kernel."""
    for name in module_names or sorted(m.name for m in pkgutil.iter_modules(gpu.__path__)):
        module = importlib.import_module(f"{gpu.__name__}.{name}")
        cases: list[CompileCase] = (
            module.compile_cases() if hasattr(module, "compile_cases") else []
        )
        seen = set()
        for case in cases:
            if not (once and case.kernel in seen):
                yield case
            seen.add(case.kernel)


def compile_case(case: CompileCase, arch: int) -> CompiledSize:
    """Compile for compute capability arch / 10. Raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict.fromkeys(case.kernel.arg_names, "constexpr")
    attributes = {}
    for name, hinted in case.signature.items():
        signature[name], _, multiple = hinted.partition(":")
        if multiple or hinted.startswith("*"):
            place = (case.kernel.arg_names.index(name),)
            attributes[place] = [["tt.divisibility", int(multiple or 16)]]
    constants = {name for name, kind in signature.items() if kind == "constexpr"}
    if constants != set(case.constexprs):
        wrong = sorted(constants ^ set(case.constexprs))
        raise ValueError(f"{', '.join(wrong)}: not exactly once in signature and constexprs")
    compiled = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constexprs), attributes),
        target=GPUTarget("cuda", arch, 32),
        options={
            "num_warps": case.num_warps,
            "num_stages": case.num_stages,
            "maxnreg": case.max_registers,
        },
    )
    if found := early_reads(compiled.asm["ttgir"]):
        raise RuntimeError(f"products are read before they are complete: {'; '.join(found)}")
    if found := accesses_before_wait(compiled.asm["ptx"], case.reads_weights_early):
        raise RuntimeError(f"comes before the wait for the previous kernel: {'; '.join(found)}")
    registers, stack_bytes = _resources(compiled.asm["cubin"])
    return CompiledSize(
        registers, stack_bytes, compiled.metadata.shared, len(compiled.asm["cubin"])
    )


def early_reads(ttgir: str) -> list[str]:
    """Operations that read the sums of an asynchronous product without waiting for it.

    Triton 3.6 and 3.9 make such code of a product whose loop passes it through an `if`.
    """
    found = []
    lines = ttgir.splitlines()
    for place, line in enumerate(lines):
        product = re.match(r"\s*(%\w+)(:\d+)? = ttng\.warp_group_dot .*isAsync = true", line)
        if product is None:
            continue
        name = re.compile(re.escape(product[1]) + r"(?!\w)")
        first_use = next((use for use in lines[place + 1 :] if name.search(use)), "scf.yield")
        if not re.search(r"warp_group_dot|scf\.yield", first_use):
            found.append(first_use.strip())
    return found


_ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+ )?((?P<load>ld\.global|ld\.relaxed|ld\.acquire)|st\.global|red\.|atom\."
    r"|cp\.async\.(?!bulk\.prefetch)|cp\.reduce|ret;)"
)


def accesses_before_wait(ptx: str, reads_weights_early: bool = False) -> list[str]:
    """What a kernel that starts early (`overlap.py`) does in front of its wait, and must not.

    It must neither touch memory there nor return; it may load if it `reads_weights_early`.
    """
    if "griddepcontrol" not in ptx:
        return []
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    if not wait:
        return ["it never waits"]
    found = []
    for line in before.splitlines():
        access = _ACCESS.match(line)
        if access is not None and not (reads_weights_early and access["load"]):
            found.append(line.strip())
    return found


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, as the tool that Triton carries reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), "--dump-resource-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert used is not None, text
    return int(used[1]), int(used[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code."""
    # Read when a kernel is declared: one that is to be interpreted cannot be compiled.
    os.environ["TRITON_INTERPRET"] = "0"
    parser = argparse.ArgumentParser(prog="python -m tokenmill.kernels.gpu.compile")
    parser.add_argument("--arch", type=int, default=90, help="compute capability times 10")
    parser.add_argument("--once", action="store_true", help="only the first case of each kernel")
    parser.add_argument("module", nargs="*", help="a module of the package; all if none is named")
    options = parser.parse_args(arguments)

    num_failed = 0
    print(f"{'kernel':<56}{'registers':>10}{'stack':>8}{'shared':>9}{'cubin':>9}")
    for case in collect_cases(options.module, options.once):
        try:
            size = compile_case(case, options.arch)
        except Exception:  # noqa: BLE001  whatever a compiler raises; the others are to be seen too
            traceback.print_exc()
            print(f"{case.name:<56}  does not compile")
            num_failed += 1
            continue
        too_large = size.shared_bytes > MAX_SHARED_BYTES
        num_failed += too_large
        print(
            f"{case.name:<56}{size.registers:>10}{size.stack_bytes:>8}{size.shared_bytes:>9}"
            f"{size.cubin_bytes:>9}{'  too much shared memory' if too_large else ''}",
            flush=True,
        )
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
