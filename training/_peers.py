"""A line from each process to process 0, beside JAX: who is lost is known at once and by name, and so is who wants to stop.

JAX's own service misses a lost process only after 100 s, and then ends the others without a word; an exchange over gloo
fails with a connection that was closed, one over NCCL waits. The lines are those over which the processes met at the start
(`_rendezvous`). The kernel closes the line of a process that ends in whatever way; a host that vanished is missed by TCP's
keep-alive. All messages are lines of JSON with a "kind".
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: nothing is wrong with the settings, try again
_MOST_BYTES = 1 << 20
_SEND_SECS = 10.0
_GRACE_SECS, _LAST_SECS = 2.0, 0.5
_KEEP_ALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))  # 30 s
_USER_TIMEOUT_MS = 30_000  # for what was sent and is not acknowledged

Handler = Callable[[int, dict[str, Any]], Any]


class Peers:
    """The lines of this process: of process 0 one to each other, of the others one to process 0.

    Args:
      index: of this process.
      links: index -> connected socket.
      names: index -> how a message calls the process: host and pid where they are known.
      on_lost: called once, from a thread, with what was lost, in words; the default ends this process with `code`.
      on_stopped: called once, from a thread, with the number of the signal that ended another process where nothing was to
        be saved; the default ends this process likewise.
    """

    def __init__(
        self,
        index: int,
        links: Mapping[int, socket.socket],
        names: Mapping[int, str],
        on_lost: Callable[[str], Any] | None = None,
        on_stopped: Callable[[int], Any] | None = None,
    ):
        self.index, self._links, self._names = index, dict(links), dict(names)
        self.others = sorted(self._links)
        self.lost = threading.Event()
        self.problem, self.code = "", EXIT_CODE  # what was lost, and with which exit code to end
        self._on_lost = on_lost or (lambda text: end(text, self.code))
        self._on_stopped = on_stopped or end_stopped
        self._handlers: dict[str, Handler] = {}
        self._early: list[tuple[int, dict[str, Any]]] = []  # came before its handler
        self._gone: set[int] = set()  # said goodbye
        self._lock = threading.RLock()
        self._closing = False
        self._selector = selectors.DefaultSelector()
        for number, link in self._links.items():
            link.settimeout(_SEND_SECS)
            _keep_alive(link)
            self._selector.register(link, selectors.EVENT_READ, (number, bytearray()))
        threading.Thread(target=self._listen, daemon=True, name="peers").start()

    def on(self, kind: str, handler: Handler) -> None:
        """`handler(index, message)` is called for each message of the kind, from a thread."""
        with self._lock:
            self._handlers[kind] = handler
            early, self._early = self._early, []
        for number, message in early:
            self._handle(number, message)

    def tell_first(self, kind: str, **message: Any) -> None:
        """To process 0, which may be this one."""
        self._tell(0, {"kind": kind, **message})

    def tell_all(self, kind: str, **message: Any) -> None:
        """From process 0 to all, itself last."""
        for number in (*self.others, 0):
            self._tell(number, {"kind": kind, **message})

    def called(self, numbers: list[int]) -> str:
        """Processes by number and, where they are known, host and pid."""
        told = [f"{n} ({self._names[n]})" if n in self._names else str(n) for n in numbers]
        return f"process{'es' if len(told) > 1 else ''} {', '.join(told)}"

    def declare(self, text: str, code: int = EXIT_CODE) -> None:
        """Something is lost that the run cannot go on without: all end. From process 0, or in this process alone."""
        with self._lock:
            if self._closing or self.lost.is_set():
                return
            self.problem, self.code = text, code
            self.lost.set()
        if self.index == 0:
            self._send_all({"kind": "lost", "text": text, "code": code})
            self.let_others_end()
        self._on_lost(text)

    def stopped(self, number: int) -> bool:
        """A signal ends this process before or after its training loop, where nothing is to be saved: all end like it.

        False where this process is ending already.
        """
        with self._lock:
            if self._closing or self.lost.is_set():
                return False
            self.lost.set()
        self._send_all({"kind": "stopped", "number": number})
        self.close()
        self.let_others_end()
        return True

    def let_others_end(self) -> None:
        """Process 0 ends last: JAX in the others would print that its service is gone."""
        if self.index == 0:
            time.sleep(_LAST_SECS)

    def fail(self, text: str, code: int = EXIT_CODE) -> None:
        """Tells the others why this process ends and how they shall, so that they need not wait for it."""
        if not self._closing:
            self._send_all({"kind": "failed", "text": text, "code": code})
        self.close()
        if self.index == 0:
            time.sleep(_GRACE_SECS)
            self.let_others_end()

    def close(self) -> None:
        """Ends the lines without alarm: the others know that this process is done."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._send_all({"kind": "goodbye"})
        for link in self._links.values():
            try:
                link.shutdown(socket.SHUT_WR)  # what was sent still arrives
            except OSError:
                pass

    def _send_all(self, message: dict[str, Any]) -> None:
        for number in self.others:
            self._tell(number, message)

    def _tell(self, number: int, message: dict[str, Any]) -> None:
        if number == self.index:
            self._handle(number, message)
            return
        with self._lock:
            try:
                self._links[number].sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                pass  # it is gone: the thread that listens finds out

    def _listen(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                number, line = key.data
                try:
                    received = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                except TimeoutError:
                    continue
                except OSError:
                    received = b""
                line += received
                if not received or len(line) > _MOST_BYTES:
                    self._selector.unregister(key.fileobj)
                    with self._lock:
                        self._links[number].close()
                    if number not in self._gone and not self._closing:
                        self.declare(f"{self.called([number])} was lost: it ended or cannot be reached")
                    continue
                while b"\n" in line:
                    one, _, rest = bytes(line).partition(b"\n")
                    line[:] = rest
                    try:
                        self._take(number, json.loads(one))
                    except Exception as error:  # without this thread nobody would be missed any more
                        traceback.print_exc()
                        self.declare(f"the line to {self.called([number])} failed: {error!r}")
        self._selector.close()

    def _take(self, number: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "goodbye":
            self._gone.add(number)
        elif kind == "failed":
            self._gone.add(number)
            time.sleep(_GRACE_SECS)  # this process may be about to find the same, and say it better
            self.declare(f"{self.called([number])} ended: {message['text']}", message["code"])
        elif kind == "lost":
            self.declare(message["text"], message["code"])
        elif kind == "stopped":
            self._gone.add(number)
            if self.stopped(message["number"]):
                self._on_stopped(message["number"])
        else:
            self._handle(number, message)

    def _handle(self, number: int, message: dict[str, Any]) -> None:
        with self._lock:
            handler = self._handlers.get(message["kind"])
            if handler is None:
                self._early.append((number, message))
                return
        handler(number, message)


def end(text: str, code: int = EXIT_CODE) -> None:
    """Ends this process at once, which may stand in an exchange that never ends."""
    when = "Start all again" if code == EXIT_CODE else "Start all again when that is mended"
    try:
        print(
            f"error: {text}. {when}: --resume goes on from the last checkpoint.", file=sys.stderr, flush=True
        )
    finally:
        os._exit(code)


def end_stopped(number: int) -> None:
    """Ends this process at once, after another one got a signal."""
    print(
        "\nstopped with another process, outside its training loop; nothing more was saved",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + number)


def _keep_alive(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEP_ALIVE, ("TCP_USER_TIMEOUT", _USER_TIMEOUT_MS)):
        if hasattr(socket, name):  # not on macOS
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
