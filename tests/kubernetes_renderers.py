"""What kustomize and Helm make of deploy/kubernetes, as far as the files there use them: tests need neither program.

Where kubectl or helm is installed, tests/test_kubernetes.py holds both against it. What these do not know is an error.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
_KEYS = {"apiVersion", "kind", "namespace", "resources", "components", "images", "configMapGenerator", "patches"}
_KEYS |= {"configurations"}  # of names with the suffix, which there is none of here


# ---- kustomize ------------------------------------------------------------------------------------------------------


def kustomize(folder: Path, below: list[Manifest] | None = None) -> list[Manifest]:
    """The manifests of a folder with a kustomization. Generated ConfigMaps keep their names, without a suffix."""
    (said,) = read(folder / "kustomization.yaml")
    assert set(said) <= _KEYS, sorted(said)
    found = deepcopy(below or [])
    for name in said.get("resources", []):
        path = folder / name
        found += kustomize(path) if path.is_dir() else read(path)
    for each in said.get("configMapGenerator", []):
        _generate(each, found)
    for name in said.get("components") or []:
        found = kustomize(folder / name, found)
    for patch in said.get("patches", []):
        found = _patched(patch, found)
    for manifest in found:
        if "namespace" in said and manifest["kind"] != "Namespace":
            manifest["metadata"]["namespace"] = said["namespace"]
        for container in containers(manifest):
            for image in said.get("images", []):
                name, _, tag = container["image"].rpartition(":")
                if name == image["name"]:
                    container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
    return found


def read(path: Path) -> list[Manifest]:
    """The documents of a file."""
    return documents(path.read_text(encoding="utf-8"))


def documents(text: str) -> list[Any]:
    """Those of a text in YAML, empty ones among them. By libyaml, which takes a tenth of the time."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


def containers(manifest: Manifest) -> list[dict[str, Any]]:
    """Of all pods that a manifest makes, those that come first among them."""
    return [
        each for pod in pods(manifest) for each in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
    ]


def pods(manifest: Manifest) -> list[dict[str, Any]]:
    """The templates of pods in a manifest."""
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return [manifest["spec"]["template"]] if "template" in manifest.get("spec", {}) else []


def _generate(said: dict[str, Any], found: list[Manifest]) -> None:
    data = dict(literal.split("=", 1) for literal in said["literals"])
    if said.get("behavior") == "merge":
        (old,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", said["name"]))
        old["data"] |= data
    else:
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": said["name"]}, "data": data})


def _patched(said: dict[str, Any], found: list[Manifest]) -> list[Manifest]:
    target, patch = said["target"], documents(said["patch"])[0]
    hit = [each for each in found if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])]
    if not hit:  # a component may be for what is not there
        return found
    if isinstance(patch, dict):
        assert patch["$patch"] == "delete", patch
        return [each for each in found if each is not hit[0]]
    for change in patch:
        *way, last = change["path"].strip("/").split("/")
        place: Any = hit[0]
        for step in way:
            place = place[int(step) if isinstance(place, list) else step]
        assert (last in place) == (change["op"] != "add"), change["path"]
        if change["op"] == "remove":
            del place[last]
        else:
            assert change["op"] in ("add", "replace"), change
            place[last] = change["value"]
    return found


# ---- Helm -----------------------------------------------------------------------------------------------------------


def helm(
    templates: list[str],
    values: dict[str, Any],
    release: str = "octavo",
    namespace: str = "octavo",
    live: Iterable[Manifest] = (),
) -> list[Manifest]:
    """The manifests of a chart's templates. `live`: what is there already, in its namespaces. Raises ChartRefused."""

    def place(manifest: Manifest) -> tuple[str, ...]:
        named = manifest["metadata"]
        return manifest["apiVersion"], manifest["kind"], named["namespace"], named["name"]

    there = {place(each): each for each in live}
    scope: dict[str, Any] = {
        "Values": values,
        "Release": {"Name": release, "Namespace": namespace},
        "lookup": lambda *place: there.get(place, {}),
    }
    texts = ["".join(_rendered(iter(_tokens(text)), scope)) for text in templates]
    for text in texts:
        if refused := re.search("\0(.*?)\0", text):
            raise ChartRefused(refused[1])
    return [manifest for text in texts for manifest in documents(text) if manifest]


def merged(defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Values over values, as Helm lays them: maps are merged, and null takes a value away."""
    both = dict(defaults)
    for name, value in given.items():
        if value is None:
            both.pop(name, None)
        else:
            is_map = isinstance(value, dict) and isinstance(both.get(name), dict)
            both[name] = merged(both[name], value) if is_map else value
    return both


def _tokens(text: str) -> list[str]:
    """Text and actions by turns; the blanks that an action's hyphen eats are gone."""
    return re.split(r"(?:\s*\{\{-|\{\{) (.*?) \}\}", text)


def _rendered(tokens: Iterator[str], scope: dict[str, Any]) -> list[str]:
    """Up to the end of the block that has begun, and which of `end` and `else` that is."""
    made = [next(tokens)]
    for action in tokens:
        if action in ("end", "else"):
            return [*made, action]
        if action.startswith("if "):
            *inner, ending = _rendered(tokens, scope)
            *other, _ = _rendered(tokens, scope) if ending == "else" else [ending]
            made += inner if _value(action[3:], scope) else other
        elif action.startswith("with "):
            block = list(_until_end(tokens))
            if value := _value(action[5:], scope):
                made += _rendered(iter([*block, "end"]), value)[:-1]
        elif match := re.fullmatch(r"range (\$\w+), (\$\w+) := (.*)", action):
            block = list(_until_end(tokens))
            for name, value in sorted(_value(match[3], scope).items()):
                made += _rendered(iter([*block, "end"]), scope | {match[1]: name, match[2]: value})[:-1]
        else:
            made.append(_shown(_value(action, scope)))
        made.append(next(tokens))
    return made


def _until_end(tokens: Iterator[str]) -> Iterator[str]:
    """Of a block without blocks in it."""
    for token in tokens:
        if token == "end":
            return
        assert not token.startswith(("if ", "range ", "with ")), token
        yield token


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


class ChartRefused(Exception):
    """What a chart says of values that do not go together."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "not": lambda value: not value,
    "or": lambda first, second: first or second,
    "and": lambda first, second: first and second,
    "add": lambda first, second: int(first) + int(second),
    "div": lambda first, second: int(first) // int(second),
    "fail": lambda why: f"\0{why}\0",  # branches that are not taken are rendered too
    "print": lambda *texts: "".join(texts),
    "quote": lambda value: json.dumps(_shown(value)),
    "toYaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip("\n"),
    "toJson": lambda value: json.dumps(value, sort_keys=True, separators=(",", ":")),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "trunc": lambda length, text: text[: int(length)],
    "nindent": lambda width, text: "".join(f"\n{' ' * int(width)}{line}" for line in text.splitlines()),
}


def _value(expression: str, scope: dict[str, Any]) -> Any:
    """Of a pipeline: each of its functions gets what is before it as its last argument."""
    while inner := re.search(r"\(([^()]*)\)", expression):
        scope = scope | {f"$inner{len(scope)}": _value(inner[1], scope)}
        expression = expression.replace(inner[0], f"$inner{len(scope) - 1}")
    piped: list[Any] = []
    for part in expression.split(" | "):
        first, *rest = shlex.split(part)
        if callable(function := _FUNCTIONS.get(first, scope.get(first))):
            piped = [function(*(_operand(each, scope) for each in rest), *piped)]
        else:
            assert not rest and not piped, part
            piped = [_operand(first, scope)]
    return piped[0]


def _operand(word: str, scope: dict[str, Any]) -> Any:
    if word.startswith("$"):
        return scope[word]
    if not word.startswith("."):
        return word
    found: Any = scope
    for name in word[1:].split("."):
        found = found[name]
    return found
