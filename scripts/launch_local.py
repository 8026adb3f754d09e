"""Runs a command in several workers on this machine, each with a link of its own of a known speed.

    python scripts/launch_local.py --workers 2 --bandwidth 100mbit -- \\
        python scripts/pretrain.py --config gasloc-demo --run.steps 60
    python scripts/launch_local.py --workers 4 --link 3=10mbit -- python -c "import socket; print(socket.gethostname())"

Output comes with the worker's number before each line. The first worker that fails ends all, and its exit code is the
launcher's. Ctrl-C and SIGTERM are passed on to the workers; a second one ends them at once. However it ends, nothing is left
behind. Where links cannot be shaped (no Linux, no iproute2, no permission) it says so, and the workers use plain loopback; a
process that left its worker's session (setsid) may then stay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import threading

from training._signals import StopSignals
from training.launch import Cluster


def _link(text: str) -> tuple[int, str]:
    worker, equals, bandwidth = text.partition("=")
    if not (worker.isdecimal() and equals and bandwidth):
        raise ValueError(f"--link must be WORKER=BANDWIDTH, got {text!r}. Write for example 3=10mbit.")
    return int(worker), bandwidth


def main(arguments: list[str] | None = None) -> int:
    assert __doc__
    if sys.stdout is None or sys.stderr is None:  # the next file opened would take its number
        print("error: output and errors must be open, got a closed one. Use >/dev/null.", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] -- COMMAND ...",
    )
    parser.add_argument("--workers", type=int, default=4, help="number of processes (4)")
    parser.add_argument(
        "--bandwidth", help="what each worker can send and receive, such as 100mbit; else no limit"
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="WORKER=BANDWIDTH",
        help="of one worker; may be repeated",
    )
    parser.add_argument("--latency", help="one way, such as 5ms; needs netem in the kernel")
    parser.add_argument(
        "--loopback", action="store_true", help="plain loopback; workers then reach the internet"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    running: list[Cluster] = []
    starting = threading.Lock()

    def pass_on(number: int) -> None:
        with starting, contextlib.suppress(RuntimeError):  # just ended
            for cluster in running:
                cluster.signal(number)

    # A second signal ends this process, and with it all others.
    with StopSignals(pass_on) as stop:
        try:
            if not command:
                raise ValueError(
                    "a command must follow --, got none. Write: launch_local.py --workers 4 -- COMMAND"
                )
            if shutil.which(command[0]) is None:
                raise ValueError(f"the command must be a program, got {command[0]!r}, which is none in PATH.")
            cluster = Cluster(
                options.workers,
                bandwidth=options.bandwidth,
                links=dict(map(_link, options.link)),
                latency=options.latency,
                loopback=options.loopback,
            )
            with cluster:
                print(cluster.note, file=sys.stderr, flush=True)
                with starting:
                    if stop.received is not None:
                        return stop.exit_code
                    cluster.start(command, takes_input=False)
                    running.append(cluster)
                return cluster.wait()
        except (ValueError, RuntimeError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        except OSError as error:  # of a worker's line that could not be printed, above all
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
            if isinstance(error, BrokenPipeError):  # piped into head
                return 128 + signal.SIGPIPE
            print(f"error: the workers were ended: {error}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
