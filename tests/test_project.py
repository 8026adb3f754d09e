"""The project's own files agree: packages, pins, commands of the README, nothing bound to one machine."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = PYPROJECT["tool"]["setuptools"]["packages"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# The two Pythons that stand for the two supported JAX lines.
LINES = ("3.11", "3.13")


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pins(python_version: str) -> dict[str, list[str]]:
    """Canonical name -> the versions that constraints.txt pins it to on this Python."""
    found: dict[str, list[str]] = {}
    for pin in constraints():
        if pin.marker is None or pin.marker.evaluate({"python_version": python_version}):
            found.setdefault(canonicalize_name(pin.name), []).append(str(pin.specifier))
    return found


def tracked_files() -> list[Path]:
    """The files under version control; without git (an unpacked archive), those that git would not ignore."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
        )
    except (OSError, subprocess.CalledProcessError):
        skipped = re.compile(
            r"(^|/)(\.venv[^/]*|\.git|runs|build|dist|__pycache__|\.\w+_cache|[^/]*\.egg-info)(/|$)"
        )
        everything = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        return [path for path in everything if not skipped.search(path.as_posix())]
    return [Path(name) for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_packages_listed_are_the_packages_there_are():
    top_level = [p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name != "tests"]
    there = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for name in top_level
        for init in (ROOT / name).rglob("__init__.py")
    }
    assert sorted(PACKAGES) == sorted(there)
    for name in top_level:
        for file in (ROOT / name).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), f"{file.relative_to(ROOT)} is in no package"


def test_pins_are_exact_and_single():
    for pin in constraints():
        assert pin.url is None and not pin.extras, f"{pin}: a name and a version only"
        assert re.fullmatch(r"==[\w.+]+", str(pin.specifier)), f"{pin}: must be pinned by =="
    for line in LINES:
        assert not {name: found for name, found in pins(line).items() if len(found) != 1}


@pytest.mark.parametrize("line", LINES)
def test_pins_meet_the_declared_ranges(line):
    pinned = pins(line)
    declared = PYPROJECT["project"]["dependencies"] + PYPROJECT["build-system"]["requires"]
    for text in declared + [text for extra in EXTRAS.values() for text in extra]:
        requirement = Requirement(text)
        if requirement.name == PYPROJECT["project"]["name"]:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"python_version": line}):
            name = canonicalize_name(requirement.name)
            assert name in pinned, f"{text} has no pin for Python {line}"
            assert requirement.specifier.contains(pinned[name][0].removeprefix("==")), (
                f"{text}: pin is {pinned[name][0]}"
            )


def test_everything_installed_for_us_is_pinned():
    """Walks the installed distributions from our dependencies down: one without a pin changes with time."""
    pinned = pins(f"{sys.version_info.major}.{sys.version_info.minor}")
    queue = [
        Requirement(text) for text in PYPROJECT["project"]["dependencies"] + EXTRAS["test"] + EXTRAS["dev"]
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    unpinned = set()
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name == PYPROJECT["project"]["name"] or (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            requires = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:  # an extra that this environment does not have
            continue
        if name not in pinned:
            unpinned.add(name)
        for child in map(Requirement, requires):
            environments = [dict(default_environment(), extra=extra) for extra in extras | {""}]
            if child.marker is None or any(
                child.marker.evaluate(environment) for environment in environments
            ):
                queue.append(child)
    assert not unpinned
    assert len(seen) > 30, "the walk must reach the dependencies of our dependencies"


def test_files_name_no_address_and_no_place_of_one_machine():
    address = re.compile(r"https?://(?!127\.0\.0\.1|localhost|www\.w3\.org/)")
    # /home/me is the made-up path of examples.
    place = re.compile(r"(?<![\w.~$}\-/])/(?:root|home|work|tmp|Users)/(?!me\b)\w")
    found = []
    for path in tracked_files():
        if path.name == "LICENSE" or path.suffix in {".png", ".svg", ".bin"} or "checkpoints" in path.parts:
            continue
        for number, text in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1):
            if address.search(text) or place.search(text):
                found.append(f"{path}:{number}: {text.strip()[:100]}")
    assert not found


def test_readme_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [
        line.strip() for block in readme_blocks("bash") for line in block.splitlines() if line.strip()
    ]
    assert {"make demo", "make test"} <= set(commands)
    for command in commands:
        words = [word for word in command.split() if word != "export" and not re.match(r"[A-Z_]+=", word)]
        if not words:
            assert command.startswith("export "), command
        elif words[0] == "make":
            assert words[1] in targets, command
        elif words[0] == "python":
            assert (ROOT / words[1]).is_file(), command
        elif words[:2] == ["pip", "install"]:
            assert (ROOT / "constraints.txt").is_file() and "constraints.txt" in words, command
            extras = re.findall(r"\[(\w+)\]", command)
            assert set(extras) <= set(EXTRAS), command
        else:
            assert command.startswith("#"), f"{command}: this test must know how to check it"


def test_readme_names_only_files_there_are():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w./-]+(?:/|\.md|\.txt|\.py|\.toml))`", text):
        if name != "scripts/NAME.py":
            assert (ROOT / name).exists(), name


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) <= 50


def test_continuous_check_is_executable():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
