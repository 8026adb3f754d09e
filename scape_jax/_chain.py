"""From a bare rule to an optimizer: decoupled weight decay, learning rate, and a chain that stands still on a skip."""

from collections.abc import Callable
from typing import Any

import optax

from scape_jax._checks import check_rates
from scape_jax._exchange import hold_on_skip


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that also knows its exchange; wrapped by optax it is an ordinary one and loses that.

    Attributes:
      apply: (grads, state, params, **extra) -> (new params, new state), update and apply_updates in one; or None.
      wire: (params, num_workers, step) -> WireBytes, by keyword; the closed form for these settings.
      final_level: index of the density level that holds for good once `final_count` steps are taken.
      final_count: see final_level.
      mask_every: steps for which one mask is used.
    """

    apply: Callable[..., Any] | None = None
    wire: Callable[..., Any]
    final_level: int = 0
    final_count: int = 0
    mask_every: int = 1


def make_optimizer(
    rule: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any,
    weight_decay_mask: Any,
    *,
    wire: Callable[..., Any],
) -> Optimizer:
    """theta <- theta - eta (rule + lam theta), of which every part waits when the exchange inside `rule` skips.

    Raises:
      ValueError: learning_rate or weight_decay is not a finite number >= 0.
    """
    check_rates(learning_rate, weight_decay)
    parts = [rule]
    # A traced decay (inject_hyperparams) may become non-zero, so only a plain zero leaves the part out.
    if not (isinstance(weight_decay, int | float) and weight_decay == 0):
        parts.append(optax.add_decayed_weights(weight_decay, weight_decay_mask))
    parts.append(optax.scale_by_learning_rate(learning_rate))
    optimizer = Optimizer(*hold_on_skip(optax.chain(*parts)))
    optimizer.wire = wire
    return optimizer
