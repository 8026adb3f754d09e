"""All processes of a group meet at process 0 and compare what they are about to run, before JAX starts.

JAX's own service cannot do this: its start waits until every process is there, and at the end of the wait it aborts the
process without naming anyone. So process 0 first listens here, at the address that JAX's service takes next. Each of the
others sends it one line of JSON and gets two back: at once, that this is process 0; when all are there, nothing or what is
wrong, the same text for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

from training._group import Group

_SAID = {"group": str, "count": int, "index": int, "host": str, "pid": int, "facts": dict}
_WELCOME = {"wait": str}
_ANSWER = {"problem": str | None}
_MOST_BYTES = 1 << 20  # of a line; settings and versions take a few KB
_REMIND_SECS = 30.0
_RETRY_SECS = 0.2
_SEND_SECS = 10.0
_LINGER_SECS = 10.0  # for those that come after process 0 has found what is wrong
_MOST_SHOWN = 8  # processes or differences in a message
_MOST_CHARACTERS = 100  # of a value in a message


def meet(
    group: Group, facts: Mapping[str, str], timeout_secs: float
) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Returns in each process once all of them are there with the same facts.

    Communicates a few KB a process, with process 0 only. The wait of process 0 counts; another one that has reached it stays
    as long.

    Returns:
      (links, names): the connection to each other process in process 0, to process 0 in the others; and how to call them.

    Raises:
      ValueError: a process is missing, came twice, or differs. All that are there raise the same.
    """
    who = (group.name, group.count, group.index, socket.gethostname(), os.getpid())
    mine = dict(zip(_SAID, (*who, dict(facts)), strict=True))
    if group.index == 0:
        first = _First(group, mine)
        problem = first.wait(timeout_secs)
        links = first.links
        names = {i: f"{said['host']} pid {said['pid']}" for i, said in first.came.items()}
    else:
        problem, links = _ask(group, mine, timeout_secs)
        names = {0: str(group.coordinator)}
    if problem:
        raise ValueError(problem)
    return links, names


class _First:
    """Process 0: collects what the others say, and answers all of them at once."""

    def __init__(self, group: Group, mine: dict[str, Any]):
        self._group, self.came = group, {0: mine}
        self._lines: dict[socket.socket, bytearray] = {}
        self._index_of: dict[socket.socket, int] = {}
        self._problem: str | None = None
        self._told: set[int] = set()
        self.links: dict[int, socket.socket] = {}  # of those that were told that all are there
        self._count = group.count  # or the most that any process gives

    def wait(self, timeout_secs: float) -> str | None:
        """What is wrong; None: all are there and alike."""
        group, began = self._group, time.monotonic()
        reminder, in_time = began + _REMIND_SECS, True
        with _listener(group) as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, lambda _: self._accept(listener, selector))
            try:
                while len(self.came) < group.count and self._problem is None:
                    now = time.monotonic()
                    if now >= began + timeout_secs:
                        self._problem, in_time = self._missing(timeout_secs), False
                        break
                    if now >= reminder:
                        reminder = now + _REMIND_SECS
                        print(f"still waiting for {_processes(self._absent(), group)} ...", flush=True)
                    for key, _ in selector.select(min(began + timeout_secs, reminder) - now):
                        key.data(key.fileobj)
                different = _differences(self.came) if len(self.came) > 1 else None
                self._problem = "\n".join(filter(None, (self._problem, different))) or None
                self._answer(selector)
                if in_time:
                    self._linger(selector, time.monotonic() + min(timeout_secs, _LINGER_SECS))
            finally:
                for link in list(self._lines):
                    link.close()
        return self._problem

    def _answer(self, selector: selectors.BaseSelector) -> None:
        for link in list(self._index_of):
            _send(link, {"problem": self._problem})
            index = self._index_of[link]
            self._told.add(index)
            if self._problem is None:
                selector.unregister(link)
                self._lines.pop(link)
                self.links[self._index_of.pop(link)] = link
            else:
                self._drop(link, selector)

    def _linger(self, selector: selectors.BaseSelector, until: float) -> None:
        """Tells those that are not there yet; they would find nobody, and say that process 0 did not come."""
        while len(self._told) < self._count - 1 and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                key.data(key.fileobj)
            self._answer(selector)

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            link, _ = listener.accept()
        except OSError:  # gone again
            return
        link.setblocking(False)
        self._lines[link] = bytearray()
        selector.register(link, selectors.EVENT_READ, lambda _: self._read(link, selector))

    def _read(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            received = link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        line = self._lines[link]
        line += received
        if link in self._index_of:
            if not received:  # it ended while it waited, and may be started again
                self.came.pop(self._index_of[link], None)
                self._drop(link, selector)
        elif not received or len(line) > _MOST_BYTES:
            self._drop(link, selector)
        elif line.endswith(b"\n"):
            said = _parsed(bytes(line), _SAID)
            if said is None or not _possible(said):  # not one of ours: whatever probes ports
                self._drop(link, selector)
            elif said["group"] != self._group.name:
                here, there = (
                    name or "one without a scheduler" for name in (self._group.name, said["group"])
                )
                text = f"{self._group.coordinator} must be a port of {there} alone, but {here} is there. Set another."
                _send(link, {"problem": text})
                self._drop(link, selector)
            else:
                self._take(link, said)

    def _take(self, link: socket.socket, said: dict[str, Any]) -> None:
        index, count, before = said["index"], said["count"], self.came.get(said["index"])
        who = f"{said['host']} pid {said['pid']}"
        self._index_of[link] = index
        self._count = max(self._count, count)
        if self._problem is not None:
            return  # all are told the first
        if count != self._group.count:
            self._problem = (
                f"all processes must give the same number of processes, got {self._group.count} in process 0 and {count} in "
                f"process {index} ({who}). Give all the same command."
            )
        elif before is not None:
            self._problem = (
                f"each process must have an index of its own, got {index} twice: {before['host']} pid {before['pid']} and "
                f"{who}. Count them from 0 to {count - 1}."
            )
        else:
            self.came[index] = said
            _send(link, {"wait": self._group.name})
            link.setblocking(False)

    def _drop(self, link: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(link)
        link.close()
        self._lines.pop(link)
        self._index_of.pop(link, None)

    def _absent(self) -> list[int]:
        return [index for index in range(self._group.count) if index not in self.came]

    def _missing(self, timeout_secs: float) -> str:
        there = [f"{index} on {self.came[index]['host']}" for index in sorted(self.came)]
        return (
            f"{_processes(self._absent(), self._group)} of {self._group.count} did not come to {self._group.coordinator} "
            f"within {timeout_secs:g} s. There: {_some(there)}. Look at what is missing: was it started, did it fail, "
            "can it reach that address? --start-timeout SECS waits longer."
        )


def _ask(
    group: Group, mine: dict[str, Any], timeout_secs: float
) -> tuple[str | None, dict[int, socket.socket]]:
    """What process 0 says is wrong, or that it does not come; else the connection to it, which stays."""
    assert group.coordinator is not None
    host, _, port = group.coordinator.rpartition(":")
    deadline, last = time.monotonic() + timeout_secs, "no time to try"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as stack:
                address = (host.strip("[]"), int(port))
                link = stack.enter_context(socket.create_connection(address, min(left, _SEND_SECS)))
                _send(link, mine)
                link.settimeout(max(0.01, deadline - time.monotonic()))
                with link.makefile("rb", buffering=0) as lines:  # takes no more than these lines
                    line = lines.readline(_MOST_BYTES)
                    if _parsed(line, _WELCOME):
                        # Process 0 may have come just now, and waits for its own time.
                        link.settimeout(timeout_secs + _REMIND_SECS)
                        line = lines.readline(_MOST_BYTES)
                answer = _parsed(line, _ANSWER)
                if answer is not None:
                    if answer["problem"]:
                        return answer["problem"], {}
                    stack.pop_all()
                    return None, {0: link}
            last = "what is there closed the connection or is no process of ours"
        except TimeoutError:
            last = "timed out; a firewall or another program may be there"
        except OSError as error:
            last = str(error)
        time.sleep(min(_RETRY_SECS, max(0.0, deadline - time.monotonic())))
    return (
        f"process 0 of {group.count}{_on(0, group)} did not come within {timeout_secs:g} s: {group.coordinator} gives no "
        f"answer ({last}). Look at process 0: was it started, did it fail, is that its address? --start-timeout SECS waits "
        "longer.",
        {},
    )


def _listener(group: Group) -> socket.socket:
    """Listens on all of the node's addresses, as JAX's service does afterwards."""
    assert group.coordinator is not None
    port, both = int(group.coordinator.rpartition(":")[2]), socket.has_dualstack_ipv6()
    try:
        if both:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, backlog=group.count + 16, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=group.count + 16)
    except OSError as error:
        raise ValueError(
            f"port {port} of {group.coordinator} must be free on {socket.gethostname()} for process 0, got: "
            f"{error.strerror}. Choose another port for all processes (JAX_COORDINATOR_PORT under a scheduler)."
        ) from error


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    try:
        link.settimeout(_SEND_SECS)
        link.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        pass  # it is gone; who waits for it says so


def _parsed(line: bytes, kinds: Mapping[str, Any]) -> dict[str, Any] | None:
    """The line's values of these types; None: it is another program's, which may send anything."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not found.keys() >= kinds.keys():
        return None
    right = all(isinstance(found[k], kind) and not isinstance(found[k], bool) for k, kind in kinds.items())
    return found if right else None


def _possible(said: Mapping[str, Any]) -> bool:
    return 0 < said["index"] < said["count"] and all(isinstance(v, str) for v in said["facts"].values())


def _differences(came: Mapping[int, dict[str, Any]]) -> str | None:
    """The first facts that are not the same in all, with the values and who has them."""
    indices = sorted(came)
    lines = []
    for fact in dict.fromkeys(fact for index in indices for fact in came[index]["facts"]):
        holders: dict[str, list[int]] = {}
        for index in indices:
            holders.setdefault(came[index]["facts"].get(fact, "not set"), []).append(index)
        if len(holders) > 1:
            parts = (f"{_short(value)} in {_processes(who)}" for value, who in holders.items())
            lines.append(f"  {fact}: {_some(parts)}")
    if not lines:
        return None
    hosts = _some(f"{index} on {came[index]['host']}" for index in indices)
    return (
        "all processes must run the same, got differences:\n" + _some(lines, "\n", "  ") + "\n"
        f"Processes: {hosts}. Give all the same command, code and packages."
    )


def _short(value: str) -> str:
    if value.strip() != value or not value:
        value = repr(value)  # so that it can be seen
    return value if len(value) <= _MOST_CHARACTERS else value[: _MOST_CHARACTERS - 3] + "..."


def _some(parts: Iterable[str], between: str = ", ", before: str = "") -> str:
    """As many as a reader wants to see."""
    parts = list(parts)
    left_out = [f"{before}and {len(parts) - _MOST_SHOWN} more"] * (len(parts) > _MOST_SHOWN)
    return between.join(parts[:_MOST_SHOWN] + left_out)


def _processes(indices: list[int], group: Group | None = None) -> str:
    named = _some(f"{index}{_on(index, group) if group else ''}" for index in indices)
    return f"process{'es' if len(indices) > 1 else ''} {named}"


def _on(index: int, group: Group) -> str:
    return f" ({group.hosts[index]})" if group.hosts else ""
