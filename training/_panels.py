"""The plots of a report: what each shows and how to read it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot of a run: its curves, as (key of metrics.jsonl, name), and how to read it.

    The one key of a panel `by_worker` holds a list with a number for each worker. Where they differ it is a picture. A run
    without the key `needs`, or with `unless`, leaves the panel out.
    """

    title: str
    curves: tuple[tuple[str, str], ...]
    meaning: str
    by_worker: bool = False
    needs: str = ""
    unless: str = ""


PANELS = (
    Panel(
        "loss (nats per token)",
        (("loss_mean", "training"), ("validation_loss", "validation")),
        "Mean training loss since the point before, and loss on held-out text: good is falling; validation "
        "rising while training falls is overfitting.",
    ),
    Panel(
        "loss of single workers",
        (
            ("loss_worker_min", "training, lowest"),
            ("loss_worker_max", "training, highest"),
            ("validation_loss_worker_min", "validation, lowest"),
            ("validation_loss_worker_max", "validation, highest"),
            ("validation_loss", "validation of the mean"),
        ),
        "Workers that differ: good is a narrow band, and the mean of their parameters below all of them.",
    ),
    Panel(
        "consensus distance",
        (("consensus_distance", "distance"),),
        "Root mean square distance of the workers' parameters from their mean: good is level or falling; growing "
        "says that they meet too rarely for the outer learning rate and momentum.",
    ),
    Panel(
        "local steps of each worker",
        (("local_steps", "steps"),),
        "Steps between two exchanges: a slower worker takes fewer with outer.adapt, and good is a number that "
        "settles.",
        by_worker=True,
    ),
    Panel(
        "seconds of each worker's local steps",
        (("local_secs", "seconds"),),
        "Time from one exchange to the next: good is the same for all at a step, for then they reach the exchange "
        "together. Workers of one process share a clock.",
        by_worker=True,
    ),
    Panel(
        "seconds of each worker's exchange",
        (("exchange_secs", "seconds"),),
        "Time in the exchange, waiting for its peers included: good is far below the local steps; where a worker waits "
        "long, slower ones should take fewer of them.",
        by_worker=True,
    ),
    Panel(
        "bytes sent per worker",
        (("bytes_sent_total", "sent"), ("dense_bytes_total", "dense all-reduce")),
        "What a worker has sent so far, beside what a dense exchange would have: good is far below it.",
    ),
    Panel(
        "density of the mask",
        (("density", "density"),),
        "Fraction of the entries sent in a step: falls from 1 during the warm-up to optimizer.density, and a little "
        "above it for leaves that are sent whole.",
    ),
    Panel(
        "overlap of adjacent masks",
        (("mask_overlap", "overlap"),),
        "Part of a mask that was in the one before: good is in between, for at 1 the same entries go every time, "
        "and at the density the choice is as by chance.",
    ),
    Panel(
        "norms",
        (("residual_norm", "residual"), ("kept_norm", "kept part"), ("grad_norm", "averaged gradient")),
        "The residual is what waits to be sent: good is a level line; one that keeps growing says that too little "
        "is sent.",
        needs="residual_norm",
    ),
    Panel(
        "norm of the gradient",
        (("grad_norm", "gradient"),),
        "Before clipping, in rounds the mean over steps and workers: good is level or falling; jumps say that the "
        "learning rate is too high, or that the data change.",
        unless="residual_norm",
    ),
    Panel(
        "learning rate",
        (("lr", "learning rate"),),
        "What each step applied: good is the schedule as you set it; it stands still in a skipped step.",
    ),
)
