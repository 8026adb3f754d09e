"""The section of what happens between islands: rounds of local steps and the outer optimizer that joins them."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

from training._fields import Settings
from training._problems import require

OuterName = Literal["none", "gasloc", "diloco", "local_sgd", "dadam", "local_dadam", "noloco"]
ALL_TO_ALL = ("diloco", "local_sgd")  # defined on the complete graph only
WITHOUT_STEP = ("local_sgd", "dadam", "local_dadam")  # take the mix as it is: no rate, no momentum
_RATE = 0.7


@dataclasses.dataclass(frozen=True)
class OuterConfig(Settings):
    """Rounds of mesh.worker islands; see gasloc_jax for each method. none: one island, an exchange in every step.

    run.steps counts nominal inner steps and a round is `local_steps` of them (the largest of a list). A run that ends
    in mid-round takes the steps that are left as its last round, which is noted where it happens; evaluations and
    checkpoints come at the first end of a round at or after their step.
    """

    section: ClassVar[str] = "outer"

    name: OuterName = "none"
    """Outer optimizer; none: mesh.data workers that exchange in every step."""
    topology: Literal["random_pairs", "random_ring", "ring", "exponential", "complete"] | None = None
    """Who meets in a round; None: random_pairs, and complete for diloco and local_sgd."""
    local_steps: int | tuple[int, ...] = 10
    """Inner steps of a round: H, or a list with one for each worker."""
    learning_rate: float = _RATE
    """Outer learning rate (gasloc, diloco, noloco)."""
    momentum: float | None = None
    """Outer momentum (gasloc, diloco, noloco); None: 0.9, for noloco 0.5."""
    payload_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """What travels between workers; less than float32 keeps a residual."""
    fragments: int = 1
    """A round exchanges one of so many parts of the model, dealt by layer."""
    delay: int = 0
    """An exchange is applied so many steps into the next round; 0: at once."""
    drift_weight: Literal["uniform", "steps"] = "uniform"
    """steps: a worker's drift counts by how many steps it took."""
    adapt: bool = False
    """Choose each worker's steps from measured times: the fastest takes local_steps, the others what fits into its time."""
    fewest_steps: int = 1
    """Fewest steps of a worker (adapt)."""
    measure: bool | None = None
    """Time local steps and exchange of every round, for local_secs and exchange_secs in the metrics. The host then waits
    for the devices twice a round and sends nothing ahead. None: without outer.delay, whose overlap timing would end.
    """
    evaluate_workers: bool = True
    """At an evaluation also measure the validation loss of every single worker."""

    @property
    def steps_per_round(self) -> int:
        """H in nominal steps; no worker takes more in a round."""
        return self.local_steps if isinstance(self.local_steps, int) else max(self.local_steps)

    def steps_of_each(self, workers: int) -> list[int]:
        """H of every worker, as set."""
        return [self.local_steps] * workers if isinstance(self.local_steps, int) else list(self.local_steps)

    @property
    def measures(self) -> bool:
        """Whether the two halves of a round are timed."""
        return self.adapt or (self.delay == 0 if self.measure is None else self.measure)

    def check(self) -> None:
        given = [self.local_steps] if isinstance(self.local_steps, int) else list(self.local_steps)
        require(
            bool(given) and min(given) >= 1,
            f"outer.local_steps must be at least 1 for every worker, got {self.local_steps}. 10 to 30 are usual.",
        )
        if given and min(given) >= 1:
            self._check_steps(given)
        rate, momentum = self.learning_rate, self.momentum
        require(
            0 <= rate < math.inf,
            f"outer.learning_rate must be finite and not negative, got {rate}. {_RATE} is usual.",
        )
        require(
            momentum is None or 0 <= momentum < 1,
            f"outer.momentum must be in [0, 1), got {momentum}. 0.9 is usual; 0: none.",
        )
        if self.name in WITHOUT_STEP:
            require(
                momentum is None and rate == _RATE,
                f"outer.learning_rate and outer.momentum must be left out for {self.name}, which takes the mix as it "
                f"is, got {rate} and {momentum}. Use gasloc or diloco for an outer step.",
            )
        if self.name in ALL_TO_ALL:
            require(
                self.topology in (None, "complete"),
                f"outer.topology must be complete for {self.name}, got {self.topology}. Leave it out, or use gasloc or "
                "local_dadam.",
            )
        require(
            self.fragments >= 1,
            f"outer.fragments must be at least 1, got {self.fragments}. 1: the whole model in every round.",
        )
        require(
            self.drift_weight == "uniform" or (self.fragments == 1 and self.delay == 0),
            f"outer.drift_weight must be uniform with fragments or a delay, got {self.drift_weight}, {self.fragments} "
            f"fragments and a delay of {self.delay}. Use uniform, or fragments 1 and delay 0.",
        )

    def _check_steps(self, given: list[int]) -> None:
        """What depends on how many steps a round has."""
        least = min(self.fewest_steps, *given) if self.adapt else min(given)
        require(
            0 <= self.delay < least,
            f"outer.delay must be in [0, {least}), below the fewest steps of a round, got {self.delay}. 0: at once.",
        )
        require(
            self.name != "dadam" or max(given) == 1,
            f"outer.local_steps must be 1 for dadam, got {self.local_steps}. Give --outer.local_steps 1, or use local_dadam "
            "for more.",
        )
        if self.measures:
            require(
                self.delay == 0,
                f"outer.delay must be 0 with outer.adapt or outer.measure, got {self.delay}. Timing the exchange by "
                "itself would end its overlap; leave them out.",
            )
        if self.adapt:
            require(
                isinstance(self.local_steps, int),
                f"outer.local_steps must be one number with outer.adapt, got {self.local_steps}. Each worker starts "
                "from it.",
            )
            require(
                1 <= self.fewest_steps <= min(given),
                f"outer.fewest_steps must be in [1, outer.local_steps = {self.local_steps}], got {self.fewest_steps}. 1 is "
                "usual.",
            )

    def given_in_vain(self) -> list[str]:
        """Without an outer optimizer: the settings that differ from their defaults."""
        fields = dataclasses.fields(self) if self.name == "none" else ()
        return [field.name for field in fields if getattr(self, field.name) != field.default]

    def last_round_problem(self, start: int, total: int) -> str | None:
        """A last round that is too short for the delay; None where there is none."""
        left = (total - start) % self.steps_per_round
        if left and left <= self.delay:
            return (
                f"run.steps must leave a last round of more than outer.delay = {self.delay} steps, got {left}. Use "
                f"{total - left} steps."
            )
        return None
