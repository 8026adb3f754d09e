"""Host-side check that token ids fit the vocabulary; the compiled model does not check them."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_tokens(tokens: Any, vocab_size: int) -> np.ndarray:
    """`tokens` as an array; a ValueError names the first id outside [0, vocab_size) and its position."""
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"token ids must be integers, got {tokens.dtype} of shape {tokens.shape}. Encode the text first."
        )
    if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
        where = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]
        position = tuple(int(i) for i in where)
        raise ValueError(
            f"every token id must be in [0, {vocab_size}), got id {int(tokens[position])} at position "
            f"{position[0] if len(position) == 1 else position}. The data were made with another tokenizer "
            "than the "
            f"model's vocabulary of {vocab_size}; prepare them again or choose the matching model."
        )
    return tokens
