"""W workers that gossip, in NumPy float64, literally to the equations: the second source JAX is tested against.

Sources: GASLoC (arXiv 2606.11081), DiLoCo (arXiv 2311.08105), streaming DiLoCo (arXiv 2501.18512), NoLoCo (arXiv
2506.10911). One worker after the other, full-size arrays, fragments as boolean masks, graphs as matrices: slow, and meant
to be read. Imports numpy only; nothing of the package imports it. Parameters are flat dicts {path: array}.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Tree = dict[str, np.ndarray]


def add(a: Tree, b: Tree, factor: float = 1.0) -> Tree:
    """a + factor b."""
    return {path: a[path] + factor * b[path] for path in a}


def mix(matrix: np.ndarray, trees: Sequence[Tree]) -> list[Tree]:
    """z_i = sum_j matrix[i, j] y_j."""
    workers = range(len(trees))
    return [{path: sum(matrix[i, j] * trees[j][path] for j in workers) for path in trees[0]} for i in workers]


def finite(tree: Tree) -> bool:
    return all(np.isfinite(x).all() for x in tree.values())


# ---- rules that turn a gradient into an update, one object a worker; inner and outer optimizers alike


class Sgd:
    """Momentum as optax has it: t <- g + mu t; the update is -eta t, or -eta (g + mu t) with Nesterov's look ahead."""

    def __init__(self, learning_rate: float, momentum: float = 0.0, nesterov: bool = False):
        self.learning_rate, self.momentum, self.nesterov = learning_rate, momentum, nesterov
        self.trace: Tree | None = None

    def update(self, gradient: Tree, params: Tree) -> Tree:
        before = (
            {path: np.zeros_like(g) for path, g in gradient.items()} if self.trace is None else self.trace
        )
        self.trace = add(gradient, before, self.momentum)
        direction = add(gradient, self.trace, self.momentum) if self.nesterov else self.trace
        return {path: -self.learning_rate * d for path, d in direction.items()}


class Adam:
    """Adam with bias correction, and AdamW's decoupled decay; the learning rate may be a function of the steps taken."""

    def __init__(
        self,
        learning_rate: float | Callable[[int], float],
        b1: float = 0.9,
        b2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.learning_rate, self.b1, self.b2, self.eps, self.decay = learning_rate, b1, b2, eps, weight_decay
        self.m: Tree = {}
        self.v: Tree = {}
        self.count = 0

    def update(self, gradient: Tree, params: Tree) -> Tree:
        rate = self.learning_rate(self.count) if callable(self.learning_rate) else self.learning_rate
        self.count += 1
        out = {}
        for path, g in gradient.items():
            m = self.b1 * self.m.get(path, np.zeros_like(g)) + (1 - self.b1) * g
            v = self.b2 * self.v.get(path, np.zeros_like(g)) + (1 - self.b2) * g**2
            m_hat, v_hat = m / (1 - self.b1**self.count), v / (1 - self.b2**self.count)
            self.m[path], self.v[path] = m, v
            out[path] = -rate * (m_hat / (np.sqrt(v_hat) + self.eps) + self.decay * params[path])
        return out


# ---- the outer step of all workers: (anchors, pseudo-gradients, matrix) -> new anchors


class Optax:
    """theta <- theta + rule(theta - z), z the mix of theta - delta: the default form. DiLoCo is the matrix of 1/W."""

    def __init__(self, make_rule: Callable[[], Any], num_workers: int):
        self.rules = [make_rule() for _ in range(num_workers)]

    def step(self, anchors: list[Tree], deltas: list[Tree], matrix: np.ndarray) -> list[Tree]:
        z = mix(matrix, [add(a, d, -1.0) for a, d in zip(anchors, deltas, strict=True)])
        pairs = zip(self.rules, anchors, z, strict=True)
        return [add(a, rule.update(add(a, z_i, -1.0), a)) for rule, a, z_i in pairs]


class NesterovGossip:
    """The two explicit forms: z + gamma (z - z_prev), "mixed", and z + gamma (y - y_prev), "local"."""

    def __init__(self, learning_rate: float, gamma: float, momentum: str):
        self.learning_rate, self.gamma, self.momentum = learning_rate, gamma, momentum
        self.previous: list[Tree] | None = None

    def step(self, anchors: list[Tree], deltas: list[Tree], matrix: np.ndarray) -> list[Tree]:
        y = [add(a, d, -self.learning_rate) for a, d in zip(anchors, deltas, strict=True)]
        z = mix(matrix, y)
        moved = z if self.momentum == "mixed" else y
        previous = anchors if self.previous is None else self.previous
        self.previous = moved
        return [add(z_i, add(m, p, -1.0), self.gamma) for z_i, m, p in zip(z, moved, previous, strict=True)]


class NoLoCo:
    """m <- mu m + beta mix(drift) + k (mix(theta) - theta), theta <- theta + m."""

    def __init__(self, learning_rate: float, momentum: float, pull: float):
        self.beta, self.mu, self.k = learning_rate, momentum, pull
        self.m: list[Tree] | None = None

    def step(self, anchors: list[Tree], deltas: list[Tree], matrix: np.ndarray) -> list[Tree]:
        if self.m is None:
            self.m = [{path: np.zeros_like(x) for path, x in a.items()} for a in anchors]
        drifts = mix(matrix, [{path: -d for path, d in delta.items()} for delta in deltas])
        means = mix(matrix, anchors)
        self.m = [
            {path: self.mu * m[path] + self.beta * g[path] + self.k * (mean[path] - a[path]) for path in a}
            for m, g, mean, a in zip(self.m, drifts, means, anchors, strict=True)
        ]
        return [add(a, m) for a, m in zip(anchors, self.m, strict=True)]


# ---- rounds


@dataclasses.dataclass
class Workers:
    """All workers of a run.

    Attributes:
      params: theta^i, equal at the start.
      inner: each worker's inner rule.
      outer: an outer step for each fragment.
      fragments: for each fragment {path: boolean mask}; one fragment of everything by default.
      delay: inner steps after which the exchange of a fragment arrives; 0: at the round's end.
      reference_steps: weigh drifts by H_i / reference_steps; None: uniform.
    """

    params: list[Tree]
    inner: list[Any]
    outer: list[Any]
    fragments: list[dict[str, np.ndarray]] = dataclasses.field(default_factory=list)
    delay: int = 0
    reference_steps: int | None = None

    def __post_init__(self):
        self.params = [{path: np.array(x, np.float64) for path, x in p.items()} for p in self.params]
        if not self.fragments:
            self.fragments = [{path: np.ones(x.shape, bool) for path, x in self.params[0].items()}]
        self.anchors = [dict(p) for p in self.params]
        self.count = 0
        self.skipped = [0] * len(self.params)

    def round(
        self, gradient: Callable[[Tree, int, int], Tree], matrix: np.ndarray, steps: Sequence[int]
    ) -> None:
        """`gradient(params, worker, i)` is that of step i of this round; `steps` holds each worker's H_i."""
        mask = self.fragments[self.count % len(self.fragments)]
        if self.delay:
            sent = [dict(p) for p in self.params]
            new = self._exchanged(sent, matrix)
            self._local(gradient, [0] * len(steps), [self.delay] * len(steps))
            for n in range(len(self.params)):
                for path, on in mask.items():
                    self.params[n][path] = np.where(
                        on, self.params[n][path] + new[n][path] - sent[n][path], self.params[n][path]
                    )
                    self.anchors[n][path] = np.where(on, new[n][path], self.anchors[n][path])
            self._local(gradient, [self.delay] * len(steps), steps)
            self._drop_nonfinite()
        else:
            self._local(gradient, [0] * len(steps), steps)
            self._drop_nonfinite()
            if self.reference_steps is not None:
                for n, taken in enumerate(steps):
                    drift = add(self.params[n], self.anchors[n], -1.0)
                    self.params[n] = add(self.anchors[n], drift, taken / self.reference_steps)
            new = self._exchanged(self.params, matrix)
            for n in range(len(self.params)):
                for path, on in mask.items():
                    self.params[n][path] = np.where(on, new[n][path], self.params[n][path])
                    self.anchors[n][path] = np.where(on, new[n][path], self.anchors[n][path])
        self.count += 1

    def mean(self) -> Tree:
        """The mean over workers."""
        return {path: np.mean([p[path] for p in self.params], axis=0) for path in self.params[0]}

    def consensus_distance(self) -> float:
        """sqrt(mean_i |theta^i - mean|^2)."""
        mean = self.mean()
        squares = [sum(np.sum((p[path] - mean[path]) ** 2) for path in mean) for p in self.params]
        return float(np.sqrt(np.mean(squares)))

    def _local(self, gradient: Callable, start: Sequence[int], stop: Sequence[int]) -> None:
        for n, rule in enumerate(self.inner):
            for i in range(start[n], stop[n]):
                self.params[n] = add(
                    self.params[n], rule.update(gradient(self.params[n], n, i), self.params[n])
                )

    def _exchanged(self, sent: list[Tree], matrix: np.ndarray) -> list[Tree]:
        # Whole models, of which the caller takes the fragment: entries do not act on each other.
        outer = self.outer[self.count % len(self.outer)]
        deltas = [add(a, p, -1.0) for a, p in zip(self.anchors, sent, strict=True)]
        return outer.step(self.anchors, deltas, matrix)

    def _drop_nonfinite(self) -> None:
        for n, p in enumerate(self.params):
            if not finite(p):
                self.params[n] = dict(self.anchors[n])
                self.skipped[n] += 1
