"""Token files: round trips, id widths at their boundaries, damage of every kind, nothing executed."""

import pathlib
import pickle
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training import token_file
from training.token_file import open_tokens, token_dtype, write_tokens

HEADER_BYTES = 128
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.tokens"


def with_fields(data: bytes, offset: int, fields: bytes) -> bytes:
    """Returns the file with header bytes replaced and the header's CRC made right again."""
    body = bytearray(data[: HEADER_BYTES - 4])
    body[offset : offset + len(fields)] = fields
    return bytes(body) + struct.pack("<I", zlib.crc32(body)) + data[HEADER_BYTES:]


@given(data=st.data(), vocab_size=st.sampled_from([1, 2, 257, 65535, 65536, 65537, 128256, 2**31]))
def test_round_trip(tmp_path_factory, data, vocab_size):
    chunks = data.draw(st.lists(st.lists(st.integers(0, vocab_size - 1), max_size=20), max_size=5))
    path = tmp_path_factory.mktemp("t") / "a.tokens"
    expected = [id for chunk in chunks for id in chunk]
    if not expected:
        with pytest.raises(ValueError, match="at least one token"):
            write_tokens(path, chunks, vocab_size, "test")
        return
    written = write_tokens(path, chunks, vocab_size, "tést")
    file = open_tokens(path, verify=True)
    assert file.tokens.tolist() == expected
    assert file.header == written
    assert (len(file), file.vocab_size, file.tokenizer_name) == (len(expected), vocab_size, "tést")
    start = data.draw(st.integers(0, len(expected) - 1))
    window = file.read_windows([start], len(expected) - start)
    assert window.dtype == np.int32
    assert window.tolist() == [expected[start:]]


@pytest.mark.parametrize(
    ("vocab_size", "largest", "dtype"),
    [(65535, 65534, "uint16"), (65536, 65535, "uint16"), (65537, 65536, "uint32"), (128256, 70000, "uint32")],
)
def test_the_id_width_follows_the_vocabulary(path, vocab_size, largest, dtype):
    """70000 must come back as 70000, not as 70000 - 65536 = 4464."""
    write_tokens(path, [[0, largest, 1]], vocab_size, "test")
    file = open_tokens(path)
    assert file.header.dtype == dtype
    assert file.tokens.tolist() == [0, largest, 1]
    assert file.read_windows([1], 2).tolist() == [[largest, 1]]
    assert path.stat().st_size == HEADER_BYTES + 3 * np.dtype(dtype).itemsize


def test_a_forced_width(path):
    with pytest.raises(ValueError, match=r"uint16 holds ids up to 65535.*128256 ids"):
        write_tokens(path, [[1]], 128256, "test", dtype=np.uint16)
    for dtype in (np.uint8, np.int32, np.float32):
        with pytest.raises(ValueError, match="uint16 or uint32"):
            write_tokens(path, [[1]], 257, "test", dtype=dtype)
    assert not path.exists()
    write_tokens(path, [[1, 2]], 257, "test", dtype=np.uint32)
    assert open_tokens(path).header.dtype == np.uint32
    assert open_tokens(path).tokens.tolist() == [1, 2]


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_vocabulary_sizes_out_of_range(vocab_size):
    with pytest.raises(ValueError, match=f"got {vocab_size}"):
        token_dtype(vocab_size)


@pytest.mark.parametrize("wrong", [300, 65536 + 5, -1, 2**40])
def test_an_id_outside_the_vocabulary_is_not_written(path, wrong):
    """65536 + 5 would pass as 5 if it were narrowed before the check."""
    with pytest.raises(ValueError, match=rf"\[0, 300\).*'test'.*id {wrong} at position 6"):
        write_tokens(path, [[1, 2, 299], [], [0, 4, 5, wrong, 7]], 300, "test")
    assert list(path.parent.iterdir()) == []


def test_an_id_outside_the_vocabulary_is_not_read(path):
    write_tokens(path, [np.arange(50)], 50, "test")
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 2 * 33] = 77
    path.write_bytes(data)
    file = open_tokens(path, verify=False)
    assert file.read_windows([0, 34], 16).max() == 49
    with pytest.raises(ValueError, match=r"\[0, 50\).*id 77 at position 33"):
        file.read_windows([0, 30], 16)


def test_verification_checks_ids_too(path):
    """A file whose checksum is right but whose ids are not: written by a faulty program."""
    write_tokens(path, [[5, 60, 7]], 100, "test")
    path.write_bytes(with_fields(path.read_bytes(), 16, struct.pack("<Q", 50)))
    assert open_tokens(path, verify=False).vocab_size == 50
    with pytest.raises(ValueError, match=r"id 60 at position 1"):
        open_tokens(path)


@pytest.mark.parametrize("chunks", [[[1.0]], [np.ones((2, 2), int)], [["a"]], [[True, False]], [3]])
def test_chunks_must_be_sequences_of_integers(path, chunks):
    with pytest.raises(ValueError, match=r"1-D arrays of integers.*after 2 tokens"):
        write_tokens(path, [[1, 2], *chunks], 257, "test")
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("chunks", [[], [[]], [[], np.zeros(0, np.int64)]])
def test_no_tokens_leave_no_file(path, chunks):
    with pytest.raises(ValueError, match=f"at least one token, got none for {path}"):
        write_tokens(path, chunks, 257, "test")
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("name", ["", "n" * 65, "é" * 33, "a\0b"])
def test_names_that_do_not_fit_the_header(path, name):
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        write_tokens(path, [[1]], 257, name)


def test_a_failing_source_keeps_the_old_file(path):
    write_tokens(path, [[1, 2, 3]], 257, "test")

    def chunks():
        yield [4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, chunks(), 257, "test")
    assert open_tokens(path).tokens.tolist() == [1, 2, 3]
    assert list(path.parent.iterdir()) == [path]


def test_an_open_file_survives_its_replacement(path):
    write_tokens(path, [[1, 2, 3]], 257, "test")
    old = open_tokens(path)
    write_tokens(path, [[9]], 257, "test")
    assert old.tokens.tolist() == [1, 2, 3]
    assert open_tokens(path).tokens.tolist() == [9]


def test_a_killed_writer_leaves_no_file_of_that_name(path):
    code = (
        "import os, sys; from training.token_file import write_tokens\n"
        "def chunks():\n    yield list(range(200)) * 10000\n    os.kill(os.getpid(), 9)\n"
        "write_tokens(sys.argv[1], chunks(), 257, 'test')"
    )
    result = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=60)
    assert result.returncode == -9
    assert not path.exists()
    write_tokens(path, [[1]], 257, "test")
    assert open_tokens(path).tokens.tolist() == [1]


def test_tokens_are_mapped_and_read_only(path):
    write_tokens(path, [np.arange(1000)], 1000, "test")
    file = open_tokens(path)
    base = file.tokens
    while not isinstance(base, np.memmap):
        base = base.base
        assert base is not None, "the tokens were copied into memory"
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1


@pytest.mark.parametrize(("starts", "length"), [([-1], 2), ([9], 2), ([0, 99], 3), ([0], 11)])
def test_windows_outside_the_file(path, starts, length):
    write_tokens(path, [np.arange(10)], 10, "test")
    with pytest.raises(ValueError, match=f"inside the 10 tokens of {path}"):
        open_tokens(path).read_windows(starts, length)


def test_every_flipped_byte_is_found(path):
    write_tokens(path, [[3, 1, 4, 1, 5]], 257, "test")
    good = path.read_bytes()
    assert len(good) == HEADER_BYTES + 10
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=str(path)):
            open_tokens(path)
    path.write_bytes(good)
    assert len(open_tokens(path)) == 5


def test_every_shortened_or_longer_file_is_found_without_reading_it(path):
    write_tokens(path, [[3, 1, 4, 1, 5]], 257, "test")
    good = path.read_bytes()
    for data in [good[:n] for n in range(len(good))] + [good + b"\0"]:
        path.write_bytes(data)
        with pytest.raises(ValueError, match=str(path)):
            open_tokens(path, verify=False)


@pytest.mark.parametrize(
    ("offset", "fields", "message"),
    [
        (8, struct.pack("<I", 2), "version must be 1, got 2"),
        (12, struct.pack("<I", 3), "3 bytes"),
        (12, struct.pack("<I", 8), "8 bytes"),
        (16, struct.pack("<Q", 0), "for 0 ids"),
        (16, struct.pack("<Q", 2**31 + 1), "for 2147483649 ids"),
        (16, struct.pack("<Q", 65537), "5 ids of 2 bytes for 65537 ids"),
        (24, struct.pack("<Q", 0), "0 ids"),
        (24, struct.pack("<Q", 2**62), "must have"),
    ],
)
def test_impossible_headers(path, offset, fields, message):
    """Well-formed headers (good CRC) that no correct program writes."""
    write_tokens(path, [[3, 1, 4, 1, 5]], 257, "test")
    path.write_bytes(with_fields(path.read_bytes(), offset, fields))
    with pytest.raises(ValueError, match=message) as error:
        open_tokens(path)
    assert str(path) in str(error.value)


class _Hostile:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (self.target, "w")


def test_a_hostile_file_executes_nothing(path, tmp_path):
    target = tmp_path / "executed"
    payload = pickle.dumps(_Hostile(str(target)))
    pickle.loads(payload).close()
    assert target.exists(), "the payload must be one that does harm when unpickled"
    target.unlink()

    path.write_bytes(payload)
    with pytest.raises(ValueError, match=f"must start with .* in {path}"):
        open_tokens(path)
    array_path = tmp_path / "array.npy"
    np.save(array_path, np.array([_Hostile(str(target))], object), allow_pickle=True)
    with pytest.raises(ValueError, match=f"must start with .* in {array_path}"):
        open_tokens(array_path)
    write_tokens(path, [[1] * 200], 257, "test")
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + payload.ljust(400, b"\0"))
    with pytest.raises(ValueError, match="damaged"):
        open_tokens(path)
    assert not target.exists()


def test_what_is_no_file(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no token file at {path}"):
        open_tokens(path)
    with pytest.raises(ValueError, match=f"regular file, got {tmp_path}"):
        open_tokens(tmp_path)


def test_large_files_are_verified_only_when_asked(path, monkeypatch, caplog):
    write_tokens(path, [[3, 1, 4, 1, 5]], 257, "test")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(token_file, "AUTO_VERIFY_BYTES", 10)
    with pytest.raises(ValueError, match="BLAKE2b"):
        open_tokens(path)
    monkeypatch.setattr(token_file, "AUTO_VERIFY_BYTES", 9)
    with caplog.at_level("INFO"):
        assert len(open_tokens(path)) == 5
    assert "verify=True" in caplog.text
    with pytest.raises(ValueError, match="BLAKE2b"):
        open_tokens(path, verify=True)


def test_verification_streams(path, monkeypatch):
    """The pass over the payload goes in several chunks, the last one short."""
    write_tokens(path, [np.arange(1000)], 1000, "test")
    monkeypatch.setattr(token_file, "_CHUNK_BYTES", 96)
    assert len(open_tokens(path, verify=True)) == 1000
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="BLAKE2b"):
        open_tokens(path, verify=True)
