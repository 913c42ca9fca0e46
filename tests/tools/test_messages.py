# SPDX-License-Identifier: Apache-2.0
"""docs/development/messages.txt is what the sources give, and each form of a message in Python is read."""

from pathlib import Path

import pytest

from tools import messages
from tools.messages_sources import Kind, Package

SOURCE = '''
"""A module's docstring is no message."""
LIMIT = "LimitReached"
log = logging.getLogger(__name__)

def refused(field, expected):
    return RequestError(ErrorCode.INVALID_REQUEST, f"{field}: expected {expected}")

def ready(now):
    text = f"{now.serving} of {len(now.groups)} serve{_others(now)}"
    return verdict("Ready", now.serving > 0, "Serving" if now.whole else "Starting", text)

def _others(now):
    return f"; not counted are {', '.join(now.names)}"

def check(size, error):
    assert size, "the size is known"
    found = "nothing there" if error is None else str(error)
    if size > 3:
        raise refused("size", f"at most {LIMITS[size]} bytes")
    if size > 2:
        raise ConfigError(f"--size: expected a number, found {found}")
    log.info("checked size=%d", size)
    log.warning("size not checked error=%s", error)
    gauge("sizes", "Sizes that were checked.", size)
    return LIMIT, "the limit of sizes is reached"

class RequestError(Exception):
    """Raised by `check`."""

class ConfigError(RequestError):
    """Raised by `check` too."""
'''


@pytest.mark.parametrize("name", messages.PARTS)
def test_the_committed_file_has_what_the_sources_give(name: str) -> None:
    assert messages.part(name) in messages.PAGE.read_text(), "run: python -m tools.messages"


def test_the_committed_file_has_nothing_else() -> None:
    assert messages.page() == messages.PAGE.read_text(), "run: python -m tools.messages"


def test_each_form_of_a_message_is_read_with_its_code_and_the_names_of_its_values(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = Package(tmp_path, Kind.ERROR).messages()["a.py"]
    assert [(one.kind, str(one)) for one in found] == [
        (Kind.ERROR, "InvalidRequest: {field}: expected {expected}"),
        (Kind.CONDITION, "Ready Serving|Starting: {now.serving} of {now.groups} serve{others}"),
        (Kind.ERROR, "{others} = ; not counted are {now.names}"),
        (Kind.ERROR, "InvalidRequest: size: expected at most {LIMITS} bytes"),
        (Kind.ERROR, "ConfigError: --size: expected a number, found {nothing there|{error}}"),
        (Kind.LOG, "WARNING: size not checked error=%s"),
        (Kind.METRIC, "sizes: Sizes that were checked."),
        (Kind.ERROR, "{check} = LimitReached: the limit of sizes is reached"),
    ]
