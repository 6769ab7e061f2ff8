"""The compile check finds kernels that a GPU would refuse; and what kernel modules share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenmill.kernels.gpu.launch import cdiv, define_op, next_power_of_2

CHECK = "from tokenmill.kernels.gpu.compile import main; sys.exit(main(sys.argv[1:]))"

KERNELS = '''
import triton
import triton.language as tl
from tokenmill.kernels.gpu.launch import CompileCase


@triton.jit
def copy(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def turn(x, out, SIZE: tl.constexpr):
    """A square through shared memory, since rows become columns."""
    i = tl.arange(0, SIZE)
    square = tl.load(x + i[:, None] * SIZE + i[None, :])
    tl.store(out + i[:, None] * SIZE + i[None, :], tl.trans(square))


@triton.jit
def wrong(x):
    tl.store(x, no_such_name)


def square(size):
    return CompileCase(f"square {size}", turn, {"x": "*fp32", "out": "*fp32"}, {"SIZE": size}, 8)


COPY = CompileCase("copy", copy, {"x": "*bf16", "out": "*bf16", "n": "i32"}, {"BLOCK": 1024})
'''


def check(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the check in a process that does not interpret; modules may come from a folder, too."""
    extend = "" if folder is None else f"gpu.__path__.append({str(folder)!r});"
    code = f"import sys; from tokenmill.kernels import gpu; {extend}{CHECK}"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )


def write_module(folder: Path, cases: str) -> None:
    text = f"{KERNELS}\ndef compile_cases():\n    return [{cases}]\n"
    (folder / "some_kernels.py").write_text(text)


def test_kernels_compile() -> None:
    done = check("--once")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("add_rms_norm", "gated_activation", "rotate_and_write_kv", "prepare_step"):
        assert f"\n{name}" in done.stdout


@pytest.mark.slow
def test_every_case_compiles() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_shows_sizes(tmp_path: Path) -> None:
    write_module(tmp_path, "COPY, square(32)")
    done = check("some_kernels", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    _, copy, square = done.stdout.splitlines()
    name, registers, stack, shared, cubin = copy.split()
    assert name == "copy"
    assert 0 < int(registers) <= 255
    assert (int(stack), int(shared)) == (0, 0)
    assert int(cubin) > 1000
    assert int(square.split()[4]) >= 32 * 32 * 4, "its shared memory"


def test_a_kernel_with_too_much_shared_memory_fails(tmp_path: Path) -> None:
    write_module(tmp_path, "square(256), COPY")
    done = check("some_kernels", folder=tmp_path)
    assert done.returncode == 1
    assert "too much shared memory" in done.stdout
    assert "\ncopy " in done.stdout, "the others are shown"


def test_kernels_that_do_not_compile_fail(tmp_path: Path) -> None:
    write_module(
        tmp_path,
        'CompileCase("bad", wrong, {"x": "*fp32"}, {}),'
        'CompileCase("lacking", wrong, {}, {}),'
        'CompileCase("double", wrong, {"x": "*fp32"}, {"x": None}),'
        "COPY",
    )
    done = check("some_kernels", folder=tmp_path)
    assert done.returncode == 1
    assert "no_such_name is not defined" in done.stderr
    assert done.stderr.count("x: not exactly once in signature and constexprs") == 2
    assert done.stdout.count("does not compile") == 3
    assert "\ncopy " in done.stdout, "the others are shown"


def test_only_the_first_case_of_a_kernel(tmp_path: Path) -> None:
    write_module(tmp_path, "COPY, square(32), square(64)")
    done = check("--once", "some_kernels", folder=tmp_path)
    assert "square 32" in done.stdout
    assert "square 64" not in done.stdout


def test_ops_are_dispatched_by_device(device: str) -> None:
    calls = []

    def on_cuda(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("cuda")

    def on_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append("cpu")

    define_op("test_op(Tensor x, Tensor(a!) out) -> ()", cuda=on_cuda, cpu=on_cpu)
    x = torch.ones(3, device=device)
    torch.ops.tokenmill.test_op(x, x.clone())
    assert calls == [device]
    torch.ops.tokenmill.test_op(x.to("meta"), x.to("meta"))
    assert calls == [device]
    with pytest.raises(AssertionError, match="caller allocates"):
        define_op("test_op_2(Tensor x) -> Tensor", cuda=on_cuda, cpu=on_cpu)


def test_launch_arithmetic() -> None:
    for number in range(1, 70):
        power = next_power_of_2(number)
        assert power >= number > power // 2
        assert power & (power - 1) == 0
        for divisor in range(1, 9):
            assert (cdiv(number, divisor) - 1) * divisor < number <= cdiv(number, divisor) * divisor
    assert cdiv(0, 8) == 0
