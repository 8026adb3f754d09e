"""The launcher as a command: what it prints, how it ends, and that nothing is left however it is ended."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.training.runs_for_tests import ROOT, environment
from training.launch import Cluster

SCRIPT = [sys.executable, str(ROOT / "scripts" / "launch_local.py")]
PYTHON = [sys.executable, "-c"]


@pytest.fixture(scope="module")
def why_not():
    """Why this machine makes no namespaces; "" if it does."""
    with Cluster(1) as cluster:
        return "" if cluster.shaped else cluster.note


class Trace:
    """Finds what belongs to one test, by a variable of all its processes."""

    def __init__(self):
        self.name = f"LAUNCH_TEST_{uuid.uuid4().hex}"
        self.environment = environment() | {self.name: "1"}
        self.namespaces = set()
        self.links = host_links()

    def processes(self):
        """Their ids; notes the namespaces that they stand in."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.name.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
                    self.namespaces |= namespaces_of(folder)
            except OSError:  # gone, or somebody else's
                pass
        return found

    def left(self):
        """Processes, namespaces of theirs that any process still stands in, and links of this machine's own network."""
        processes = self.processes()
        own = self.namespaces - namespaces_of(Path("/proc/self"))
        used = set().union(*map(namespaces_of, Path("/proc").glob("[0-9]*")))
        return processes, own & used, host_links() - self.links

    def assert_nothing_left(self):
        for _ in range(500):
            if not any(left := self.left()):
                return
            time.sleep(0.01)
        raise AssertionError(left)


def namespaces_of(process):
    found = set()
    for kind in ("net", "mnt", "pid", "uts"):
        try:
            found.add(os.readlink(process / "ns" / kind))
        except OSError:
            pass
    return found


def host_links():
    return set(os.listdir("/sys/class/net"))


@pytest.fixture
def trace():
    found = Trace()
    yield found
    found.assert_nothing_left()


def launch(trace, *arguments, prefix=(), **settings):
    return subprocess.run(
        [*prefix, *SCRIPT, *arguments], env=trace.environment, capture_output=True, text=True, timeout=60, **settings
    )  # fmt: skip


def start(trace, *arguments, **settings):
    return subprocess.Popen(
        [*SCRIPT, *arguments], env=trace.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings
    )  # fmt: skip


def test_lines_have_the_worker_before_them(trace):
    command = "import sys; print('input', repr(sys.stdin.read())); print('err', file=sys.stderr)"
    done = launch(trace, "--workers", "2", "--", *PYTHON, command)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] input ''", "[1] input ''"]
    first, *errors = done.stderr.splitlines()
    assert first.startswith("2 workers") and sorted(errors) == ["[0] err", "[1] err"]


def test_exit_code_and_words_of_the_first_failure(trace):
    code = "import os, sys, time; os.environ['JAX_PROCESS_ID'] == '1' and sys.exit(7); time.sleep(1000)"
    done = launch(trace, "--workers", "3", "--", *PYTHON, code)
    assert done.returncode == 7 and "\nworker 1 failed with exit code 7; ending the others\n" in done.stderr


def test_a_reader_that_leaves_ends_all(trace):
    with start(trace, "--workers", "2", "--", "yes") as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(20) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("redirection", "exit_code", "message"),
    [
        (">&-", 2, "error: output and errors must be open, got a closed one"),
        ("2>&-", 2, ""),
        ("> /dev/full", 1, "error: the workers were ended: .*No space left"),
    ],
)
def test_output_that_cannot_be_written_is_an_error(trace, redirection, exit_code, message):
    command = [
        "sh",
        "-c",
        f'exec "$@" {redirection}',
        "sh",
        *SCRIPT,
        "--loopback",
        "--workers",
        "1",
        "--",
        "echo",
        "x",
    ]
    done = subprocess.run(command, env=trace.environment, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("1 workers on plain")]
    assert done.returncode == exit_code and len(errors) == bool(message), done.stderr
    assert re.match(message, "".join(errors))


# Ignores what can be ignored and has a process of its own in the background.
STUBBORN = ["sh", "-c", "trap '' TERM INT HUP; sleep 1000 & echo ready; sleep 1000"]

SAVING = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: got.append(number))
print("ready")
while not got:
    time.sleep(0.01)
time.sleep(0.5)
print("saved", got)
sys.exit(128 + got[0])
"""


def wait_for_ready(launcher, workers=2):
    while workers:
        line = launcher.stdout.readline()
        assert line, "it ended"
        workers -= "ready" in line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_reaches_each_worker_once(trace, number):
    """As a terminal's Ctrl-C, which the launcher passes on to workers that did not get it from the terminal."""
    with start(trace, "--workers", "2", "--", *PYTHON, SAVING, start_new_session=True) as launcher:
        wait_for_ready(launcher)
        os.killpg(launcher.pid, number)
        said = launcher.communicate(timeout=20)[0]
    assert launcher.returncode == 128 + number
    assert sorted(said.splitlines()) == [f"[{worker}] saved [{int(number)}]" for worker in (0, 1)]


def test_a_second_signal_ends_at_once(trace):
    code = "import signal, time\nsignal.signal(2, signal.SIG_IGN)\nprint('ready')\ntime.sleep(1000)"
    with start(trace, "--workers", "2", "--", *PYTHON, code) as launcher:
        wait_for_ready(launcher)
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        assert launcher.communicate(timeout=20)[0] == "" and launcher.returncode == 130


def test_a_second_signal_ends_at_once_even_if_nobody_reads(trace):
    """The first one then waits for the supervisor, which waits for the reader of the output."""
    with start(trace, "--workers", "2", "--", "yes") as launcher:
        launcher.stdout.readline()
        time.sleep(1.5)  # until all the queues between are full
        launcher.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        try:
            assert launcher.wait(20) == 143
        finally:
            launcher.kill()


def test_a_supervisor_that_is_killed_is_an_error(trace):
    """As by a machine without memory: all workers go, and the launcher says so."""
    with start(trace, "--workers", "2", "--", *STUBBORN) as launcher:
        wait_for_ready(launcher)
        commands = {each: Path(f"/proc/{each}/cmdline").read_bytes() for each in trace.processes()}
        supervisors = [
            process
            for process, command in commands.items()
            if b"training._supervisor" in command and b"unshare" not in command
        ]
        for process in supervisors:
            os.kill(process, signal.SIGKILL)
        assert len(supervisors) == 1 and launcher.wait(20) == 1
        assert launcher.stdout.read().startswith("error: the supervisor of the workers is gone")


@pytest.mark.parametrize("kind", ["namespaces", "loopback"])
def test_killed_at_any_moment_it_leaves_nothing(trace, why_not, kind):
    """Moments from its first to well after the workers'; after each it starts again."""
    if kind == "namespaces" and why_not:
        pytest.skip(why_not)
    arguments = [
        "--workers",
        "2",
        *(["--loopback"] if kind == "loopback" else ["--bandwidth", "10mbit"]),
        "--",
    ]
    random_secs = random.Random(5)
    moments = [0.1 * (i + random_secs.random()) for i in range(8)]
    for moment in [*moments, None] if kind == "namespaces" else [*moments[::3], None]:
        with start(trace, *arguments, *STUBBORN) as launcher:
            if moment is None:  # surely at work
                wait_for_ready(launcher)
                assert len(trace.processes()) >= 6  # launcher, supervisor, two workers, a child of each
            else:
                time.sleep(moment)
                trace.processes()
            launcher.kill()
        trace.assert_nothing_left()
        again = launch(trace, *arguments, "echo", "alive")
        assert again.returncode == 0 and again.stdout.count("alive") == 2, again.stderr
        trace.assert_nothing_left()
    if kind == "namespaces":
        assert (
            len(trace.namespaces - namespaces_of(Path("/proc/self"))) >= 10
        )  # four of three processes, at least once


def test_without_permission_it_says_so_and_runs(trace):
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can give up what namespaces need, with setpriv")
    powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = launch(trace, "--workers", "2", "--bandwidth", "1mbit", "--", "echo", "alive", prefix=powerless)
    assert done.returncode == 0 and done.stdout.count("alive") == 2
    assert re.search(
        r"^2 workers on plain loopback: links are not shaped, and .* ignored, since unshare: ", done.stderr
    )


def test_loopback_says_what_it_ignores(trace):
    done = launch(trace, "--workers", "1", "--loopback", "--latency", "1ms", "--", "echo", "alive")
    assert (done.returncode, done.stdout) == (0, "[0] alive\n")
    ending = "links are not shaped, and what was asked for is ignored, since loopback was asked for\n"
    assert done.stderr == f"1 workers on plain loopback: {ending}"


JOINED = """
import os
import jax
address, count, me = (os.environ[f"JAX_{name}"] for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"))
jax.distributed.initialize(address, int(count), int(me))
import numpy as np
from jax.experimental import multihost_utils
found = multihost_utils.process_allgather(np.full(250_000, int(me), np.int32))
received = int(next(line for line in open("/proc/net/dev") if "net0:" in line).split(":")[1].split()[0])
print("sum", int(found.sum()), 10**6 < received < 1.2 * 10**6)
"""


def test_jax_joins_over_the_links(trace, why_not):
    """A million bytes of the other one come through the interface of each."""
    if why_not:
        pytest.skip(why_not)
    done = launch(trace, "--workers", "2", "--bandwidth", "100mbit", "--", *PYTHON, JOINED)
    assert done.returncode == 0, done.stderr
    assert [line for line in sorted(done.stdout.splitlines()) if "sum" in line] == [
        f"[{worker}] sum 250000 True" for worker in (0, 1)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a command must follow --"),
        (["--workers", "0", "--", "true"], r"workers must be in 1\.\.250, got 0"),
        (["--workers", "2", "--link", "2=1mbit", "--", "true"], r"a worker must be in 0\.\.1, got 2"),
        (["--link", "1mbit", "--", "true"], "--link must be WORKER=BANDWIDTH, got '1mbit'"),
        (["--bandwidth", "100mb", "--", "true"], "got '100mb'"),
        (["--latency", "fast", "--", "true"], "got 'fast'"),
        (["--", "no-such-program"], "must be a program, got 'no-such-program'"),
        (["--", str(ROOT / "README.md")], "must be a program"),
    ],
)
def test_wrong_commands(trace, arguments, message):
    done = launch(trace, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert re.match(f"error: .*{message}", done.stderr) and done.stderr.count("\n") == 1
