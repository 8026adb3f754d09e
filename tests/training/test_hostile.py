"""Files of others are read, never executed, and lead nowhere else: checkpoints, settings, token files, tokenizers, models.

Each holds a pickle, or names code, that would make the file `executed`; what comes of it is one error that names the file.
"""

import ast
import contextlib
import functools
import gc
import json
import pickle
import shutil
import struct
import zlib
from pathlib import PurePosixPath

import pytest
import tensorstore as ts
import yaml

from models import import_hf
from scripts import pretrain as script
from tests import helpers
from tests.test_layering import ROOT, imported_names, modules
from tests.training.runs_for_tests import tiny, write_corpus
from tests.training.test_token_file import _Hostile, with_fields
from training import config as settings
from training import runs
from training._integrity import FILE, damaged, seal
from training.checkpoint import Checkpoints
from training.corpus import prepare_stdlib
from training.tokenizer import ByteTokenizer, get_tokenizer
from training.train import build, restore, save, start

# Of a read that failed orbax leaves tasks behind, which complain when they are collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# No archive is unpacked anywhere, so no name in one can lead out of its folder.
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle", "marshal", "shelve", "torch",
    "tarfile", "zipfile",
}  # fmt: skip
CALLS = {"eval", "exec", "os.system", "os.popen", "shutil.unpack_archive"}
YAML = {"yaml.safe_load", "yaml.YAMLError"}
# What these run is no file's: cells that the user types, and the source of this library's own kernels.
EXCEPTIONS = {
    ("training/_cell_worker.py", "eval"),
    ("training/_cell_worker.py", "exec"),
    ("pallas_kernels/_triton.py", "exec"),
}


def executing(source):
    """The names in a module's source that can execute what is in a file."""
    names = {name for _, name in imported_names(source, "package")}
    found = {name for name in names if name.split(".")[0] in MODULES or name in CALLS}
    found |= {name for name in names if name.startswith("yaml.")} - YAML
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("yaml."):
            found |= {ast.unparse(node)} - YAML
        if isinstance(node, ast.Call):
            found |= {ast.unparse(node.func)} & CALLS
            for given in node.keywords:
                true = not (isinstance(given.value, ast.Constant) and given.value.value is False)
                if given.arg in ("allow_pickle", "shell") and true:
                    found.add(given.arg)
    return found


def test_nothing_can_execute_what_is_in_a_file():
    found = {(str(p), name) for p in modules() for name in executing((ROOT / p).read_text(encoding="utf-8"))}
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch.serialization", "from os import system", "eval(text)",
        "import os\nos.system(text)", "import yaml\nyaml.load(text, yaml.FullLoader)", "from yaml import unsafe_load",
        "import numpy as np\nnp.load(file, allow_pickle=True)", "subprocess.run(text, shell=flag)",
        "def f():\n    from tarfile import open", "shutil.unpack_archive(file)",
    ],
)  # fmt: skip
def test_what_could_would_be_found(source):
    assert executing(source)


@pytest.fixture
def hostile(tmp_path):
    """What creates `executed` when it is unpickled, and at no time does."""
    target = tmp_path / "executed"
    value = _Hostile(str(target))
    pickle.loads(pickle.dumps(value)).close()
    assert target.exists(), "the payload must do harm when unpickled"
    target.unlink()
    yield value
    assert not target.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The setup and the folder of a run with a checkpoint of step 7, and its state."""
    home = tmp_path_factory.mktemp("home")
    config = tiny(write_corpus(home), **{"mesh.data": 2, "optimizer.name": "adams"})
    setup, folder = build(config), home / "run"
    runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
    state = start(setup)
    state.step = 7
    with Checkpoints(folder) as checkpoints:
        save(setup, state, checkpoints)
    state.loader.close()
    return setup, folder, (state.params, state.opt_state)


@pytest.fixture
def checkpoint(finished, tmp_path):
    """A copy of the checkpoint, to do harm to."""
    shutil.copytree(finished[1], tmp_path / "run")
    yield tmp_path / "run" / "checkpoints" / "7"
    gc.collect()


def loaded(setup, checkpoint):
    with Checkpoints(checkpoint.parents[1]) as checkpoints:
        state = restore(setup, checkpoints)
    state.loader.close()
    return state.params, state.opt_state


def replace(checkpoint, pattern, content):
    """Puts `content` in place of the largest such file, with checksums that fit."""
    path = max(checkpoint.glob(pattern), key=lambda path: path.stat().st_size)
    path.write_bytes(content)
    seal(checkpoint)


# Kinds of files in a checkpoint, and whether orbax restores a state without.
KINDS = {
    "params/ocdbt.process_*/d/*": False,
    "params/ocdbt.process_*/manifest.ocdbt": True,
    "params/d/*": False,
    "params/manifest.ocdbt": False,
    "params/_METADATA": False,
    "params/_sharding": True,
    "meta/metadata": False,
    "_CHECKPOINT_METADATA": True,
    "commit_success.txt": True,
}


def test_these_are_all_kinds_of_files(checkpoint):
    for path in (path for path in checkpoint.rglob("*") if path.is_file()):
        name = path.relative_to(checkpoint).as_posix().replace("opt_state/", "params/")
        known = path.name == FILE or any(PurePosixPath(name).match(pattern) for pattern in KINDS)
        assert known, name


@pytest.mark.parametrize("pattern", KINDS)
def test_a_pickle_in_a_checkpoint(pattern, finished, checkpoint, hostile):
    """Nothing is loaded, or the whole state."""
    replace(checkpoint, pattern, pickle.dumps(hostile))
    if KINDS[pattern]:
        helpers.assert_bit_equal(loaded(finished[0], checkpoint), finished[2])
        return
    with pytest.raises(ValueError, match="nothing was loaded") as refused:
        loaded(finished[0], checkpoint)
    assert str(checkpoint) in str(refused.value)


@pytest.mark.parametrize("item", ["_CHECKPOINT_METADATA", "params/_METADATA"])
def test_code_named_in_orbax_metadata_is_not_imported(item, finished, checkpoint, hostile, monkeypatch):
    place = checkpoint.parents[2]
    (place / "hostile_module.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('executed').touch()"
    )
    monkeypatch.syspath_prepend(place)
    text = (checkpoint / item).read_text()
    for name in ("orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler", "jax.Array"):
        text = text.replace(f'"{name}"', '"hostile_module.Handler"')
    assert "hostile_module" in text
    replace(checkpoint, item, text.encode())
    with contextlib.suppress(ValueError):
        helpers.assert_bit_equal(loaded(finished[0], checkpoint), finished[2])


# What stands in place of a part of the metadata; of all of it where there is no part.
FORMS = {
    "a list": ("", []),
    "nothing": ("", None),
    "no parts": ("", {}),
    "no shapes": ("leaves", None),
    "no settings": ("config", None),
    "no totals": ("totals", None),
    "no position": ("data", None),
    "half a position": ("data", {"step": 3}),
    "a negative position": ("data.step", -(2**70)),
    "a setting that is none": ("config", {"optimizer.__class__": "adams"}),
    "a path that leads out": ("leaves.params", {"../../outside": "float32[4]"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_metadata_of_another_form(form, finished, checkpoint):
    (path, value), whole = FORMS[form], {"": json.loads((checkpoint / "meta" / "metadata").read_text())}
    *outer, last = ["", *path.split(".")] if path else [""]
    part = whole
    for name in outer:
        part = part[name]
    part[last] = value
    replace(checkpoint, "meta/metadata", json.dumps(whole[""]).encode())
    with pytest.raises(ValueError):
        loaded(finished[0], checkpoint)


DEEP = pytest.param(b"[" * 20_000, id="deep")


@pytest.mark.parametrize("content", [pytest.param(None, id="pickle"), DEEP])
def test_checksums(content, finished, checkpoint, hostile):
    (checkpoint / FILE).write_bytes(content or pickle.dumps(hostile))
    with pytest.raises(ValueError, match=f"{checkpoint / FILE} cannot be read"):
        loaded(finished[0], checkpoint)


@pytest.mark.parametrize("name", ["../secret", "{}/secret"])
def test_checksums_of_a_file_elsewhere(name, tmp_path):
    """It counts as missing, though it is there and has this size and checksum."""
    (tmp_path / "secret").write_text("1234")
    (tmp_path / "7").mkdir()
    sums = {name.format(tmp_path): [4, zlib.crc32(b"1234")]}
    (tmp_path / "7" / FILE).write_text(json.dumps(sums))
    assert "secret is missing" in damaged(tmp_path / "7")


def test_what_is_written_leads_nowhere_else(checkpoint, tmp_path):
    """A link in the place of a file that a run writes is replaced, not followed."""
    outside = tmp_path / "outside"
    outside.write_text("kept")
    (checkpoint / FILE).unlink()
    (checkpoint / FILE).symlink_to(outside)
    seal(checkpoint)
    assert outside.read_text() == "kept" and not (checkpoint / FILE).is_symlink()


def test_the_lock_leads_nowhere_else(checkpoint, tmp_path):
    outside, folder = tmp_path / "outside", checkpoint.parents[1]
    outside.write_text("kept")
    (folder / runs.LOCK_FILE).unlink(missing_ok=True)
    (folder / runs.LOCK_FILE).symlink_to(outside)
    with contextlib.suppress(ValueError, OSError), runs.held(folder):
        pass
    assert outside.read_text() == "kept"


TAGS = ("!!python/object/apply:os.system [{}]", "!!python/object/new:os.system [{}]")


@pytest.mark.parametrize("tag", TAGS)
def test_code_in_yaml(tag, tmp_path, hostile):
    target, path = tmp_path / "executed", tmp_path / "settings.yaml"
    path.write_text("run: " + tag.format(f'"touch {target}"'))
    with contextlib.suppress(yaml.YAMLError):
        yaml.unsafe_load(path.read_text())
    assert target.exists(), "the payload must do harm when it is loaded unsafely"
    target.unlink()
    with pytest.raises(ValueError, match=rf"{path} must be valid YAML"):
        settings.read_values(path)


@pytest.mark.parametrize("name", ["config.json", "settings.yaml", "settings.json"])
@pytest.mark.parametrize(
    "content",
    [pytest.param(0, id="text"), pytest.param(pickle.HIGHEST_PROTOCOL, id="binary"), DEEP],
)
def test_settings_of_another_kind(name, content, tmp_path, hostile, capsys):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(hostile, content))
    arguments = ["--resume", str(tmp_path)] if name == "config.json" else ["--config-file", str(path)]
    assert script.main(arguments) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "number"),
    [("run.steps", "1e999"), ("run.steps", '"1e999"'), ("optimizer.density", f"1{'0' * 400}")],
)
def test_numbers_that_are_none(key, number, tmp_path):
    (tmp_path / "settings.json").write_text(f'{{"{key}": {number}}}')
    with pytest.raises(ValueError, match=key):
        settings.Config.load(tmp_path / "settings.json")


@pytest.mark.parametrize("count", [2**64 - 1, 2**63 + 1])
def test_token_files(count, finished, tmp_path, hostile):
    """A pickle, and counts that are negative as signed numbers, where a run reads its data."""
    corpus = write_corpus(tmp_path / "corpus", tokens=500)
    config = settings.update(finished[0].config, {"data.source": str(corpus)})
    path = corpus / "train.tokens"
    path.write_bytes(with_fields(path.read_bytes(), 24, struct.pack("<Q", count)))
    with pytest.raises(ValueError, match=f"{path} must have"):
        build(config)
    path.write_bytes(pickle.dumps(hostile))
    with pytest.raises(ValueError, match=f"must start with .* in {path}"):
        build(config)


@pytest.mark.parametrize("name", ["../../tokenizer", "os.system", "cos\nsystem\n(S'touch executed'\ntR."])
def test_a_tokenizer_is_a_name_of_a_table(name):
    """None is loaded from a file; a token file names the one it was made with."""
    with pytest.raises(ValueError, match=r"must be one of \['byte'\]"):
        get_tokenizer(name)


def test_a_tokenizers_name_leads_nowhere_else(tmp_path):
    class Elsewhere(ByteTokenizer):
        name = "../../../elsewhere/"

    sources, cache = tmp_path / "sources", tmp_path / "a" / "b" / "cache"
    for path in (sources / f"{i}.py" for i in range(99)):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"n = {path.stem}\n" * 9)
    found = prepare_stdlib(cache, Elsewhere(), folder=sources)
    assert found.train.path.parent.parent == cache
    for folder, inside in (
        (tmp_path, {"sources", "a"}),
        (tmp_path / "a", {"b"}),
        (tmp_path / "a" / "b", {"cache"}),
    ):
        assert {path.name for path in folder.iterdir()} == inside


def crc32c(data):
    crc = 2**32 - 1
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 2**32 - 1


def test_arrays_lie_in_their_folder(tmp_path):
    """The files of arrays name each other, in the format that orbax uses; a name that leads out is refused."""
    opened = functools.partial(opened_database, tmp_path / "checkpoint")
    inside, context = "inside______/", ts.Context()
    part, whole = opened(inside, context), opened("", context)
    part.write("array", b"outside" * 99).result()
    transaction = ts.Transaction(atomic=True)
    part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
    transaction.commit_sync()
    assert opened("").read("array").result().value == b"outside" * 99

    (index,) = (tmp_path / "checkpoint" / "d").iterdir()
    content = index.read_bytes()[:-4].replace(inside.encode(), b"../outside__/")
    assert b"../outside" in content
    index.write_bytes(content + struct.pack("<I", crc32c(content)))
    (tmp_path / "checkpoint" / inside).rename(tmp_path / "outside__")
    with pytest.raises(ValueError, match="Invalid key"):
        opened("").read("array").result()


def opened_database(folder, path, context=None):
    base = {"driver": "file", "path": f"{folder}/{path}"}
    config = {"compression": None, "max_inline_value_bytes": 0}
    return ts.KvStore.open(
        {"driver": "ocdbt", "base": base, "config": config}, context=context or ts.Context()
    ).result()


def test_a_pickle_as_a_model(tmp_path, hostile):
    config = {
        "model_type": "gpt2",
        **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), 8),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(hostile))
    with pytest.raises(ValueError, match=r"must hold \.safetensors files"):
        import_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(hostile))
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors"):
        import_hf(tmp_path)
