"""Several workers on this machine, each with a link of its own of a known speed, as on a cluster.

    with Cluster(4, bandwidth="100mbit") as cluster:
        cluster.start([sys.executable, "scripts/pretrain.py", "--config", "gasloc-demo"])
        exit_code = cluster.wait()

Every worker stands in network, host-name and mount namespaces of its own, joined by a bridge; `tc` lets its interface `net0`
send and receive no faster than its bandwidth. The namespaces have no names and no files: the kernel removes them with the
last process in them, and all processes end with the one that made the Cluster; on plain loopback one that left its worker's
session (setsid) may stay. Imports no JAX.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from training._bandwidth import in_words, parse_bandwidth, parse_latency
from training._channel import Channel
from training._lines import print_line
from training._links import MOST_WORKERS, address

__all__ = ["Cluster", "parse_bandwidth"]


class Cluster:
    """Workers 0 .. `workers` - 1 on this machine; a context manager, `close` ends all.

    Where namespaces cannot be made (not Linux, no iproute2, no permission), workers run on plain loopback, without limits:
    `shaped` is False and `note` says why.

    Args:
      workers: 1 to 250.
      bandwidth: what each worker can send, and as much receive; bit/s or as tc writes it ("100mbit"). None: no limit.
      links: bandwidth of single workers instead, {3: "10mbit"}.
      latency: of one way from any worker to any other, "5ms" or seconds. Needs netem in the kernel.
      loopback: plain loopback although namespaces could be made, in which workers reach each other only, and no internet.

    Raises:
      ValueError: an argument is not as above; the kernel has no netem and a latency is asked for.
    """

    def __init__(
        self,
        workers: int,
        *,
        bandwidth: str | float | None = None,
        links: Mapping[int, str | float] = {},
        latency: str | float | None = None,
        loopback: bool = False,
    ):
        if not 1 <= workers <= MOST_WORKERS:
            raise ValueError(
                f"workers must be in 1..{MOST_WORKERS}, got {workers}. Each is a process on this machine."
            )
        self.workers = workers
        self._check_workers(links)
        common = None if bandwidth is None else parse_bandwidth(bandwidth)
        self.bandwidths: list[float | None] = [common] * workers
        for worker, own in links.items():
            self.bandwidths[worker] = parse_bandwidth(own)
        self.latency_secs = 0.0 if latency is None else parse_latency(latency)
        self.failure = ""
        self._starts = 0
        self._running = False
        self._ended = threading.Condition()
        self._code: int | None = None
        self._problem: BaseException | None = None
        self._on_line: Callable[[int, str], None] | None = None
        self._channel = Channel(
            {"workers": workers, "rates": self.bandwidths, "latency_secs": self.latency_secs}, loopback
        )
        self.shaped = not self._channel.problem
        self.note = self._describe(self._channel.problem)
        self._teller = threading.Thread(target=self._tell, daemon=True, name="cluster-lines")
        self._teller.start()

    def start(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] = {},
        on_line: Callable[[int, str], None] | None = None,
        takes_input: bool = True,
        grace_secs: float = 10.0,
    ) -> None:
        """Starts `command` in every worker; again once the last one has ended, over the same links.

        The first worker that fails ends all: the others get SIGTERM, and SIGKILL `grace_secs` later.

        Args:
          command: program and arguments.
          environment: variables besides this process's own. Each worker also gets PYTHONUNBUFFERED, and to join the group
            JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
          on_line: called as on_line(worker, text) from a thread for every line of output and of errors. None: they are
            printed with a prefix, `[0] `.
          takes_input: whether `send` is used; without it workers read an empty input.

        Raises:
          ValueError: the command cannot be run, or the last one still runs.
        """
        _check_strings(command, environment)
        host, port = (address(0), 20_000 + self._starts) if self.shaped else ("127.0.0.1", _free_port())
        base = {"PYTHONUNBUFFERED": "1", **os.environ, **environment}
        base |= {"JAX_COORDINATOR_ADDRESS": f"{host}:{port}", "JAX_NUM_PROCESSES": str(self.workers)}
        if self._running:
            raise ValueError(
                "the last command must have ended before the next one starts. Wait for it first."
            )
        self._starts += 1
        self._code, self.failure, self._on_line, self._running = None, "", on_line, True
        try:
            self._channel.ask(
                do="start",
                command=list(command),
                folder=os.getcwd(),
                environments=[base | {"JAX_PROCESS_ID": str(worker)} for worker in range(self.workers)],
                takes_input=takes_input,
                grace_secs=grace_secs,
            )
        except (ValueError, RuntimeError) as error:
            self._running = False
            if isinstance(error, RuntimeError):
                raise
            raise ValueError(f"command must be a program that runs, got {command[0]!r}: {error}") from None

    def send(self, text: str, worker: int | None = None) -> None:
        """Writes a line to the input of one worker, or of all. A worker that has ended gets nothing."""
        self._check_workers([] if worker is None else [worker])
        self._channel.ask(do="send", text=text, worker=worker)

    def set_bandwidth(self, bandwidth: str | float | None, worker: int | None = None) -> None:
        """Changes the link of one worker, or of all, in force on return; nothing happens without links."""
        self._check_workers([] if worker is None else [worker])
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        rates = {each: rate for each in (range(self.workers) if worker is None else [worker])}
        self._channel.ask(do="rate", rates=rates)
        for each in rates:
            self.bandwidths[each] = rate

    def signal(self, number: int) -> None:
        """Sends a signal to every worker once, and to what it started. Leaving with 128 + `number` is then no failure."""
        self._channel.ask(do="signal", number=int(number))

    def wait(self, timeout_secs: float | None = None) -> int:
        """Exit code of the command, when all workers have left and all their lines are delivered.

        That of the worker that failed first, 128 + the signal if one ended it; without a failure, that of a worker which
        left because of `signal`, or 0. `failure` says in words which worker failed.

        Raises:
          TimeoutError: it still runs after `timeout_secs`.
          RuntimeError: the supervisor is gone, so all workers are.
          Exception: what `on_line` raised; all workers are ended then.
        """
        if not self._running and self._code is None and self._problem is None:
            raise ValueError("a command must have been started before the wait for its end. Call start.")
        with self._ended:
            if not self._ended.wait_for(
                lambda: self._problem is not None or self._code is not None, timeout_secs
            ):
                raise TimeoutError(
                    f"the workers still run after {timeout_secs} s. Wait longer, or close the cluster."
                )
        if self._problem is not None:
            raise self._problem
        assert self._code is not None
        return self._code

    def close(self) -> None:
        """Ends everything at once; may be called again. `signal` and `wait` before it for a softer end."""
        self._channel.close()
        if threading.current_thread() is not self._teller:
            self._teller.join(10)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _describe(self, problem: str) -> str:
        if problem:
            asked = any(self.bandwidths) or self.latency_secs
            ignored = ", and what was asked for is ignored," if asked else ""
            return f"{self.workers} workers on plain loopback: links are not shaped{ignored} since {problem}"
        rates = sorted(set(self.bandwidths), key=self.bandwidths.count, reverse=True)
        others = [
            f"worker {i} {in_words(rate)}" for i, rate in enumerate(self.bandwidths) if rate != rates[0]
        ]
        latency = f", {self.latency_secs * 1e3:g} ms one way" if self.latency_secs else ""
        exceptions = f" ({', '.join(others)})" if others else ""
        return f"{self.workers} workers, each on a link of its own, {in_words(rates[0])}{exceptions}{latency}"

    def _check_workers(self, workers: Sequence[int] | Mapping[int, Any]) -> None:
        for worker in workers:
            if worker not in range(self.workers):
                raise ValueError(
                    f"a worker must be in 0..{self.workers - 1}, got {worker}. Count the workers from 0."
                )

    def _tell(self) -> None:
        while True:
            message = self._channel.events.get()
            try:
                match message["event"]:
                    case "line" if self._problem is None:
                        self._tell_line(message["worker"], message["stream"], message["text"])
                    case "failed":
                        self.failure = _failure(message["worker"], message["status"])
                        if self._on_line is None:
                            print(f"{self.failure}; ending the others", file=sys.stderr, flush=True)
                    case "exit":
                        self._end(code=message["code"])
                    case "gone":
                        self._end(problem=RuntimeError(message["text"]))
                        return
            except BaseException as error:
                self._end(problem=error)
                self._channel.shut()

    def _tell_line(self, worker: int, stream: int, text: str) -> None:
        if self._on_line is None:
            print_line(worker, stream, text)
        else:
            self._on_line(worker, text)

    def _end(self, code: int | None = None, problem: BaseException | None = None) -> None:
        with self._ended:
            if self._code is None:
                self._code, self._problem, self._running = code, self._problem or problem, False
            self._ended.notify_all()


def _check_strings(command: Any, environment: Any) -> None:
    if isinstance(command, (str, bytes)) or not all(isinstance(part, str) for part in command):
        raise ValueError(
            f"command must be a list of strings, got {command!r}. Give the program and each argument by itself."
        )
    if not command:
        raise ValueError("command must name a program, got nothing. Give the program and its arguments.")
    for name, value in environment.items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ValueError(
                f"environment must map strings to strings, got {name!r}: {value!r}. Write numbers as text."
            )


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _failure(worker: int, status: int) -> str:
    if status - 128 in (signal.SIGINT, signal.SIGTERM):  # asked to leave by somebody else, and did
        return f"worker {worker} left with exit code {status} ({signal.Signals(status - 128).name})"
    if status >= 0:
        return f"worker {worker} failed with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"worker {worker} was ended by {name}"
