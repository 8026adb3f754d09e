"""How a group of processes starts: who describes it, what is a conflict, who is told of one that is missing or differs."""

import contextlib
import json
import re
import socket
import threading
import time

import pytest

from tests.training.runs_for_tests import options, tiny
from tests.training.test_processes import free_port, together
from training import _rendezvous, distributed
from training._group import NO_FLAGS, hosts_of
from training.distributed import Flags, Group, describe, take_flags

JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[09-10],m1", "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "3",
}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}  # fmt: skip
ALL_FLAGS = Flags("f:5", 2, 1)


def told(environment, flags=NO_FLAGS):
    group = describe(environment, flags)
    return group.coordinator, group.count, group.index, group.local_device_ids


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, Flags(), (None, 1, 0, None)),
        (JAX, Flags(), ("a:1", 4, 3, None)),
        ({}, ALL_FLAGS, ("f:5", 2, 1, None)),
        (JAX | SLURM, ALL_FLAGS, ("f:5", 2, 1, None)),  # together they win, even over what is no group
        ({"JAX_PROCESS_ID": "x"} | MPI, ALL_FLAGS, ("f:5", 2, 1, None)),
        (JAX, Flags(process=3), ("a:1", 4, 3, None)),
        ({"JAX_NUM_PROCESSES": "2"}, Flags(coordinator="[::1]:7", process=0), ("[::1]:7", 2, 0, None)),
        (SLURM, Flags(), ("n09:61447", 3, 1, None)),
        (SLURM, Flags(coordinator="n09:5"), ("n09:5", 3, 1, None)),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "n09:6"}, Flags(), ("n09:6", 3, 1, None)),
        (SLURM | {"JAX_COORDINATOR_PORT": "99"}, Flags(), ("n09:99", 3, 1, None)),
        (SLURM | {"SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "k1"}, Flags(), ("k1:61649", 3, 1, (0,))),
        (SLURM | {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "k1"}, Flags(), ("k1:61447", 3, 1, (1,))),
        (SLURM | {"SLURM_STEP_NODELIST": "k1", "CUDA_VISIBLE_DEVICES": "0"}, Flags(), ("k1:61447", 3, 1, None)),
        (SLURM | {"SLURM_STEP_NODELIST": "k1", "CUDA_VISIBLE_DEVICES": "0,1"}, Flags(), ("k1:61447", 3, 1, (0,))),
        (SLURM | {"SLURM_STEP_NODELIST": "k1", "JAX_LOCAL_DEVICE_IDS": "2"}, Flags(), ("k1:61447", 3, 1, None)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Flags(), (None, 1, 0, None)),  # an interactive step of a larger job
        ({n: v for n, v in SLURM.items() if "STEP" not in n}, Flags(), (None, 1, 0, None)),  # a batch script
        ({n: v for n, v in SLURM.items() if "STEP" not in n} | JAX, Flags(), ("a:1", 4, 3, None)),  # a launcher in one
        (MPI, Flags(), ("10.96.0.1", 4, 2, (0,))),
        (MPI | SLURM, Flags(), ("10.96.0.1", 4, 2, (0,))),  # srun started mpirun's daemons
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, Flags(), ("127.0.0.1", 4, 2, (0,))),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Flags(), ("10.96.0.1", 4, 2, None)),
        (MPI | {"OMPI_MCA_orte_hnp_uri": "", "PMIX_NAMESPACE": "prterun-node-1-77@1"}, Flags(), ("node-1", 4, 2, (0,))),
        (MPI | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, Flags(), (None, 1, 0, None)),
        ({"JOB_COMPLETION_INDEX": "5"}, Flags(), (None, 1, 0, None)),  # pods of their own
        ({n: JAX[n] for n in list(JAX)[:2]} | {"JOB_COMPLETION_INDEX": "1"}, Flags(), ("a:1", 4, 1, None)),
        (JAX | {"JOB_COMPLETION_INDEX": "1"}, Flags(), ("a:1", 4, 3, None)),  # a local launcher in a pod
    ],
)  # fmt: skip
def test_who_describes_the_group(environment, flags, expected):
    found = told(environment, flags)
    if found[0] and ":" not in expected[0]:  # a port derived from mpirun's job
        host, _, port = found[0].rpartition(":")
        assert 61440 <= int(port) < 65536
        found = (host, *found[1:])
    assert found == expected


@pytest.mark.parametrize(
    ("environment", "flags", "message"),
    [
        (JAX, Flags(process=2), "^--process and JAX_PROCESS_ID must say the same, got 2 and 3. Unset one"),
        (JAX, Flags(coordinator="b:1"), "^--coordinator and JAX_COORDINATOR_ADDRESS must say the same, got b:1 and a:1"),
        (JAX | SLURM, Flags(), "^JAX_NUM_PROCESSES and SLURM_STEP_NUM_TASKS must say the same, got 4 and 3"),
        (JAX | MPI, Flags(), "^JAX_PROCESS_ID and OMPI_COMM_WORLD_RANK must say the same, got 3 and 2"),
        (SLURM, Flags(processes=2), "^--processes and SLURM_STEP_NUM_TASKS must say the same, got 2 and 3"),
        ({}, Flags(processes=2), "got no --coordinator and no --process. Set them, or unset --processes for"),
        ({"JAX_NUM_PROCESSES": "2"}, Flags(process=0), "got no --coordinator. Set it, or unset --process and JAX_NUM"),
        ({}, Flags("a:1", 2, 2), r"^--process must be in 0\.\.--processes - 1 = 1, got 2"),
        ({}, Flags("a:1", 0, 0), "^--process must be in 0.* = -1, got 0"),
        ({}, Flags("a", 2, 1), "^--coordinator must be the host and a free port of process 0, got 'a'. Write host:port"),
        ({}, Flags("a:70000", 2, 1), "got 'a:70000'"),
        ({}, Flags("http://127.0.0.1:12377", 2, 1), "got 'http://127.0.0.1:12377'. Write host:port alone"),
        ({}, Flags("::1", 2, 1), r"got '::1'. Write .* an IPv6 address in brackets: \[::1\]:12345"),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "fe80::2:1"}, Flags(), "^JAX_COORDINATOR_ADDRESS must be .* got 'fe80::2:1'"),
        ({}, Flags("[::1]", 2, 1), r"got '\[::1\]'"),
        (SLURM | {"JAX_COORDINATOR_PORT": "x"}, Flags(), "host and a free port .* 'n09:x'"),
        (SLURM | {"SLURM_PROCID": "3"}, Flags(), r"^SLURM_PROCID must be in 0\.\.SLURM_STEP_NUM_TASKS - 1 = 2, got 3"),
        (SLURM | {"SLURM_PROCID": "?"}, Flags(), r"^SLURM_PROCID must be a whole number, got '\?'"),
        ({n: v for n, v in MPI.items() if "MCA" not in n}, Flags(), "^Open MPI gives no address .* mpirun -x JAX_COORD"),
        ({n: JAX[n] for n in list(JAX)[:2]} | {"JOB_COMPLETION_INDEX": "4"}, Flags(), "^JOB_COMPLETION_INDEX must be in 0"),
    ],
)  # fmt: skip
def test_conflicts_name_who_says_what(environment, flags, message):
    with pytest.raises(ValueError, match=message):
        describe(environment, flags)


def test_node_lists():
    assert hosts_of("n1") == ("n1",)
    assert hosts_of("a,r[1-2]n[08,10-11],z[3]-ib") == (
        "a", *(f"r{r}n{n}" for r in (1, 2) for n in ("08", "10", "11")), "z3-ib",
    )  # fmt: skip
    assert describe(SLURM).hosts == ("n09", "n10", "m1")
    assert describe(SLURM | {"SLURM_STEP_NODELIST": "n[1-2]"}).hosts == ()  # who is where is not said


@pytest.mark.parametrize(
    "nodes", ["", " ", ",", "n1,", "n[01-", "n[01-]", "n[]", "m[a-b]", "n[3-1]", "n1]", "n[1[2]]"]
)
def test_what_is_no_node_list_is_named(nodes):
    message = f"^SLURM_STEP_NODELIST must list the step's nodes .*, got {re.escape(repr(nodes))}. Leave it"
    with pytest.raises(ValueError, match=message):
        describe(SLURM | {"SLURM_STEP_NODELIST": nodes})


def test_two_jobs_and_two_steps_on_a_node_take_two_ports():
    ports = {
        told(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step})[0]
        for job in (7, 8, 9)
        for step in "012"
    }
    assert len(ports) == 9  # fmt: skip


def test_flags_are_taken_from_a_command_line():
    words = (
        "--config demo --process 1 --processes=2 --coordinator h:1 --start-timeout 7 --processed 3".split()
    )
    assert take_flags(words) == (Flags("h:1", 2, 1), 7.0, ["--config", "demo", "--processed", "3"])
    assert take_flags([]) == (Flags(), distributed.START_TIMEOUT_SECS, [])
    with pytest.raises(ValueError, match="positive seconds, got 0"):
        take_flags(["--start-timeout", "0"])


def met(*members, secs=30.0, apart_secs=0.0, port=None, within_secs=60):
    """What each of the members (index, facts, changes of its group) is told, all in threads of this process."""
    port = port or free_port()
    found = [None] * len(members)

    def run(number, index, facts, changes):
        group = Group(**{"count": len(members), "index": index, "coordinator": f"127.0.0.1:{port}"} | changes)
        try:
            links, _ = _rendezvous.meet(group, facts, secs)
            assert sorted(links) == [
                other for other in range(group.count) if index == 0 < other or other == 0 < index
            ]
            for link in links.values():
                link.close()
        except ValueError as error:
            found[number] = str(error)

    threads = [
        threading.Thread(target=run, args=(number, *member), daemon=True)
        for number, member in enumerate(members)
    ]
    for thread in threads:
        thread.start()
        time.sleep(apart_secs)
    for thread in threads:
        thread.join(within_secs)
    assert not any(thread.is_alive() for thread in threads)
    return found


SAME = {"optimizer.density": "0.1", "jax": "0.10.2"}


def test_all_are_there_and_alike():
    assert met((2, SAME, {}), (0, SAME, {}), (1, SAME, {})) == [None] * 3


def test_all_are_told_the_same_differences():
    other = {"optimizer.density": "0.01", "jax": "0.12", **{f"code of {n}": "x" for n in range(9)}}
    one, *rest = met((0, SAME, {}), (1, other, {}), (2, SAME, {}), (3, other, {}))
    assert rest == [one] * 3
    assert "\n  optimizer.density: 0.1 in processes 0, 2, 0.01 in processes 1, 3\n" in one
    assert "\n  jax: 0.10.2 in processes 0, 2, 0.12 in processes 1, 3\n" in one
    assert "\n  code of 0: not set in processes 0, 2, x in processes 1, 3\n" in one
    assert one.count("\n  code of") == 6 and "\n  and 3 more\n" in one
    assert f"Processes: 0 on {socket.gethostname()}, 1 on" in one


def test_values_that_cannot_be_seen_are_quoted():
    one, two = met((0, {"name": "", "jax": "1"}, {}), (1, {"name": "a b", "jax": " 1"}, {}))
    assert (
        one == two
        and "\n  name: '' in process 0, a b in process 1\n  jax: 1 in process 0, ' 1' in process 1\n" in one
    )


def test_those_that_are_there_name_those_that_are_not():
    hosts = {"count": 4, "hosts": ("a", "b", "c", "d")}
    one, two = met((0, SAME, hosts), (2, SAME, hosts), secs=1.0)
    assert one == two and one.startswith("processes 1 (b), 3 (d) of 4 did not come to 127.0.0.1:")
    assert "within 1 s. There: 0 on" in one and "2 on" in one
    (three,) = met((1, SAME, {"count": 2, "hosts": ("a", "b")}), secs=0.5)
    assert three.startswith("process 0 of 2 (a) did not come within 0.5 s: 127.0.0.1:") and "refused" in three


def test_a_late_process_0_still_waits_its_own_time():
    """The others' time may be over before its own: they stay, and are told who is missing rather than that it is."""
    port, found = free_port(), []

    def run(index, secs):
        with pytest.raises(ValueError) as caught:
            _rendezvous.meet(Group(3, index, f"127.0.0.1:{port}"), SAME, secs)
        found.append(str(caught.value))

    threads = [threading.Thread(target=run, args=given, daemon=True) for given in ((1, 1.0), (0, 2.0))]
    threads[0].start()
    time.sleep(0.5)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    assert found[0] == found[1] and found[0].startswith("process 2 of 3 did not come")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (({}, {}), "^each process must have an index of its own, got 1 twice: .* 0 to 2[.]"),
        (({"count": 4}, {}), "^all processes must give the same number .* got 3 in process 0 and 4 in process 1 "),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_told_to_all(changes, message):
    """Also to a process that comes after process 0 has found them."""
    one, two = ({"count": 3} | own for own in changes)
    members = (0, SAME, {"count": 3}), (1, SAME, one), (1, SAME, two), (2, SAME, {"count": 3})
    found = met(*members, secs=3.0, apart_secs=0.3)
    assert found == [found[0]] * 4 and re.search(message, found[0]), found
    # Who never comes is not waited for.
    found = met((0, SAME, {}), (1, SAME, {"count": 9}), secs=1.0)
    assert found[0] == found[1] and "got 2 in process 0 and 9 in process 1 (" in found[0]


def test_strangers_do_not_disturb():
    """A probe of the port, another program's words, and a process of another job that took the same port."""
    other = {"group": "Slurm step 9.0", "count": 2, "index": 1, "host": "h", "pid": 1, "facts": {}}
    ours = other | {"group": "Slurm step 8.0"}
    wrong = (
        {"index": [1], "count": True, "pid": None, "facts": []},
        {"facts": {"a": 1}},
        {"index": -1},
        {"index": 2},
    )
    strangers = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1]\n",
        b'{"index": 1}\n',
        b"[" * 100_000 + b"\n",
        b"1" * (1 << 20) + b"1",  # without an end
        *(json.dumps(ours | {n: v}).encode() + b"\n" for values in wrong for n, v in values.items()),
        json.dumps(other).encode() + b"\n",
    ]
    port, answers = free_port(), []

    def run(index):
        links, names = _rendezvous.meet(
            Group(2, index, f"127.0.0.1:{port}", name="Slurm step 8.0"), SAME, 30.0
        )
        answers.append(list(names))
        for link in links.values():
            link.close()

    first = threading.Thread(target=run, args=(0,), daemon=True)
    first.start()
    for words in strangers:
        with reached(port) as link:
            answer = b""
            with contextlib.suppress(ConnectionError):  # it closes on what is too long, which may be underway
                link.sendall(words)
                link.shutdown(socket.SHUT_WR)
                answer = link.recv(4096)
    assert b"must be a port of Slurm step 9.0 alone, but Slurm step 8.0 is there. Set another." in answer
    run(1)
    first.join(60)
    assert sorted(answers) == [[0], [0, 1]]


def reached(port):
    for _ in range(200):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 30)
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_a_silent_program_at_the_port_is_not_waited_for():
    """Only process 0, which says at once that it is there, may take longer than the others' own time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (found,) = met((1, SAME, {"count": 2}), secs=0.5, port=silent.getsockname()[1], within_secs=15)
    assert "did not come within 0.5 s" in found and "another program may be there" in found


def test_a_taken_port_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"^port {port} of 127.0.0.1:{port} must be free on .*in use"):
            _rendezvous.meet(Group(2, 0, f"127.0.0.1:{port}"), SAME, 5.0)


def pair(module, *extra):
    """Two processes by flags, each with what is its own."""
    port = free_port()
    return [
        [module, "--coordinator", f"127.0.0.1:{port}", "--processes", 2, "--process", index, *own]
        for index, own in enumerate(extra)
    ]


def test_two_processes_agree_or_are_told_of_their_devices(tmp_path):
    """With a proxy for the web in the environment, through which JAX's own service would try to go."""
    module, proxy = "tests.training.join_process", {"http_proxy": "127.0.0.1:9", "HTTPS_PROXY": "127.0.0.1:9"}
    commands = pair(module, ["a", 1], ["a", 1])
    found = together(*commands, variables=(proxy, proxy), secs=60)
    assert [code for code, _, _ in found] == [0, 0], found
    assert ["process 0 of 2 = 2" in found[0][1], "process 1 of 2 = 2" in found[1][1]] == [True] * 2
    found = together(*pair(module, [], []), variables=({}, {"JAX_NUM_CPU_DEVICES": "2"}), secs=60)
    assert [code for code, _, _ in found] == [2, 2], found
    for _, _, errors in found:
        assert (
            "got 1 x cpu in process 0 and 2 x cpu in process 1. Give each" in errors
            and "Traceback" not in errors
        )


def test_pretrain_names_a_setting_that_differs(tmp_path):
    """Both processes end by themselves with the same words, before JAX starts."""
    words = options(tiny(tmp_path))
    found = together(
        *pair("scripts.pretrain", words, [*words, "--optimizer.density", 0.2]), cwd=tmp_path, secs=60
    )
    assert [code for code, _, _ in found] == [2, 2], found
    errors = [text for _, _, text in found]
    assert errors[0] == errors[1]
    assert (
        "got differences:\n  optimizer.density: 0.1 in process 0, 0.2 in process 1\nProcesses: 0 on "
        in errors[0]
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("there", [0, 1])
def test_a_process_that_never_comes_is_named(there):
    command = pair("tests.training.join_process", [], [])[there]
    ((code, _, errors),) = together([*command, "--start-timeout", 1], variables=({},), secs=60)
    assert code == 2 and f"error: process {1 - there} of 2 did not come" in errors and "within 1 s" in errors
