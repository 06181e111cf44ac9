"""deploy/monitoring/: dashboard and rules ask for what schedulers and gateways tell, and alerts fire when they should.

What needs promtool is skipped where it is missing, but not in CI: there it fails. CI is where `CI` is set, as hosts of
CI do, or `TESTS_IN_CI`, as `.ci/run` does (`CI` alone would make Hypothesis try the same examples in every run).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from octavo import Client, SamplingParams
from octavo.errors import RequestFailed
from octavo.shared.ports import free_port
from tests.fakes import FakeWorker
from tests.gateway.running import gateway
from tests.integration.scheduler_process import scheduler
from tests.pages import PAGES, ROOT

FOLDER = ROOT / "deploy" / "monitoring"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "rules.yaml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
UNIT_TESTS = FOLDER / "rules.test.yaml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
TARGETS = [(panel, target) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname", "alertstate", "model_name"}}
OF_EVERY_SCRAPE = {"job", "instance"}
OPEN_LABELS = {"job", "instance", "model_name", "status", "alertname", "alertstate"}  # any value may come

# What promtool has against our metrics: `octavo:` is in all of their names, and one histogram has a name that
# dashboards of this field expect.
KNOWN_COMPLAINTS = (
    r"octavo:\w+ metric names should not contain ':'",
    r'octavo:iteration_tokens_total non-counter metrics should not have "_total" suffix',
)

Samples = dict[str, list[dict[str, str]]]  # the labels of all samples, by name


# What Prometheus asks for: 2 wants OpenMetrics, 3 also names in UTF-8.
ACCEPTED = {
    "2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}


@dataclass(frozen=True)
class Told:
    """By the job of those who tell it: `texts` as curl gets them, and names of samples as each Prometheus does."""

    texts: dict[str, str]
    names: dict[str, dict[str, set[str]]]


@pytest.fixture(scope="module")
def live() -> Iterator[Told]:
    """A scheduler and a gateway after some requests, one of them refused."""
    port = free_port()
    with FakeWorker() as worker, scheduler(f"--worker={worker.address}", f"--metrics-port={port}") as service:
        service.wait_until_ready()
        with gateway(service.address) as http, Client(service.address) as client:
            for number in range(3):
                assert client.complete(f"say {number}|", SamplingParams(max_tokens=4)).outputs
            with pytest.raises(RequestFailed):
                client.complete("a", SamplingParams(max_tokens=4), model="another")
            asked = {"prompt": "a|", "max_tokens": 3}
            assert http.post("/v1/completions", asked)[0] == 200
            with http.streaming("/v1/completions", asked) as answer:
                assert b"[DONE]" in answer.read()
            urls = {"octavo": f"http://127.0.0.1:{port}", "octavo-gateway": f"http://127.0.0.1:{http.metrics_port}"}
            names = {
                version: {job: names_of(read(url, accept)) for job, url in urls.items()}
                for version, accept in ACCEPTED.items()
            }
            yield Told({job: read(url) for job, url in urls.items()}, names)


@pytest.fixture(scope="module")
def texts(live: Told) -> dict[str, str]:
    return live.texts


def read(url: str, accept: str = "*/*") -> str:
    request = urllib.request.Request(f"{url}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())


def names_of(text: str) -> set[str]:
    """Of all samples, in whatever format; OpenMetrics has times of creation in addition."""
    return {name for name in re.findall(r"^([\w:]+)[{ ]", text, flags=re.MULTILINE) if not name.endswith("_created")}


def samples_of(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


@pytest.fixture(scope="module")
def told(texts: dict[str, str]) -> Samples:
    """Of schedulers and gateways, with what every scrape adds."""
    samples = {name: found for text in texts.values() for name, found in samples_of(text).items()}
    return {name: [labels | dict.fromkeys(OF_EVERY_SCRAPE, "") for labels in found] for name, found in samples.items()}


def promtool(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs it; skips where there is none, and fails in CI."""
    binary = shutil.which("promtool")
    if binary is None:
        missing = "no promtool on the path: it is in Debian's package prometheus, and .ci/run takes it out of there"
        if {"CI", "TESTS_IN_CI"} & os.environ.keys():
            pytest.fail(missing)
        pytest.skip(missing)
    return subprocess.run([binary, *arguments], input=given, capture_output=True, text=True, timeout=60)


def grouped_by(expression: str) -> set[str]:
    """Labels of `by (...)` and `on (...)`."""
    lists = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    return {label.strip() for names in lists for label in names.split(",")}


def selectors_of(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Names of metrics, each with its matchers: label, operator, value. A metric has a colon, or braces."""
    outside = re.sub(r"\b(?:by|on)\s*\([^)]*\)", "", expression)
    known = "|".join(OF_PROMETHEUS)
    found = re.findall(rf"\b([a-z]\w*:[\w:]+|{known})\b(?:\{{([^}}]*)\}})?|\b(\w+)\{{([^}}]*)\}}", outside)
    return [
        (name or other, re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', inside or inside_other))
        for name, inside, other, inside_other in found
    ]


def problems_of(expression: str, told: Samples) -> list[str]:
    """What the expression asks for and nobody tells."""
    problems, known = [], set()
    for name, matchers in selectors_of(expression):
        if name in told:
            labels = {label for sample in told[name] for label in sample}
        elif name in RECORDED:
            labels = grouped_by(RECORDED[name])
        elif name in OF_PROMETHEUS:
            labels = OF_PROMETHEUS[name]
        else:
            problems.append(f"no metric {name}")
            continue
        known |= labels
        for label, operator, value in matchers:
            if label not in labels:
                problems.append(f"{name} has no label {label}")
            elif label not in OPEN_LABELS:
                values = {sample.get(label) for sample in told[name]}
                asked = value.split("|") if "~" in operator else [value]
                problems += [f"{name} has no {label}={each}" for each in asked if each not in values]
    return problems + [f"no label {label} to group by" for label in grouped_by(expression) - known]


def test_rules_ask_for_what_is_told(told: Samples) -> None:
    wrong = {rule["expr"]: found for rule in RULES if (found := problems_of(rule["expr"], told))}
    assert wrong == {} and len(ALERTS) > 10 and len(RECORDED) > 14


def test_the_dashboard_asks_for_what_is_told(told: Samples) -> None:
    queries = [variable.get("definition", "") for variable in DASHBOARD["templating"]["list"]]
    expressions = [target["expr"] for _, target in TARGETS] + [
        annotation["expr"] for annotation in DASHBOARD["annotations"]["list"]
    ]
    labels = [re.fullmatch(r"label_values\((.*), (\w+)\)", query) for query in queries if query]
    asked = [f"sum by ({found[2]}) ({found[1]})" for found in labels if found]
    assert len(asked) == 3 and len(expressions) > 50
    wrong = {each: found for each in expressions + asked if (found := problems_of(each, told))}
    assert wrong == {}
    shown = {family_of(name) for each in expressions for name, _ in selectors_of(each)}
    assert {family_of(name) for name in told if not name.endswith("_created")} - shown == set(), "told, and not shown"


def family_of(name: str) -> str:
    """Without what a histogram's samples add to it."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum(rate(octavo:no_such_total[5m]))", "no metric octavo:no_such_total"),
        ('octavo:request_success_total{reason="stop"}', "octavo:request_success_total has no label reason"),
        (
            'octavo:admission_rejections_total{reason=~"queue_full|late"}',
            "octavo:admission_rejections_total has no reason=late",
        ),
        (
            'octavo:time_to_first_token_seconds_bucket{le="3"}',
            "octavo:time_to_first_token_seconds_bucket has no le=3",
        ),
        ("sum by (model_name) (octavo:admission_rejections_total)", "no label model_name to group by"),
        ("job:octavo_requests_bad:ratio_rate7m", "no metric job:octavo_requests_bad:ratio_rate7m"),
        ('other_total{job="x"}', "no metric other_total"),
    ],
)
def test_what_nobody_tells_is_found(expression: str, problem: str, told: Samples) -> None:
    assert problems_of(expression, told) == [problem]


def test_the_dashboard_can_be_imported() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(taken)) == len(taken) and max(x for x, _ in taken) < 24
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    sources = re.findall(r'"uid": "([^"]*)"', json.dumps([panels, *DASHBOARD["templating"]["list"]]))
    assert set(sources) == {"${datasource}"}
    used = set(re.findall(r"\$(?!__)(\w+)", " ".join(target["expr"] for _, target in TARGETS)))
    assert used == variables.keys() - {"datasource"}
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == [
        "Now", "Requests and queue", "Latency", "Tokens", "Cache", "Preemptions and moves", "Workers", "Step",
        "Refusals", "HTTP gateway",
    ]  # fmt: skip


def test_legends_name_labels_that_are_left() -> None:
    for panel, target in TARGETS:
        left = grouped_by(target["expr"]).union(
            *(grouped_by(RECORDED[name]) for name, _ in selectors_of(target["expr"]) if name in RECORDED)
        )
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= left, panel["title"]


def test_each_alert_has_a_section_and_each_section_an_alert() -> None:
    page = PAGES["docs/alerts.md"]
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    assert [title for title in titles if title.startswith("Octavo")] == list(ALERTS)
    for section in sections:
        if section.startswith("Octavo"):
            parts = re.findall(r"^\*\*(.+?)\.\*\*", section, flags=re.MULTILINE)
            assert parts == ["For users", "Look first", "Do"], section
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
        severity = re.search(rf"^\| \[{name}\]\(#{name.lower()}\) \| (\w+) \|", page, flags=re.MULTILINE)
        assert severity is not None and severity[1] == rule["labels"]["severity"], name


def test_each_alert_is_seen_to_fire_and_not_to() -> None:
    tests = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", [])]
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == ALERTS.keys()
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == ALERTS.keys()


def test_promtool_reads_the_rules_and_the_configuration() -> None:
    for arguments in (("rules", FOLDER / "rules.yaml"), ("config", FOLDER / "prometheus.yml")):
        checked = promtool("check", *map(str, arguments))
        assert checked.returncode == 0 and "SUCCESS" in checked.stdout, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_not_else() -> None:
    tested = promtool("test", "rules", str(UNIT_TESTS))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("version", ACCEPTED)
def test_prometheus_keeps_the_names(version: str, live: Told) -> None:
    """Also what asks for OpenMetrics, as Prometheus 2 does."""
    configuration = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert [job["job_name"] for job in configuration["scrape_configs"]] == list(live.texts)
    for job, text in live.texts.items():
        assert live.names[version][job] == names_of(text)


def test_promtool_reads_the_metrics(texts: dict[str, str]) -> None:
    for job, text in texts.items():
        checked = promtool("check", "metrics", given=text)
        said = (checked.stdout + checked.stderr).splitlines()
        known = [line for line in said if any(re.fullmatch(each, line) for each in KNOWN_COMPLAINTS)]
        assert said == known != [], job


def test_every_panel_and_recorded_rule_finds_something_in_what_is_told(texts: dict[str, str], tmp_path: Path) -> None:
    """Every sample that was told becomes a series that grows, and each expression has to have a value then."""
    series = [{"series": f'up{{job="{job}", instance="a"}}', "values": "1x70"} for job in texts]
    for job, text in texts.items():
        for name, found in samples_of(text).items():
            for labels in found:
                given = ", ".join(
                    f'{label}="{value}"' for label, value in {**labels, "job": job, "instance": "a"}.items()
                )
                series.append({"series": f"{name}{{{given}}}", "values": "0+1x70"})
    expressions = {re.sub(r"\$__\w+", "5m", target["expr"]) for _, target in TARGETS} | RECORDED.keys()
    expressions = {re.sub(r"\$\w+", ".*", each) for each in expressions}
    cases = [
        # A panel without a value, or with none that is a number, gives no sample.
        {"expr": f"count(({each}) >= 0) > bool 0", "eval_time": "70m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for each in sorted(expressions)
    ]
    tests = {
        "rule_files": [str(FOLDER / "rules.yaml")],
        "evaluation_interval": "5m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": cases}],
    }
    (tmp_path / "told.yaml").write_text(json.dumps(tests), encoding="utf-8")
    tested = promtool("test", "rules", str(tmp_path / "told.yaml"))
    assert tested.returncode == 0, tested.stdout + tested.stderr
