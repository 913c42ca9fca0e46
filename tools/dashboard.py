# SPDX-License-Identifier: Apache-2.0
"""Writes the chart's Grafana dashboard: `python -m tools.dashboard`. The table below has its panels; Grafana's own SDK makes the JSON."""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import msgspec
from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

PATH = Path(__file__).parents[1] / "charts" / "diffusion-operator" / "files" / "dashboard.json"
# Three panels a line; Grafana's grid has 24 columns.
WIDTH, HEIGHT = 8, 8
SOURCE = DataSourceRef(type_val="prometheus", uid="$source")
# The label that the chart's PodMonitors give the series of a worker, and the model that is chosen on the page.
MODEL = "diffusion_operator_dev_deployment"
CHOSEN = f'{{namespace="$namespace", {MODEL}="$model"}}'


class Panel(msgspec.Struct, frozen=True):
    """A graph of the dashboard: its title and description, the unit of its values, and a PromQL expression for each name of a line."""

    title: str
    text: str
    unit: str
    lines: dict[str, str]


def _percentiles(histogram: str, which: str = "") -> dict[str, str]:
    rate = f"sum by (le) (rate({histogram}_bucket{which}[$__rate_interval]))"
    return {name: f"histogram_quantile({share}, {rate})" for name, share in (("50 %", 0.5), ("90 %", 0.9), ("99 %", 0.99))}


def _rate(counter: str, which: str = "", by: str = "") -> str:
    return f"sum {f'by ({by}) ' if by else ''}(rate({counter}{which}[$__rate_interval]))"


def _mean(histogram: str, *, by: str) -> str:
    return f"{_rate(f'{histogram}_sum', CHOSEN, by)} / {_rate(f'{histogram}_count', CHOSEN, by)}"


FLEET = (
    Panel(
        "Deployments",
        "DiffusionDeployments by the reason of their Ready condition.",
        "short",
        {"{{reason}}": 'sum by (reason) (diffusion_operator_objects{kind="DiffusionDeployment"})'},
    ),
    Panel(
        "Replicas",
        "Replicas of all models by state. Those that are Asleep have freed their GPU memory.",
        "short",
        {"{{state}}": "sum by (state) (diffusion_operator_replicas)"},
    ),
    Panel(
        "Queue",
        "Images that are being made now, and images that wait for a place in a batch, of all models.",
        "short",
        {"being made": "sum(diffusion_worker_requests_in_flight)", "waiting": "sum(diffusion_worker_requests_queued)"},
    ),
    Panel(
        "Held requests",
        "Requests that wait until their model serves, and how long the oldest of them has waited.",
        "short",
        {"requests": "sum(diffusion_worker_requests_held)", "seconds of the first": "max(diffusion_worker_held_oldest_seconds)"},
    ),
    Panel(
        "Images per second",
        "Images made per second, by model.",
        "short",
        {f"{{{{{MODEL}}}}}": _rate("diffusion_worker_images_total", by=MODEL)},
    ),
    Panel(
        "Seconds to the first step",
        "Time from a request to the first step of its image, in percentiles: waiting, a wake if there was one, and the text encoders.",
        "s",
        _percentiles("diffusion_worker_first_step_seconds"),
    ),
    Panel(
        "Adapter loads per second",
        "Loads of LoRA adapters on workers per second, by error code or OK.",
        "short",
        {"{{code}}": _rate("diffusion_worker_adapter_loads_total", by="code") + " > 0"},
    ),
    Panel(
        "Adapter evictions per second",
        "Adapters evicted per second from a worker's memory to make room for others.",
        "short",
        {"evictions": _rate("diffusion_worker_adapter_evictions_total")},
    ),
    Panel(
        "Failures per second",
        "Requests that ended without images, by error code or ClientGone, and rank groups that were lost and started again.",
        "short",
        {
            "{{code}}": _rate("diffusion_worker_requests_total", '{code!="OK"}', "code") + " > 0",
            "rank groups": _rate("diffusion_worker_rank_group_restarts_total"),
        },
    ),
)
ONE_MODEL = (
    Panel(
        "State",
        "The state of the worker in each replica.",
        "short",
        {"{{pod}} {{state}}": f"diffusion_worker_state{CHOSEN} > 0"},
    ),
    Panel(
        "Requests per second",
        "Requests for images that ended, by error code, ClientGone or OK.",
        "short",
        {"{{code}}": _rate("diffusion_worker_requests_total", CHOSEN, "code") + " > 0"},
    ),
    Panel(
        "Seconds of a request",
        "Time from a request to the end of its answer with images, in percentiles. Requests that failed are left out.",
        "s",
        _percentiles("diffusion_worker_request_seconds", CHOSEN),
    ),
    Panel(
        "Seconds by phase",
        "Average time of an image in each phase, such as the queue, the steps and the decoding.",
        "s",
        {"{{phase}}": _mean("diffusion_worker_phase_seconds", by="phase")},
    ),
    Panel(
        "Rows per model call",
        "Average number of rows in a call of the model. An image has one row, or two with guidance; more rows in a call are cheaper.",
        "short",
        {"rows": f"{_rate('diffusion_worker_model_rows_total', CHOSEN)} / {_rate('diffusion_worker_model_calls_total', CHOSEN)}"},
    ),
    Panel(
        "Memory of the weights",
        "Weights in the memory of each rank's device; about 0 while the model sleeps.",
        "bytes",
        {"{{pod}} rank {{rank}}": f"diffusion_worker_rank_weights_resident_bytes{CHOSEN}"},
    ),
    Panel(
        "Seconds of a sleep and of a wake",
        "Average time of the sleeps and of the wakes that succeeded.",
        "s",
        {"{{kind}}": _mean("diffusion_worker_operation_seconds", by="kind")},
    ),
    Panel(
        "Adapters",
        "Number of adapters in each state, on average over the replicas.",
        "short",
        {"{{state}}": f"avg by (state) (diffusion_worker_adapters{CHOSEN}) > 0"},
    ),
)


def chosen(expression: str, *, namespace: str, model: str) -> str:
    """Return an expression with this namespace and model in place of the dashboard's variables, and 20 s as the interval of rates.

    The interval is for metrics that are read every two seconds.
    """
    for place, value in (("$__rate_interval", "20s"), ("$namespace", namespace), ("$model", model)):
        expression = expression.replace(place, value)
    return expression


def rendered() -> str:
    """Build Grafana's dashboard from the panels of this module, and return its JSON text; no file is written."""
    board = (
        dashboard.Dashboard("Diffusion models")
        .uid("diffusion-operator")
        .tags(["diffusion-operator"])
        .description("All models of the diffusion operator, and one of them.")
        .time("now-1h", "now")
        .refresh("30s")
        .readonly()
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(_variable("namespace", "label_values(diffusion_worker_state, namespace)"))
        .with_variable(_variable("model", f'label_values(diffusion_worker_state{{namespace="$namespace"}}, {MODEL})'))
    )
    numbers = itertools.count(1)
    for row, panels in (("All models", FLEET), ("$model", ONE_MODEL)):
        board = board.with_row(dashboard.Row(row).id(next(numbers)))
        for panel in panels:
            board = board.with_panel(_graph(panel).id(next(numbers)))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return dashboard.QueryVariable(name).datasource(SOURCE).query(query).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _graph(panel: Panel) -> timeseries.Panel:
    graph = timeseries.Panel().title(panel.title).description(panel.text).unit(panel.unit).min(0).datasource(SOURCE)
    legend = common.VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    graph = graph.legend(legend).tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    for reference, (name, expression) in zip(string.ascii_uppercase, panel.lines.items(), strict=False):
        graph = graph.with_target(prometheus.Dataquery().ref_id(reference).expr(expression).legend_format(name))
    return graph.span(WIDTH).height(HEIGHT)


if __name__ == "__main__":
    PATH.write_text(rendered())
