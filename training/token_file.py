"""Token files: a fixed binary header and the token ids, memory-mapped for reading.

Layout, little-endian: 128 bytes of header (`_HEADER`, zero-padded; its own CRC-32 stands last), then `count`
ids of 2 or 4 bytes. Nothing in the file is ever executed or unpickled. The id width follows the vocabulary (2
bytes iff `vocab_size <= 65536`), so that an id can never wrap.

Checks, by cost:
  every open    magic, version, header CRC, file length: constant time;
  verify=True   the payload's BLAKE2b checksum and every id against the vocabulary: one streaming pass in
                constant memory. verify="auto", the default, does it for files up to `AUTO_VERIFY_BYTES` only;
  every batch   the ids that are handed out against the vocabulary: one vectorised maximum.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import secrets
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

_log = logging.getLogger(__name__)

AUTO_VERIFY_BYTES = 2**30
"""Largest payload that `open_tokens(verify="auto")` reads through: about a second or two."""

_MAGIC = b"SGTOKENS"
_VERSION = 1
_HEADER_BYTES = 128
_NAME_BYTES = 64
_DIGEST_BYTES = 16
# magic, version, bytes per token, vocabulary size, token count, payload BLAKE2b, tokenizer name
_HEADER = struct.Struct(f"<8sIIQQ{_DIGEST_BYTES}s{_NAME_BYTES}s")
_CRC = struct.Struct("<I")
_CHUNK_BYTES = 2**24
_LARGEST_VOCAB = 2**31  # batches hold int32 ids


@dataclasses.dataclass(frozen=True)
class TokenHeader:
    """What a token file says about itself."""

    tokenizer_name: str
    vocab_size: int
    count: int
    dtype: np.dtype
    checksum: str

    def pack(self) -> bytes:
        name = self.tokenizer_name.encode()
        fields = _HEADER.pack(
            _MAGIC,
            _VERSION,
            self.dtype.itemsize,
            self.vocab_size,
            self.count,
            bytes.fromhex(self.checksum),
            name,
        )
        body = fields.ljust(_HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the narrowest of uint16 and uint32 that holds every id of the vocabulary."""
    if not 1 <= vocab_size <= _LARGEST_VOCAB:
        raise ValueError(
            f"vocab_size must be in [1, 2**31], got {vocab_size}. Pass the tokenizer's vocabulary size."
        )
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def check_ids(ids: NDArray[np.integer], vocab_size: int, first_position: int, source: str) -> None:
    """Raises if one of `ids`, which stand from `first_position` in `source`, is outside [0, vocab_size)."""
    if ids.size == 0 or (int(np.max(ids)) < vocab_size and int(np.min(ids)) >= 0):
        return
    wrong = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    raise ValueError(
        f"token ids must be in [0, {vocab_size}), the vocabulary of {source}; got id {ids[wrong]} "
        f"at position {first_position + wrong}. Encode the text with the tokenizer of this vocabulary."
    )


def write_tokens(
    path: str | os.PathLike[str],
    chunks: Iterable[ArrayLike],
    vocab_size: int,
    tokenizer_name: str,
    *,
    dtype: DTypeLike | None = None,
) -> TokenHeader:
    """Writes the concatenation of `chunks` to a token file, in constant memory.

    The file appears under its name only when it is complete and on disk, and replaces an older one in one
    step; on any error nothing is left behind.

    Args:
      path: the file; its folder is made if needed.
      chunks: 1-D integer arrays (or lists) of ids; empty ones are fine, as long as there is one token in all.
      vocab_size: number of ids of the tokenizer; every id must be below it.
      tokenizer_name: at most 64 bytes, recorded in the header.
      dtype: uint16 or uint32; by default chosen from `vocab_size`, and an error if too small for it.
    """
    path = pathlib.Path(path)
    smallest = token_dtype(vocab_size)
    stored = smallest if dtype is None else np.dtype(dtype).newbyteorder("<")
    if stored not in (np.dtype("<u2"), np.dtype("<u4")):
        raise ValueError(
            f"dtype must be uint16 or uint32, got {np.dtype(dtype)}. Leave it out to have it chosen."
        )
    if stored.itemsize < smallest.itemsize:
        raise ValueError(
            f"dtype {stored.name} holds ids up to {2**16 - 1}, but the vocabulary of {tokenizer_name!r} has "
            f"{vocab_size} ids. Use uint32, or leave dtype out to have it chosen."
        )
    name_bytes = len(tokenizer_name.encode())
    if not 0 < name_bytes <= _NAME_BYTES or "\0" in tokenizer_name:
        raise ValueError(
            f"tokenizer_name must have 1 to {_NAME_BYTES} bytes and no NUL, got {tokenizer_name!r} "
            f"({name_bytes} bytes). Use a short name."
        )
    count, digest = 0, hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with replace_atomically(path) as file:
        file.write(bytes(_HEADER_BYTES))
        for chunk in chunks:
            ids = np.asarray(chunk)
            if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
                raise ValueError(
                    f"chunks for {path} must be 1-D arrays of integers, got shape {ids.shape} and dtype "
                    f"{ids.dtype} after {count} tokens. Flatten the ids and give them an integer dtype."
                )
            check_ids(ids, vocab_size, count, f"tokenizer {tokenizer_name!r}")
            payload = ids.astype(stored).tobytes()
            digest.update(payload)
            file.write(payload)
            count += ids.size
        if count == 0:
            raise ValueError(
                f"a token file needs at least one token, got none for {path}. Check that the corpus has text."
            )
        header = TokenHeader(tokenizer_name, vocab_size, count, stored, digest.hexdigest())
        file.seek(0)
        file.write(header.pack())
    return header


@contextlib.contextmanager
def replace_atomically(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the name `path` when the block ends well, and vanishes when it raises.

    Each writer has a temporary file of its own, so several processes may write the same path: the last one
    wins.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if (
        os.name == "posix"
    ):  # The rename itself is on disk only once the folder is; Windows cannot open folders.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """An open token file; `tokens` is a read-only memory map of all ids.

    Replacing the file while it is open, as `write_tokens` does, is safe; cutting it short in place is not.
    """

    path: pathlib.Path
    header: TokenHeader
    # A plain array over the map: slicing `np.memmap` itself costs several times more per slice.
    tokens: NDArray[np.unsignedinteger] = dataclasses.field(repr=False)

    def __len__(self) -> int:
        return self.header.count

    @property
    def vocab_size(self) -> int:
        return self.header.vocab_size

    @property
    def tokenizer_name(self) -> str:
        return self.header.tokenizer_name

    def read_windows(self, starts: ArrayLike, length: int) -> NDArray[np.int32]:
        """Returns `tokens[s : s + length]` for each s in `starts`, ids checked against the vocabulary."""
        starts = np.asarray(starts, np.int64)
        if starts.size and not (0 <= starts.min() and starts.max() + length <= len(self)):
            raise ValueError(
                f"windows of {length} tokens must lie inside the {len(self)} tokens of {self.path}, got "
                f"starts from {starts.min()} to {starts.max()}. Use starts up to {len(self) - length}."
            )
        # Row by row: several times faster than one indexed gather, which computes B x L positions.
        windows = np.empty((starts.size, length), self.tokens.dtype)
        for row, start in enumerate(starts.tolist()):
            windows[row] = self.tokens[start : start + length]
        if windows.size and windows.max() >= self.vocab_size:
            row = int(np.argmax((windows >= self.vocab_size).any(axis=1)))
            check_ids(windows[row], self.vocab_size, int(starts[row]), str(self.path))
        return windows.astype(np.int32)


def open_tokens(path: str | os.PathLike[str], *, verify: bool | Literal["auto"] = "auto") -> TokenFile:
    """Opens a token file; see the module's docstring for what `verify` reads.

    Raises FileNotFoundError if there is none, ValueError with the path if it is damaged or no token file.
    """
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no token file at {path}. Write one with training.token_file.write_tokens.")
    if not path.is_file():
        raise ValueError(f"a token file must be a regular file, got {path}. Name the file itself.")
    header = _read_header(path)
    tokens = np.asarray(np.memmap(path, header.dtype, "r", offset=_HEADER_BYTES, shape=(header.count,)))
    if verify == "auto":
        verify = tokens.nbytes <= AUTO_VERIFY_BYTES
        if not verify:
            _log.info(
                "%s: payload of %d bytes is over %d, checksum not read; open with verify=True to check it.",
                path, tokens.nbytes, AUTO_VERIFY_BYTES,
            )  # fmt: skip
    if verify:
        _verify_payload(path, header, tokens)
    return TokenFile(path, header, tokens)


def _read_header(path: pathlib.Path) -> TokenHeader:
    with open(path, "rb") as file:
        block = file.read(_HEADER_BYTES)
    if block[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"a token file must start with {_MAGIC!r}, got {block[: len(_MAGIC)]!r} in {path}. It is another "
            "kind of file; write it anew with training.token_file.write_tokens."
        )
    again = "Write the file anew."
    size = path.stat().st_size
    if len(block) < _HEADER_BYTES:
        raise ValueError(
            f"a token file has {_HEADER_BYTES} bytes of header, got {size} bytes in {path}. {again}"
        )
    body, (crc,) = block[: -_CRC.size], _CRC.unpack(block[-_CRC.size :])
    _, version, item_bytes, vocab_size, count, digest, name = _HEADER.unpack_from(body)
    if version != _VERSION:
        raise ValueError(f"token file version must be {_VERSION}, got {version} in {path}. {again}")
    if zlib.crc32(body) != crc:
        raise ValueError(
            f"the header of {path} is damaged: its CRC-32 is {zlib.crc32(body):#x}, not {crc:#x}. {again}"
        )
    # A header with a good CRC may still come from a faulty program.
    sound = item_bytes in (2, 4) and count >= 1 and 1 <= vocab_size <= _LARGEST_VOCAB
    if not sound or item_bytes < token_dtype(vocab_size).itemsize:
        raise ValueError(
            f"a token file has at least one id of 2 or 4 bytes that holds its vocabulary, got {count} ids of "
            f"{item_bytes} bytes for {vocab_size} ids in {path}. {again}"
        )
    dtype = np.dtype(f"<u{item_bytes}")
    expected = _HEADER_BYTES + count * item_bytes
    if size != expected:
        raise ValueError(f"{path} must have {expected} bytes for its {count} tokens, got {size}. {again}")
    return TokenHeader(name.rstrip(b"\0").decode(errors="replace"), vocab_size, count, dtype, digest.hex())


def _verify_payload(path: pathlib.Path, header: TokenHeader, tokens: NDArray[np.unsignedinteger]) -> None:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    step = _CHUNK_BYTES // header.dtype.itemsize
    for start in range(0, header.count, step):
        digest.update(tokens[start : start + step].tobytes())
    if digest.hexdigest() != header.checksum:
        raise ValueError(
            f"the tokens of {path} are damaged: their BLAKE2b is {digest.hexdigest()}, not "
            f"{header.checksum}. Write the file anew."
        )
    for start in range(0, header.count, step):
        check_ids(tokens[start : start + step], header.vocab_size, start, str(path))
