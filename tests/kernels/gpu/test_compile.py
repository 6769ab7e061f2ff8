"""The compile check finds kernels that a GPU would refuse; and what kernel modules share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tokenmill.kernels.gpu.launch import cdiv, define_op, next_power_of_2

IMPORT = "from tokenmill.kernels.gpu.compile import main"

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


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that does not interpret."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(f"import sys; {IMPORT}; sys.exit(main({list(arguments)!r}))")


CASES = {
    "sizes": "COPY, square(32)",
    "too_much": "square(256), COPY",
    "wrong": """
        CompileCase("bad", wrong, {"x": "*fp32"}, {}),
        CompileCase("lacking", wrong, {}, {}),
        CompileCase("double", wrong, {"x": "*fp32"}, {"x": None}),
        COPY
    """,
    "several": "COPY, square(32), square(64)",
}
"""Cases of modules beside the package's own."""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """`code`, `out` and `err` of the check of each module: of "several" with --once."""
    folder = tmp_path_factory.mktemp("kernels")
    for name, cases in CASES.items():
        text = f"{KERNELS}\ndef compile_cases():\n    return [{cases}]\n"
        (folder / f"{name}.py").write_text(text)
    done = python(f"""
import contextlib, io, json
from tokenmill.kernels import gpu
{IMPORT}
gpu.__path__.append({str(folder)!r})
found = {{}}
for name in {list(CASES)}:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            code = main([*(["--once"] if name == "several" else []), name])
    found[name] = {{"code": code, "out": out.getvalue(), "err": err.getvalue()}}
print(json.dumps(found))
""")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_compile() -> None:
    done = check("--once")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("add_rms_norm", "gated_activation", "rotate_and_write_kv", "prepare_step"):
        assert f"\n{name}" in done.stdout


@pytest.mark.slow
def test_every_case_compiles() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_shows_sizes(checked: dict[str, dict[str, Any]]) -> None:
    found = checked["sizes"]
    assert not found["code"], found["err"]
    _, copy, square = found["out"].splitlines()
    name, registers, stack, shared, cubin = copy.split()
    assert name == "copy"
    assert 0 < int(registers) <= 255
    assert (int(stack), int(shared)) == (0, 0)
    assert int(cubin) > 1000
    assert int(square.split()[4]) >= 32 * 32 * 4, "its shared memory"


def test_a_kernel_with_too_much_shared_memory_fails(checked: dict[str, dict[str, Any]]) -> None:
    found = checked["too_much"]
    assert found["code"] == 1
    assert "too much shared memory" in found["out"]
    assert "\ncopy " in found["out"], "the others are shown"


def test_kernels_that_do_not_compile_fail(checked: dict[str, dict[str, Any]]) -> None:
    found = checked["wrong"]
    assert found["code"] == 1
    assert "no_such_name is not defined" in found["err"]
    assert found["err"].count("x: not exactly once in signature and constexprs") == 2
    assert found["out"].count("does not compile") == 3
    assert "\ncopy " in found["out"], "the others are shown"


def test_only_the_first_case_of_a_kernel(checked: dict[str, dict[str, Any]]) -> None:
    assert "square 32" in checked["several"]["out"]
    assert "square 64" not in checked["several"]["out"]


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
