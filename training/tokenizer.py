"""The built-in byte-level tokenizer: one token per UTF-8 byte and an end-of-text token.

Any object with the members of `Tokenizer` can take its place; token files record the name, so that a file
made with one tokenizer is not read as another's.
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray


@runtime_checkable
class Tokenizer(Protocol):
    """What the data code asks of a tokenizer."""

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_text(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.integer]: ...

    def decode(self, ids: ArrayLike) -> str: ...


def replace_surrogates(text: str) -> str:
    """Joins surrogate pairs and turns lone surrogates into U+FFFD, so that the text has a UTF-8 form.

    Strings parsed from JSON escapes may hold lone surrogates, for which `str.encode("utf-8")` raises.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Tokens 0-255 are the bytes of the UTF-8 text, token 256 ends a document.

    >>> ByteTokenizer().encode("né").tolist()
    [110, 195, 169]
    """

    @property
    def name(self) -> str:
        return "byte"

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def end_of_text(self) -> int:
        return 256

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Returns the ids of `text`, without an end-of-text token."""
        data = replace_surrogates(text).encode("utf-8")
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: ArrayLike, end_of_text: str = "") -> str:
        """Returns the text of `ids`; bytes that are no UTF-8 become U+FFFD, token 256 becomes `end_of_text`.

        A document ends any unfinished character: bytes on the two sides of a token 256 are never joined.
        """
        array = np.atleast_1d(np.asarray(ids))
        if array.size == 0:
            return ""
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(
                f"ids must be a 1-D array of integers, got shape {array.shape} and dtype {array.dtype}. "
                "Decode one sequence at a time."
            )
        wrong = np.flatnonzero((array < 0) | (array > self.end_of_text))
        if wrong.size:
            raise ValueError(
                f"ids of the byte tokenizer are in [0, {self.end_of_text}], got {array[wrong[0]]} at "
                f"position {wrong[0]}. Decode with the tokenizer that made these ids."
            )
        documents = np.split(array, np.flatnonzero(array == self.end_of_text))
        # Every part after the first starts with the end-of-text token it was split at.
        parts = [documents[0], *(part[1:] for part in documents[1:])]
        return end_of_text.join(part.astype(np.uint8).tobytes().decode("utf-8", "replace") for part in parts)


_BUILT_IN: dict[str, Tokenizer] = {"byte": ByteTokenizer()}


def get_tokenizer(name: str) -> Tokenizer:
    """Returns the built-in tokenizer called `name`, as recorded in a token file."""
    if name not in _BUILT_IN:
        raise ValueError(
            f"tokenizer must be one of {sorted(_BUILT_IN)}, got {name!r}. Pass an object instead."
        )
    return _BUILT_IN[name]
