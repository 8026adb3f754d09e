"""The standard-library corpus: what is a document, the split, the cache, several processes at once."""

import logging
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from training import corpus
from training.corpus import (
    CorpusCounts,
    decode_source,
    default_cache_folder,
    prepare_stdlib,
    split_of,
    stdlib_documents,
)
from training.tokenizer import ByteTokenizer

ROOT = pathlib.Path(__file__).parents[2]

FILES = {
    "a.py": b"a = 1\n",
    "b/__init__.py": b"",
    "b/blank.py": b"\n  \n",
    "b/mod.py": b"x = 2\r\ny = 3\rz = 4\n",
    "b-c/mod.py": b"# sorts before b/ by character\n",
    "copy.py": b"x = 2\ny = 3\nz = 4\n",
    "latin.py": "# -*- coding: latin-1 -*-\ns = 'é'\n".encode("latin-1"),
    "broken.py": b"s = '\xff'\n",
    "unknown.py": b"# coding: no-such-encoding\n",
    "bom.py": b"\xef\xbb\xbfv = 1\n",
    "notes.txt": b"no source\n",
    "_sysconfigdata_x.py": b"prefix = '/home/me'\n",
    "sitecustomize.py": b"local = 1\n",
    "site-packages/other.py": b"other = 1\n",
    "sub/dist-packages/other.py": b"other = 2\n",
    "__pycache__/cached.py": b"cached = 1\n",
}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "lib"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "link.py").symlink_to(root / "notes.txt")
    return root


@pytest.fixture
def many(tmp_path):
    """A folder with enough documents for both parts of the split."""
    root = tmp_path / "many"
    root.mkdir()
    for i in range(100):
        (root / f"m{i}.py").write_text(f"value = {i}\n" * (i % 7 + 1))
    parts = {split_of(f"m{i}.py") for i in range(100)}
    assert parts == {"train", "validation"}
    return root


def test_documents_are_the_sources_in_the_order_of_their_paths(folder):
    counts = CorpusCounts()
    documents = dict(stdlib_documents(folder, counts))
    assert " ".join(documents) == "a.py b-c/mod.py b/mod.py bom.py broken.py latin.py unknown.py"
    assert documents["b/mod.py"] == "x = 2\ny = 3\nz = 4\n"
    assert documents["latin.py"] == "# -*- coding: latin-1 -*-\ns = 'é'\n"
    assert documents["broken.py"] == "s = '\ufffd'\n"
    assert documents["bom.py"] == "v = 1\n"
    characters = sum(map(len, documents.values()))
    assert counts == CorpusCounts(
        documents=7, characters=characters, empty=2, duplicates=1, broken_encoding=2
    )


@pytest.mark.parametrize(
    "data", [b"\xff", b"# coding: utf-8\n\xc3", b"# coding: ascii\n\xe9", b"# coding: x\n\xff"]
)
def test_broken_encodings_are_replaced_and_reported(data):
    text, broken = decode_source(data)
    assert broken
    assert text.endswith("\ufffd")


def test_the_library_of_this_python():
    counts = CorpusCounts()
    paths, lengths = zip(*((path, len(text)) for path, text in stdlib_documents(counts=counts)), strict=True)
    assert list(paths) == sorted(set(paths))
    assert {"ast.py", "json/decoder.py"} <= set(paths)
    assert not [path for path in paths if "-packages/" in path]
    assert counts.characters == sum(lengths) > 5_000_000
    validation = [path for path in paths if split_of(path) == "validation"]
    assert 0.03 < len(validation) / len(paths) < 0.07


def test_the_split_is_stable():
    """Known answers: the part of a path is the same in every release, process and Python."""
    validation = [i for i in range(100) if split_of(f"m{i}.py") == "validation"]
    assert validation == [4, 11, 22, 25, 26, 44, 85, 90, 99]


def documents_of(tokens):
    ids = np.asarray(tokens)
    assert ids[-1] == 256
    parts = np.split(ids[:-1], np.flatnonzero(ids[:-1] == 256))
    return [ByteTokenizer().decode(part) for part in parts]


def test_prepared_files_hold_every_document_once(many, tmp_path):
    prepared = prepare_stdlib(tmp_path / "cache", folder=many)
    train, validation = documents_of(prepared.train.tokens), documents_of(prepared.validation.tokens)
    assert not set(train) & set(validation)
    by_part = {"train": [], "validation": []}
    for path, text in stdlib_documents(many):
        by_part[split_of(path)].append(text)
    assert {"train": train, "validation": validation} == by_part
    assert (prepared.train.tokenizer_name, prepared.train.vocab_size) == ("byte", 257)
    assert prepared.counts["documents"] == 100
    assert prepared.counts["train_tokens"] == len(prepared.train)
    assert prepared.counts["validation_tokens"] == len(prepared.validation)


def test_real_documents_are_in_one_part_only():
    texts = {"train": set(), "validation": set()}
    for path, text in stdlib_documents():
        texts[split_of(path)].add(text)
    assert texts["train"] and texts["validation"]
    assert not texts["train"] & texts["validation"]


def test_a_second_call_reads_the_cache(many, tmp_path, monkeypatch):
    first = prepare_stdlib(tmp_path / "cache", folder=many)

    def fail(*args):
        raise AssertionError("the corpus was prepared twice")

    monkeypatch.setattr(corpus, "write_tokens", fail)
    second = prepare_stdlib(tmp_path / "cache", folder=many)
    assert second.train.path == first.train.path
    assert second.counts == first.counts


def test_other_sources_get_another_folder(many, tmp_path):
    first = prepare_stdlib(tmp_path / "cache", folder=many)
    (many / "more.py").write_text("more = 1\n")
    second = prepare_stdlib(tmp_path / "cache", folder=many)
    assert first.train.path.parent != second.train.path.parent
    total = {name: len(c.train) + len(c.validation) for name, c in [("first", first), ("second", second)]}
    assert total["second"] == total["first"] + len("more = 1\n") + 1
    (many / "more.py").rename(many / "renamed.py")
    third = prepare_stdlib(tmp_path / "cache", folder=many)
    (many / "renamed.py").write_text("more = 12\n")
    fourth = prepare_stdlib(tmp_path / "cache", folder=many)
    assert len({c.train.path.parent for c in (first, second, third, fourth)}) == 4


def test_another_tokenizer_gets_another_folder(many, tmp_path):
    class Other(ByteTokenizer):
        @property
        def name(self):
            return "other/byte"

    first = prepare_stdlib(tmp_path / "cache", folder=many)
    second = prepare_stdlib(tmp_path / "cache", Other(), folder=many)
    assert first.train.path.parent != second.train.path.parent
    assert second.train.tokenizer_name == "other/byte"
    assert second.train.path.parent.parent == tmp_path / "cache"


@pytest.mark.parametrize("name", ["train.tokens", "validation.tokens", "counts.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_cache_is_made_again(many, tmp_path, caplog, name, damage):
    first = prepare_stdlib(tmp_path / "cache", folder=many)
    path = first.train.path.with_name(name)
    good = path.read_bytes()
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(good[:-1] if damage == "cut" else bytes([good[0] ^ 0x11]) + good[1:])
    with caplog.at_level(logging.WARNING):
        prepare_stdlib(tmp_path / "cache", folder=many)
    assert path.read_bytes() == good
    assert damage == "remove" or "damaged" in caplog.text


def test_several_processes_prepare_at_once(many, tmp_path):
    code = (
        "import sys; from training.corpus import prepare_stdlib\n"
        "for _ in range(3):\n"
        "    c = prepare_stdlib(sys.argv[1], folder=sys.argv[2])\n"
        "    print(c.train.header.checksum, c.validation.header.checksum)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(many)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len({line for output in outputs for line in output.splitlines()}) == 1
    (made,) = (tmp_path / "cache").iterdir()
    assert sorted(path.name for path in made.iterdir()) == [
        "counts.json",
        "train.tokens",
        "validation.tokens",
    ]


def test_no_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "zipped.pyc").write_bytes(b"x")
    with pytest.raises(ValueError, match=f"at least one .*below {tmp_path / 'empty'}, got none"):
        prepare_stdlib(tmp_path / "cache", folder=tmp_path / "empty")
    assert not (tmp_path / "cache").exists()


def test_only_empty_sources(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("\n")
    with pytest.raises(ValueError, match="at least one token"):
        prepare_stdlib(tmp_path / "cache", folder=tmp_path / "lib")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_the_default_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "scape-gasloc"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(default_cache_folder()) == "data"


def test_the_default_source_is_the_running_python(monkeypatch, many, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(many) if name == "stdlib" else None)
    assert len(list(stdlib_documents())) == 100
    assert prepare_stdlib(tmp_path / "cache").counts["documents"] == 100
