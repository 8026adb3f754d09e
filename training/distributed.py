"""The one way to start: alone, by the local launcher, Slurm, Open MPI, Kubernetes, or explicit flags.

    count = distributed.join(settings={"density": "0.1"})

All processes meet before JAX starts (`_rendezvous`), so one that is missing or differs is named in every other one that
is there, and nothing can hang in a collective. One that ends between the meeting and JAX's start is not: JAX then aborts the
others at the end of its own wait.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax

from training._group import NO_FLAGS, Flags, Group, describe
from training._peers import Peers
from training._rendezvous import meet
from training._watchdog import AFTER_ALL_SECS

__all__ = [
    "START_TIMEOUT_SECS",
    "Flags",
    "Group",
    "describe",
    "join",
    "peers",
    "require_same_devices",
    "take_flags",
]

START_TIMEOUT_SECS = 300.0
_PACKAGES = ("training", "models", "scape_jax", "gasloc_jax", "pallas_kernels")
_VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "numpy")
_GPUS = Path("/proc/driver/nvidia/gpus")
_peers: Peers | None = None


def take_flags(arguments: list[str]) -> tuple[Flags, float, list[str]]:
    """The group by --coordinator, --processes and --process, the seconds of --start-timeout, and the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, prog="pretrain.py")
    parser.add_argument("--coordinator", metavar="HOST:PORT")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("--start-timeout", type=float, default=START_TIMEOUT_SECS)
    given, rest = parser.parse_known_args(arguments)
    if not 0 < given.start_timeout < float("inf"):
        raise ValueError(
            f"--start-timeout must be positive seconds, got {given.start_timeout}. 300 is the default."
        )
    return Flags(given.coordinator, given.processes, given.process), given.start_timeout, rest


def join(
    environment: Mapping[str, str] = os.environ,
    flags: Flags = NO_FLAGS,
    *,
    settings: Mapping[str, object] | None = None,
    timeout_secs: float = START_TIMEOUT_SECS,
) -> int:
    """Joins the group that flags and environment describe and returns its number of processes; 1 where they describe none.

    Must be called before JAX starts, in the main thread. It waits until all processes are there, `settings` are what they
    must have in common besides code, versions and kind of GPU. Communicates a few KB.

    Raises:
      ValueError: the group is half described (see `describe`), or a process is missing after `timeout_secs` or differs; then
        every process that is there raises the same.
    """
    group = describe(environment, flags)
    if group.coordinator is None:
        return 1
    if group.index == 0:
        print(
            f"waiting for {group.count} processes at {group.coordinator} (by {group.source}) ...", flush=True
        )
    links, names = meet(group, _facts(settings or {}), timeout_secs)
    global _peers
    _peers = Peers(group.index, links, names)
    _initialize(group, timeout_secs)
    atexit.register(_leave)  # runs before JAX's own, which waits for the others
    return group.count


def _leave() -> None:
    """At the end of this process: the others need to know whether it is done."""
    assert _peers is not None
    error = getattr(sys, "last_value", None)  # set where an exception ends a program
    if error is None:
        _peers.close()
    else:
        _peers.fail(f"{type(error).__name__}: {str(error)[:300]}")


def peers() -> Peers | None:
    """The lines to the other processes, once this one has joined them; None: it is alone."""
    return _peers


def require_same_devices() -> None:
    """Raises ValueError in all processes unless each has as many devices of the same kind; after `join`, starts JAX's
    devices. Communicates nothing: JAX has told everyone of all devices.
    """
    found: dict[int, Counter[str]] = {}
    for device in jax.devices():
        found.setdefault(device.process_index, Counter())[device.device_kind] += 1
    told = {
        index: ", ".join(f"{n} x {kind}" for kind, n in sorted(found[index].items()))
        for index in sorted(found)
    }
    others = {index: text for index, text in told.items() if text != told[0]}
    if others:
        jax.distributed.shutdown()  # all of them raise: none may leave before the others know
        index, text = next(iter(others.items()))
        more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
        raise ValueError(
            f"all processes must have the same devices, got {told[0]} in process 0 and {text} in process {index}{more}. "
            "Give each as many of one kind (JAX_LOCAL_DEVICE_IDS chooses)."
        )


def _facts(settings: Mapping[str, object]) -> dict[str, str]:
    """What all processes must have in common, by name. Found without starting JAX's devices, which must come after."""
    facts = {name: str(value) for name, value in settings.items()}
    on_cpu = "cpu" in (jax.config.jax_platforms, facts.get("mesh.platform"))
    command = getattr(sys.modules["__main__"], "__file__", None)
    if command:
        facts["code of the command"] = _digest(Path(command).parent, [Path(command)])
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin:
            # Sources, not a commit: this is what runs, also where a node has no git and where files were changed.
            folder = Path(spec.origin).parent
            facts[f"code of {package}"] = _digest(folder, sorted(folder.rglob("*.py")))
    facts["Python"] = platform.python_version()
    for name in _VERSIONS:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not on_cpu:
        facts["GPUs of the node"] = ", ".join(sorted(_gpu_models())) or "none"
    return facts


def _digest(folder: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _gpu_models() -> set[str]:
    found = set()
    for file in _GPUS.glob("*/information"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        found |= {line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")}
    return found


def _initialize(group: Group, timeout_secs: float) -> None:
    assert group.coordinator is not None
    _no_proxy(group.coordinator.rpartition(":")[0])
    # The wait is one call, in which Python runs no handlers; and JAX leaves one of its own for SIGTERM.
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        jax.distributed.initialize(
            group.coordinator,
            group.count,
            group.index,
            group.local_device_ids,
            cluster_detection_method="deactivate",  # `describe` has decided
            initialization_timeout=max(60, int(timeout_secs)),
            # JAX would abort all after 100 s without a word of one: `_peers` and `_watchdog` are sooner, and name it.
            heartbeat_timeout_seconds=int(AFTER_ALL_SECS),
        )
    except RuntimeError as error:
        raise ValueError(
            f"JAX must start in all {group.count} processes at {group.coordinator}, got: "
            f"{str(error).splitlines()[0][:300]}. Start them again."
        ) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _no_proxy(host: str) -> None:
    """JAX's service would go through a proxy that the environment names for the web, and time out."""
    if any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy") for name in os.environ):
        spared = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        os.environ["no_grpc_proxy"] = f"{host},{spared}" if spared else host
        jax.config.update("jax_check_proxy_envs", False)  # its warning of just this
