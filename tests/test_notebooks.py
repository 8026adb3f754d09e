"""Every notebook runs from top to bottom in a process of its own, and is committed as it ran, with its pictures.

As a script this file is that process, a notebook without Jupyter: test_notebooks.py FILE [OLD NEW].
"""

import importlib
import json
import linecache
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from tests.training.runs_for_tests import environment
from training.launch import Cluster

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
NAMES = ("scape_from_scratch", "gasloc_and_stragglers", "multi_host")


class Shell:
    """What a notebook here asks of IPython: %load_ext NAME, alone in its cell, and the cell magics that this registers."""

    def __init__(self):
        self.magics = {}

    def register_magic_function(self, function, magic_kind, magic_name):
        assert magic_kind == "cell"
        self.magics[magic_name] = function

    def run_file(self, file: Path, old: str = "", new: str = "") -> None:
        """Runs the cells in order in one namespace; an error's traceback names notebook, cell and line."""
        text, names = file.read_text(encoding="utf-8"), {"__name__": "__main__"}
        assert old in text
        for number, cell in enumerate(json.loads(text.replace(old, new) if old else text)["cells"]):
            if cell["cell_type"] == "code":
                self.run_cell("".join(cell["source"]), f"{file.name}, cell {number}", names)

    def run_cell(self, source: str, name: str, names: dict) -> None:
        if source.startswith("%load_ext "):
            importlib.import_module(source.split()[1]).load_ipython_extension(self)
        elif source.startswith("%%"):
            line, _, body = source.removeprefix("%%").partition("\n")
            magic, _, line = line.partition(" ")
            self.magics[magic](line, body)
        else:
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), names)


def main(file: str, *replacement: str) -> None:
    import matplotlib.pyplot as plt

    def show() -> None:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
        plt.close("all")

    plt.show = show
    try:
        Shell().run_file(Path(file), *replacement)
    except Exception:
        traceback.print_exc()  # with the cell's lines, which the interpreter itself would look for in a file
        sys.exit(1)


def run(file, folder, *replacement):
    """Runs this file as a script in `folder`."""
    return subprocess.run(
        [sys.executable, __file__, str(file), *replacement],
        cwd=folder,
        # Workers share what they have compiled, however short it took.
        env=environment() | {"MPLBACKEND": "agg", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def cells(name, kind):
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in found["cells"] if cell["cell_type"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As the notebooks' own: they keep the text of the standard library beside it."""
    path = tmp_path_factory.mktemp("tree") / "notebooks"
    path.mkdir()
    return path


def test_all_are_tested():
    assert sorted(NAMES) == sorted(path.stem for path in NOTEBOOKS.iterdir() if path.suffix == ".ipynb")


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name, folder):
    done = run(NOTEBOOKS / f"{name}.ipynb", folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def test_the_one_with_workers_runs_on_plain_loopback_too(folder):
    with Cluster(1) as cluster:
        if not cluster.shaped:
            pytest.skip("it has just done so: " + cluster.note)
    file = NOTEBOOKS / "multi_host.ipynb"
    done = run(file, folder, 'start(4, bandwidth=\\"100mbit\\")', "start(4, loopback=True)")
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "4 workers on plain loopback" in done.stdout


def test_an_error_names_notebook_cell_and_line(tmp_path):
    code = ["x = 1\n", "assert x == 2"]
    notebook = {"cells": [{"cell_type": "markdown", "source": ["a"]}, {"cell_type": "code", "source": code}]}
    (tmp_path / "wrong.ipynb").write_text(json.dumps(notebook))
    done = run(tmp_path / "wrong.ipynb", tmp_path)
    assert done.returncode == 1 and 'File "wrong.ipynb, cell 1", line 2' in done.stderr
    assert done.stderr.rstrip().endswith("AssertionError") and "assert x == 2" in done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_it_is_committed_as_it_ran(name):
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 300_000
    first = "".join(cells(name, "markdown")[0]["source"])
    assert "Needs: " in first and "Takes about" in " ".join(first.split())
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [
        output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


if __name__ == "__main__":
    main(*sys.argv[1:])
