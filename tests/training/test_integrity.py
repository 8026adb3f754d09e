"""Files of a checkpoint that are not as they were written, and two runs in one folder."""

import io
import json
import random
import shutil

import pytest

from tests.training.runs_for_tests import tiny, write_corpus
from training import config as settings
from training import runs
from training._integrity import FILE, damaged, seal
from training.checkpoint import Checkpoints
from training.train import build, train


@pytest.fixture
def folder(tmp_path):
    """Files as of a checkpoint."""
    for name, content in {"a": b"1234", "b/c": b"x" * 100, "b/empty": b""}.items():
        path = tmp_path / "20" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    seal(tmp_path / "20")
    return tmp_path / "20"


def test_a_whole_one_is_whole(folder):
    assert damaged(folder) is None
    seal(folder)  # again
    assert damaged(folder) is None
    (folder / FILE).unlink()  # one whose run ended before it was summed up
    assert damaged(folder) is None


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_found(folder, bit):
    path = folder / "b" / "c"
    content = bytearray(path.read_bytes())
    content[random.Random(bit).randrange(100)] ^= 1 << bit
    path.write_bytes(content)
    assert damaged(folder) == f"{path} has other bytes than were written"


def test_missing_and_short_files_are_found_and_new_ones_are_no_harm(folder):
    (folder / "new").write_text("n")
    assert damaged(folder) is None
    (folder / "b" / "c").write_bytes(b"x" * 99)
    assert damaged(folder) == f"{folder / 'b' / 'c'} has 99 bytes of 100"
    (folder / "b" / "c").unlink()
    assert damaged(folder) == f"{folder / 'b/c'} is missing"


def test_what_is_not_there_is_not_sealed(folder):
    """A checkpoint that could not be written: a folder with sums alone would count as one."""
    with pytest.raises(FileNotFoundError):
        seal(folder / "5")
    assert not (folder / "5").exists()


@pytest.mark.parametrize(
    "text", ["", "[1, 2]", '{"a": 4}', '{"a": ["x", 1]}', "{" * 2000, '{"../../secret": [4, 1]}', "\0\0"]
)
def test_sums_that_are_damaged_or_hostile_load_nothing(folder, text):
    (folder.parent / "secret").write_text("1234")
    (folder / FILE).write_text(text)
    told = damaged(folder)
    assert told is not None and str(folder) in told
    assert ("cannot be read" in told) or ("secret is missing" in told)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6."""
    home = tmp_path_factory.mktemp("home")
    config = tiny(
        write_corpus(home),
        run__steps=6,
        checkpoint__every=2,
        checkpoint__keep=3,
        mesh__data=2,
        optimizer__name="adams",
    )
    folder = home / "run"
    runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
    train(build(config), folder, out=io.StringIO())
    return config, folder


def hurt(folder, step):
    """Flips a bit in the largest file of a checkpoint."""
    path = max(
        (p for p in (folder / "checkpoints" / str(step)).rglob("*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    return path


def test_all_checkpoints_are_sealed(finished):
    for step in (2, 4, 6):
        sums = json.loads((finished[1] / "checkpoints" / str(step) / FILE).read_text())
        assert len(sums) > 3


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(finished, tmp_path):
    """Case 18, and a later save of the same step is whole again."""
    config, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    path = hurt(folder, 6)
    out = io.StringIO()
    outcome = train(build(settings.update(config, {"run.steps": 8})), folder, resume=True, out=out)
    told = out.getvalue()
    assert outcome.step == 8
    assert (
        f"the checkpoint of step 6 is damaged: {path} has other bytes" in told
        and "going on from step 4" in told
    )
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest_whole(print) == 8
        assert damaged(folder / "checkpoints" / "6") is None


def test_where_none_is_whole_nothing_is_loaded(finished, tmp_path):
    config, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    paths = [hurt(folder, step) for step in (2, 4, 6)]
    with pytest.raises(ValueError, match="a whole checkpoint is needed") as refused:
        train(build(settings.update(config, {"run.steps": 8})), folder, resume=True, out=io.StringIO())
    assert all(str(path) in str(refused.value) for path in paths)


def test_every_kth_checkpoint_stays(finished, tmp_path):
    config, _ = finished
    folder = tmp_path / "run"
    other = settings.update(config, {"checkpoint.keep": 1, "checkpoint.keep_every": 4})
    runs.new_folder(settings.update(other, {"run.folder": str(folder)}))
    train(build(other), folder, out=io.StringIO())
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [4, 6]


def test_two_runs_in_one_folder_are_refused(finished, tmp_path):
    config, _ = finished
    folder = tmp_path / "run"
    shutil.copytree(finished[1], folder)
    with (
        runs.held(folder),
        pytest.raises(ValueError, match=r"must be its own, but process \d+ on .* is training in"),
    ):
        train(build(settings.update(config, {"run.steps": 8})), folder, resume=True, out=io.StringIO())
    with runs.held(folder), pytest.raises(ValueError), runs.held(folder):
        pass
    with runs.held(folder):  # let go
        pass
