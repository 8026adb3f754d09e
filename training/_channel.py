"""How training/launch.py starts the supervisor of the workers, in namespaces where it can, and speaks with it."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training._links import namespace_commands, why_no_namespaces

_ANSWER_SECS = 120.0
_END_SECS = 10.0
# A slow reader of lines holds up the workers then, and not this process's memory.
_WAITING_EVENTS = 10_000
_GONE = "the supervisor of the workers is gone, and all workers with it"


class Channel:
    """A running supervisor.

    Attributes:
      problem: why it has no namespaces, "" where it has them.
      events: what it tells without being asked; {"event": "gone", "text": ...} at its end.

    Raises:
      ValueError: a latency is asked for that the kernel cannot make.
    """

    def __init__(self, setting: Mapping[str, Any], loopback: bool):
        self.events: queue.Queue[dict[str, Any]] = queue.Queue(_WAITING_EVENTS)
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self.problem = "loopback was asked for" if loopback else why_no_namespaces()
        if not self.problem:
            for prefix in namespace_commands():
                self.problem = self._launch(prefix, setting)
                if not self.problem:
                    break
        if self.problem and (problem := self._launch([], setting)):
            raise RuntimeError(f"the supervisor of the workers did not start: {problem}")
        self._reader = threading.Thread(target=self._read, daemon=True, name="cluster-reader")
        self._reader.start()

    def ask(self, **request: Any) -> None:
        """Returns when it is done.

        Raises:
          ValueError: it cannot be done.
          RuntimeError: the supervisor is gone.
        """
        with self._asking:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                answer = self._answers.get(timeout=_ANSWER_SECS)
            except (OSError, queue.Empty):
                answer = {"answer": "gone"}
        if answer["answer"] == "gone":
            raise RuntimeError(f"{_GONE}. Make a new Cluster.")
        if answer["answer"] == "error":
            raise ValueError(answer["text"])

    def shut(self) -> None:
        """Ends the supervisor and all that it started, and does not wait for it."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is gone
            pass

    def close(self) -> None:
        """Ends the supervisor and all that it started; the events end with it."""
        self.shut()
        try:
            self._process.wait(_END_SECS)  # as process 1 of its namespace it ends after all others there
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_END_SECS)
        self._socket.close()
        self._errors.close()

    def _launch(self, prefix: Sequence[str], setting: Mapping[str, Any]) -> str:
        """Starts the supervisor by `prefix`; returns why it could not make its namespaces, "" if it could."""
        self._socket, theirs = socket.socketpair()
        parent = _own_end()
        argument = {**setting, "control": theirs.fileno(), "parent": parent, "namespaces": bool(prefix)}
        # -S: the standard library is enough, and starts sooner. -P: nothing is imported from the user's folder.
        command = [*prefix, sys.executable, "-S", "-P", "-m", "training._supervisor", json.dumps(argument)]
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
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
        try:
            answer = self._first_answer()
        except BaseException:  # Ctrl-C too: in a notebook the process lives on
            self._socket.close()
            self._process.kill()
            self._process.wait()
            raise
        if answer["answer"] == "done":
            return ""
        self._socket.close()
        self._process.wait()
        self._errors.close()
        if answer["answer"] == "netem":
            raise ValueError(
                f"a latency needs the kernel's netem, which this machine lacks (tc says: {answer['text']}). Leave it out."
            )
        return answer["text"]

    def _first_answer(self) -> dict[str, Any]:
        self._socket.settimeout(_ANSWER_SECS)
        line = self._socket.recv(1 << 16)  # a few hundred bytes, written at once
        self._socket.settimeout(None)
        return json.loads(line) if line else {"answer": "error", "text": self._said() or "it ended at once"}

    def _read(self) -> None:
        """Sorts what the supervisor says: answers to whoever asked, the rest to the events."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    message = json.loads(line)
                    (self._answers if "answer" in message else self.events).put(message)
        except (OSError, ValueError):  # closed, or dead in the middle of a line
            pass
        said = self._said()
        self._answers.put({"answer": "gone"})
        self.events.put({"event": "gone", "text": f"{_GONE}{said and f' ({said})'}. Make a new Cluster."})

    def _said(self) -> str:
        """Last line that the supervisor, or `unshare`, wrote to its errors, after its end."""
        try:
            self._process.wait(_END_SECS)
        except subprocess.TimeoutExpired:
            return ""
        self._errors.seek(0)
        return (self._errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]


def _own_end() -> int | None:
    """Descriptor that is ready to read when this process is gone, even if a forked copy of it holds the socket open."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux, or an old kernel: the socket says it
        return None
