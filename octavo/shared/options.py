"""Options of a service: one frozen dataclass, from which flags, variables and file keys follow.

A field made with `option()` named `max_num_seqs` can be set, the first found winning, by
    --max-num-seqs 64           a flag
    OCTAVO_MAX_NUM_SEQS=64      a variable
    max_num_seqs: 64            a key in the file of `--config FILE.yaml`
and has the field's default otherwise. Whatever names no option of the command is an error, which names the nearest
one: a typo is never a default. Field types: bool, int, float, str, Path, `tuple[T, ...]`, `list[T]`, and unions of
these with None.
Knows nothing of any particular service, and reads the environment only when asked to parse.

Every command waits for this import: 25 ms, where pydantic alone takes 60 (`python -m benchmarks.beside_libraries`).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import numbers
import os
import types
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from octavo.shared.command_line import Parser, did_you_mean

PREFIX = "OCTAVO_"
COMMON, LOGGING, OTHER = "common", "logging and metrics", "other"  # groups of options: the first, and the last two
# Read elsewhere: by every command, and by those that ask a server.
NOT_OPTIONS = frozenset({"OCTAVO_CACHE", "OCTAVO_TERMINAL", "OCTAVO_API_KEY"})
OF_CLIENTS = frozenset({"OCTAVO_RETRY_WINDOW"})  # likewise, and an option of the gateway beside

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
KNOWN = "known_options"  # attribute of a parsed namespace: the names of all options of the command
_POSITION = "position"  # likewise: the name of the option that may be given as a position
_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Described:
    """An option as --help and the documentation show it. `default` is empty where the help text names it."""

    flag: str
    group: str
    values: str
    default: str
    help: str


class OptionError(ValueError):
    """A flag, variable or key that names no option or has no acceptable value. The message is one line for the user."""


def option(
    default: Any,
    help: str,
    *,
    group: str = OTHER,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    hidden: bool = False,
) -> Any:
    """A dataclass field that users can set. `choices` restricts what text is accepted.

    `help` is one short clause, to which the default is added unless the word is in it. `group` is the heading under
    which --help shows it; headings come in the order in which they are first named. `hidden` ones are not shown.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "metavar": metavar,
        "group": group,
        "hidden": hidden,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def add_arguments(parser: argparse.ArgumentParser, cls: type, *, without: Collection[str] = ()) -> None:
    """Adds the flags of `cls` by their groups, and `--config`. With several classes, the first to name an option
    defines its flag. Those of `without` are no options of this command, from whatever source."""
    parser.allow_abbrev = False
    taken = {action.dest for action in parser._actions}
    hints = typing.get_type_hints(cls)
    options = [field for field in _options_of(cls) if field.name not in without]
    for field in options:
        if field.name not in taken:
            _add_flag(_group(parser, field.metadata["group"]), field, hints[field.name])
    if "config" not in taken | set(hints):
        _group(parser, COMMON).add_argument(
            "--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="file of options"
        )
    known = parser.get_default(KNOWN) or frozenset()
    parser.set_defaults(**{KNOWN: known | {field.name for field in options} | {"config"}})


def _group(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """The group of this title, made at its first use, in its place."""
    found = next((each for each in parser._action_groups if each.title == title), None)
    if found is None:
        found = parser.add_argument_group(title)
        places = {COMMON: -1, LOGGING: 1, OTHER: 2}
        positionals, help_only, *groups = parser._action_groups
        parser._action_groups = [
            positionals,
            help_only,
            *sorted(groups, key=lambda each: places.get(each.title or "", 0)),
        ]
    return found


def add_position(parser: argparse.ArgumentParser, name: str) -> None:
    """Lets the option `name`, which the parser has already, be given without its flag, too."""
    help = f"in place of --{name}"
    parser.add_argument(name.upper(), nargs="?", default=argparse.SUPPRESS, help=help)
    parser.set_defaults(**{_POSITION: name})


def from_namespace(cls: type[C], namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> C:
    """Builds `cls` from a namespace of a parser that `add_arguments` filled, the environment and the config file.

    Raises OptionError; a ValueError of the class's own `__post_init__` (options that contradict) becomes one.
    """
    try:
        return cls(**given_values(cls, namespace, environ))
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from error


def given_values(cls: type, namespace: argparse.Namespace, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Options of `cls` by name that a flag, a variable or the config file sets. Raises OptionError."""
    environ = os.environ if environ is None else environ
    fields = {field.name: field for field in _options_of(cls)}
    hints = typing.get_type_hints(cls)
    known = getattr(namespace, KNOWN, frozenset(fields) | {"config"})
    variables = _variables(environ, known)
    file_name = getattr(namespace, "config", None) or variables.get("config")
    keys = _read_file(Path(file_name), known) if file_name else {}

    position = getattr(namespace, _POSITION, "")
    if position and hasattr(namespace, position.upper()):
        if hasattr(namespace, position):
            raise OptionError(f"the {position} is given twice: as a position and as --{position}")
        namespace = argparse.Namespace(**{**vars(namespace), position: getattr(namespace, position.upper())})

    values: dict[str, Any] = {}
    for name, field in fields.items():
        if hasattr(namespace, name):
            values[name] = _collected(hints[name], getattr(namespace, name))
        elif name in variables:
            values[name] = _from_text(field, hints[name], variables[name], PREFIX + name.upper())
        elif name in keys:
            values[name] = _from_key(field, hints[name], keys[name], f"{file_name}: {name}")
    return values


def parse(cls: type[C], argv: Sequence[str] | None, prog: str) -> C:
    """Parses a command line of `cls` alone (None: this process's). Bad usage ends the process: one line, code 2."""
    parser = Parser(prog=prog)
    add_arguments(parser, cls)
    namespace = parser.parse_args(argv)
    try:
        return from_namespace(cls, namespace)
    except OptionError as error:
        parser.error(str(error))


def from_values(cls: type[C], values: Mapping[str, Any]) -> C:
    """Builds `cls` from Python values by option name: read by the rules of text, so that 8 and "8" are the same.

    None is the default. Raises OptionError.
    """
    fields = {field.name: field for field in _options_of(cls)}
    hints = typing.get_type_hints(cls)
    if unknown := [name for name in values if name not in fields]:
        raise unknown_option(unknown[0], fields)
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return cls(**{name: _from_value(fields[name], hints[name], value) for name, value in given.items()})
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from error


def unknown_option(name: str, known: Iterable[str]) -> OptionError:
    """For a name that no option has, with the one that may be meant."""
    return OptionError(f"no option is called {name}{did_you_mean(name, known)}")


def to_arguments(options: Any) -> list[str]:
    """The flags that give another process these very options: the inverse of `parse`, defaults left out."""
    flags: list[str] = []
    for field in _options_of(type(options)):
        value, flag = getattr(options, field.name), _flag(field.name)
        if value == _default_of(field):
            continue
        if isinstance(value, bool):
            flags.append(flag if value else _flag(f"no_{field.name}"))
        else:
            items = value if isinstance(value, (list, tuple)) else [value]
            flags.extend(f"{flag}={'' if item is None else item}" for item in items)
    return flags


def environment_without_options(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that gets its options as flags: variables meant for its parent would be errors."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX) or name in NOT_OPTIONS}


def described(cls: type) -> list[Described]:
    """All options of `cls` but hidden ones, in the order of its fields."""
    hints = typing.get_type_hints(cls)
    return [
        Described(
            flag=_flag("[no-]" + field.name) if bool in _members(hints[field.name]) else _flag(field.name),
            group=field.metadata["group"],
            values="" if bool in _members(hints[field.name]) else _values(field, hints[field.name]),
            default="" if "default" in field.metadata["help"] else _shown(_default_of(field)),
            help=field.metadata["help"],
        )
        for field in _options_of(cls)
        if not field.metadata["hidden"]
    ]


# ---- fields ----


def _options_of(cls: type) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(cls) if "help" in field.metadata]


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _item_hint(hint: Any) -> Any:
    """The type of the items where `hint` is a list or a tuple of any length, else None."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) in (list, tuple) else None


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return "none" if default in (None, "", (), []) else str(default)


def _collected(hint: Any, value: Any) -> Any:
    return tuple(value) if typing.get_origin(hint) is tuple else value


def _add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field[Any], hint: Any) -> None:
    text = field.metadata["help"]
    if "default" not in text:
        text += f" (default: {_shown(_default_of(field))})"
    text = argparse.SUPPRESS if field.metadata["hidden"] else text.replace("%", "%%")
    settings: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    if bool in _members(hint):
        parser.add_argument(_flag(field.name), action=argparse.BooleanOptionalAction, **settings)
        return
    item = _item_hint(hint)

    def convert(value: str) -> Any:
        try:
            return _convert(field, hint if item is None else item, value)
        except OptionError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    settings["metavar"] = _values(field, hint)
    parser.add_argument(_flag(field.name), type=convert, action="store" if item is None else "append", **settings)


def _values(field: dataclasses.Field[Any], hint: Any) -> str:
    """What follows the flag in --help."""
    choices, item = field.metadata["choices"], _item_hint(hint)
    return field.metadata["metavar"] or ("|".join(choices) if choices else _metavar(hint, item))


def _metavar(hint: Any, item: Any) -> str:
    return next((_METAVARS[kind] for kind in _members(item or hint) if kind in _METAVARS), "VALUE")


# ---- values ----


def _convert(field: dataclasses.Field[Any], hint: Any, text: str) -> Any:
    """Reads one value from text: the first member of a union that accepts it."""
    choices = field.metadata["choices"]
    members = _members(hint)
    if text == "" and type(None) in members:
        return None
    if choices and text not in choices:
        raise OptionError(f"{text!r} is none of {', '.join(choices)}{did_you_mean(text, choices)}")
    kinds = sorted((kind for kind in members if kind is not type(None)), key=lambda kind: kind is str)  # text last
    for kind in kinds:
        if kind is bool and text.lower() in _TRUE | _FALSE:
            return text.lower() in _TRUE
        try:
            if kind is not bool:
                value = kind(text)
                if kind is not float or math.isfinite(value):  # no timer takes another, and no sum
                    return value
        except ValueError:
            continue
    raise OptionError(f"{text!r} is not {_accepted(hint)}")


def _from_text(field: dataclasses.Field[Any], hint: Any, text: str, where: str) -> Any:
    """Reads a variable; a repeatable option's items are parted by commas."""
    item = _item_hint(hint)
    try:
        if item is None:
            return _convert(field, hint, text)
        return _collected(hint, [_convert(field, item, part.strip()) for part in text.split(",") if part.strip()])
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def _from_key(field: dataclasses.Field[Any], hint: Any, value: Any, where: str) -> Any:
    """Reads a YAML value by the same rules as text; a boolean is accepted where the option is one, and nowhere else."""
    item = _item_hint(hint)
    if item is not None:
        values = value if isinstance(value, list) else [value]
        return _collected(hint, [_from_key(field, item, each, where) for each in values])
    if isinstance(value, bool):
        if bool in _members(hint):
            return value
        raise OptionError(f"{where}: {value} is not accepted (YAML reads a bare yes, no, on, off as true or false)")
    if isinstance(value, (list, dict)):
        raise OptionError(f"{where}: one value is wanted, not a {type(value).__name__}")
    try:
        return _convert(field, hint, "" if value is None else str(value))
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from error


def _from_value(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    """Reads a Python value, whose type may be that of the option already, text, or another kind of number."""
    item = _item_hint(hint)
    if item is not None:
        values = value if isinstance(value, (list, tuple)) else [value]
        return _collected(hint, [_from_value(field, item, each) for each in values])
    if isinstance(value, bool) and bool not in _members(hint):
        raise OptionError(f"{field.name}: {value} is not {_accepted(hint)}")
    if not isinstance(value, (str, bool, numbers.Number, os.PathLike)):
        raise OptionError(f"{field.name}: {type(value).__name__} is not {_accepted(hint)}")
    return _from_text(field, hint, str(value), field.name)


def _accepted(hint: Any) -> str:
    kinds = sorted((kind for kind in _members(hint) if kind is not type(None)), key=lambda kind: kind is str)
    return " or ".join(_KIND_NAMES.get(kind, kind.__name__) for kind in kinds)


# ---- sources ----


def _variables(environ: Mapping[str, str], known: frozenset[str]) -> dict[str, str]:
    """Option name to text, for every OCTAVO_ variable of the environment."""
    found = {name: text for name, text in environ.items() if name.startswith(PREFIX) and name not in NOT_OPTIONS}
    options = {name.removeprefix(PREFIX).lower(): text for name, text in found.items()}
    strange = {name for name in found if name.removeprefix(PREFIX).lower() not in known or not name.isupper()}
    unknown = sorted(strange - OF_CLIENTS)
    if unknown:
        hint = ""
        if any("_SERVICE_" in name or text.startswith("tcp://") for name, text in found.items()):
            hint = " (Kubernetes sets such for its Services: enableServiceLinks: false in the pod)"
        hint = hint or _nearest(unknown, {PREFIX + name.upper() for name in known})
        raise OptionError(f"{', '.join(unknown)}: no option of this command has that name{hint}")
    return options


def _nearest(unknown: list[str], known: Iterable[str]) -> str:
    """A hint at the nearest option, for a single unknown name; with several it would be unclear which is meant."""
    return did_you_mean(unknown[0], known) if len(unknown) == 1 else ""


def _read_file(path: Path, known: frozenset[str]) -> dict[str, Any]:
    import yaml  # only a command that was given a file needs it

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"--config {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise OptionError(f"--config {path}: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(f"--config {path}: a mapping of option names to values is wanted")
    keys = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = sorted(key for key in keys if key not in known - {"config"})
    if unknown:
        hint = _nearest(unknown, known - {"config"})
        raise OptionError(f"--config {path}: {', '.join(unknown)}: no option of this command has that name{hint}")
    return keys


def check_port(name: str, port: int | None) -> None:
    """Raises ValueError for what is no TCP port; gRPC would take it modulo 65,536."""
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"{name} is {port}; 0 to 65535 is accepted")


def check_tls_files(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Raises ValueError for what is no certificate with its key."""
    if (cert is None) != (key is None):
        raise ValueError("tls_cert_file and tls_key_file go together")
    if client_ca is not None and cert is None:
        raise ValueError("tls_client_ca_file is for TLS, which tls_cert_file switches on")


def is_host(name: str) -> bool:
    """Whether it may be looked up: each part between two dots has 1 to 63 characters, as names on the net have."""
    try:
        return bool(name) and bool(name.encode("idna"))
    except UnicodeError:
        return False
