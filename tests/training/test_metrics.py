"""metrics.jsonl and TensorBoard: append-safe, each step once, any number readable."""

import json
import math

import numpy as np
import pytest

from training import metrics
from training.metrics import MetricsWriter


def write(folder, steps, start_step=0, **values):
    with MetricsWriter(folder, start_step=start_step, tensorboard=False) as writer:
        for step in steps:
            writer.write({"step": step, "loss": float(step), **values})


def test_round_trip_of_numbers(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write({"step": np.int64(1), "loss": np.float32(0.1), "skipped": np.int32(3), "norm": math.nan})
        writer.write({"step": 2, "norm": -math.inf})
    first, second = metrics.read(tmp_path)
    assert first["loss"] == np.float32(0.1) and first["skipped"] == 3 and math.isnan(first["norm"])
    assert second["norm"] == -math.inf
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN and Infinity are not JSON


def test_line_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.write({"step": 1, "loss": 1.0})
    assert [r["step"] for r in metrics.read(tmp_path)] == [1]
    writer.close()


def test_resume_drops_the_steps_that_are_done_again(tmp_path):
    write(tmp_path, [5, 10, 15, 20])
    write(tmp_path, [15, 20, 25], start_step=10, again=1)
    records = metrics.read(tmp_path)
    assert [r["step"] for r in records] == [5, 10, 15, 20, 25]
    assert [r.get("again", 0) for r in records] == [0, 0, 1, 1, 1]


def test_resume_after_a_line_cut_short(tmp_path):
    write(tmp_path, [5, 10])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "lo')
    assert [r["step"] for r in metrics.read(tmp_path)] == [5, 10]
    write(tmp_path, [15], start_step=10)
    assert [r["step"] for r in metrics.read(tmp_path)] == [5, 10, 15]


def test_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2 is not valid JSON"):
        metrics.read(tmp_path)


def test_new_run_starts_with_an_empty_file(tmp_path):
    write(tmp_path, [5])
    write(tmp_path, [1])
    assert [r["step"] for r in metrics.read(tmp_path)] == [1]


def test_series_skips_records_without_the_key(tmp_path):
    records = [{"step": 1, "a": 1.0}, {"step": 2, "b": 2.0}, {"step": 3, "a": 3.0}]
    assert metrics.series(records, "a") == ([1, 3], [1.0, 3.0])


def test_tensorboard_holds_the_same_scalars(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 7, "loss": 1.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    found, data = [], file.read_bytes()
    while data:  # TFRecord: length (8), its CRC (4), payload, CRC (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    assert found == [(7, "loss", 1.5)]
