"""The process that starts, watches and ends the workers of one machine; training/launch.py starts it and speaks with it.

Both send JSON lines over one socket. Where that is possible it runs as the first process of a pid namespace: when it ends,
the kernel ends everything below it. It ends as soon as the process that started it does, in whatever way that happens. Only
the standard library, and one thread: children are made by fork.

Requests (each is answered): start, send, rate, signal. Events: line, failed, exit.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Any, NoReturn

from training._lines import Lines
from training._links import Links, NoNetemError, die_with_parent

_CHUNK_BYTES = 1 << 16


class _Worker:
    """One running command."""

    def __init__(self, number: int, process: subprocess.Popen):
        self.number, self.process = number, process
        self.code: int | None = None
        self.unsent = b""
        assert process.stdout is not None and process.stderr is not None
        self.streams = {process.stdout.fileno(): (1, Lines()), process.stderr.fileno(): (2, Lines())}

    def signal(self, number: int) -> None:
        """To the worker and all that it started in its own process group."""
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):  # gone, or on macOS a zombie
            pass


class Supervisor:
    def __init__(self, control: socket.socket, parent: int | None, links: Links | None):
        self._control, self._links = control, links
        self._workers: dict[int, _Worker] = {}  # by process id
        self._failed: _Worker | None = None
        self._passed_on: set[int] = set()
        self._kill_at: float | None = None
        self._grace_secs = 0.0
        self._requests = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, self._read_requests)
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ, self.end)
        wake, self._wake_writer = socket.socketpair()
        for end in (wake, self._wake_writer):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ, lambda: self._reap(wake))

    def run(self) -> NoReturn:
        while True:
            wait_secs = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, events in self._selector.select(wait_secs):
                if self._selector.get_map().get(key.fd) is key:  # not closed by one before it
                    key.data() if callable(key.data) else self._serve(key.data, key.fd, events)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                self._signal(signal.SIGKILL)

    def end(self) -> NoReturn:
        self._signal(signal.SIGKILL)
        os._exit(0)

    def _tell(self, **message: Any) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.end()

    def _read_requests(self) -> None:
        try:
            data = self._control.recv(_CHUNK_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self.end()
        *lines, self._requests = (self._requests + data).split(b"\n")
        for line in lines:
            try:
                request = json.loads(line)
                getattr(self, f"_do_{request.pop('do')}")(**request)
            except Exception as error:  # a wrong request ends no worker
                self._tell(answer="error", text=str(error))
            else:
                self._tell(answer="done")

    def _do_start(
        self, command: list[str], folder: str, environments: list[dict[str, str]], takes_input: bool, grace_secs: float
    ) -> None:  # fmt: skip
        if self._workers:
            raise ValueError("the last command must have ended before the next one starts. Wait for it.")
        self._failed, self._kill_at, self._grace_secs = None, None, grace_secs
        self._passed_on = set()
        try:
            for number, environment in enumerate(environments):
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=environment,
                    stdin=subprocess.PIPE if takes_input else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                    preexec_fn=self._prepare(number),
                )
                worker = self._workers[process.pid] = _Worker(number, process)
                for fd in worker.streams:
                    os.set_blocking(fd, False)
                    self._selector.register(fd, selectors.EVENT_READ, worker)
                if process.stdin is not None:
                    os.set_blocking(process.stdin.fileno(), False)
        except Exception:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)
                worker.process.wait()
                self._close(worker)
            self._workers.clear()
            raise

    def _prepare(self, number: int) -> Callable[[], None]:
        die = die_with_parent(signal.SIGKILL) if sys.platform == "linux" else None

        def prepare() -> None:
            for caught in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(caught, signal.SIG_DFL)  # a background job of a shell has SIGINT ignored
            if die is not None:
                die()
            if self._links is not None:
                self._links.enter(number)

        return prepare

    def _do_send(self, text: str, worker: int | None) -> None:
        for each in self._workers.values():
            if worker in (None, each.number) and each.code is None and each.process.stdin is not None:
                each.unsent += text.encode(errors="surrogateescape") + b"\n"
                self._write(each)

    def _do_rate(self, rates: dict[str, float | None]) -> None:
        if self._links is not None:
            for worker, rate in rates.items():
                self._links.set_rate(int(worker), rate)

    def _do_signal(self, number: int) -> None:
        self._passed_on.add(number)
        self._signal(number)

    def _signal(self, number: int) -> None:
        for worker in self._workers.values():
            if worker.code is None:
                worker.signal(number)

    def _serve(self, worker: _Worker, fd: int, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(worker)
        else:
            self._read(worker, fd)

    def _write(self, worker: _Worker) -> None:
        assert worker.process.stdin is not None
        fd = worker.process.stdin.fileno()
        watched = fd in self._selector.get_map()
        try:
            worker.unsent = worker.unsent[os.write(fd, worker.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # it reads no more
            worker.unsent = b""
        if worker.unsent and not watched:
            self._selector.register(fd, selectors.EVENT_WRITE, worker)
        elif watched and not worker.unsent:
            self._selector.unregister(fd)

    def _read(self, worker: _Worker, fd: int) -> bool:
        """Passes on what there is; False where there is nothing now."""
        stream, lines = worker.streams[fd]
        try:
            data = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return False
        for text in lines.feed(data) if data else lines.end():
            self._tell(event="line", worker=worker.number, stream=stream, text=text)
        if not data:
            self._selector.unregister(fd)
            del worker.streams[fd]
        return bool(data)

    def _reap(self, wake: socket.socket) -> None:
        wake.recv(_CHUNK_BYTES)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)  # orphans of the workers come to process 1
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid in self._workers:
                self._left(self._workers[pid], os.waitstatus_to_exitcode(status))
        if self._workers and all(worker.code is not None for worker in self._workers.values()):
            self._all_left()

    def _left(self, worker: _Worker, status: int) -> None:
        worker.process.returncode = status
        worker.code = code = status if status >= 0 else 128 - status
        worker.signal(signal.SIGKILL)  # what it left behind
        for fd in list(worker.streams):
            # Only what it wrote itself: a daemon that left its process group may write without end.
            for _ in range(_waiting_bytes(fd) // _CHUNK_BYTES + 1):
                if not self._read(worker, fd):
                    break
            if fd in worker.streams:  # somebody else holds it open
                for text in worker.streams[fd][1].end():
                    self._tell(event="line", worker=worker.number, stream=worker.streams[fd][0], text=text)
        self._close(worker)
        # After a signal to all, each leaves in its own time: a second one would disturb those that still save.
        stopped = code - 128 in self._passed_on
        if code != 0 and not stopped and self._failed is None:
            self._failed = worker
            self._tell(event="failed", worker=worker.number, status=status)
            self._signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + self._grace_secs

    def _close(self, worker: _Worker) -> None:
        process = worker.process
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                if pipe.fileno() in self._selector.get_map():
                    self._selector.unregister(pipe.fileno())
                pipe.close()
        worker.streams.clear()

    def _all_left(self) -> None:
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)  # all in this pid namespace but process 1
            except ProcessLookupError:
                pass
        codes = [worker.code for worker in sorted(self._workers.values(), key=lambda worker: worker.number)]
        code = self._failed.code if self._failed else next((code for code in codes if code), 0)
        self._workers.clear()
        self._kill_at = None
        self._tell(event="exit", code=code)


def _waiting_bytes(fd: int) -> int:
    """How much a pipe holds."""
    return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]


def main() -> NoReturn:
    setting = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    control = socket.socket(fileno=setting["control"])
    for fd in (setting["control"], setting["parent"]):
        if fd is not None:
            os.set_inheritable(fd, False)
    ready: dict[str, Any] = {"answer": "done"}
    links = None
    try:
        if setting["namespaces"]:
            links = Links(setting["workers"], setting["latency_secs"])
            for worker, rate in enumerate(setting["rates"]):
                if rate is not None:
                    links.set_rate(worker, rate)
    except NoNetemError as error:
        ready = {"answer": "netem", "text": str(error)}
    except (OSError, subprocess.SubprocessError) as error:
        ready = {"answer": "error", "text": str(error)}
    control.sendall(json.dumps(ready).encode() + b"\n")
    if ready["answer"] != "done":
        sys.exit(1)
    Supervisor(control, setting["parent"], links).run()


if __name__ == "__main__":
    main()
