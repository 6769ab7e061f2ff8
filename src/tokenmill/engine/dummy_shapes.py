"""The tensors that a model of some config reads, found out without torch in this process.

Only the families' own code knows them, and it needs torch. So a process is asked that ends with its
answer: the server's front end stays small.

    asked     {"config": ..., "implementation": ...}     on stdin
    answers   {"shapes": {name: [size, ...]}} or {"error": message}, the last line of stdout
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tokenmill.errors import ConfigError, EngineDeadError

PROGRAM = "from tokenmill.engine.dummy_shapes import answer; answer()"


def shapes_elsewhere(
    hf_config: Mapping[str, Any], implementation: str
) -> dict[str, tuple[int, ...]]:
    """As `models.loader.tensor_shapes`. Raises `ConfigError` as it does."""
    asked = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input=json.dumps({"config": dict(hf_config), "implementation": implementation}),
        capture_output=True,
        text=True,
    )
    if asked.returncode != 0:
        last = (asked.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise EngineDeadError(f"The tensors of a dummy model could not be found out: {last}")
    found = json.loads(asked.stdout.splitlines()[-1])
    if "error" in found:
        raise ConfigError(found["error"])
    return {name: tuple(shape) for name, shape in found["shapes"].items()}


def answer() -> None:
    """The other process."""
    from tokenmill.models.loader import tensor_shapes

    asked = json.load(sys.stdin)
    try:
        found: dict[str, Any] = {"shapes": tensor_shapes(asked["config"], asked["implementation"])}
    except ConfigError as error:
        found = {"error": str(error)}
    print(json.dumps(found))
