"""What shard_map's check_vma should know of a value: another on each worker ("varying"), or the same on all.

check_vma follows where values come from, not what they are: m_t lies in the same buffer as the residual, so what is
read from there counts as varying although m_t is equal on all workers by construction. Saying so costs nothing.
Under check_vma=False, or without an axis, both functions do nothing.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

AxisName = str | tuple[str, ...] | None

_equal_p = Primitive("equal_on_workers")
_equal_p.def_impl(lambda x, *, axes: x)


@_equal_p.def_abstract_eval
def _equal_type(x: Any, *, axes: tuple[str, ...]) -> Any:
    kept = x.manual_axis_type.varying - set(axes)
    return x.update(manual_axis_type=x.manual_axis_type.update(varying=kept))


mlir.register_lowering(_equal_p, lambda ctx, x, *, axes: [x])
batching.defvectorized(_equal_p)


def axes_of(axis_name: AxisName) -> tuple[str, ...]:
    return () if axis_name is None else (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes along which shard_map takes `x` for varying; none under check_vma=False."""
    return jax.typeof(x).manual_axis_type.varying


def equal_on_workers(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, typed as the same on all workers. A promise: nothing is checked or communicated."""
    axes = tuple(a for a in axes_of(axis_name) if a in varying_axes(x))
    return _equal_p.bind(x, axes=axes) if axes else x


def own_on_workers(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """`x`, typed as another on each worker, where types are followed at all."""
    axes = axes_of(axis_name)
    if not axes:
        return x
    typed = varying_axes(lax.axis_index(axes)) - varying_axes(x)
    return lax.pcast(x, tuple(a for a in axes if a in typed), to="varying")
