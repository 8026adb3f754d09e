"""Commands to all workers and their answers, and what is said where a worker ends without one; interface's count."""

import sys

import pytest

from training.interface import interfaces, sent_bytes
from training.launch import Cluster
from training.workers import Workers

SCRIPT = """
import os, sys
from training.workers import answer, commands
me = int(os.environ["JAX_PROCESS_ID"])
answer(me=me)
for command in commands():
    if command.get("die") == me:
        print("about to fail"); sys.exit(7)
    if "hang" in command:
        continue
    answer(me=me, got=command)
"""


def start(**options):
    return Workers(Cluster(2, loopback=True), [sys.executable, "-c", SCRIPT], **options)


def test_every_worker_answers_in_its_place():
    with start() as workers:
        assert workers.ready == [{"me": 0}, {"me": 1}]
        for command in ({"a": [1, 2.5]}, {"b": "line\nbreak ü"}):
            assert workers.ask(**command) == [{"me": me, "got": command} for me in (0, 1)]


def test_a_worker_that_ends_is_named_with_what_it_printed():
    with start() as workers:
        with pytest.raises(RuntimeError, match=r"exit code 7\. worker 1 .*\n(.*\n)*\[1\] about to fail"):
            workers.ask(die=1)


def test_a_worker_that_does_not_answer():
    with start(timeout_secs=1.5) as workers:
        with pytest.raises(TimeoutError, match=r"worker 0 did not answer within 1\.5 s"):
            workers.ask(hang=True)


def test_a_worker_that_never_gets_ready_leaves_nothing_running():
    cluster = Cluster(2, loopback=True)
    with pytest.raises(RuntimeError, match="exit code 3"):
        Workers(cluster, [sys.executable, "-c", "import sys; sys.exit(3)"])
    with pytest.raises((RuntimeError, ValueError, OSError)):
        cluster.start([sys.executable, "-c", "pass"])  # it was closed


@pytest.mark.skipif(not interfaces(), reason="the kernel has no table of interfaces")
def test_interface_that_is_not_there():
    with pytest.raises(ValueError, match=r"counted on net0, got .*lo.*\. Start with"):
        sent_bytes("net0")
    assert sent_bytes("lo")() >= 0
