"""The embedded corpus: the source text of the running Python's own standard library, as token files.

Real text that every machine already has; nothing is downloaded. Documents are the `*.py` files below the
stdlib folder, in the order of their relative paths. A document belongs to the validation part by a hash of
its relative path, so the split does not depend on order, machine or other files.
"""

import dataclasses
import hashlib
import io
import json
import logging
import os
import pathlib
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from training.token_file import TokenFile, open_tokens, replace_atomically, write_tokens
from training.tokenizer import ByteTokenizer, Tokenizer

_log = logging.getLogger(__name__)

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
VALIDATION_FRACTION = 0.05

# Part of the cache key: raise it whenever the same Python and tokenizer would give other tokens than before.
_FORMAT_VERSION = 1

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Written by the installation, not by Python's authors: they hold this machine's paths.
_SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclasses.dataclass
class CorpusCounts:
    """What `stdlib_documents` met, filled in as it runs."""

    documents: int = 0
    characters: int = 0
    empty: int = 0
    duplicates: int = 0
    broken_encoding: int = 0


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two token files of a prepared corpus, and what was met while preparing it."""

    train: TokenFile
    validation: TokenFile
    counts: dict[str, int]


def split_of(relative_path: str) -> Split:
    """Returns the part that a document belongs to, from its relative path alone."""
    digest = hashlib.blake2b(relative_path.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < VALIDATION_FRACTION * 2**64 else "train"


def decode_source(data: bytes) -> tuple[str, bool]:
    """Returns the text of a Python source file with `\\n` line ends, and whether its encoding was broken.

    The encoding is the declared one (PEP 263), or UTF-8 if that is unknown; broken bytes become U+FFFD.
    """
    broken = False
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError:
        encoding, broken = "utf-8", True
    try:
        text = data.decode(encoding)
    except UnicodeError:
        text, broken = data.decode(encoding, "replace"), True
    return text.replace("\r\n", "\n").replace("\r", "\n"), broken


def stdlib_documents(
    folder: str | os.PathLike[str] | None = None, counts: CorpusCounts | None = None
) -> Iterator[tuple[str, str]]:
    """Yields (relative path, text) of the Python source files of the standard library, sorted by path.

    Empty files and exact copies of an earlier document are skipped and counted: a copy could otherwise stand
    in both parts of the split.

    Args:
      folder: where to look; by default the standard library of the running Python.
      counts: if given, filled in along the way.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib") if folder is None else folder)
    counts = CorpusCounts() if counts is None else counts
    seen: set[bytes] = set()
    for relative, path in _source_files(folder):
        text, broken = decode_source(path.read_bytes())
        counts.broken_encoding += broken
        if not text.strip():
            counts.empty += 1
            continue
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in seen:
            counts.duplicates += 1
            continue
        seen.add(digest)
        counts.documents += 1
        counts.characters += len(text)
        yield relative, text


def _source_files(folder: pathlib.Path) -> list[tuple[str, pathlib.Path]]:
    """Returns (relative path with `/`, path) of the source files, sorted."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = pathlib.Path(parent, name)
            # A link would lead out of the library or name a file that is met anyway.
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIXES) and not path.is_symlink():
                found.append((path.relative_to(folder).as_posix(), path))
    if not found:
        raise ValueError(
            f"the corpus needs at least one *.py file below {folder}, got none. This Python comes without "
            "its library's sources (zipped or stripped): use another Python, or token files of your own."
        )
    return sorted(found)


def encode_documents(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.integer]]:
    """Yields the ids of each document, ended by the tokenizer's end-of-text token."""
    for text in documents:
        ids = tokenizer.encode(text)
        yield np.append(ids, np.asarray([tokenizer.end_of_text], ids.dtype))


def default_cache_folder() -> pathlib.Path:
    """Returns `$XDG_CACHE_HOME/scape-gasloc` where that is set, else `./data`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return pathlib.Path(base, "scape-gasloc") if base else pathlib.Path("data")


def prepare_stdlib(
    cache_folder: str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | None = None,
    *,
    folder: str | os.PathLike[str] | None = None,
) -> Corpus:
    """Opens the token files of the standard-library corpus, making them first if absent or damaged.

    Several processes may prepare the same cache at once: each writes files of its own with equal bytes and
    renames them into place, so whichever comes last changes nothing and no reader ever sees half a file.

    Args:
      cache_folder: where the token files are kept; by default `default_cache_folder()`.
      tokenizer: by default the byte tokenizer.
      folder: the sources; by default the standard library of the running Python.
    """
    tokenizer = ByteTokenizer() if tokenizer is None else tokenizer
    source = pathlib.Path(sysconfig.get_path("stdlib") if folder is None else folder)
    cache = pathlib.Path(default_cache_folder() if cache_folder is None else cache_folder) / _key(
        source, tokenizer
    )
    try:
        return _open_corpus(cache)
    except FileNotFoundError:
        _log.info("preparing the standard-library corpus in %s", cache)
    except ValueError as error:
        _log.warning("preparing the corpus again, because a cached file is damaged: %s", error)

    parts: dict[str, int] = {}
    for (
        split
    ) in SPLITS:  # Read once per part: the text is small, and one streaming writer at a time is simple.
        counts = CorpusCounts()
        documents = (text for path, text in stdlib_documents(source, counts) if split_of(path) == split)
        header = write_tokens(
            cache / f"{split}.tokens",
            encode_documents(documents, tokenizer),
            tokenizer.vocab_size,
            tokenizer.name,
        )
        parts[f"{split}_tokens"] = header.count
    with replace_atomically(cache / "counts.json") as file:
        file.write(json.dumps(dataclasses.asdict(counts) | parts, indent=1).encode())
    corpus = _open_corpus(cache)
    _log.info("corpus ready: %s", corpus.counts)
    return corpus


def _key(source: pathlib.Path, tokenizer: Tokenizer) -> str:
    """Returns the folder name of a cached corpus.

    Distributions ship one Python version with and without its test suite: the list of files and sizes tells
    the two apart.
    """
    files = [(relative, path.stat().st_size) for relative, path in _source_files(source)]
    digest = hashlib.blake2b(json.dumps(files).encode(), digest_size=4).hexdigest()
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{tokenizer.name}{tokenizer.vocab_size}")
    version = f"{platform.python_implementation().lower()}{'.'.join(map(str, sys.version_info[:3]))}"
    return f"stdlib-{version}-{digest}-{name}-v{_FORMAT_VERSION}"


def _open_corpus(cache: pathlib.Path) -> Corpus:
    train, validation = (open_tokens(cache / f"{split}.tokens") for split in SPLITS)
    return Corpus(train, validation, json.loads((cache / "counts.json").read_text()))
