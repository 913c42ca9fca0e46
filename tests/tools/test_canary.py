# SPDX-License-Identifier: Apache-2.0
"""Prompts in tests: each contains the canary's word or a digit's name, and the suite fails where an output contains a prompt."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.syntax import parse
from tools.suite import canary

TESTS = Path(__file__).parents[1]
FIELDS = ("prompt", "negative_prompt")
# Prompts whose words matter to the comparison, or that the test itself searches for.
OTHERS = {
    "contract/test_prompts_stay_secret.py",
    "support/families/images/qwen.py",
    "support/families/images/worded_images.py",
    "support/worker/wordy_encoders.py",
    "tools/test_canary.py",
    "worker/families/test_families_image_traps.py",
    "worker/runner/model_call/test_prompt_cache.py",
    "worker/runner/pipelines/test_protocol.py",
    "worker/runner/pipelines/test_tasks.py",
}

pytest_plugins = ("pytester",)


def text_of(value: ast.expr) -> str | None:
    """Return the text of a string expression, with a digit's name for each computed part; None for another expression."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "seven" for part in value.values)
    return None


def prompts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of each prompt: a named argument, an entry of a table, or a variable, with a name in FIELDS."""
    for node in ast.walk(tree):
        pairs: list[tuple[str | None, ast.expr]] = []
        if isinstance(node, ast.keyword):
            pairs = [(node.arg, node.value)]
        elif isinstance(node, ast.Dict):
            pairs = [(text_of(key) if key else None, value) for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pairs = [(node.targets[0].id, node.value)]
        for name, value in pairs:
            if name in FIELDS and (text := text_of(value)) is not None:
                yield value.lineno, text


def test_every_prompt_of_a_test_can_be_found_in_an_output() -> None:
    files = [path for path in sorted(TESTS.rglob("*.py")) if str(path.relative_to(TESTS)) not in OTHERS]
    written = [(path, line, text) for path in files for line, text in prompts(parse(path.read_text()))]
    assert len(written) > 300
    lacking = [
        f"{path.relative_to(TESTS)}:{line}: {text!r}" for path, line, text in written if text.strip() and not canary.PROMPT.search(text)
    ]
    assert lacking == [], f"expected {canary.WORD!r} in each of these prompts"


def test_the_files_that_are_left_out_are_there() -> None:
    assert [name for name in OTHERS if not (TESTS / name).exists()] == []


@pytest.mark.parametrize("text", [f"a {canary.WORD}", "a red DIGIT seven", "digits one and two"])
def test_a_text_with_a_prompt_is_found_with_its_line_and_not_repeated(text: str) -> None:
    with pytest.raises(AssertionError) as found:
        canary.search(f"fine\nWARNING cut off: {text} and more", "the log")
    assert str(found.value) == "the log: expected no text of a request, found one in line 2 after 'WARNING cut off: " + (
        "'" if text.startswith("digits") else "a '" if canary.WORD in text else "a red '"
    )
    canary.search("image request request_id=digit-7 seven digits", "the log")


@pytest.mark.slow
def test_a_test_that_passes_fails_where_its_output_has_a_prompt(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    loud = ("print(WORD)", "sys.stderr.write(WORD)", "logging.getLogger('diffusers').warning(WORD)")
    tests = [f"def test_loud_{number}():\n    {writes}\n" for number, writes in enumerate(loud)]
    pytester.makepyfile("\n".join([f"import logging, sys\nWORD = 'a {canary.WORD}'\n", *tests, "def test_quiet():\n    print('fine')\n"]))
    result = pytester.runpytest_subprocess("-p", "tools.suite.canary", "-p", "no:cacheprovider")
    # The inner run reported the text; it is no output of this test.
    capsys.readouterr()
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines("expected no text of a request in the output, found some in Captured*")
