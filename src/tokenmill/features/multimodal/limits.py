"""What one prompt may bring in all."""

from __future__ import annotations

import threading

from tokenmill.errors import ContextLengthExceededError
from tokenmill.features.multimodal.decoding import MAX_FILE_BYTES, refused

MAX_PROMPT_BYTES = 1 << 26
"""Of all images of one prompt, as files."""


class PromptLimits:
    """What is left to the images of one prompt, which several threads may prepare."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: of prompt and output together."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._bytes_left = MAX_PROMPT_BYTES
        self._lock = threading.Lock()

    @property
    def file_bytes(self) -> int:
        """Most bytes of the next file."""
        return min(MAX_FILE_BYTES, self._bytes_left)

    def take_file(self, num_bytes: int) -> None:
        """Count a file. Raises `InvalidRequestError` if all are too much."""
        with self._lock:
            self._bytes_left -= num_bytes
            if self._bytes_left < 0:
                raise refused(
                    f"the images of the prompt have more than {MAX_PROMPT_BYTES} bytes as files;"
                    f" send fewer, or smaller ones"
                )

    def check_image(self, num_tokens: int) -> None:
        """Refuse an image that is too long alone, before it is processed."""
        if num_tokens >= self._max_tokens:
            raise self._too_long(num_tokens)

    def take_tokens(self, num_tokens: int) -> None:
        """Count an image's placeholders. Raises `ContextLengthExceededError` for too many."""
        with self._lock:
            self._num_tokens += num_tokens
            if self._num_tokens >= self._max_tokens:
                raise self._too_long(self._num_tokens)

    def _too_long(self, num_tokens: int) -> ContextLengthExceededError:
        return ContextLengthExceededError(
            f"images take {num_tokens} tokens, but max_model_len={self._max_tokens} must hold the"
            f" whole prompt and at least one new token; send fewer, or smaller ones.",
            parameter="image",
        )
