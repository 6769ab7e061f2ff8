"""Where a conversation's images stand in its prompt, whatever its users write.

A template writes the model's mark for each image of a message, as text, and a user may write the
same text. So what users write is disguised before the template sees it; whatever looks like a mark
afterwards was written by the template.

    users' texts      a mark becomes a sentinel that nobody can guess
    template          text with marks of its own, and sentinels
    here              sentinels become marks again, of which the places are known
    tokenizer         ids, with an id for each mark
    here              those of users become the ids of what they spell
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.errors import ChatTemplateError, InvalidRequestError
from tokenmill.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.features.multimodal.images import Images


class Marks:
    """The marks of one rendering."""

    def __init__(self, images: Images) -> None:
        self.check_count = images.check_count
        self._mark, self._mark_id = images.mark_token, images.mark_token_id
        self._written_out = images.mark_text
        self._with_surroundings = images.with_surroundings
        nonce = secrets.token_hex(8)
        self._users = f"\ue0f2{nonce}u\ue0f3"
        self.image = f"\ue0f2{nonce}i\ue0f3"
        """Stands for an image in a text, for a template that knows no images."""
        self._border = f"\ue0f2{nonce}b\ue0f3"
        """Keeps a text that ends as a mark begins apart from one that ends as marks do."""
        self._any = re.compile(f"{re.escape(self._mark)}|{self._users}|{self.image}")

    def disguised(self, value: Any) -> Any:
        """Data of users without marks, as a copy where there were some."""
        if isinstance(value, str):
            value = value.replace(self._mark, self._users)
            begins = any(value.endswith(self._mark[:n]) for n in range(1, len(self._mark)))
            return value + self._border if begins else value
        if isinstance(value, Mapping):
            return {self.disguised(key): self.disguised(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.disguised(item) for item in value]
        return value

    def encode(
        self, tokenizer: Tokenizer, rendered: str, images: Sequence[Any], add_special_tokens: bool
    ) -> tuple[str, list[int]]:
        """The prompt of a rendered text, and its ids, in which the mark's id stands for an image
        each.

        Raises `ChatTemplateError` if the template has not written a mark for each image, and
        `InvalidRequestError` if the vocabulary cannot spell what a user has written.
        """
        is_users = [found == self._users for found in self._any.findall(rendered)]
        text = self._with_surroundings(rendered.replace(self.image, self._written_out))
        text = text.replace(self._users, self._mark).replace(self._border, "")
        token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if token_ids.count(self._mark_id) != len(is_users):
            raise _unspeakable(self._mark)
        if any(is_users):
            token_ids = self._with_spelled(token_ids, is_users, self._spelled(tokenizer))
        num_marks = token_ids.count(self._mark_id)
        if num_marks != len(images):
            raise ChatTemplateError(
                f"the chat template has written {num_marks} image marks for {len(images)} images of"
                f" the messages; it may take them in messages of users only.",
                parameter="messages",
            )
        return text, token_ids

    def _with_spelled(
        self, token_ids: list[int], is_users: list[bool], spelled: list[int]
    ) -> list[int]:
        """The ids, with the marks that users have written spelled out."""
        ids: list[int] = []
        numbers = iter(is_users)
        for token_id in token_ids:
            ids += spelled if token_id == self._mark_id and next(numbers) else [token_id]
        return ids

    def _spelled(self, tokenizer: Tokenizer) -> list[int]:
        """The mark in the longest pieces that the vocabulary has otherwise, or in bytes."""
        special = tokenizer.special_token_ids | {self._mark_id, None}
        ids: list[int | None] = []
        begin = 0
        while begin < len(self._mark):
            for end in range(len(self._mark), begin, -1):
                token_id = tokenizer.token_to_id(self._mark[begin:end])
                if token_id not in special:
                    ids.append(token_id)
                    break
            else:
                end = begin + 1
                data = self._mark[begin:end].encode()
                ids += [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
            begin = end
        known = [token_id for token_id in ids if token_id is not None]
        if len(known) < len(ids):
            raise _unspeakable(self._mark)
        return known


def _unspeakable(mark: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"messages hold {mark!r}, which stands for an image in prompts of this model and cannot be"
        f" written as plain text; leave it out.",
        parameter="messages",
    )
