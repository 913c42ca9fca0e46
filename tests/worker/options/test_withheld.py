# SPDX-License-Identifier: Apache-2.0
"""No text of a request is in a log, whichever library writes it; a log still says where the error is."""

import io
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diffusion_worker import withheld
from diffusion_worker.errors import ConfigError
from support.sample import sample

TESTS = Path(__file__).parents[2]
SECRET = "velvet-armadillo"
ENCODERS = ("clip", "t5", "umt5", "mt5", "gemma", "gemma2", "glm", "llama", "mistral", "qwen3", "smollm3", "qwen2_5_vl", "omnigen")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Provide the output of loggers of libraries and of the worker, while messages are withheld as in a process that serves."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    names = ("diffusers.pipelines.flux", "transformers", "py.warnings", "diffusion_worker", "a_custom_class")
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
    factory, hooks = logging.getLogRecordFactory(), (threading.excepthook, sys.unraisablehook)
    withheld.install()
    withheld.withhold()
    try:
        yield written
    finally:
        withheld.withhold(False)
        logging.captureWarnings(False)
        logging.setLogRecordFactory(factory)
        threading.excepthook, sys.unraisablehook = hooks
        for logger in loggers:
            logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["diffusers.pipelines.flux", "transformers", "a_custom_class"])
def test_a_librarys_warning_is_left_out_and_its_error_is_its_place_alone(log: io.StringIO, name: str) -> None:
    logging.getLogger(name).warning("The following part of your input was truncated: %s", [SECRET])
    assert log.getvalue() == ""
    logging.getLogger(name).error("The following part of your input cannot be used: %s", [SECRET])
    assert log.getvalue().startswith(f"{name}: a message of test_withheld.py:") and SECRET not in log.getvalue()


def test_a_warning_of_python_is_left_out_too(log: io.StringIO, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        withheld.install()
        warnings.warn(f"cannot read {SECRET}", stacklevel=1)
    assert log.getvalue() + "".join(capfd.readouterr()) == ""


def fails(error: Exception) -> None:
    try:
        raise KeyError(SECRET)
    except KeyError as cause:
        raise error from cause


def test_a_traceback_has_its_lines_and_kinds_but_no_message_that_may_quote_a_request(log: io.StringIO) -> None:
    try:
        fails(ValueError(f"cannot make {SECRET}"))
    except ValueError:
        logging.getLogger("diffusion_worker.test").exception("a request failed")
    text = log.getvalue()
    assert SECRET not in text and text.startswith("a request failed\nTraceback")
    assert text.index("KeyError (its message is withheld") < text.index("ValueError (its message is withheld")
    assert "in fails\n    raise error from cause" in text


def test_what_torch_says_and_what_this_package_says_is_told(log: io.StringIO) -> None:
    for broken in (lambda: torch.nn.Linear(2, 2)(torch.zeros(1, 3)), lambda: fails(ConfigError("--ranks: expected 1"))):
        try:
            broken()
        except (RuntimeError, ConfigError):
            logging.getLogger("diffusion_worker.test").exception("failed")
    assert "mat1 and mat2 shapes" in log.getvalue() and "--ranks: expected 1" in log.getvalue()


class FailsInTheEnd:
    def __del__(self) -> None:
        fails(ValueError(f"cannot end {SECRET}"))


def test_what_nothing_catches_in_a_thread_or_in_the_end_of_an_object_is_a_record_too(
    log: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    thread = threading.Thread(target=fails, args=(ValueError(f"cannot send {SECRET}"),), name="sender")
    thread.start()
    thread.join()
    FailsInTheEnd()
    written, text = "".join(capfd.readouterr()), log.getvalue()
    assert SECRET not in written + text
    assert "uncaught exception in the thread sender" in text and "uncaught exception where Python cannot raise it" in text
    assert text.count("ValueError (its message is withheld") == 2


def test_before_the_load_is_over_everything_is_told(log: io.StringIO) -> None:
    withheld.withhold(False)
    logging.getLogger("transformers").warning("the weights lack %s", "a layer")
    assert log.getvalue() == "the weights lack a layer\n"


@pytest.mark.slow
def test_300_words_of_a_prompt_are_in_no_log_of_any_text_encoder_also_where_it_fails() -> None:
    encoders = sample(ENCODERS, 6)
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    command = [sys.executable, "-m", "support.worker.wordy_encoders", *encoders]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "PYTHONPATH": path})
    outcomes, _, words = run.stdout.partition("\nWORDS ")
    assert run.returncode == 0, run.stderr
    assert len(words.split()) == 300
    written = (outcomes + run.stderr).casefold()
    assert [word for word in words.split() if word in written] == []
    # Without the filter the words would be there: diffusers warns of each truncation, and each failure is logged.
    assert written.count("is withheld, as it may quote a request") >= len(encoders), written
    for encoder in encoders:
        assert f"served {encoder}" in written and f"failed {encoder}" in written
