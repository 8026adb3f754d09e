"""W workers in NumPy float64, literally to the papers' equations: the second source JAX is tested against.

Sources: SCAPE (arXiv 2607.01678), Algorithm 1; AdamS (arXiv 2505.16363). One worker after the other, m and e
apart, boolean masks, full-size arrays: slow, and meant to be read. Imports numpy only; nothing of the package
imports it. Parameters and gradients are flat dicts {path: array}; `step` takes one dict of gradients for each
worker.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import numpy as np

Tree = dict[str, np.ndarray]
Masks = dict[str, np.ndarray]  # of bool

MAX_WAIT = 255  # the steps that an entry was passed over are counted in one byte


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments of `scape_jax.scape` that change values; `num_workers` is W."""

    num_workers: int = 1
    learning_rate: float | Callable[[int], float] = 1e-3
    density: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    clip_order: str = "before"
    bias_correction: str = "both"
    selection: str = "block"
    block_size: int = 4096
    payload_dtype: str = "float32"
    dense: Callable[[str], bool] | None = None
    density_warmup_steps: int = 0
    mask_every: int = 1
    staleness_power: float = 0.0


# ---- equations shared by all methods


def adams(m_prev: np.ndarray, m: np.ndarray, g_in_v: np.ndarray, t: int, s: Settings) -> np.ndarray:
    """The update u_t from m_{t-1}, m_t and the gradient that enters v_t."""
    b1, b2, eps, correction = s.b1, s.b2, s.eps, s.bias_correction
    if correction == "none":
        v = b2 * m_prev**2 + (1 - b2) * g_in_v**2
        return m / (np.sqrt(v) + eps)
    if correction == "both":
        v = b2 * m_prev**2 + (1 - b2) * g_in_v**2
        return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
    if correction == "momentum":
        m_prev, m = m_prev / (1 - b1**t), m / (1 - b1**t)
        v = b2 * m_prev**2 + (1 - b2) * g_in_v**2
        return m / (np.sqrt(v) + eps)
    raise ValueError(f"bias_correction must be none, both or momentum, got {correction!r}.")


def global_norm(tree: Tree) -> float:
    return float(np.sqrt(sum(np.sum(x**2) for x in tree.values())))


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """clip_by_global_norm multiplies by min(1, c / norm)."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm


def all_finite(grads: Sequence[Tree]) -> bool:
    return all(np.isfinite(g).all() for worker in grads for g in worker.values())


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To the nearest value with 8 significant bits, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def sent(x: np.ndarray, payload_dtype: str) -> np.ndarray:
    """What arrives of a payload. The sum over workers is not rounded here."""
    return round_to_bfloat16(x) if payload_dtype == "bfloat16" else x


def is_dense(path: str, shape: tuple[int, ...], s: Settings) -> bool:
    """Never sparse: scalars, vectors, norm scales, biases, leaves below one block and what the user names."""
    parts = re.split(r"[/_.]", path.lower())
    named = any(p in ("bias", "scale") or p.startswith("norm") or p.endswith("norm") for p in parts)
    small = len(shape) < 2 or int(np.prod(shape)) < s.block_size
    return s.density >= 1 or named or small or (s.dense is not None and s.dense(path))


def keep_of(length: int, density: float) -> int:
    return max(1, int(np.floor(density * length + 0.5)))


def largest(score: np.ndarray, k: int) -> np.ndarray:
    """Mask of the k largest scores; of equal ones the lower index wins."""
    mask = np.zeros(score.shape, bool)
    mask[np.argsort(-score, kind="stable")[:k]] = True
    return mask


# ---- rows, owners and density levels


def owned_rows(size: int, s: Settings) -> list[list[slice]]:
    """For each worker the rows of a leaf that it selects in.

    Block: rows of B entries, worker n owns rows n R_w .. (n+1) R_w with R_w = ceil(R / W). Leaf: one row per
    worker, of ceil(N / W) entries rounded up to 32.
    """
    row = s.block_size
    if s.selection == "leaf":
        row = math.ceil(math.ceil(size / s.num_workers) / 32) * 32
    rows = [slice(start, min(start + row, size)) for start in range(0, size, max(row, 1))]
    share = math.ceil(len(rows) / s.num_workers)
    return [rows[n * share : (n + 1) * share] for n in range(s.num_workers)]


def refresh(scores: Sequence[Tree], dense: dict[str, bool], density: float, s: Settings) -> Masks:
    """M_t: every owner's choice in its own rows, from its own |mt^n|; together the mask of all workers."""
    masks = {}
    for path, is_whole in dense.items():
        shape = scores[0][path].shape
        mask = np.full(scores[0][path].size, is_whole)
        if not is_whole:
            for n, rows in enumerate(owned_rows(mask.size, s)):
                for row in rows:
                    score = scores[n][path].reshape(-1)[row]
                    mask[row] = largest(score, keep_of(score.size, density))
        masks[path] = mask.reshape(shape)
    return masks


def density_of_mask_selected_in(t: int, s: Settings) -> float:
    """d^(min(1, t/T)) rounded up to one of the levels d^(j/n), j = 0..n."""
    if s.density >= 1 or not s.density_warmup_steps:
        return s.density
    n = max(2, min(8, round(np.log2(1 / s.density) + 0.5)))
    j = min(t, s.density_warmup_steps) * n // s.density_warmup_steps
    return s.density ** (j / n)


# ---- methods


class _Method:
    def __init__(self, params: Tree, settings: Settings):
        self.s = settings
        self.params = {path: np.array(p, np.float64) for path, p in params.items()}
        self.dense = {path: is_dense(path, np.shape(p), settings) for path, p in params.items()}
        self.m = self._zeros()
        self.count = 0
        self.skipped = 0
        self.grad_norm = 0.0
        self.clip_factor = 1.0

    def _zeros(self) -> Tree:
        return {path: np.zeros_like(p) for path, p in self.params.items()}

    def step(self, grads: Sequence[Tree], **options) -> None:
        """One step of all workers. If any gradient is not finite, only `skipped` changes."""
        if len(grads) != self.s.num_workers:
            raise ValueError(f"grads must hold {self.s.num_workers} dicts, one per worker, got {len(grads)}.")
        if not all_finite(grads):
            self.skipped += 1
            return
        grads = [{path: np.asarray(g, np.float64) for path, g in worker.items()} for worker in grads]
        update = self._update(grads, self.count + 1, **options)
        eta = self.s.learning_rate(self.count) if callable(self.s.learning_rate) else self.s.learning_rate
        for path, theta in self.params.items():
            self.params[path] = theta - eta * (update[path] + self.s.weight_decay * theta)
        self.count += 1

    def _update(self, grads: Sequence[Tree], t: int) -> Tree:
        """u_t of all workers; changes m and whatever else the method keeps."""
        raise NotImplementedError

    def _clip(self, ghat: Tree) -> Tree:
        self.grad_norm = global_norm(ghat)
        self.clip_factor = clip_factor(self.grad_norm, self.s.clip_norm)
        return {path: self.clip_factor * g for path, g in ghat.items()}


class Scape(_Method):
    """SCAPE, Algorithm 1, with clipping before m is rebuilt (`clip_order="paper"`: the literal listing)."""

    def __init__(self, params: Tree, settings: Settings):
        super().__init__(params, settings)
        self.e = [self._zeros() for _ in range(settings.num_workers)]
        self.mask = {path: np.ones(p.shape, bool) for path, p in self.params.items()}
        self.waited = {path: np.zeros(p.shape) for path, p in self.params.items()}
        self.scores: list[Tree] = []

    def _update(self, grads: Sequence[Tree], t: int, next_mask: Masks | None = None) -> Tree:
        # `next_mask` replaces what `refresh` would choose.
        s, b1, mask, m = self.s, self.s.b1, self.mask, self.m
        mt = [
            {path: b1 * m[path] + (1 - b1) * g[path] + e[path] for path in m}
            for g, e in zip(grads, self.e, strict=True)
        ]
        self.e = [{path: np.where(mask[path], 0.0, mt_n[path]) for path in m} for mt_n in mt]
        if s.payload_dtype == "float32":
            bbar = {path: np.mean([mt_n[path][mask[path]] for mt_n in mt], axis=0) for path in m}
        else:
            # All know b1 m, so what a worker sends, and rounds, is the rest of mt^n / (1-b1): g + e/(1-b1).
            bbar = {}
            for path in m:
                known = b1 * m[path][mask[path]]
                parts = [sent((mt_n[path][mask[path]] - known) / (1 - b1), s.payload_dtype) for mt_n in mt]
                bbar[path] = known + (1 - b1) * np.mean(parts, axis=0)
        ghat = {path: (bbar[path] - b1 * m[path][mask[path]]) / (1 - b1) for path in m}
        clipped = self._clip(ghat)

        new_m, update = self._zeros(), self._zeros()
        for path, on in mask.items():
            m_prev = m[path][on]
            m_t = bbar[path] if s.clip_order == "paper" else b1 * m_prev + (1 - b1) * clipped[path]
            tau = self.waited[path][on] + 1  # 1 for an entry kept in consecutive steps
            g_in_v = clipped[path] / tau**s.staleness_power
            new_m[path][on] = m_t
            update[path][on] = adams(m_prev, m_t, g_in_v, t, s)
        self.m = new_m

        self.waited = {
            path: np.where(on, 0, np.minimum(self.waited[path] + 1, MAX_WAIT)) for path, on in mask.items()
        }
        self.scores = [{path: np.abs(x) for path, x in mt_n.items()} for mt_n in mt]
        if next_mask is not None:
            self.mask = next_mask
        elif (t - 1) % s.mask_every == 0:
            self.mask = refresh(self.scores, self.dense, density_of_mask_selected_in(t, s), s)
        return update


class Dense(_Method):
    """AdamS or AdamW on the mean gradient; `payload_dtype` rounds each worker's gradient before the mean."""

    def __init__(self, params: Tree, settings: Settings, rule: str = "adams"):
        super().__init__(params, settings)
        self.rule = rule
        self.v = self._zeros()  # AdamW's; AdamS has none

    def _update(self, grads: Sequence[Tree], t: int) -> Tree:
        dtype = self.s.payload_dtype
        mean = {path: np.mean([sent(g[path], dtype) for g in grads], axis=0) for path in self.m}
        return self._rule(self._clip(mean), t)

    def _rule(self, ghat: Tree, t: int) -> Tree:
        s, m_prev = self.s, self.m
        self.m = {path: s.b1 * m_prev[path] + (1 - s.b1) * g for path, g in ghat.items()}
        if self.rule == "adams":
            return {p: adams(m_prev[p], m, ghat[p], t, s) for p, m in self.m.items()}
        self.v = {path: s.b2 * self.v[path] + (1 - s.b2) * g**2 for path, g in ghat.items()}
        m_hat = {path: m / (1 - s.b1**t) for path, m in self.m.items()}
        v_hat = {path: v / (1 - s.b2**t) for path, v in self.v.items()}
        return {path: m_hat[path] / (np.sqrt(v_hat[path]) + s.eps) for path in self.m}


class TopK(Dense):
    """Top-k per leaf of each worker's raw gradient plus what it has not sent; then AdamW or AdamS."""

    def __init__(self, params: Tree, settings: Settings, rule: str = "adamw"):
        super().__init__(params, settings, rule)
        self.residual = [self._zeros() for _ in range(settings.num_workers)]
        self.masks: list[Masks] = []

    def _update(self, grads: Sequence[Tree], t: int, masks: list[Masks] | None = None) -> Tree:
        # `masks`, one for each worker, replace what the workers would choose.
        total = [
            {path: g[path] + r[path] for path in self.m} for g, r in zip(grads, self.residual, strict=True)
        ]
        self.scores: list[Tree] = [{path: np.abs(x) for path, x in worker.items()} for worker in total]
        self.masks = [self._choose(score) for score in self.scores] if masks is None else masks
        pairs = list(zip(total, self.masks, strict=True))
        self.residual = [{path: np.where(on[path], 0.0, x[path]) for path in self.m} for x, on in pairs]
        mean = {p: np.mean([np.where(on[p], x[p], 0.0) for x, on in pairs], axis=0) for p in self.m}
        return self._rule(self._clip(mean), t)

    def _choose(self, score: Tree) -> Masks:
        return {
            path: np.ones(x.shape, bool)
            if self.dense[path]
            else largest(x.reshape(-1), keep_of(x.size, self.s.density)).reshape(x.shape)
            for path, x in score.items()
        }
