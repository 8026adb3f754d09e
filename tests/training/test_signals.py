"""The wish to stop: noted at once even while the main thread is busy, a second one ends the process."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.training.runs_for_tests import environment
from training._signals import StopSignals

# Derives a key for minutes in one C call, in which Python runs no signal handlers.
BUSY = """
import hashlib
from training._signals import StopSignals
with StopSignals(lambda number: print("wish", number, flush=True), lambda: print("second", flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def wait_until(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened in 5 s")


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM)]
)
def test_second_signal_ends_a_busy_process(first, second):
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"wish {int(first)}\n"  # while the C call runs
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(second)
    assert process.communicate(timeout=20)[0] == "second\n"
    assert process.returncode == 128 + second


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_first_signal_is_only_noted(number, code):
    seen = []
    before = signal.getsignal(number)
    with StopSignals(seen.append) as stop:
        assert stop.received is None and stop.exit_code == 0
        os.kill(os.getpid(), number)
        wait_until(lambda: seen)
        os.kill(os.getpid(), number)  # passed on by a launcher in the same moment: the same wish
        time.sleep(0.05)
    assert (stop.received, stop.exit_code, seen) == (number, code, [number])
    assert signal.getsignal(number) is before


def test_works_without_signals_outside_the_main_thread():
    found = []

    def other():
        with StopSignals() as stop:
            found.append(stop.received)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [None]


def test_thread_ends_with_the_block():
    with StopSignals():
        assert any(t.name == "stop-signals" for t in threading.enumerate())
    wait_until(lambda: not any(t.name == "stop-signals" for t in threading.enumerate()))
