"""bench_overlap: what counts as message and as compute, how spans are joined, and its picture."""

import pytest

from scripts import bench_overlap as bench


def test_kinds_of_operations():
    kinds = {
        "all_gather_invariant.7": "mask", "all-gather.1": "mask", "psum.7": "payload", "all-reduce.2": "payload",
        "copy.3": "compute", "ynn_fusion.75": "compute", "while.616": None, "conditional": None, "call.2": None,
    }  # fmt: skip
    assert {name: bench.kind(name) for name in kinds} == kinds


def test_time_that_two_kinds_share():
    mask, compute = (
        bench.joined([(3.0, 5.0), (0.0, 1.0), (1.0005, 2.0)]),
        bench.joined([(0.5, 4.0), (4.5, 9.0)]),
    )
    assert mask == [(0.0, 2.0), (3.0, 5.0)]
    assert bench.beside_secs(mask, compute) == pytest.approx(1.5 + 1.0 + 0.5)
    assert bench.beside_secs(mask, []) == 0


def test_picture_has_a_panel_for_each_program():
    spans = {"compute": [(0.0, 1.0)], "mask": [(0.0, 0.5)]}
    drawing = bench.picture(dict.fromkeys(bench.METHODS, spans), 20)
    assert [axes.get_title(loc="left") for axes in drawing.axes] == [
        f"masks gathered {when}" for when in bench.METHODS.values()
    ]
