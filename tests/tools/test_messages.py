# SPDX-License-Identifier: Apache-2.0
"""docs/development/messages.txt is what the sources give, and each form of a message in Python, in the chart and in the page is read."""

from pathlib import Path

import pytest

from tools.messages import browser, entries, manifests, page
from tools.messages.message import Kind
from tools.messages.python import Package

SOURCE = '''
"""A module's docstring is no message."""
LIMIT = "LimitReached"
PREFIX = "worker_"
NOT_FOUND = "no such file"
MOST = 3
FORMS = {"size": "one of three sizes"}
log = logging.getLogger(__name__)

def refused(field, expected):
    return RequestError(ErrorCode.INVALID_REQUEST, f"{field}: expected {expected}")

def ready(now):
    text = f"{now.serving} of {len(now.groups)} serve{_others(now)}"
    return verdict("Ready", now.serving > 0, "Serving" if now.whole else "Starting", text)

def _others(now):
    return f"; not counted are {', '.join(now.names) or 'an unknown number'}" if now.names else ""

def check(size, error):
    assert size, "the size is known"
    found = "nothing there" if error is None else str(error)
    if size > 3:
        raise refused("size", f"at most {LIMITS[size]} bytes")
    if size > 2:
        raise ConfigError(f"--size: expected a number, found {found}, a {type(found).__name__}")
    log.info("checked size=%d", size)
    level = logging.INFO if error is None else logging.WARNING
    log.log(level, "size not checked error=%s", error)
    if size < 0:
        raise ConfigError("--size: expected " + FORMS["size"])
    gauge("sizes", "Sizes that were checked.", size)
    if NOT_FOUND in str(error) or str(error).startswith("no such folder"):
        draw(prompt="a blue house", headers={"Content-Security-Policy": "not for users"})
        raise ConfigError(f"{size}: expected at most {MOST}")
    counted("checks", "Checks of sizes.")
    return LIMIT, "the limit of sizes is reached"

def counted(name, text):
    return CounterMetricFamily(PREFIX + name, text)

class RequestError(Exception):
    """Raised by `check`."""

class ConfigError(RequestError):
    """Raised by `check` too."""
'''


@pytest.mark.parametrize("name", page.PARTS)
def test_the_committed_file_has_what_the_sources_give(name: str) -> None:
    assert page.part(name) in page.PAGE.read_text(), "run: python -m tools.messages"


def test_the_committed_file_has_nothing_else() -> None:
    assert page.page() == page.PAGE.read_text(), "run: python -m tools.messages"


def test_each_form_of_a_message_is_read_with_its_code_and_the_names_of_its_values(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = Package(tmp_path, Kind.ERROR).messages()["a.py"]
    assert [(one.kind, str(one)) for one in found] == [
        (Kind.ERROR, "InvalidRequest: {field}: expected {expected}"),
        (Kind.CONDITION, "Ready Serving|Starting: {now.serving} of {number of now.groups} serve{others}"),
        (Kind.ERROR, "{others} = {; not counted are {{now.names}|an unknown number}|}"),
        (Kind.ERROR, "InvalidRequest: size: expected at most {LIMITS} bytes"),
        (Kind.ERROR, "ConfigError: --size: expected a number, found {nothing there|{error}}, a {type of found}"),
        (Kind.LOG, "INFO or WARNING: size not checked error={error}"),
        (Kind.ERROR, "ConfigError: --size: expected one of three sizes"),
        (Kind.METRIC, "sizes (gauge): Sizes that were checked."),
        (Kind.ERROR, "ConfigError: {size}: expected at most 3"),
        (Kind.METRIC, "worker_checks_total (counter): Checks of sizes."),
        (Kind.ERROR, "{check} = LimitReached: the limit of sizes is reached"),
    ]


HTML = """<html><head><title>Images</title><script>var a = "no text at all";</script></head><body>
<section aria-label="Image"><label for="seed">Seed</label><input id="seed" placeholder="random">
<p>The API needs no page: POST to <code>v1/images</code>.</p><ul></ul></section></body></html>"""

SCRIPT = """
// A comment is "no text".
const STATES = {
  ready: ["good", "ready"],
  asleep: ["rest", "the model is asleep"], // "a comment" again
};
const AGAIN = "Try again.";
const TITLES = { NotFound: "There is no such model" };
const ADVICE = {
  Busy: "The model was busy. " + AGAIN,
};
function show(error) {
  headers({ Authorization: `Bearer ${key}` });
  const before = ahead ? `, ${ahead} ${ahead === 1 ? "request" : "requests"} before this one` : "";
  announce(`Waiting: ${WAITS[state] ?? state}${before} …`);
  link.textContent = `Download (${Math.ceil(size / 1024)} KiB)`;
  row.id = `strength-${id}`;
  row.append(element("button", "Remove"));
  throw new Problem({ code: "NotFound", message: "No model came." });
}
"""


def test_each_form_of_a_text_of_the_page_is_read() -> None:
    assert list(browser.html_texts(HTML)) == [
        "title: Images",
        "section aria-label: Image",
        "label: Seed",
        "input placeholder: random",
        "p: The API needs no page: POST to v1/images.",
    ]
    assert list(browser.script_texts(SCRIPT)) == [
        "STATES.ready: ready",
        "STATES.asleep: the model is asleep",
        "Try again.",
        "TITLES.NotFound: There is no such model",
        "ADVICE.Busy: The model was busy. Try again.",
        ", {ahead} {request|requests} before this one",
        "Waiting: {WAITS}{before} …",
        "Download ({…} KiB)",
        "Remove",
        "message: No model came.",
    ]


def test_texts_of_the_chart_are_its_refusals_its_notes_and_its_alerts(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        '{{ fail "metrics: is false" }}\n{{ fail (printf "env: %s is taken" .name) }}\n# to fail "is no message"'
    )
    assert list(manifests.refusals(tmp_path)) == ["metrics: is false", "env: %s is taken"]
    notes = tmp_path / "NOTES.txt"
    notes.write_text("{{ .Chart.Name }} runs.\n{{- if .Values.crds }}\nKinds\nstay:\n\n  kubectl get crd\n{{- end }}\n")
    assert list(manifests.notes(notes)) == ["{{ .Chart.Name }} runs.", "Kinds stay: kubectl get crd"]
    alerts = tmp_path / "alerts.yaml"
    alerts.write_text("- rules:\n  - {alert: Down, labels: {severity: critical}, annotations: {summary: It is down.}}")
    assert list(manifests.alerts(alerts)) == ["Down (critical): It is down."]


PAGE = """The introduction.

== Errors ==

a.py
    Busy: model {name}: {why}, {advice}
    {why} = it has {left} requests
    {why} = it sleeps
    {advice} = wait {seconds} s
    {refusal} = NotFound: there is no model
    {limit} = over its limit
    {limit} = and it has no limit

== Alerts ==

Down: It is down.
"""


def test_an_entry_is_a_whole_text_with_the_parts_that_it_holds_and_its_place() -> None:
    assert [(one.section, one.heading, one.text) for one in entries.entries(PAGE)] == [
        ("Errors", "a.py", "Busy: model {name}: {it has {left} requests|it sleeps}, wait {seconds} s"),
        ("Errors", "a.py", "NotFound: there is no model"),
        ("Errors", "a.py", "a part of a message, limit: over its limit | and it has no limit"),
        ("Alerts", "", "Down: It is down."),
    ]
