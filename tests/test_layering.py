"""Who may import whom: scripts -> training -> {models, scape_jax, gasloc_jax} -> pallas_kernels -> jax.

Read from the source with `ast`, so an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Package -> the packages of this repository that it may import, besides itself.
MAY_IMPORT = {
    "pallas_kernels": set(),
    "scape_jax": {"pallas_kernels"},
    "gasloc_jax": {"pallas_kernels"},
    "models": {"pallas_kernels"},
    "training": {"models", "scape_jax", "gasloc_jax", "pallas_kernels"},
    "scripts": {"training", "models", "scape_jax", "gasloc_jax", "pallas_kernels"},
}

# Import name -> name of the distribution, where the two differ by more than case, "-" and "_".
DISTRIBUTION_OF = {"orbax": "orbax-checkpoint", "yaml": "PyYAML"}


def imported_names(source: str, package: str, file: str = "source") -> Iterator[tuple[int, str]]:
    """Line and full name of every import: `from a import b` gives `a.b`, relative ones start at `package`."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def modules() -> list[Path]:
    """Every Python file of the packages, relative to the root."""
    return sorted(p.relative_to(ROOT) for package in MAY_IMPORT for p in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    source = (ROOT / path).read_text(encoding="utf-8")
    return list(imported_names(source, ".".join(path.parent.parts), str(path)))


def layer_violations(package: str, imports: list[tuple[int, str]]) -> list[str]:
    """The imports of `package` that the table above does not allow."""
    ours = set(MAY_IMPORT) | {"tests"}
    return [
        f"line {line}: {package} must not import {name}"
        for line, name in imports
        if (top := name.split(".")[0]) in ours and top != package and top not in MAY_IMPORT[package]
    ]


def test_layers_hold():
    found = {str(path): layer_violations(path.parts[0], imports_of(path)) for path in modules()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("scape_jax", "import gasloc_jax"),
        ("gasloc_jax", "from scape_jax import scape"),
        ("models", "def f():\n    import scape_jax.reference"),
        ("models", "from training.config import Config"),
        ("pallas_kernels", "if True:\n    import scape_jax"),
        ("training", "from scripts import pretrain"),
        ("scape_jax", "from tests.helpers import make_mesh"),
    ],
)
def test_layers_can_break(package, source):
    assert layer_violations(package.split(".")[0], list(imported_names(source, package)))


def test_relative_imports_stay_inside():
    names = [name for _, name in imported_names("from . import _masks\nfrom .._b import c", "scape_jax.sub")]
    assert names == ["scape_jax.sub._masks", "scape_jax._b.c"]


def test_scape_reference_is_independent_of_the_fast_code():
    """It may use numpy only, and nothing but tests may use it: a bug in shared code would go unseen."""
    references = [path for path in modules() if path.stem == "reference" and path.parts[0].endswith("_jax")]
    for path in references:
        allowed = set(sys.stdlib_module_names) | {"numpy"}
        assert not [name for _, name in imports_of(path) if name.split(".")[0] not in allowed], path
    for path in modules():
        package = path.parts[0]
        if package in ("scape_jax", "gasloc_jax") and path not in references:
            assert not [name for _, name in imports_of(path) if name.startswith(f"{package}.reference")], path


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["cuda"]
    declared = {_canonical(re.match(r"[\w.-]+", text)[0]) for text in requirements}
    known = set(sys.stdlib_module_names) | set(MAY_IMPORT)
    missing = {
        f"{path}:{line} {name}"
        for path in modules()
        for line, name in imports_of(path)
        if (top := name.split(".")[0]) not in known
        and _canonical(DISTRIBUTION_OF.get(top, top)) not in declared
    }
    assert not missing


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
