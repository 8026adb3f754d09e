"""Several workers on this machine, each with a link of its own of a known speed, as on a cluster.

    with Cluster(4, bandwidth="100mbit") as cluster:
        cluster.start([sys.executable, "scripts/pretrain.py", "--config", "gasloc-demo"])
        exit_code = cluster.wait()

Every worker stands in network, host-name and mount namespaces of its own, joined by a bridge; `tc` lets its interface `net0`
send and receive no faster than its bandwidth. The namespaces have no names and no files: the kernel removes them with the
last process in them, and all processes end with the one that made the Cluster. Imports no JAX.
"""

from __future__ import annotations

import json
import math
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from training._links import MOST_WORKERS, address, find_tool

_BIT_PER_SEC = {"": 1, "bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_ANSWER_SECS = 120.0
_WAITING_LINES = 10_000
_COLOURS = (36, 33, 32, 35, 34, 31)


def parse_bandwidth(text: str | float) -> float:
    """Bit/s of a number or of tc's spelling of one.

    Example:
      >>> parse_bandwidth("100mbit"), parse_bandwidth("2.5gbit"), parse_bandwidth(1e6)
      (100000000.0, 2500000000.0, 1000000.0)

    Raises:
      ValueError: it is no such text, or not in 1 kbit .. 1 tbit.
    """
    bandwidth = _number(str(text), _BIT_PER_SEC)
    if not 1e3 <= bandwidth <= 1e12:
        raise ValueError(
            "a bandwidth must be a number of bit/s, alone or with kbit, mbit, gbit or tbit, from 1kbit to 1tbit, got "
            f'{text!r}. Write for example "100mbit".'
        )
    return bandwidth


def parse_latency(text: str | float) -> float:
    """Seconds of a number of seconds or a text with us, ms or s; ValueError for others and outside 0 .. 10 s."""
    latency_secs = float(text) if isinstance(text, int | float) else _number(text, _SECS)
    if not 0 <= latency_secs <= 10:
        raise ValueError(
            f'a latency must be a number with us, ms or s, from 0 to 10s, got {text!r}. Write for example "5ms".'
        )
    return latency_secs


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
        self._asking = threading.Lock()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._events: queue.Queue[dict[str, Any]] = queue.Queue(_WAITING_LINES)
        self._ended = threading.Condition()
        self._code: int | None = None
        self._problem: BaseException | None = None
        self._on_line: Callable[[int, str], None] | None = None
        problem = "loopback was asked for" if loopback else _why_no_namespaces()
        if not problem:
            for prefix in _namespace_commands():
                problem = self._launch(prefix)
                if not problem:
                    break
        self.shaped = not problem
        if problem:
            if no_process := self._launch([]):
                raise RuntimeError(f"the supervisor of the workers did not start: {no_process}")
        self.note = self._describe(problem)
        self._reader = threading.Thread(target=self._read, daemon=True, name="cluster-reader")
        self._teller = threading.Thread(target=self._tell, daemon=True, name="cluster-lines")
        self._reader.start()
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
        if not command:
            raise ValueError("command must name a program, got nothing. Give the program and its arguments.")
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
            self._ask(
                do="start",
                command=list(command),
                folder=os.getcwd(),
                environments=[base | {"JAX_PROCESS_ID": str(worker)} for worker in range(self.workers)],
                takes_input=takes_input,
                grace_secs=grace_secs,
            )
        except ValueError as error:
            self._running = False
            raise ValueError(f"command must be a program that runs, got {command[0]!r}: {error}") from None

    def send(self, text: str, worker: int | None = None) -> None:
        """Writes a line to the input of one worker, or of all. A worker that has ended gets nothing."""
        self._check_workers([] if worker is None else [worker])
        self._ask(do="send", text=text, worker=worker)

    def set_bandwidth(self, bandwidth: str | float | None, worker: int | None = None) -> None:
        """Changes the link of one worker, or of all, in force on return; nothing happens without links."""
        self._check_workers([] if worker is None else [worker])
        rate = None if bandwidth is None else parse_bandwidth(bandwidth)
        rates = {each: rate for each in (range(self.workers) if worker is None else [worker])}
        self._ask(do="rate", rates=rates)
        for each in rates:
            self.bandwidths[each] = rate

    def signal(self, number: int) -> None:
        """Sends a signal to every worker once, and to what it started. Leaving with 128 + `number` is then no failure."""
        self._ask(do="signal", number=int(number))

    def wait(self, timeout_secs: float | None = None) -> int:
        """Exit code of the command, when all workers have left and all their lines are delivered.

        That of the worker that failed first, 128 + the signal if one ended it; without a failure, that of a worker which
        left because of `signal`, or 0. `failure` says in words which worker failed.

        Raises:
          TimeoutError: it still runs after `timeout_secs`.
          RuntimeError: the supervisor is gone, so all workers are.
          Exception: what `on_line` raised; all workers are ended then.
        """
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
        _shut(self._control)
        try:
            self._supervisor.wait(10)  # its process 1 ends after all others there
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._reader.join(10)
        if threading.current_thread() is not self._teller:
            self._teller.join(10)
        self._control.close()
        self._errors.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _launch(self, prefix: Sequence[str]) -> str:
        """Starts the supervisor by `prefix`; returns why it could not make its namespaces, "" if it could."""
        ours, theirs = socket.socketpair()
        # Ready to read when this process is gone, even if a forked copy of it holds the socket open.
        parent = os.pidfd_open(os.getpid()) if hasattr(os, "pidfd_open") else None
        setting = {
            "control": theirs.fileno(),
            "parent": parent,
            "namespaces": bool(prefix),
            "workers": self.workers,
            "rates": self.bandwidths,
            "latency_secs": self.latency_secs,
        }
        self._errors = tempfile.TemporaryFile()
        # -S: the standard library is enough, and starts sooner. -P: nothing is imported from the user's folder.
        command = [*prefix, sys.executable, "-S", "-P", "-m", "training._supervisor", json.dumps(setting)]
        self._supervisor = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[fd for fd in (theirs.fileno(), parent) if fd is not None],
            start_new_session=True,  # a terminal's Ctrl-C comes to the launcher alone, which passes it on
        )
        theirs.close()
        if parent is not None:
            os.close(parent)
        self._control = ours
        ready = select.select([ours], [], [], _ANSWER_SECS)[0]
        line = ours.recv(4096) if ready else b""
        answer = json.loads(line) if line else {"answer": "error", "text": self._said() or "no answer"}
        if answer["answer"] == "done":
            return ""
        ours.close()
        if not ready:
            self._supervisor.kill()
        self._supervisor.wait()
        self._errors.close()
        if answer["answer"] == "netem":
            raise ValueError(
                f"a latency needs the kernel's netem, which this machine lacks (tc says: {answer['text']}). Leave it out."
            )
        return answer["text"]

    def _said(self) -> str:
        """Last line that the supervisor, or `unshare`, wrote to its errors."""
        self._supervisor.wait(10)
        self._errors.seek(0)
        return (self._errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]

    def _describe(self, problem: str) -> str:
        if problem:
            asked = any(self.bandwidths) or self.latency_secs
            return (
                f"{self.workers} workers on plain loopback: links are not shaped"
                f"{', the bandwidths and the latency asked for do not hold' if asked else ''}, since {problem}"
            )
        rates = sorted(set(self.bandwidths), key=self.bandwidths.count, reverse=True)
        others = [
            f"worker {i} {_in_words(rate)}" for i, rate in enumerate(self.bandwidths) if rate != rates[0]
        ]
        latency = f", {self.latency_secs * 1e3:g} ms one way" if self.latency_secs else ""
        exceptions = f" ({', '.join(others)})" if others else ""
        return (
            f"{self.workers} workers, each on a link of its own, {_in_words(rates[0])}{exceptions}{latency}"
        )

    def _check_workers(self, workers: Sequence[int] | Mapping[int, Any]) -> None:
        for worker in workers:
            if worker not in range(self.workers):
                raise ValueError(
                    f"a worker must be in 0..{self.workers - 1}, got {worker}. Count the workers from 0."
                )

    def _ask(self, **request: Any) -> None:
        with self._asking:
            try:
                self._control.sendall(json.dumps(request).encode() + b"\n")
                answer = self._answers.get(timeout=_ANSWER_SECS)
            except (OSError, queue.Empty):
                answer = {"answer": "gone"}
        if answer["answer"] == "gone":
            raise RuntimeError(
                "the supervisor of the workers is gone, and all workers with it. Make a new Cluster."
            )
        if answer["answer"] == "error":
            raise ValueError(answer["text"])

    def _read(self) -> None:
        """Sorts what the supervisor says: answers to whoever asked, the rest to the thread that tells it."""
        try:
            with self._control.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    (self._answers if "answer" in message else self._events).put(message)
        except (OSError, ValueError):  # closed, or dead in the middle of a line
            pass
        self._answers.put({"answer": "gone"})
        self._events.put({"event": "gone"})

    def _tell(self) -> None:
        while True:
            message = self._events.get()
            try:
                match message["event"]:
                    case "line" if self._problem is None:
                        self._tell_line(**message)
                    case "failed":
                        self.failure = _failure(message["worker"], message["status"])
                        if self._on_line is None:
                            print(f"{self.failure}; ending the others", file=sys.stderr, flush=True)
                    case "exit":
                        self._end(code=message["code"])
                    case "gone":
                        self._end(
                            problem=RuntimeError(
                                "the supervisor of the workers is gone, and all workers with it."
                            )
                        )
                        return
            except BaseException as error:
                self._end(problem=error)
                _shut(self._control)

    def _tell_line(self, worker: int, stream: int, text: str, event: str) -> None:
        if self._on_line is not None:
            self._on_line(worker, text)
            return
        out = sys.stdout if stream == 1 else sys.stderr
        prefix = f"[{worker}] "
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            prefix = f"\x1b[{_COLOURS[worker % len(_COLOURS)]}m{prefix}\x1b[0m"
        encoding = out.encoding or "utf-8"
        print(prefix + text.encode(encoding, "replace").decode(encoding), file=out, flush=True)

    def _end(self, code: int | None = None, problem: BaseException | None = None) -> None:
        with self._ended:
            if self._code is None:
                self._code, self._problem, self._running = code, self._problem or problem, False
            self._ended.notify_all()


def _number(text: str, units: Mapping[str, float]) -> float:
    """NaN where the text is no number with one of the units."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    try:
        return float(found[1]) * units[found[2]] if found else math.nan
    except (ValueError, KeyError):
        return math.nan


def _why_no_namespaces() -> str:
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("unshare", "ip", "tc") if find_tool(name) is None]
    if not missing:
        return ""
    return f"there is no program {' and no '.join(missing)} (packages util-linux and iproute2)"


def _namespace_commands() -> list[list[str]]:
    """How to start a process as the first of its own namespaces: as root, or as root of a user namespace only."""
    kinds = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare = find_tool("unshare") or "unshare"
    own_user = [unshare, "--user", "--map-root-user", *kinds]
    return [[unshare, *kinds], own_user] if os.geteuid() == 0 else [own_user]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _shut(control: socket.socket) -> None:
    try:
        control.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end is gone
        pass


def _failure(worker: int, status: int) -> str:
    if status >= 0:
        return f"worker {worker} failed with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"worker {worker} was ended by {name}"


def _in_words(rate: float | None) -> str:
    if rate is None:
        return "not limited"
    unit = next(unit for unit in ("tbit", "gbit", "mbit", "kbit") if rate >= _BIT_PER_SEC[unit])
    return f"{rate / _BIT_PER_SEC[unit]:g} {unit[0].upper() if unit != 'kbit' else 'k'}bit/s"
