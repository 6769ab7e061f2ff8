"""Imports point down, and there are no cycles between packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "tokenmill"

LAYERS: list[set[str]] = [
    {"entrypoints"},
    {"simulate"},
    {"engine"},
    {"core", "executor"},
    {"worker"},
    {"features"},
    {"models"},
    {"layers"},
    {"attention", "sampling", "quantization", "parallel", "structured_output"},
    {"kernels"},
    {"contracts"},
    {"config"},
    {"tokenizer"},
    {"checkpoint"},
    {"observe"},
    {"outputs", "sampling_params", "pooling_outputs", "pooling_params"},
    {"lora_request"},
    {"structured_outputs"},
    {"repetition"},
    {"parameter_checks"},
    {"errors"},
]
"""From the top; a package imports from packages below it only."""

DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}

WITHOUT_TORCH = [
    "core",
    "contracts",
    "config",
    "engine",
    "structured_output",
    "tokenizer",
    "checkpoint",
    "observe",
    "simulate",
]
"""Packages that load no torch when they are imported."""


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_packages(path: Path) -> list[tuple[int, str]]:
    """(line, package of tokenmill) of every import in the file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            names = (
                [f"tokenmill.{alias.name}" for alias in node.names]
                if module == "tokenmill"
                else [module]
            )
        else:
            continue
        found += [(node.lineno, n.split(".")[1]) for n in names if n.startswith("tokenmill.")]
    return found


def test_every_package_has_a_layer() -> None:
    found = {package_of(path) for path in modules()} - {"__init__", "__main__"}
    assert found <= set(DEPTH)


def test_imports_point_down() -> None:
    # The others are public names and the command, imported lazily.
    layered = [path for path in modules() if package_of(path) not in ("__init__", "__main__")]
    wrong = [
        f"{path.relative_to(SOURCE)}:{line} imports {other}"
        for path in layered
        for line, other in imported_packages(path)
        if other not in (package_of(path), "__version__")
        and DEPTH[other] <= DEPTH[package_of(path)]
    ]
    assert not wrong


SIMULATED = {"core", "contracts", "config", "observe", "sampling_params", "errors"}
"""What a simulation is made of, besides the rule by which an engine with several cores sends
requests to them."""


def test_a_simulation_knows_the_scheduler_and_no_engine() -> None:
    for path in (SOURCE / "simulate").glob("*.py"):
        text = path.read_text()
        used = {other for _, other in imported_packages(path)} - {"simulate"}
        rule = re.findall(r"^from tokenmill\.engine\.(\w+)", text, re.MULTILINE)
        assert set(rule) <= {"prefix_index", "replica_balancer"}
        assert used - {"engine"} <= SIMULATED, path.name


def test_torch_stays_out_of_the_host_packages() -> None:
    for path in modules():
        if package_of(path) not in WITHOUT_TORCH:
            continue
        for node in ast.parse(path.read_text()).body:
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not any(name.split(".")[0] == "torch" for name in names), (
                f"{path.relative_to(SOURCE)}:{node.lineno}"
            )
