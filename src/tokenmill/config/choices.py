"""Settings that were left open, and why each has its value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from tokenmill.config.engine_config import Reason

T = TypeVar("T", int, str)


@dataclass(slots=True)
class Choices:
    """Collects the reasons while settings are resolved."""

    reasons: list[Reason] = field(default_factory=list)

    def choose(self, setting: str, value: T, why: str) -> T:
        self.reasons.append(Reason(setting, str(value), why))
        return value
