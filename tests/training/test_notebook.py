"""`%%workers`: what a cell prints and leaves, values that come back; no exception, hang or death keeps anyone waiting."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick_compile import ENVIRONMENT
from training import notebook
from training._cell_worker import decode, encode
from training.launch import Cluster
from training.notebook import CellError, CellWorkers


@pytest.fixture(scope="module")
def start():
    """Makes two workers on loopback, which compile quickly; all are ended in the end."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = []

        def start(**arguments):
            made.append(CellWorkers(Cluster(2, loopback=True), **arguments))
            return made[-1]

        yield start
        for group in made:
            group.close()


@pytest.fixture(scope="module")
def group(start):
    return start()


def printed(capsys):
    return sorted(capsys.readouterr().out.splitlines())


def test_a_cell_runs_on_all_and_what_it_leaves_stays(group, capsys):
    group.run("x = 10 * worker\nprint('a', workers)\nprint('b', end='')")
    assert printed(capsys) == ["[0] a 2", "[0] b", "[1] a 2", "[1] b"]
    group.run("def f(n):\n    return x + n\nf(1)")
    assert printed(capsys) == ["[0] 1", "[1] 11"]
    assert group.fetch("f(2)") == [2, 12]


def test_jax_is_one_group(group):
    group.run(
        "from jax.experimental import multihost_utils as mh\n"
        "from jax.sharding import AxisType, NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((workers,), ('data',), axis_types=(AxisType.Auto,))\n"
        "y = jax.make_array_from_process_local_data(NamedSharding(mesh, P('data')), np.full((1, 3), worker))\n"
        "total = jax.jit(lambda y: y.sum(0))(y)"
    )
    for array, own in zip(group.fetch("[y, total]"), (0, 1), strict=True):
        np.testing.assert_array_equal(array[0], [[own] * 3])  # of a global array its own part
        np.testing.assert_array_equal(array[1], [1] * 3)


def test_a_large_array_comes_whole(group):
    size = 700_000  # 7 MB of text; a line of the launcher holds 1
    for found in group.fetch(f"np.arange({size}, dtype=np.int64)"):
        np.testing.assert_array_equal(found, np.arange(size))


def test_values_survive_the_way():
    value = {"a": [1, 2.5, None, "é", True], "b": {"c": np.float32(0.1), "d": jnp.ones((2, 0), jnp.int8)}}
    found = decode(encode(value))
    assert found["a"] == value["a"] and found["b"]["c"] == np.float32(0.1)
    assert found["b"]["d"].shape == (2, 0) and found["b"]["d"].dtype == np.int8
    assert decode(encode(jnp.asarray([1.5], jnp.bfloat16))).dtype == np.float32
    with pytest.raises(TypeError, match="arrays, numbers and strings, got object"):
        encode({"x": object()})
    assert jax.devices()[0].platform == "cpu"


def test_an_exception_is_shown_with_its_worker_and_line_and_all_go_on(group):
    with pytest.raises(CellError) as caught:
        group.run("kept = worker\nif worker == 1:\n    1 / 0")
    text = str(caught.value)
    assert text.startswith("worker 1 raised:\nTraceback") and "line 3, in <module>\n    1 / 0" in text
    assert text.endswith("ZeroDivisionError: division by zero") and "_cell_worker" not in text
    assert group.fetch("kept") == [0, 1]
    with pytest.raises(CellError, match=r"^workers 0, 1 raised:\n(.|\n)*SyntaxError"):
        group.run("x = = 1")
    with pytest.raises(CellError, match="SystemExit"):
        group.run("raise SystemExit(3)")
    with pytest.raises(CellError, match="must be made of arrays"):
        group.fetch("print")
    assert "".join(caught.value._render_traceback_()) == text.replace("\n", "")


def test_a_cell_that_takes_too_long_is_interrupted(group, capsys):
    begin = time.monotonic()
    with pytest.raises(CellError, match=r"workers 0, 1 did not finish within 1 s(.|\n)*the workers run on"):
        group.run("import time\nbefore = 5\nprint('here')\ntime.sleep(600)", 1)
    assert time.monotonic() - begin < 60
    assert printed(capsys) == ["[0] here", "[1] here"]
    assert group.fetch("before") == [5, 5]  # and not what the interrupted cell answered


def test_who_waits_in_a_collective_for_one_that_raised_is_ended(start):
    group = start(grace_secs=1.0)
    group.run("from jax.experimental import multihost_utils as mh")
    with pytest.raises(CellError) as caught:
        group.run("if worker == 1:\n    raise ValueError('bad batch')\nmh.process_allgather(np.zeros(3))")
    text = str(caught.value)
    assert text.startswith("worker 1 raised:") and "ValueError: bad batch" in text
    assert "worker 0 did not finish within 1 s after that" in text and "all workers were ended" in text
    with pytest.raises(ValueError, match=r"the workers must run, but they were ended.*Start new ones"):
        group.run("1")


def test_a_worker_that_dies_ends_all_and_start_makes_new_ones(capsys):
    try:
        group = notebook.start(2, loopback=True)
        assert "2 workers on plain loopback" in capsys.readouterr().out
        with pytest.raises(CellError, match=r"\nworker 1 failed with exit code 7, which ended all\.$"):
            group.run("import os, sys\nif worker == 1:\n    os._exit(7)\nelse:\n    1 / 0")
        with pytest.raises(ValueError, match="worker 1 failed with exit code 7"):
            group.fetch("1")
    finally:
        group.close()


def test_the_magic_runs_in_the_workers_that_were_started(group, monkeypatch):
    magics = {}

    class Shell:
        def register_magic_function(self, function, magic_kind, magic_name):
            magics[magic_kind, magic_name] = function

    notebook.load_ipython_extension(Shell())
    magic = magics["cell", "workers"]
    monkeypatch.setattr(notebook, "_running", None)
    with pytest.raises(ValueError, match="workers must run before a cell does"):
        magic("", "z = 1")
    monkeypatch.setattr(notebook, "_running", group)
    magic("", "z = worker + 1\n")
    assert group.fetch("z") == [1, 2]
    with pytest.raises(CellError, match=r"did not finish within 0\.5 s"):
        magic("0.5", "import time\ntime.sleep(600)")
