"""Which group of processes this one belongs to: read from flags and environment variables, nothing is started.

`describe` knows four sources: explicit flags, JAX's three variables, a Slurm step, and Open MPI's mpirun. A pod of an
indexed Kubernetes job finds its index by itself and needs JAX's variables for the rest.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Mapping, Sequence

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
PORT = "JAX_COORDINATOR_PORT"
# What srun sets for each task; a batch script has no list of a step's nodes.
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))
_NODES = re.compile(
    r"PART(,PART)*".replace("PART", r"([^][,\s]|\[RANGE(,RANGE)*\])+").replace("RANGE", r"[0-9]+(-[0-9]+)?")
)
_HOST = re.compile(r"\[[0-9A-Fa-f:.]+(%\w+)?\]|[^][\s:/@]+")
_POD_INDEX = "JOB_COMPLETION_INDEX"
# Above what Linux gives out by itself (32768..60999), so that a derived port is rarely taken.
_FIRST_PORT, _PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class Flags:
    """The group as a command line gives it; None: not given."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


NO_FLAGS = Flags()


@dataclasses.dataclass(frozen=True)
class Group:
    """One process and those it trains with. `count` 1 without a coordinator: a process of its own."""

    count: int = 1
    index: int = 0
    coordinator: str | None = None
    """Host and port of process 0."""
    source: str = "a single process"
    name: str = ""
    """Tells two groups apart that use one address by mistake: job and step of a scheduler."""
    local_device_ids: tuple[int, ...] | None = None
    """The devices of the node that are this process' own; None: all it sees."""
    hosts: tuple[str, ...] = ()
    """Node of each process where there is one process a node and the scheduler lists them."""


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """What a scheduler says; each number with the variable that says it."""

    count: tuple[str, int]
    index: tuple[str, int]
    address: str | None
    group: Group  # the rest


def describe(environment: Mapping[str, str], flags: Flags = NO_FLAGS) -> Group:
    """The group of this process.

    All three flags win over everything. Fewer are completed from JAX's variables, then from the scheduler's, and what is
    said twice must be the same; only an address may replace the one derived from a scheduler. JAX_LOCAL_DEVICE_IDS, which
    JAX reads itself, wins over the devices chosen here.

        >>> describe({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[01-02]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
        ...           "SLURM_LOCALID": "0"}).coordinator
        'n01:61447'

    Raises:
      ValueError: the group is described in part, twice in different ways, or with something that is no such number.
    """
    given = {
        "--coordinator": flags.coordinator,
        "--processes": flags.processes,
        "--process": flags.process,
    }
    by_flags = {name: value for name, value in given.items() if value is not None}
    complete = len(by_flags) == len(given)
    variables = {} if complete else {n: environment[n] for n in (ADDRESS, COUNT, INDEX) if environment.get(n)}
    launcher = None if complete else _open_mpi(environment) or _slurm(environment)
    if not by_flags and not variables and launcher is None:
        return Group()

    address = _agreed(
        [(name, by_flags.get(name) or variables.get(name)) for name in ("--coordinator", ADDRESS)]
    )
    counts = [("--processes", flags.processes), (COUNT, _whole(COUNT, variables.get(COUNT)))]
    indices = [("--process", flags.process), (INDEX, _whole(INDEX, variables.get(INDEX)))]
    if launcher is not None:
        counts.append(launcher.count)
        indices.append(launcher.index)
        address = address or (None if launcher.address is None else ("", launcher.address))
    elif not complete and all(value is None for _, value in indices):
        indices.append((_POD_INDEX, _whole(_POD_INDEX, environment.get(_POD_INDEX))))
    count, index = _agreed(counts), _agreed(indices)
    if address is None or count is None or index is None:
        found = (address, count, index)
        raise ValueError(_in_part(found, by_flags, variables, launcher))
    _check(address, count, index)
    base = Group(source=_source(complete, by_flags, variables)) if launcher is None else launcher.group
    return dataclasses.replace(base, count=count[1], index=index[1], coordinator=address[1])


def _agreed(said: Sequence[tuple[str, object]]) -> tuple | None:
    """The first of what is said, with its name; all must say the same."""
    found = [(name, value) for name, value in said if value is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise ValueError(
                f"{found[0][0]} and {name} must say the same, got {found[0][1]} and {value}. Unset one of them, or give "
                "--coordinator, --processes and --process, which win together."
            )
    return found[0] if found else None


def _in_part(found: tuple, by_flags: Mapping, variables: Mapping, launcher: _Launcher | None) -> str:
    if launcher is not None:  # it knows number and index
        return (
            f"{launcher.group.source} gives no address that all processes know. Pass host and a free port of process 0: "
            f"mpirun -x {ADDRESS}=HOST:PORT ..."
        )
    names = ("--coordinator", "--processes", "--process") if by_flags else (ADDRESS, COUNT, INDEX)
    missing = [name for name, value in zip(names, found, strict=True) if value is None]
    return (
        f"{', '.join(names)} must all be set for several processes, got no {' and no '.join(missing)}. Set "
        f"{'it' if len(missing) == 1 else 'them'}, or unset {' and '.join([*by_flags, *variables])} for a single process."
    )


def _check(address: tuple, count: tuple, index: tuple) -> None:
    name, value = address
    host, _, port = value.rpartition(":")
    if not _HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name or 'the address'} must be the host and a free port of process 0, got {value!r}. Write host:port alone, "
            "an IPv6 address in brackets: [::1]:12345."
        )
    if count[1] < 1 or not 0 <= index[1] < count[1]:
        raise ValueError(
            f"{index[0]} must be in 0..{count[0]} - 1 = {count[1] - 1}, got {index[1]}. Count the processes from 0."
        )


def _source(complete: bool, by_flags: Mapping, variables: Mapping) -> str:
    if complete:
        return "flags"
    return " and ".join(["flags"] * bool(by_flags) + ["JAX's variables"] * bool(variables))


def _slurm(environment: Mapping[str, str]) -> _Launcher | None:
    """The Slurm step of several tasks that this process is one of."""
    if not all(name in environment for name in _SLURM):
        return None
    counts = [n for n in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if n in environment]
    name = min(counts, key=lambda name: _number(name, environment))  # a job may have more than its step
    tasks = _number(name, environment)
    if tasks < 2:
        return None
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    hosts = hosts_of(environment["SLURM_STEP_NODELIST"])
    # Jobs, and steps of one job, that share a node get ports of their own.
    port = (
        _FIRST_PORT
        + (_number("SLURM_JOB_ID", environment) + 101 * int(step if step.isdecimal() else 0)) % _PORTS
    )
    return _Launcher(
        (name, tasks),
        ("SLURM_PROCID", _number("SLURM_PROCID", environment)),
        f"{hosts[0]}:{environment.get(PORT) or port}",
        Group(
            source="Slurm",
            name=f"Slurm step {job}.{step}",
            local_device_ids=_own_device(environment, "SLURM_LOCALID", tasks > len(hosts)),
            hosts=hosts if len(hosts) == tasks else (),
        ),
    )


def hosts_of(nodes: str) -> tuple[str, ...]:
    """The names in a Slurm node list.

    >>> hosts_of("a,n[01-03,7]-ib")
    ('a', 'n01-ib', 'n02-ib', 'n03-ib', 'n7-ib')
    """
    found: list[str] = []
    if not _NODES.fullmatch(nodes):
        raise ValueError(_no_list(nodes))
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names = [""]
        for text, numbers in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            names = [name + end for name in names for end in ([text] if text else _numbers(numbers))]
        if not names:  # a range that goes down
            raise ValueError(_no_list(nodes))
        found += names
    return tuple(found)


def _no_list(nodes: str) -> str:
    return (
        f"SLURM_STEP_NODELIST must list the step's nodes as in n[01-03,7],m1, got {nodes!r}. Leave it as srun sets it, or "
        "give --coordinator, --processes and --process, which win over it."
    )


def _numbers(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return found


def _open_mpi(environment: Mapping[str, str]) -> _Launcher | None:
    """mpirun's processes. Inside a Slurm job it starts its own daemons by srun, whose variables are not the processes'."""
    if not all(name in environment for name in _MPI):
        return None
    size, rank, _, local_size = (_number(name, environment) for name in _MPI)
    if size < 2:
        return None
    # Of version 4: "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"; of 5: "prterun-HOST-PID@1". Both name mpirun's node,
    # which runs process 0 unless it is a login node.
    job = environment.get("OMPI_MCA_orte_hnp_uri") or environment.get("PMIX_NAMESPACE", "")
    port = environment.get(PORT) or _FIRST_PORT + zlib.crc32(job.partition(";")[0].encode()) % _PORTS
    where = re.search(r"tcp://([^,:;]+)|^prterun-(.+)-\d+@\d+$", job)
    host = "127.0.0.1" if local_size == size else where and (where[1] or where[2])
    return _Launcher(
        (_MPI[0], size),
        (_MPI[1], rank),
        f"{host}:{port}" if job and host else None,
        Group(
            source="Open MPI",
            name=f"Open MPI job {job.partition(';')[0]}",
            local_device_ids=_own_device(environment, _MPI[2], local_size > 1),
        ),
    )


def _own_device(environment: Mapping[str, str], local: str, shared: bool) -> tuple[int, ...] | None:
    """One GPU each where several processes share a node, unless the scheduler shows each its own already."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    bound = visible and "," not in visible
    if not shared or bound or environment.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    return (_number(local, environment),)


def _number(name: str, environment: Mapping[str, str]) -> int:
    found = _whole(name, environment[name])
    assert found is not None
    return found


def _whole(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}. Write digits.") from None
