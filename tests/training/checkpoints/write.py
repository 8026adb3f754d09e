"""Writes the run that test_versions.py goes on with, into a folder named after the line of JAX that wrote it.

    python -m tests.training.checkpoints.write

From the repository's root, once with the Python of each line. expected.json holds what the writer had: the arrays at the
checkpoint by their checksums, and the losses of the steps after it.
"""

import contextlib
import hashlib
import json
import platform
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np

from tests.training.runs_for_tests import tiny, write_corpus
from tests.training.test_resume_matrix import advance
from training import config as settings
from training import runs
from training._integrity import seal
from training._leaves import by_path
from training.checkpoint import Checkpoints
from training.mesh import prepare_devices
from training.train import build, save, start

FOLDER = Path(__file__).parent
STEP, MORE = 3, 3
TOKENS = 4000
# SCAPE on two devices; of the transformer's leaves the largest is sparse.
CHANGES = {
    "model.n_layers": 1, "model.width": 8, "model.n_heads": 2, "model.n_kv_heads": 1, "model.ff_width": 64,
    "optimizer.dense": ["norm", "attention", "up", "gate", "embed", "head"], "schedule.learning_rate": 1e-2,
    "data.length": 16, "mesh.data": 2, "run.steps": STEP + MORE,
}  # fmt: skip


def sums(state):
    """Type, shape and checksum of every array."""
    arrays = {
        f"{item}/{path}": np.asarray(x)
        for item in ("params", "opt_state")
        for path, x in by_path(getattr(state, item)).items()
    }
    return {
        path: f"{x.dtype}{list(x.shape)} {hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest()}"
        for path, x in arrays.items()
    }


def main():
    prepare_devices(CHANGES["mesh.data"], "cpu")
    folder = FOLDER / f"jax{'.'.join(jax.__version__.split('.')[:2])}"
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as home, contextlib.chdir(home):
        write_corpus(Path("corpus"), tokens=TOKENS)
        config = tiny("corpus", **CHANGES)
        runs.new_folder(settings.update(config, {"run.folder": str(folder)}))
        setup = build(config)
        state = start(setup)
        advance(setup, state, STEP)
        with Checkpoints(folder) as checkpoints:
            save(setup, state, checkpoints)
        expected = {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "step": STEP,
            "data": state.loader.get_state(),
            "arrays": sums(state),
            "losses": advance(setup, state, MORE),
        }
        state.loader.close()
    checkpoint = folder / "checkpoints" / str(STEP)
    for path in checkpoint.rglob("commit_success.txt"):  # orbax writes down where it wrote
        path.write_text("Checkpoint commit was successful\n")
    seal(checkpoint)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
