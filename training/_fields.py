"""Settings that check themselves: types by annotation, ranges by `check`, unknown keys by the nearest name.

Every value passes through `coerce`, wherever it comes from (a preset, the command line, a JSON or YAML file),
so that the text "3e-4" of a YAML file becomes a float and the text "False" never becomes a true flag.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, Union

from training._problems import did_you_mean, gathered, note, require

T = TypeVar("T")

_NEAR = 0.5  # likeness from which a name is offered: "sparisty" has 0.53 to "density"
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def coerce(value: Any, annotation: Any, name: str) -> Any:
    """`value` as the annotated type, or a ValueError that names the setting."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        options = typing.get_args(annotation)
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            if type(None) in options:
                return None
        inner = [option for option in options if option is not type(None)]
        if len(inner) > 1:  # one value, or a list of such
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            inner = [option for option in inner if (typing.get_origin(option) is tuple) is is_list]
        return coerce(value, inner[0], name)
    if origin is Literal:
        allowed = typing.get_args(annotation)
        if value in allowed:
            return value
        hint = did_you_mean(value, allowed) or " Use one of these."
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.{hint}")
    if origin is tuple:
        item_type = typing.get_args(annotation)[0]
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(
                f"{name} must be a list of {item_type.__name__}, got {value!r}. Write it as [a, b]."
            )
        return tuple(coerce(item, item_type, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        if isinstance(value, annotation):
            return value
        raise ValueError(f"{name} must be a section of settings, got {value!r}. Write its keys under it.")
    if annotation is bool:
        return _coerce_bool(value, name)
    if annotation is int:
        return _coerce_int(value, name)
    if annotation is float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"{name} must be a number, got {value!r}. Write one such as 3e-4.")
        try:
            return float(value)
        except (ValueError, OverflowError):
            raise ValueError(
                f"{name} must be a number such as 3e-4, got the text {value!r}. Write digits."
            ) from None
    if annotation is str:
        if isinstance(value, str):
            return value
        raise ValueError(f"{name} must be text, got {value!r}. Put it in quotes.")
    raise TypeError(f"{name} is annotated {annotation}, which settings do not support.")


def _coerce_bool(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, (str, int)) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{name} must be True or False, got {value!r}. Write one of the two.")


def _coerce_int(value: Any, name: str) -> int:
    if isinstance(value, str):
        try:
            return int(value.replace("_", ""))
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                raise ValueError(
                    f"{name} must be a whole number, got the text {value!r}. Write digits."
                ) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value % 1 != 0:  # inf % 1 is NaN
        raise ValueError(f"{name} must be a whole number, got {value!r}. Write one without a fraction.")
    return int(value)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base of all sections: coerces every field at construction, then calls `check`; all problems in one error."""

    section: ClassVar[str] = ""  # how messages name the fields
    sound: ClassVar[bool] = (
        True  # set at construction: every value has its type, so that checks can compare them
    )

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        with gathered():
            sound = True
            for field in dataclasses.fields(self):
                name = f"{self.section}.{field.name}" if self.section else field.name
                try:
                    value = coerce(getattr(self, field.name), hints[field.name], name)
                except ValueError as error:
                    sound = require(False, str(error))
                else:
                    object.__setattr__(self, field.name, value)
            object.__setattr__(self, "sound", sound)
            if sound:
                self.check()

    def check(self) -> None:
        """Notes what is out of range by `require`; sections override it."""


def to_dict(settings: Settings) -> dict[str, Any]:
    """Plain nested dicts and lists, ready for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def dotted(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """All leaves as {"section.key": value}."""
    flat: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, Settings):
            flat.update(dotted(value, f"{prefix}{field.name}."))
        else:
            flat[f"{prefix}{field.name}"] = value
    return flat


def update(settings: T, values: Mapping[str, Any], *, prefix: str = "", known: Sequence[str] = ()) -> T:
    """`settings` with the nested (or dotted) `values` put over it; an unknown key names the nearest known one.

    Raises one ValueError that lists everything wrong.
    """
    known = known or tuple(dotted(settings))  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{prefix.rstrip('.') or 'the file'} must hold keys and values, got {values!r}. Write key: value."
        )
    names = {field.name for field in dataclasses.fields(settings)}  # type: ignore[arg-type]
    sections: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    with gathered():
        for key, value in values.items():
            head, _, tail = str(key).partition(".")
            if head not in names:
                note(f"unknown setting {prefix + str(key)!r}. {_known_instead(f'{prefix}{key}', known)}")
            elif isinstance(getattr(settings, head), Settings):
                entries = {tail: value} if tail else value
                if isinstance(entries, Mapping):
                    sections.setdefault(head, {}).update(entries)
                else:
                    note(f"{prefix}{head} is a section, got {entries!r}. Write its keys under it.")
            elif tail:
                full = f"{prefix}{head}"
                note(
                    f"unknown setting {prefix + str(key)!r}. {full} has no keys of its own; write {full}: value."
                )
            else:
                plain[head] = value
        for head, entries in sections.items():
            plain[head] = update(getattr(settings, head), entries, prefix=f"{prefix}{head}.", known=known)
        return dataclasses.replace(settings, **plain)  # type: ignore[type-var]


def _known_instead(name: str, known: Sequence[str]) -> str:
    """The known dotted name that looks most like `name`, by its last part and in the same section where there is
    one; all of that section where none is near.
    """
    section, _, last = name.rpartition(".")
    pool = [k for k in known if k.rpartition(".")[0] == section] or list(known)
    if not section and pool == list(known):  # a section's own name is misspelt
        pool = sorted({k.partition(".")[0] for k in known})
    likeness = {k: difflib.SequenceMatcher(None, last, k.rpartition(".")[2]).ratio() for k in pool}
    best = max(pool, key=likeness.__getitem__)
    if likeness[best] >= _NEAR:
        return f"Did you mean {best!r}?"
    return f"Known ones: {', '.join(pool if len(pool) < len(known) else sorted({k.partition('.')[0] for k in known}))}."


def read_values(path: str | Path) -> dict[str, Any]:
    """The settings in a .json, .yaml or .yml file."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"no settings file at {path}. Give --config-file a .json or .yaml file that exists.")
    try:
        return _read_values(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be text in UTF-8, got: {error}. Save it as that.") from None
    except RecursionError:
        raise ValueError(f"{path} must hold sections with keys, got far deeper nesting. Repair it.") from None


def _read_values(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        import yaml  # a dependency of flax and orbax; imported here because JSON needs nothing

        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path} must be valid YAML, got: {error}. Repair it there.") from None
    elif path.suffix == ".json":
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be valid JSON, got: {error}. Repair it there.") from None
    else:
        raise ValueError(f"a settings file must end in .json, .yaml or .yml, got {path}. Rename it.")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(
            f"{path} must hold keys and values, got {type(values).__name__}. Write section: and its keys under it."
        )
    return values
