"""The progress line: what it says, plain lines without a terminal."""

import io
import math

import pytest

from training.progress import Progress, amount, duration, quantity

RECORD = {
    "step": 50, "loss": 2.5, "loss_mean": 2.25, "tokens_per_sec": 12345.0, "bytes_sent_total": 2e6,
    "dense_bytes_total": 2e7, "skipped": 0,
}  # fmt: skip


def test_plain_line_without_a_terminal():
    out = io.StringIO()
    with Progress(100, file=out) as progress:
        progress.update(RECORD)
        progress.note("saved")
    line, note = out.getvalue().splitlines()
    assert (
        line == "step 50/100  mean loss 2.250  12.3k tokens/s  sent 2 MB of 20 MB dense (10.0x fewer)  ? left"
    )
    assert note == "saved"
    assert "\x1b" not in out.getvalue()


def test_time_left_follows_the_steps(monkeypatch):
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    progress = Progress(100, file=io.StringIO())
    progress.line(RECORD)
    assert "  40s left" in progress.line({**RECORD, "step": 60})  # 10 steps took 10 s, 40 are left


def test_skipped_steps_and_one_worker():
    progress = Progress(100, file=io.StringIO())
    assert progress.line({**RECORD, "skipped": 3}).endswith("3 skipped")
    told = progress.line({**RECORD, "skipped": 2, "skipped_steps": 9})
    assert told.endswith("2 rounds x workers dropped  9 steps x workers skipped")
    assert "skipped" not in progress.line({**RECORD, "skipped": 2, "skipped_steps": 0})
    assert "sent" not in progress.line({**RECORD, "bytes_sent_total": 0, "dense_bytes_total": 0})


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (quantity, 999, "999"), (quantity, 1.5e6, "1.5M"), (amount, 9, "9 B"), (amount, 2.05e6, "2.05 MB"),
        (duration, 9.9, "9s"), (duration, 61, "1m01s"), (duration, 3725, "1h02m"), (duration, math.nan, "?"),
    ],
)  # fmt: skip
def test_numbers_for_people(function, value, text):
    assert function(value) == text


def test_workers_in_rounds():
    """Local steps stand there where they are not those of the settings, also where all workers have the same."""
    progress = Progress(100, file=io.StringIO())
    progress.local_steps = [10, 10, 10]
    line = progress.line({**RECORD, "local_steps": [10, 7, 10], "exchange_secs": [0.251, 0.25, 6.0]})
    assert "  7 to 10 local steps  exchange 0.25 to 6 s  ? left" in line
    assert "  exchange 0.25 s  " in progress.line({**RECORD, "exchange_secs": [0.251, 0.25]})
    progress.consensus_distance = 1.234
    line = progress.line({**RECORD, "local_steps": [10, 10, 10]})
    assert "  consensus 1.2  " in line and "local steps" not in line
    assert "  3 local steps  " in progress.line({**RECORD, "local_steps": [3, 3, 3]})
