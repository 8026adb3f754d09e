"""report.html and the comparison: self-contained, complete, also for unfinished runs."""

import json
import re

import numpy as np
import pytest
from rich.console import Console

from scripts import compare as command
from scripts import pretrain
from training import compare, report
from training import config as settings
from training.metrics import MetricsWriter
from training.train import Outcome

SUMMARY = {
    "steps": 40, "train_loss": 2.01, "validation_loss": 2.13, "perplexity": 8.4, "bits_per_byte": 3.07,
    "tokens_per_sec": 1234.0, "secs": 61.0, "parameters": 1000, "workers": 4, "bytes_per_step": 1000.0,
    "dense_bytes_per_step": 8000.0, "bytes_sent_total": 4e4, "dense_bytes_total": 3.2e5, "skipped": 0,
}  # fmt: skip


def make_run(folder, *, finished=True, optimizer="scape", shift=0.0):
    config = settings.update(settings.preset("tiny"), {"optimizer.name": optimizer, "run.steps": 40})
    folder.mkdir()
    config.save(folder / "config.json")
    with MetricsWriter(folder, tensorboard=False) as writer:
        for step in range(10, 41, 10):
            sent = {"bytes_sent_total": 1e3 * step, "dense_bytes_total": 8e3 * step}
            writer.write(
                {"step": step, "loss": 5.0, "loss_mean": 5 - step / 20 + shift, "lr": 1e-3, "density": 0.1,
                 "tokens_per_sec": 1e3, "wire_bytes": 1000, "mask_overlap": 0.9, "residual_norm": 1.0,
                 "kept_norm": 2.0, "grad_norm": 0.5, **sent}
            )  # fmt: skip
            if step % 20 == 0:
                writer.write({"step": step, "validation_loss": 5 - step / 22 + shift, **sent})
    if finished:
        summary = SUMMARY | {"validation_loss": SUMMARY["validation_loss"] + shift}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_report_is_self_contained_and_complete(tmp_path):
    text = report.write_report(make_run(tmp_path / "a")).read_text()
    assert text.count("<svg") == 1 and "<?xml" not in text and "<!DOCTYPE svg" not in text
    # nothing is fetched: no scripts, images, style sheets or links; the rest are XML names
    assert not re.search(r"<(script|img|link|iframe)\b", text)
    assert not re.search(r"(src|href)=['\"]\s*https?:", text)
    for title in (
        "loss (nats per token)",
        "bytes sent per worker",
        "density of the mask",
        "overlap of adjacent",
    ):
        assert title in text, title
    assert "residual" in text and "2.1300" in text and "8.0" in text
    assert "&quot;staleness_power&quot;" in text


def test_report_of_an_unfinished_run(tmp_path):
    text = report.write_report(make_run(tmp_path / "a", finished=False)).read_text()
    assert "not finished" in text and "<svg" in text


def test_panels_without_data_are_left_out(tmp_path):
    run = report.read_run(make_run(tmp_path / "a"))
    kept = [{k: v for k, v in r.items() if k not in ("mask_overlap", "density")} for r in run.records]
    titles = [
        axes.get_title()
        for axes in report.run_figure(report.RunResults(run.folder, run.config, kept, {})).axes
    ]
    assert "overlap of adjacent masks" not in titles and "loss (nats per token)" in titles


def test_curves_hold_the_logged_values(tmp_path):
    figure = report.run_figure(report.read_run(make_run(tmp_path / "a")))
    loss = next(axes for axes in figure.axes if axes.get_title() == "loss (nats per token)")
    training, validation = loss.get_lines()
    assert list(training.get_xdata()) == [10, 20, 30, 40]
    assert list(training.get_ydata()) == [4.5, 4.0, 3.5, 3.0]
    assert list(validation.get_xdata()) == [20, 40]


def test_each_panel_says_what_is_good_and_keeps_its_curves_inside(tmp_path):
    """An overlap of 1 ran along the frame; ticks of the norms, all between 1 and 10, ran into each other."""
    run = report.read_run(make_run(tmp_path / "a"))
    for record in run.records:
        if "mask_overlap" in record:
            record |= {"mask_overlap": 1.0, "residual_norm": record["step"] / 5}
    figure = report.run_figure(run)
    figure.canvas.draw()
    for axes in figure.axes:
        assert len(axes.get_xlabel().split()) > 10, axes.get_title()
        bottom, top = axes.get_ylim()
        values = [value for line in axes.get_lines() for value in line.get_ydata()]
        assert bottom <= min(values) and max(values) < top - 0.02 * (top - bottom), axes.get_title()
    norms = next(axes for axes in figure.axes if axes.get_title() == "norms")
    labels = [tick.get_text() for tick in norms.get_yticklabels()]
    assert {"1", "2", "5"} <= set(labels)
    assert not any(tick.get_text() for tick in norms.get_yticklabels(minor=True))


def test_numbers_of_each_worker(tmp_path):
    """A picture where workers differ, with the logged values in its rows; a curve where all have the same."""
    run = report.read_run(make_run(tmp_path / "a"))
    steps = [[10, 10, 10], [10, 10, 4], [10, 10, 5], [10, 10, 5]]
    logged = [r for r in run.records if "loss" in r]
    for record, counts in zip(logged, steps, strict=True):
        record |= {"local_steps": counts, "exchange_secs": [0.2] * 3}
    figure = report.run_figure(run)
    titles = {axes.get_title(): axes for axes in figure.axes}
    assert "seconds of each worker's local steps" not in titles
    (picture,) = titles["local steps of each worker"].collections
    assert np.asarray(picture.get_array()).T.tolist() == steps and picture.get_clim() == (0, 10)
    (line,) = titles["seconds of each worker's exchange"].get_lines()
    assert list(line.get_ydata()) == [0.2] * 4
    figure.canvas.draw()
    summary = SUMMARY | {
        "consensus_distance": 1.0,
        "local_steps": steps[-1],
        "local_steps_set": [10, 10, 10],
        "exchange_secs": [0.2, 0.2, 1.5],
        "islands": 3,
        "island_devices": 4,
        "skipped": 2,
        "skipped_steps": 0,
    }
    rows = dict(report.summary_rows(summary))
    assert rows["workers"] == "3 islands of 4" and rows["steps"] == "40 (2 rounds x workers dropped)"
    assert "times fewer (last round)" in rows and "bytes per worker and step (last round)" in rows
    assert rows["local steps of the last round"] == "10, 10, 5"
    assert rows["seconds of the last exchange"] == "0.2 to 1.5"
    alike = dict(report.summary_rows(summary | {"local_steps": [3, 3, 3]}))
    assert alike["local steps of the last round"] == "3, 3, 3"
    as_set = dict(report.summary_rows(summary | {"local_steps": [10, 10, 10]}))
    assert "local steps of the last round" not in as_set


def test_plots_of_a_run_in_rounds(tmp_path):
    """A gradient alone stood without a name over words on the residual; rows were told of where there were lines."""
    run = report.read_run(make_run(tmp_path / "a"))
    kept = [{k: v for k, v in r.items() if k not in ("residual_norm", "kept_norm")} for r in run.records]
    for record in kept:
        n = record["step"]
        if "loss" in record:
            record |= {"local_steps": [10, 10], "exchange_secs": [0.1, 0.2]}
            record |= {"loss_worker_min": 5 - n / 20, "loss_worker_max": 5.2 - n / 20}
        else:
            record |= {"validation_loss_worker_min": 5.1 - n / 22, "validation_loss_worker_max": 5.3 - n / 22}
    figure = report.run_figure(report.RunResults(run.folder, run.config, kept, {}))
    figure.draw_without_rendering()
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert "norms" not in panels and "residual" not in panels["norm of the gradient"].get_xlabel()
    assert "One row for each" not in panels["local steps of each worker"].get_xlabel()
    assert "One row for each" in panels["seconds of each worker's exchange"].get_xlabel()
    single = panels["loss of single workers"]
    legend, plot = single.get_legend().get_window_extent(), single.get_window_extent()
    assert legend.x0 >= plot.x1 and legend.x1 <= figure.bbox.x1


def test_label_names_the_optimizer_once(tmp_path):
    runs = [make_run(tmp_path / name, optimizer="adams") for name in ("adams", "adams-2", "run")]
    assert [report.read_run(run).label for run in runs] == ["adams", "adams-2", "run (adams)"]


def test_tables_at_80_columns_cut_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    runs = [make_run(tmp_path / "a_name_of_some_length"), make_run(tmp_path / "going", finished=False)]
    assert command.main([*map(str, runs), "--out", str(tmp_path / "picture.png")]) == 0
    pretrain.show_summary(Outcome(runs[0], 40, SUMMARY | {"bytes_sent_total": 0}, 0), Console())
    told = capsys.readouterr().out
    table = told.partition("picture:")[0]
    assert "\u2026" not in told  # the sign for a cut
    assert max(map(len, table.splitlines())) <= 80
    words = set(table.split())
    assert words >= {word for column in compare.COLUMNS for word in column.split()}
    assert words >= {"2.0100", "2.1300", "1.23k", "going", "40"}
    assert "nothing is sent by one worker" in told


def test_folder_without_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"must hold config.json"):
        report.read_run(tmp_path)


def test_compare_prints_one_table_and_one_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    worse = make_run(tmp_path / "worse", shift=0.5)
    better = make_run(tmp_path / "better", optimizer="adams")
    going = make_run(tmp_path / "going", finished=False, shift=9.0)
    out = tmp_path / "picture.png"
    assert command.main([str(worse), str(going), str(better), "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert (
        told.index("better (adams)") < told.index("worse (scape d=0.1)") < told.index("going (scape d=0.1)")
    )
    assert out.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "picture.html").read_text()
    assert "<svg" in page and "better (adams)" in page


def test_compare_refuses_clearly(tmp_path, capsys):
    assert command.main([str(tmp_path / "absent")]) == 2
    assert "must hold config.json" in capsys.readouterr().err
    assert command.main([str(make_run(tmp_path / "a")), "--out", "picture.jpg"]) == 2
    assert "--out must end in .png" in capsys.readouterr().err
