"""Writes chart/ from base/ and components/: `python -m deploy.kubernetes.make_chart`. A test compares.

Manifests say in comments what a chart makes of them, and are complete without it:

    replicas: 2  # value worker.replicas: HELP    the chart's value of that path, with this default; a block as well
    # chart: TEXT                                 a line of the chart alone
    name: x  # chart: name: y                     another line in the chart
    # tls: startupProbe                           the next is another under tls.enabled, that of components/tls
    # when EXPRESSION                             a document that the chart has under a condition, before its apiVersion

Names begin with the release's in place of `octavo`.
"""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CHART = HERE / "chart"
BASE = ("model", "worker", "scheduler", "gateway", "network")
COMPONENTS = ("ingress", "gateway-api", "service-monitor", "tls", "hpa", "keda", "ranks")
SERVICES = ("worker", "scheduler", "gateway")
OPTIONS_HELP = "variables, such as OCTAVO_MAX_NUM_SEQS; a misspelt one stops the process at its start"
# Values that no line of a manifest has a default for: path to default and help.
OF_THE_CHART: dict[str, tuple[Any, str]] = {
    "models.storageClass": ("", "empty: the cluster's default"),
    "networkPolicies.enabled": (True, "needs a network plugin that enforces them"),
    "ingress.enabled": (False, "OpenAI's API from outside the cluster, to whoever gets there"),
    "gatewayApi.enabled": (False, "in place of ingress"),
    "serviceMonitor.enabled": (False, "for the Prometheus operator"),
    "keys.enabled": (False, "with values-keys.yaml, which also says which files have them"),
    "tls.enabled": (False, "with values-tls.yaml; needs cert-manager"),
    "hpa.enabled": (False, "with the Prometheus adapter and its rules, deploy/kubernetes/prometheus-adapter.yaml"),
    "keda.enabled": (False, "in place of hpa"),
    "ranks.enabled": (False, "workers of several ranks, each a pod, by LeaderWorkerSet; not with hpa or keda"),
}
_VALUE = re.compile(
    r"(?P<start>\s*(?:- )?)(?P<key>[\w./-]+:)(?P<default> \S.*?)?\s+# value (?P<path>[\w.]+)(?:: (?P<help>.*))?"
)
_ALONE = re.compile(r"(\s*)# chart: (.*)")
_INSTEAD = re.compile(r"(\s*).*  # chart: (.*)")
_TLS = re.compile(r"(\s*)# tls: (\w+)")
_CHANGE = re.compile(r"- op: \w+\n  path: .*/(\w+)\n  value:\n((?:    .*\n?)+)")
_WHEN = re.compile(r"# when (.*)\n")
_NAMES = re.compile(
    r"(?<!replacement: )"  # of a job, which rules of Prometheus know by this one name
    r"\boctavo-(?=(?:worker|scheduler|gateway|models|fetch|ranks|access|hub|self-signed|authority|nothing-else)\b)"
)


class Values:
    """The chart's values as manifests name them: path to default and help, in their order."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Any, str]] = {}

    def add(self, path: str, default: Any, help: str) -> None:
        """Raises ValueError where the path has another default already."""
        old, old_help = self.found.get(path, (default, ""))
        if old != default:
            raise ValueError(f"{path} is {old!r} in one place, {default!r} in another")
        self.found[path] = default, old_help or help

    def tree(self) -> dict[str, Any]:
        """As the chart's values.yaml has them."""
        tree: dict[str, Any] = {}
        for path, (default, _) in self.found.items():
            *folders, name = path.split(".")
            inner = tree
            for folder in folders:
                inner = inner.setdefault(folder, {})
            inner[name] = default
        return tree

    def text(self) -> str:
        """The file values.yaml: every value under its help."""
        lines = ["# Written by deploy/kubernetes/make_chart.py from base/ and components/.", ""]
        for top in dict.fromkeys(path.partition(".")[0] for path in self.found):
            lines.append(f"{top}:")
            for path, (default, help) in self.found.items():
                if path.startswith(f"{top}."):
                    lines += [f"  # {help[0].upper()}{help[1:]}."] if help else []
                    dumped = yaml.safe_dump({path.partition(".")[2]: default}, sort_keys=False, width=1000)
                    lines += [f"  {line}" for line in dumped.splitlines()]
            lines.append("")
        return "\n".join(lines)

    def schema(self) -> str:
        """The file values.schema.json: a value that does not exist is an error, as an unknown option is."""
        kinds = {str: "string", bool: "boolean", int: "integer", list: "array", dict: "object"}

        def of(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
            properties = {
                name: {"type": kinds[type(value)]} if prefix + name in self.found else of(value, f"{prefix}{name}.")
                for name, value in tree.items()
            }
            return {"type": "object", "properties": properties, "additionalProperties": False}

        whole = {"$schema": "http://json-schema.org/draft-07/schema#", **of(self.tree(), "")}
        whole["properties"]["global"] = {"type": "object"}  # which Helm itself adds
        return json.dumps(whole, indent=2) + "\n"


def template(manifest: str, values: Values) -> str:
    """A manifest as a template; adds the values that it names."""
    documents = []
    for document in manifest.split("---\n"):
        condition = _WHEN.search(document)
        lines = _lines(_WHEN.sub("", document).splitlines(), values, _tls_probes(yaml.safe_load(document)))
        text = "---\n" + "\n".join(lines) + "\n"
        documents.append(f"{{{{- if {condition[1]} }}}}\n{text}{{{{- end }}}}\n" if condition else text)
    return "".join(documents)


def _tls_probes(manifest: dict[str, Any]) -> dict[str, list[str]]:
    """Name to probe, as components/tls patches those of a manifest: its lines, with what a chart makes of them."""
    said = yaml.safe_load((HERE / "components/tls/kustomization.yaml").read_text(encoding="utf-8"))
    target = {"kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    patches = [patch["patch"] for patch in said["patches"] if patch["target"] == target]
    changes = (match.groups() for patch in patches for match in _CHANGE.finditer(patch))
    return {name: [f"{name}:", *textwrap.indent(textwrap.dedent(probe), "  ").splitlines()] for name, probe in changes}


def _lines(lines: list[str], values: Values, probes: dict[str, list[str]]) -> list[str]:
    made = []
    while lines:
        line, *lines = lines
        if match := _TLS.fullmatch(line):
            indent, name = match.groups()
            block, rest = _block(len(indent), lines[1:])
            probe = _lines([indent + each for each in probes[name]], values, {})
            made += [f"{indent}{{{{- if .Values.tls.enabled }}}}", *probe]
            made += [f"{indent}{{{{- else }}}}", *_lines([lines[0], *block], values, probes), f"{indent}{{{{- end }}}}"]
            lines = rest
        elif match := _VALUE.fullmatch(line):
            block, lines = _block(len(match["start"]), lines)
            default = yaml.safe_load(match["default"] or "\n".join(block))
            values.add(match["path"], default, match["help"] or "")
            path = f".Values.{match['path']}"
            if isinstance(default, dict | list):
                shown = f"{{{{- toYaml {path} | nindent {len(match['start']) + 2} }}}}"
            else:
                shown = f"{{{{ {path}{' | quote' if isinstance(default, str) else ''} }}}}"
            made.append(f"{match['start']}{match['key']} {shown}")
        elif match := _ALONE.fullmatch(line) or _INSTEAD.fullmatch(line):
            made.append(match[1] + _renamed(match[2]))
        else:
            made.append(line if line.lstrip().startswith("#") else _renamed(line))
    return made


def _block(indent: int, lines: list[str]) -> tuple[list[str], list[str]]:
    """The lines that belong to a key of this indent, and the rest."""
    end = next((n for n, line in enumerate(lines) if len(line) - len(line.lstrip()) <= indent), len(lines))
    return lines[:end], lines[end:]


def _renamed(line: str) -> str:
    line = _NAMES.sub("{{ .Release.Name }}-", line)
    line = re.sub(r"^(\s*(?:- )?(?:name|app\.kubernetes\.io/instance):) octavo$", r"\1 {{ .Release.Name }}", line)
    return line.replace('namespace="octavo"', 'namespace="{{ .Release.Namespace }}"')


def _options(service: str, literals: list[str], values: Values) -> str:
    """What kustomize's generator makes of base/kustomization.yaml."""
    path = f"{service}.options"
    values.add(path, dict(literal.split("=", 1) for literal in literals), OPTIONS_HELP)
    return f"""---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{{{ .Release.Name }}}}-{service}-options
data:
  {{{{- range $name, $value := .Values.{path} }}}}
  {{{{ $name }}}}: {{{{ $value | quote }}}}
  {{{{- end }}}}
"""


def chart() -> dict[str, str]:
    """Path in chart/ to text, for every file that is written."""
    values, files = Values(), {}
    generated = yaml.safe_load((HERE / "base/kustomization.yaml").read_text(encoding="utf-8"))["configMapGenerator"]
    literals = {each["name"]: each["literals"] for each in generated}
    options = [_options(service, literals[f"octavo-{service}-options"], values) for service in SERVICES]
    files["templates/options.yaml"] = "".join(options)
    for path, each in OF_THE_CHART.items():
        values.add(path, *each)
    for name in BASE:
        files[f"templates/{name}.yaml"] = template((HERE / f"base/{name}.yaml").read_text(encoding="utf-8"), values)
    for name in COMPONENTS:
        text = (HERE / f"components/{name}/{name}.yaml").read_text(encoding="utf-8")
        files[f"templates/{name}.yaml"] = template(text, values)
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files["values.yaml"] = values.text()
    files["values.schema.json"] = values.schema()
    files["Chart.yaml"] = yaml.safe_dump(
        {
            "apiVersion": "v2",
            "name": "octavo",
            "description": project["description"],
            "type": "application",
            "version": project["version"],
            "appVersion": project["version"],
            "kubeVersion": ">=1.30.0-0",  # the first with the preStop of base/ without a feature gate
        },
        sort_keys=False,
        width=1000,
    )
    return files


if __name__ == "__main__":
    for path, text in chart().items():
        (CHART / path).parent.mkdir(parents=True, exist_ok=True)
        (CHART / path).write_text(text, encoding="utf-8")
