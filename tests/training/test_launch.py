"""Workers on one machine: their output, how one failure ends all, what a signal does, and that nothing outlives them."""

import doctest
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.training.runs_for_tests import environment
from training import _bandwidth, _lines
from training._lines import Lines
from training.launch import Cluster


@pytest.fixture(scope="module")
def why_not():
    """Why this machine makes no namespaces; "" if it does."""
    with Cluster(1) as cluster:
        return "" if cluster.shaped else cluster.note


@pytest.fixture(params=["namespaces", "loopback"])
def loopback(request, why_not):
    """Both ways to run workers, one after the other."""
    if request.param == "namespaces" and why_not:
        pytest.skip(why_not)
    return request.param == "loopback"


def alive(marker):
    """Ids of the processes, in any namespace, whose environment has the marker."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # gone, or somebody else's
            pass
    return found


def assert_gone(marker):
    for _ in range(500):
        if not (left := alive(marker)):
            return
        time.sleep(0.01)
    raise AssertionError(f"processes {left} are left")


@pytest.fixture
def marker():
    """A variable that all processes of a test carry, and that none may carry after it."""
    name = f"LAUNCH_TEST_{uuid.uuid4().hex}"
    yield name
    assert_gone(name)


@pytest.fixture
def run(marker):
    """Runs Python code in two workers; returns exit code, lines of each and the cluster's words on a failure."""

    def run(code, loopback, *, act=lambda cluster, lines: None, workers=2, **arguments):
        lines = [[] for _ in range(workers)]
        with Cluster(workers, loopback=loopback) as cluster:
            cluster.start(
                [sys.executable, "-c", f"import os, signal, sys, time\nme = int(os.environ['JAX_PROCESS_ID'])\n{code}"],
                environment={marker: "1"},
                on_line=lambda worker, text: lines[worker].append(text),
                **arguments,
            )  # fmt: skip
            act(cluster, lines)
            return cluster.wait(30), lines, cluster.failure

    return run


def wait_for(lines, text):
    for _ in range(1500):
        if all(text in own for own in lines):
            return
        time.sleep(0.01)
    raise AssertionError(lines)


def test_output_comes_in_whole_lines_and_in_order(run, loopback):
    code = r"""
for i in range(300):
    print(me, i, "é" * i)
os.write(1, b"\xff\xfe broken \xe2\x82")
os.write(1, b"\xac whole\n\n")
os.write(2, b"x" * 3_000_000 + b"\n")
os.write(1, b" 10 %\r 50 %\r100 %\r\nno end")
"""
    exit_code, lines, failure = run(code, loopback)
    assert (exit_code, failure) == (0, "")
    for worker, own in enumerate(lines):
        long = [text for text in own if text.startswith("xx")]
        assert "".join(long) == "x" * 3_000_000 and len(long) == 3
        others = [text for text in own if text not in long]
        assert others[:300] == [f"{worker} {i} {'é' * i}" for i in range(300)]
        assert others[300:] == ["\ufffd\ufffd broken € whole", "", "100 %", "no end"]


def test_a_bar_that_is_drawn_over_shows_itself_now_and_then(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines, found = Lines(), []
    for i in range(100):
        now[0] += 0.1
        found += lines.feed(f"\r{i} of 100".encode())
    assert 5 <= len(found) <= 10 and all(text.endswith("of 100") for text in found)
    assert lines.feed(b"\r\n") == ["99 of 100"] and lines.end() == []


def test_the_first_failure_ends_all(run, loopback):
    """The other one ignores SIGTERM, which it gets first."""
    code = """
signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
print("ready")
if me == 1:
    input()
    sys.exit(3)
while True:
    time.sleep(60)
"""
    exit_code, lines, failure = run(
        code,
        loopback,
        act=lambda cluster, lines: (wait_for(lines, "ready"), cluster.send("go", worker=1)),
        grace_secs=0.3,
    )
    assert (exit_code, failure) == (3, "worker 1 failed with exit code 3")
    assert lines == [["ready", "asked to end"], ["ready"]]


def test_a_worker_that_is_killed_is_a_failure(run, loopback):
    exit_code, _, failure = run("os.kill(os.getpid(), 9) if me == 0 else time.sleep(60)", loopback)
    assert (exit_code, failure) == (137, "worker 0 was ended by SIGKILL")


def test_a_worker_that_leaves_after_a_signal_of_its_own_is_no_failure_in_words(run):
    exit_code, _, failure = run("sys.exit(143) if me == 0 else time.sleep(60)", True)
    assert (exit_code, failure) == (143, "worker 0 left with exit code 143 (SIGTERM)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_once_and_disturbs_none_that_saves(run, loopback, number):
    """Worker 0 leaves at once; worker 1 still writes then, and a second signal would end it."""
    code = f"""
got = []
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, frame: got.append(number))
print("ready")
while not got:
    time.sleep(0.01)
time.sleep(0.5 * me)
print("saved", got)
sys.exit(128 + {int(number)})
"""
    exit_code, lines, failure = run(
        code, loopback, act=lambda cluster, lines: (wait_for(lines, "ready"), cluster.signal(number))
    )
    assert (exit_code, failure) == (128 + number, "")
    assert lines == [["ready", f"saved [{int(number)}]"]] * 2


def test_what_a_worker_leaves_behind_ends_with_it(run, loopback, marker):
    """It holds the worker's output open, too, and must not hold up the end."""
    exit_code, _, _ = run("import subprocess\nsubprocess.Popen(['sleep', '1000'])", loopback)
    assert exit_code == 0
    assert_gone(marker)


def test_a_daemon_ends_with_the_command(why_not, marker):
    """It left the worker's process group; the namespace holds it, and the next command finds it gone."""
    if why_not:
        pytest.skip(why_not)
    code = "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)"
    with Cluster(1) as cluster:
        cluster.start([sys.executable, "-c", code], environment={marker: "1"})
        assert cluster.wait(30) == 0
        assert_gone(marker)


def test_a_daemon_that_writes_without_pause_holds_up_nothing(loopback, marker):
    """Its pipe is never empty and never closed; once it is closed, `yes` ends with its next write."""
    lines = []
    with Cluster(1, loopback=loopback) as cluster:
        cluster.start(
            ["bash", "-c", "setsid yes & sleep 0.1; echo last >&2; exit 0"],
            environment={marker: "1"},
            on_line=lambda worker, text: lines.append(text),
        )
        assert cluster.wait(20) == 0
        assert lines.count("last") == 1


def test_input_reaches_one_or_all_and_commands_follow_each_other(marker, loopback):
    """More than a pipe holds, too, while the worker does not read."""
    with Cluster(2, loopback=loopback) as cluster:
        for word in ("first", "second"):
            lines = [[], []]
            cluster.start(
                [sys.executable, "-c", "import time; time.sleep(0.3); print(input(), len(input()))"],
                environment={marker: "1"},
                on_line=lambda worker, text, lines=lines: lines[worker].append(text),
            )
            with pytest.raises(ValueError, match="last command must have ended"):
                cluster.start(["true"])
            cluster.send(word)
            cluster.send("x" * 1_000_000, worker=1)
            cluster.send("", worker=0)
            assert cluster.wait(30) == 0
            assert lines == [[f"{word} 0"], [f"{word} 1000000"]]


def test_an_error_of_the_listener_ends_all(marker):
    def fails(worker, text):
        raise KeyError(text)

    with Cluster(2) as cluster:
        cluster.start(["sh", "-c", "echo hello; sleep 1000"], environment={marker: "1"}, on_line=fails)
        with pytest.raises(KeyError, match="hello"):
            cluster.wait(30)
        assert_gone(marker)
        with pytest.raises(RuntimeError, match="is gone"):
            cluster.start(["true"])


def test_leaving_the_block_ends_all(marker, loopback):
    with pytest.raises(TimeoutError, match=r"still run after 0\.1 s"):
        with Cluster(2, loopback=loopback) as cluster:
            cluster.start(
                ["sh", "-c", "trap '' TERM INT; sleep 1000 & sleep 1000"], environment={marker: "1"}
            )
            assert alive(marker)
            cluster.wait(0.1)
    assert_gone(marker)
    cluster.close()


OWNER = """
import os, sys, threading, time
from training.launch import Cluster
cluster, runs = Cluster(2, loopback=bool(int(sys.argv[1]))), threading.Semaphore(0)
command = ["sh", "-c", "echo run; sleep 1000"]
cluster.start(command, environment={sys.argv[2]: "1"}, on_line=lambda *line: runs.release())
runs.acquire(), runs.acquire()
child = os.fork()
if child == 0:
    time.sleep(1000)
print(child, flush=True)
time.sleep(1000)
"""


def test_workers_end_with_their_owner_even_if_a_copy_of_it_lives(marker, loopback):
    """A forked child holds every descriptor of the owner open, as those of a data loader do."""
    command = [sys.executable, "-W", "ignore", "-c", OWNER, str(int(loopback)), marker]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as owner:
        try:
            child = int(owner.stdout.readline())
            before = len(alive(marker))
        finally:
            owner.kill()
    try:
        assert before >= 2
        assert_gone(marker)
        os.kill(child, 0)  # and the copy did live
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, r"workers must be in 1\.\.250, got 0"),
        ({"workers": 2, "bandwidth": "fast"}, "got 'fast'"),
        ({"workers": 2, "links": {2: "1mbit"}}, r"a worker must be in 0\.\.1, got 2\. Count"),
        ({"workers": 2, "links": {1: "1mb"}}, "got '1mb'"),
        ({"workers": 2, "latency": "5"}, "latency must be a number with us, ms or s, .* got '5'"),
        ({"workers": 2, "latency": 11}, "got 11"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Cluster(**arguments)


def test_wrong_use(loopback):
    with Cluster(2, loopback=loopback) as cluster:
        for command, message in (
            ([], "got nothing"),
            (["/no/such/program"], "got '/no/such/program': .*No such file"),
            ("echo hi", "list of strings, got 'echo hi'"),
            (["echo", 3], r"list of strings, got \['echo', 3\]"),
        ):
            with pytest.raises(ValueError, match=f"command must .*{message}"):
                cluster.start(command)
        with pytest.raises(ValueError, match="environment must map strings to strings, got 'A': 1"):
            cluster.start(["true"], environment={"A": 1})
        with pytest.raises(ValueError, match="unexpected keyword"):  # a TypeError of the supervisor
            cluster._channel.ask(do="send", words="hi")
        with pytest.raises(ValueError, match="must have been started"):
            cluster.wait()
        for act in (lambda: cluster.send("x", worker=2), lambda: cluster.set_bandwidth("1mbit", worker=-1)):
            with pytest.raises(ValueError, match=r"in 0\.\.1, got"):
                act()
        cluster.start(["true"])  # none of them broke it
        assert cluster.wait(30) == 0


@pytest.mark.parametrize("module", [_bandwidth, _lines])
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_importing_it_does_not_import_jax():
    command = "import sys, training.launch; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", command], env=environment(), check=True, timeout=60)
