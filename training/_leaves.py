"""Trees as leaves under readable paths, and in what two sets of leaves or settings differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

_SHOWN = 4  # leaves and settings listed per kind of difference


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under paths of names joined by slashes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {"/".join(map(_name, path)): leaf for path, leaf in leaves}


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with its leaves replaced by those of the same path."""
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    return jax.tree.unflatten(structure, [leaves["/".join(map(_name, path))] for path, _ in paths])


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def shapes(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {path: f"{x.dtype}{list(x.shape)}" for path, x in leaves.items()}


def differences(item: str, saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    kinds = {
        "missing from the checkpoint": [f"{p} {wanted[p]}" for p in wanted if p not in saved],
        "only in the checkpoint": [f"{p} {saved[p]}" for p in saved if p not in wanted],
        "of another shape": [
            f"{p} {saved[p]}, must be {wanted[p]}" for p in wanted if p in saved and saved[p] != wanted[p]
        ],
    }
    lines = []
    for kind, found in kinds.items():
        if found:
            rest = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            lines.append(f"{item}, {kind}: {'; '.join(found[:_SHOWN])}{rest}")
    return lines


def changed(
    saved: Mapping[str, Any], now: Mapping[str, Any], sections: tuple[str, ...], free: tuple[str, ...] = ()
) -> list[str]:
    """Settings of the sections that differ, as lines; JSON has turned tuples into lists."""
    lines = []
    for key in sorted(set(saved) | set(now)):
        old, new = saved.get(key), now.get(key)
        old, new = (list(value) if isinstance(value, tuple) else value for value in (old, new))
        if key.startswith(sections) and key not in free and old != new:
            lines.append(f"{key}: {old!r} -> {new!r}")
    return lines
