"""A network of its own for every worker on this machine: network namespaces joined by a bridge, shaped links.

Used by training/_supervisor.py inside its private namespaces, which the kernel removes with its last process, and with them
every link, address and hosts file made here. Linux only; needs iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

MOST_WORKERS = 250  # addresses 10.77.0.1 to 10.77.0.250
MTU_BYTES = 9000
# Two frames, so that one may pass at any rate; and what 1 ms sends, so that large TCP segments stay whole on fast links.
_LEAST_BURST_BYTES = 2 * MTU_BYTES
_BURST_SECS = 1e-3
# A worker may receive from several at once, and what they send waits here; when it is full, TCP slows down.
_LEAST_QUEUE_BYTES = 4_000_000
_QUEUE_SECS = 0.05
_QUEUE_PACKETS = 100_000  # of netem, which counts packets

# From linux/sched.h, linux/mount.h and linux/prctl.h; Python has them from 3.12 on.
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
_PR_SET_PDEATHSIG = 1
_HOSTS = "/etc/hosts"


class NoNetemError(Exception):
    """The kernel cannot delay packets."""


def find_tool(name: str) -> str | None:
    """Path of a program; ordinary users often lack the folders of iproute2 in PATH."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


def why_no_namespaces() -> str:
    """What this machine obviously lacks; "" where it is worth a try."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [name for name in ("unshare", "ip", "tc") if find_tool(name) is None]
    if not missing:
        return ""
    return f"there is no program {' and no '.join(missing)} (packages util-linux and iproute2)"


def namespace_commands() -> list[list[str]]:
    """How to start a process as the first of its own namespaces: as root, or as root of a user namespace only."""
    kinds = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare = find_tool("unshare") or "unshare"
    own_user = [unshare, "--user", "--map-root-user", *kinds]
    return [[unshare, *kinds], own_user] if os.geteuid() == 0 else [own_user]


def address(worker: int) -> str:
    return f"10.77.0.{worker + 1}"


def host_name(worker: int) -> str:
    return f"worker{worker}"


def shaping(rate: float | None, latency_secs: float = 0.0) -> list[str]:
    """Arguments of `tc qdisc replace dev DEVICE` that let an interface send `rate` bit/s, one list of words a line."""
    commands = []
    if latency_secs:
        commands.append(f"root handle 1: netem delay {latency_secs * 1e6:.0f}us limit {_QUEUE_PACKETS}")
    place = "parent 1:1" if latency_secs else "root"
    if rate is not None:
        burst = max(_LEAST_BURST_BYTES, round(rate / 8 * _BURST_SECS))
        queue = max(_LEAST_QUEUE_BYTES, round(rate / 8 * _QUEUE_SECS))
        commands.append(f"{place} tbf rate {round(rate)}bit burst {burst} limit {queue}")
    elif not latency_secs:
        commands.append("root noqueue")
    else:
        commands.append(f"{place} pfifo limit {_QUEUE_PACKETS}")
    return commands


class Links:
    """Links of `workers` workers, made at construction; the calling process must have namespaces of its own.

    Raises:
      OSError: something that is needed is missing; the message says what.
      NoNetemError: a latency is asked for and the kernel has no netem.
    """

    def __init__(self, workers: int, latency_secs: float = 0.0):
        self._latency_secs = latency_secs
        self._ip, self._tc = (find_tool(name) or name for name in ("ip", "tc"))
        self._hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address(worker)} {host_name(worker)}\n" for worker in range(workers)
        )
        if not os.path.isfile(_HOSTS):
            raise OSError(f"there is no {_HOSTS} that could be replaced")
        self._own = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._networks = []
        for _ in range(workers):
            _call("unshare", _CLONE_NEWNET)
            self._networks.append(os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        _call("setns", self._own, _CLONE_NEWNET)
        ports = [f"link add bridge0 mtu {MTU_BYTES} type bridge", "link set bridge0 up"]
        for worker, network in enumerate(self._networks):
            there = f"/proc/{os.getpid()}/fd/{network}"
            ports += [
                f"link add port{worker} mtu {MTU_BYTES} type veth peer name net0 mtu {MTU_BYTES} netns {there}",
                f"link set port{worker} master bridge0",
                f"link set port{worker} up",
            ]
        self._batch(self._ip, ports)
        for worker in range(workers):
            with self._inside(worker):
                inside = [f"address add {address(worker)}/24 dev net0", "link set lo up", "link set net0 up"]
                self._batch(self._ip, inside)
        for worker in range(workers):
            self.set_rate(worker, None)
        self._try_to_enter()

    def set_rate(self, worker: int, rate: float | None) -> None:
        """Lets worker send and receive `rate` bit/s each; None: as fast as the machine can."""
        # Each end shapes what it sends: the bridge's end what the worker receives. Only one of them delays.
        down = shaping(rate)
        self._batch(self._tc, [f"qdisc replace dev port{worker} {line}" for line in down])
        with self._inside(worker):
            up = shaping(rate, self._latency_secs)
            self._batch(self._tc, [f"qdisc replace dev net0 {line}" for line in up])

    def enter(self, worker: int) -> None:
        """Moves the calling process to the worker's network, host name and hosts file; for a fresh child."""
        _call("setns", self._networks[worker], _CLONE_NEWNET)
        _call("unshare", _CLONE_NEWUTS | _CLONE_NEWNS)
        socket.sethostname(host_name(worker))
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        # The file lives in a file system of its own in memory, which needs a folder for this moment only.
        _mount("tmpfs", "/proc", "tmpfs", 0)
        with open("/proc/hosts", "w", encoding="ascii") as file:
            file.write(self._hosts)
        os.chmod("/proc/hosts", 0o644)
        _mount("/proc/hosts", _HOSTS, None, _MS_BIND)
        _call("umount2", b"/proc", _MNT_DETACH)

    def _try_to_enter(self) -> None:
        """A child tries it, so that what is forbidden is known before a worker starts."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self.enter(0)
            except OSError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as file:
            problem = file.read()
        os.waitpid(pid, 0)
        if problem:
            raise OSError(problem)

    @contextlib.contextmanager
    def _inside(self, worker: int) -> Iterator[None]:
        _call("setns", self._networks[worker], _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", self._own, _CLONE_NEWNET)

    def _batch(self, tool: str, lines: Sequence[str]) -> None:
        done = subprocess.run(
            [tool, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            if any(" netem " in line for line in lines):
                raise NoNetemError(said[0])
            raise OSError(f"{os.path.basename(tool)}: {said[0]}")


def die_with_parent(number: int) -> Callable[[], None]:
    """What a fresh child calls to get signal `number` when the thread that started it ends."""
    prctl = _libc().prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(_libc(), name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), None if kind is None else kind.encode(), flags, None)
