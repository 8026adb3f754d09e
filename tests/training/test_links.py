"""Links between workers: what is asked of tc, and what real sockets then do in real namespaces."""

import json
import subprocess
import sys

import pytest

from training._links import shaping, why_no_namespaces
from training.launch import Cluster, parse_bandwidth

BYTES = 1_250_000

# Worker FROM sends BYTES to worker TO, when told to; each tells what passed its interface, and TO how long it took.
TRANSFER = """
import json, os, socket, subprocess, sys, time
sender, receiver, count = map(int, sys.argv[1:])
me = int(os.environ["JAX_PROCESS_ID"])
def passed():
    words = next(line for line in open("/proc/net/dev") if "net0:" in line).split(":")[1].split()
    return int(words[0]), int(words[8])
def told(**more):
    received, sent = (after - before for after, before in zip(passed(), started))
    print(json.dumps({"worker": me, "received": received, "sent": sent, **more}), flush=True)
input()
started = passed()
if me == receiver:
    with socket.create_server((f"worker{me}", 7000)) as server, server.accept()[0] as link:
        got, began = len(link.recv(1)), time.monotonic()
        while got < count:
            got += len(link.recv(1 << 16)) or sys.exit("the sender is gone")
        told(secs=time.monotonic() - began)
        link.sendall(b"!")
else:
    for _ in range(200):
        try:
            link = socket.create_connection((f"worker{receiver}", 7000))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    with link:
        link.sendall(bytes(count))
        link.recv(1)
    told()
"""


def namespaces_or_skip(workers=2, **arguments):
    cluster = Cluster(workers, **arguments)
    if not cluster.shaped:
        cluster.close()
        pytest.skip(cluster.note)
    return cluster


def transfer(cluster, sender, receiver, before_going=lambda: None):
    """What sender and receiver told."""
    lines = []
    cluster.start(
        [sys.executable, "-c", TRANSFER, str(sender), str(receiver), str(BYTES)],
        on_line=lambda worker, text: lines.append(text),
    )
    before_going()
    cluster.send("go")
    assert cluster.wait(60) == 0, lines
    told = {found["worker"]: found for found in map(json.loads, lines)}
    return told[sender], told[receiver]


def test_links_are_as_fast_as_asked_and_count_their_bytes():
    """No transfer can be faster than its link, in either direction and after each change."""
    with namespaces_or_skip(bandwidth="100mbit", links={1: "20mbit"}) as cluster:
        assert cluster.note == "2 workers, each on a link of its own, 100 Mbit/s (worker 1 20 Mbit/s)"
        for sender, receiver in ((1, 0), (0, 1)):
            sent, received = transfer(cluster, sender, receiver)
            assert received["secs"] > 0.9 * BYTES * 8 / 20e6
            assert BYTES < received["received"] < 1.05 * BYTES
            assert BYTES < sent["sent"] < 1.05 * BYTES
        # While the workers run: the other one becomes the slow one.
        changed = transfer(
            cluster, 1, 0, lambda: (cluster.set_bandwidth("1gbit"), cluster.set_bandwidth("10mbit", worker=0))
        )
        assert cluster.bandwidths == [10e6, 1e9]
        assert changed[1]["secs"] > 0.9 * BYTES * 8 / 10e6


def shown(cluster):
    lines = []
    command = "tc qdisc show dev net0; cat /etc/hosts; hostname || uname -n"
    cluster.start(["sh", "-c", command], on_line=lambda worker, text: lines.append((worker, text)))
    assert cluster.wait(30) == 0
    return lines


def test_each_worker_has_its_own_name_and_queue():
    with open("/etc/hosts", encoding="utf-8") as file:
        before = file.read()
    with namespaces_or_skip(3, links={2: "2.5gbit"}) as cluster:
        assert cluster.note == "3 workers, each on a link of its own, not limited (worker 2 2.5 Gbit/s)"
        lines = shown(cluster)
        for worker in range(3):
            own = [text for number, text in lines if number == worker]
            assert own[-1] == f"worker{worker}" and f"10.77.0.{worker + 1} worker{worker}" in own
            assert ("tbf" in own[0] and "rate 2500Mbit " in own[0]) == (worker == 2)
        cluster.set_bandwidth(None)
        assert not any("tbf" in text for _, text in shown(cluster))
    with open("/etc/hosts", encoding="utf-8") as file:
        assert file.read() == before


def test_latency_or_why_not():
    """Where the kernel has netem, an answer takes two ways; elsewhere the error names it."""
    try:
        cluster = namespaces_or_skip(latency="20ms", bandwidth="100mbit")
    except ValueError as error:
        assert "needs the kernel's netem" in str(error)
        tried = subprocess.run(
            ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem"], capture_output=True
        )
        assert tried.returncode != 0
        return
    with cluster:
        assert "20 ms one way" in cluster.note
        _, received = transfer(cluster, 0, 1)
        assert received["secs"] > 0.02


def test_missing_programs_are_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path=None: "/bin/it" if name == "unshare" else None)
    if sys.platform == "linux":
        assert why_no_namespaces() == "there is no program ip and no tc (packages util-linux and iproute2)"
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Linux's" in why_no_namespaces()


def test_what_tc_is_asked_for():
    assert shaping(100e6) == ["root tbf rate 100000000bit burst 18000 limit 4000000"]
    assert shaping(400e9) == ["root tbf rate 400000000000bit burst 50000000 limit 2500000000"]
    assert shaping(None) == ["root noqueue"]
    delayed, limited = shaping(1e6, 5e-3)
    assert delayed == "root handle 1: netem delay 5000us limit 100000"
    assert limited.startswith("parent 1:1 tbf rate 1000000bit ")


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [("100mbit", 1e8), ("1Gbit", 1e9), ("400gbit", 4e11), ("10kbit", 1e4), ("2.5 mbit", 2.5e6), (5000, 5e3), ("5e6", 5e6)],
)  # fmt: skip
def test_bandwidths(text, bandwidth):
    assert parse_bandwidth(text) == bandwidth


@pytest.mark.parametrize(
    "text", ["", "fast", "100mbps", "-1mbit", "0", "nan", "inf", "2tbit", "1.2.3mbit", "100 m bit", True]
)
def test_what_is_no_bandwidth(text):
    with pytest.raises(ValueError, match=r"number of bit/s, .* from 1kbit to 1tbit, got .*Write for example"):
        parse_bandwidth(text)
