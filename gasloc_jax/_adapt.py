"""How many local steps each worker takes, so that slow workers and slow links keep nobody waiting.

Host-side and pure: nothing here touches a device or another worker. A worker needs its own measurements and one common
number, the time that a round should take.
"""

import dataclasses
import math
from collections.abc import Sequence

from gasloc_jax._checks import check_number, check_whole_number


@dataclasses.dataclass(frozen=True)
class AdaptiveLocalSteps:
    """Chooses H_i = (T - exchange) / step, rounded down and bounded: all workers reach the exchange after T seconds.

    Attributes:
      nominal: H, the local steps of every worker before anything is measured.
      minimum: fewest local steps, at least 1 (and above the delay of a round that has one).
      maximum: most local steps; batches must hold as many.
      target_secs: T; None: `common_target` of the first rounds' measurements.
      hysteresis: H_i is kept while the exact value is within this fraction of it, so that noise does not move it.

    Raises:
      ValueError: a setting is outside its range.

    Example:
      >>> import gasloc_jax
      >>> adapt = gasloc_jax.AdaptiveLocalSteps(nominal=10, maximum=20)
      >>> target_secs = adapt.common_target(step_secs=[0.1, 0.2], exchange_secs=[0.5, 0.5])
      >>> [adapt.choose(10, secs, [0.5], target_secs) for secs in ([0.1], [0.2])]
      [10, 5]
    """

    nominal: int
    minimum: int = 1
    maximum: int = 1000
    target_secs: float | None = None
    hysteresis: float = 0.15

    def __post_init__(self) -> None:
        check_whole_number("minimum", self.minimum, 1, "Every worker takes at least one step a round.")
        check_whole_number("nominal", self.nominal, self.minimum, "It must be at least the minimum.")
        check_whole_number("maximum", self.maximum, self.nominal, "It must be at least the nominal number.")
        if self.target_secs is not None:
            positive = lambda x: 0 < x < math.inf  # noqa: E731
            check_number("target_secs", self.target_secs, "a finite number > 0", positive, "None: measured.")
        fraction = lambda x: 0 <= x < 1  # noqa: E731
        check_number("hysteresis", self.hysteresis, "in [0, 1)", fraction, "Typical: 0.15.")

    def common_target(self, step_secs: Sequence[float], exchange_secs: Sequence[float]) -> float:
        """T in seconds: `target_secs`, or the time that the fastest worker needs for a round of `nominal` steps.

        Args:
          step_secs: seconds of one local step, one number for each worker; gathered once, after the first rounds.
          exchange_secs: seconds of one exchange, likewise, without the time that a worker waited for its peers.

        Raises:
          ValueError: no workers, unequally many numbers, or times that are not finite and >= 0 (steps: > 0).
        """
        if self.target_secs is not None:
            return self.target_secs
        if not step_secs or len(step_secs) != len(exchange_secs):
            raise ValueError(
                f"step_secs and exchange_secs must hold one number for each worker, got {len(step_secs)} and "
                f"{len(exchange_secs)}. Gather both from all workers."
            )
        return min(
            self.nominal * _step_secs([step]) + _exchange_secs([exchange])
            for step, exchange in zip(step_secs, exchange_secs, strict=True)
        )

    def choose(
        self, current: int, step_secs: Sequence[float], exchange_secs: Sequence[float], target_secs: float
    ) -> int:
        """This worker's local steps for the next round.

        Args:
          current: its local steps in the last round.
          step_secs: its seconds for one local step in recent rounds, of which the median counts.
          exchange_secs: its seconds for the exchange in recent rounds, of which the least counts: what is above it was
            spent waiting for a peer, and a worker that waits should not do less.
          target_secs: T.

        Raises:
          ValueError: no measurements, or times that are not finite and >= 0 (steps, T: > 0).
        """
        check_number(
            "target_secs", target_secs, "a finite number > 0", lambda x: 0 < x < math.inf, "Seconds."
        )
        exact = (target_secs - _exchange_secs(exchange_secs)) / _step_secs(step_secs)
        exact = min(max(exact, self.minimum), self.maximum)
        if self.minimum <= current <= self.maximum and abs(exact - current) <= self.hysteresis * current:
            return current
        # Down, so that nobody is late; the small number is for exact quotients such as 0.3 / 0.1.
        return max(self.minimum, math.floor(exact + 1e-6))


def _step_secs(secs: Sequence[float]) -> float:
    """The median, which a single slow round does not move."""
    _check_secs("step_secs", secs, least=math.ulp(0.0))
    ordered = sorted(secs)
    return 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])


def _exchange_secs(secs: Sequence[float]) -> float:
    _check_secs("exchange_secs", secs, least=0.0)
    return min(secs)


def _check_secs(name: str, secs: Sequence[float], least: float) -> None:
    if not len(secs) or not all(math.isfinite(s) and s >= least for s in secs):
        bound = ">= 0" if least == 0 else "> 0"
        raise ValueError(
            f"{name} must hold finite times {bound}, got {list(secs)}. Measure at least one round."
        )
