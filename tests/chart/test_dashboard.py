# SPDX-License-Identifier: Apache-2.0
"""The dashboard: every expression is valid and reads metrics that exist.

Real: the chart, promtool. Not real: Grafana.
"""

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from support.operator.chart_rendering import Chart, RenderError, of_kind, the_only
from support.operator.metric_names import wrong_names
from tools.devcluster import programs

PATH = Path(__file__).parents[2] / "charts" / "diffusion-operator" / "files" / "dashboard.json"
PANELS = json.loads(PATH.read_text())["panels"]
LINES = {f"{panel['title']}: {line['legendFormat']}": line["expr"] for panel in PANELS for line in panel.get("targets", [])}


@pytest.mark.parametrize("expression", LINES.values(), ids=LINES)
def test_an_expression_looks_at_metrics_that_there_are_by_labels_that_they_have(expression: str) -> None:
    assert wrong_names(expression) == []


def test_prometheus_takes_every_expression(tmp_path: Path) -> None:
    lines = [line.replace("$__rate_interval", "5m") for line in LINES.values()]
    rules = [{"record": f"line_{number}", "expr": line} for number, line in enumerate(lines)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [programs.prometheus("promtool"), "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and f"{len(lines)} rules found" in done.stdout, done.stdout + done.stderr


def test_panels_have_places_and_numbers_of_their_own() -> None:
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in PANELS]
    assert len(set(places)) == len({one["id"] for one in PANELS}) == len(PANELS)


def test_the_dashboard_is_installed_when_asked_with_the_labels_of_the_sidecar(chart: Chart) -> None:
    assert of_kind(chart.documents(), "ConfigMap") == []
    found = the_only(
        chart.documents(overrides={"dashboards.enabled": True, "dashboards.label": "shown", "dashboards.labelValue": "yes"}), "ConfigMap"
    )
    assert found["metadata"]["labels"]["shown"] == "yes"
    assert json.loads(found["data"]["diffusion-models.json"]) == json.loads(PATH.read_text())
    default = the_only(chart.documents(overrides={"dashboards.enabled": True}), "ConfigMap")
    assert default["metadata"]["labels"]["grafana_dashboard"] == "1"
    with pytest.raises(RenderError, match=r"set metrics\.enabled to true as well"):
        chart.text("bare-values.yaml", overrides={"dashboards.enabled": True})
