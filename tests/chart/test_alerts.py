# SPDX-License-Identifier: Apache-2.0
"""The alert rules: when each fires, as Prometheus' own promtool finds; the metrics and labels that it reads; its runbook.

Real: the chart's rules and promtool. Not real: the samples, which alert_cases.yaml has.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion_operator.api.names import FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY
from support.operator.chart_rendering import CHART, NAMESPACE, ROOT, Chart, RenderError, of_kind, the_only
from support.operator.metric_names import Selector, grouped, selectors, wrong_names
from support.operator.reason_table import TABLE, Asks, Row, condition
from tools.devcluster import programs

GROUPS: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
RULES = [pytest.param(rule, id=rule["alert"]) for group in GROUPS for rule in group["rules"]]
BY_NAME = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
CASES: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("alert_cases.yaml").read_text())
Rule = dict[str, Any]


@pytest.mark.slow
def test_each_alert_fires_when_it_should_and_not_a_minute_before_and_not_below_what_counts(tmp_path: Path) -> None:
    text = (CHART / "files" / "alerts.yaml").read_text().replace("OPERATOR_NAMESPACE", "diffusion-system")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": yaml.safe_load(text)}))
    # Rules are evaluated between samples too, as in a real Prometheus: there `increase` extrapolates.
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "20s",
        "tests": [test for case in CASES for test in promtools_tests(case)],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    promtool = programs.prometheus("promtool")
    done = subprocess.run([promtool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def promtools_tests(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield promtool's two tests of a case: the alert fires in minute `at` of `fires` and not before, and it never fires in `quiet`."""
    rule = BY_NAME[case["alert"]]
    fired = {
        "exp_labels": case["labels"] | rule["labels"],
        "exp_annotations": {"summary": case["summary"], "runbook": rule["annotations"]["runbook"]},
    }
    expected = {"fires": {case["at"] - 1: [], case["at"]: [fired]}, "quiet": {minute: [] for minute in range(case["at"] + 6)}}
    for name, alerts in expected.items():
        yield {
            "interval": "1m",
            "input_series": [{"series": one, "values": values} for one, values in case[name].items()],
            "alert_rule_test": [
                {"eval_time": f"{at}m20s", "alertname": case["alert"], "exp_alerts": found} for at, found in alerts.items()
            ],
        }


def test_every_alert_has_a_case() -> None:
    assert {case["alert"] for case in CASES} == set(BY_NAME)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_looks_at_metrics_that_there_are_by_labels_that_they_have(rule: Rule) -> None:
    assert wrong_names(rule["expr"]) == []
    written = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    assert written <= grouped(rule["expr"]), "what an aggregation leaves out is empty in the text"


@pytest.mark.parametrize("rule", RULES)
def test_the_reasons_of_a_rule_are_reasons_of_ready(rule: Rule) -> None:
    for selector in selectors(rule["expr"]):
        if reasons := selector.labels.get("reason"):
            assert set(reasons.split("|")) - ready_reasons()[selector.labels["kind"]] == set()


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind, rows in TABLE.items() for row in rows if row.asks is Asks.A_PERSON])
def test_an_alert_covers_every_status_that_asks_for_a_person(kind: str, row: Row) -> None:
    shown = {name: getattr(condition(row, type_), "reason", "") for name, type_ in SHOWN.items()}
    assert any(_takes(selector, shown, kind) for rule in BY_NAME.values() for selector in selectors(rule["expr"])), shown


SHOWN = {"diffusion_operator_objects": "Ready", "diffusion_operator_objects_degraded": "Degraded"}


def _takes(selector: Selector, shown: dict[str, str], kind: str) -> bool:
    """Return whether a selector of a rule takes the sample of an object with these reasons by metric."""
    if selector.metric not in shown or selector.labels.get("kind") != kind:
        return False
    reason = shown[selector.metric]
    return re.fullmatch(selector.labels.get("reason", ".*"), reason) is not None and reason != selector.without.get("reason")


def ready_reasons() -> dict[str, set[str]]:
    """Return the reasons of Ready by kind, read from the troubleshooting page; another test compares that page with the code."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    tables = {kind: page.partition(f"\n## {kind}")[2].partition("\n`")[0] for kind in ("DiffusionDeployment", "LoRAAdapter")}
    return {kind: set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) for kind, table in tables.items()}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_says_what_is_wrong_and_has_a_runbook_that_is_there(rule: Rule) -> None:
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor == rule["alert"].lower()
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
    assert anchor in {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert len(rule["annotations"]["summary"]) > 20
    assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m"))


def test_every_runbook_is_one_of_a_rule() -> None:
    section = (ROOT / "docs" / "operations.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^### (\w+)$", section, re.MULTILINE)) == sorted(rule["alert"] for group in GROUPS for rule in group["rules"])


def test_the_rules_are_rendered_when_asked_and_about_the_releases_operator(chart: Chart) -> None:
    assert of_kind(chart.documents(), "PrometheusRule") == []
    rule = the_only(chart.documents(overrides={"metrics.alerts": True, "metrics.labels": {"release": "prometheus"}}), "PrometheusRule")
    text = (CHART / "files" / "alerts.yaml").read_text().replace("OPERATOR_NAMESPACE", NAMESPACE)
    assert rule["spec"]["groups"] == yaml.safe_load(text)
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    with pytest.raises(RenderError, match=r"set metrics\.enabled to true as well"):
        chart.text("bare-values.yaml", overrides={"metrics.alerts": True})


def test_each_alert_has_a_link_to_its_runbook_where_the_pages_address_is_known(chart: Chart) -> None:
    page = "https://wiki.example/operations.html"
    rule = the_only(chart.documents(overrides={"metrics.alerts": True, "metrics.runbookUrl": page}), "PrometheusRule")
    for alert in [one for group in rule["spec"]["groups"] for one in group["rules"]]:
        assert alert["annotations"].keys() == {"summary", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"{page}#{alert['alert'].lower()}"


def test_workers_have_a_monitor_in_every_namespace_that_is_watched(chart: Chart) -> None:
    def workers(values: str) -> dict[str, Any]:
        [found] = [one for one in of_kind(chart.documents(values), "PodMonitor") if one["metadata"]["name"].endswith("-workers")]
        spec: dict[str, Any] = found["spec"]
        return spec

    assert workers("namespaces-values.yaml")["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}
    assert workers("cluster-wide-values.yaml")["namespaceSelector"] == {"any": True}
    selector = workers("cluster-wide-values.yaml")["selector"]
    assert selector["matchLabels"] == {LABEL_MANAGED_BY: FIELD_MANAGER}
    assert selector["matchExpressions"] == [{"key": LABEL_DEPLOYMENT, "operator": "Exists"}]
    assert workers("cluster-wide-values.yaml")["podMetricsEndpoints"] == [{"port": "http", "path": "/metrics"}]
    assert of_kind(chart.documents(), "PodMonitor") == []
