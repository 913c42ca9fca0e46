# SPDX-License-Identifier: Apache-2.0
"""tools.words: each rule with a sentence that breaks it and one that does not, and texts of each kind of file."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import words
from tools.words_sources import Kind, Text, texts_of

LONG = "Word" + " word" * 24


def rules(text: str, kind: Kind = Kind.PROSE) -> list[str]:
    return [one.rule for one in words.findings([Text("a.md", 3, text, kind)])]


def read(content: str, path: str) -> list[tuple[int, str]]:
    return [(text.line, text.text) for text in texts_of(content, path)]


@pytest.mark.parametrize("opener", words.OPENERS)
def test_no_sentence_opens_with_a_pronoun_or_a_preposition_that_inverts_it(opener: str) -> None:
    assert rules(f"{opener} a model takes is known.") == [f"opens with {opener!r}"]
    assert rules(f"Return it. **{opener}** a model takes is known.") == [f"opens with {opener!r}"]
    assert rules(f"{opener.lower()} a model takes") == [f"opens with {opener.lower()!r}"]
    assert rules(f"The model takes {opener.lower()} is known. {opener}most and {opener}-like are other words.") == []


@pytest.mark.parametrize("verb", words.BEFORE_OPENERS)
def test_nor_with_one_of_these_after_says_tells_gives_or_shows(verb: str) -> None:
    assert rules(f"{verb} whether there is room.") == [f"opens with '{verb} whether'"]
    assert rules(f"{verb} the reason. Return whether there is room.") == []


@pytest.mark.parametrize("word", words.NOT_IN_USE)
def test_words_not_in_use_are_found_in_any_case_and_as_whole_words(word: str) -> None:
    assert rules(f"The ranks {word.upper()} begin.") == [f"{word!r} is not in use: {words.NOT_IN_USE[word]}"]
    assert rules(f"The ranks x{word} begin, as does `{word}`.") == []


def test_a_sentence_has_at_most_25_words_and_code_and_urls_count_as_one() -> None:
    assert rules(f"{LONG} more.") == ["26 words, at most 25"]
    assert rules(f"{LONG}. {LONG}.") == []
    assert rules(" ".join(["word"] * 23) + " `a b c d` https://example.org/what?of=one –.") == []


def test_a_full_stop_in_code_a_number_or_an_abbreviation_ends_no_sentence() -> None:
    assert list(words.sentences("Write 1.5 or `a. B`, e.g. Both.\nThen (at last) end! Yes")) == [
        "Write 1.5 or `a. B`, e.g. Both.",
        "Then (at last) end!",
        "Yes",
    ]


def test_a_question_may_be_a_heading() -> None:
    assert rules("What does it cost?", Kind.HEADING) == []
    assert rules("What it costs", Kind.HEADING) == ["opens with 'What'"]
    assert rules("What does it cost?") == ["opens with 'What'"]


def test_a_string_of_the_code_that_begins_small_may_be_a_part_of_a_message() -> None:
    assert rules("which no rank has", Kind.STRING) == []
    assert rules("Which no rank has", Kind.STRING) == ["opens with 'Which'"]


def test_python_is_read_in_docstrings_those_of_attributes_comments_and_messages() -> None:
    source = '''"""The module."""
# SPDX-License-Identifier: Apache-2.0
import x  # noqa: F401
class A:
    """A class.

    Its paragraph.

        code = 1

    Raises:
        ConfigError: what is wrong.
    """
    b: int = 0
    """An attribute."""

def f(c):
    # A comment of
    # two lines.
    log.info("started at %s", c)  # at its end
    option(c, help="Of one.")
    status(f"three words {c} and a value")
    key("name")
    raise ConfigError("two words" + f" of {c}")
'''
    assert sorted(read(source, "worker/a.py")) == [
        (1, "The module."),
        (5, "A class."),
        (7, "Its paragraph."),
        (12, "what is wrong."),
        (15, "An attribute."),
        (18, "A comment of\ntwo lines."),
        (20, "at its end"),
        (20, "started at %s"),
        (21, "Of one."),
        (22, "three words {} and a value"),
        (24, "two words of {}"),
    ]


def test_strings_of_tests_and_examples_are_data() -> None:
    source = '"""A test."""\nraise AssertionError("what a test says")  # a comment\n'
    assert read(source, "tests/a.py") == read(source, "examples/a.py") == [(1, "A test."), (2, "a comment")]


def test_markdown_is_read_without_its_code_and_each_cell_and_item_by_itself() -> None:
    page = "# What now?\n\nA [link](what.md)\nof two lines.\n\n```\nwhat\n```\n- an item\n- another\n\n| a | b `c` |\n|---|---|\n"
    assert read(page, "docs/a.md") == [
        (1, "What now?"),
        (3, "A link\nof two lines."),
        (9, "an item"),
        (10, "another"),
        (12, "a"),
        (12, "b `c`"),
    ]
    assert [text.kind for text in texts_of(page, "docs/a.md")][:2] == [Kind.HEADING, Kind.PROSE]


def test_yaml_is_read_in_comments_and_descriptions_and_a_template_in_comments() -> None:
    manifest = "# A comment.\na: 1  # at its end\nb:\n  description: Of a field.\n  c: [{message: A rule.}]\n"
    assert read(manifest, "crds/a.yaml") == [(1, "A comment."), (2, "at its end"), (4, "Of a field."), (5, "A rule.")]
    assert read("# A comment.\na: {{ .b }}\n", "charts/x/templates/a.yaml") == [(1, "A comment.")]


def test_the_page_is_read_in_what_it_shows() -> None:
    assert read('<p title="Where it is now">What made it</p>', "page.html") == [(1, "What made it"), (1, "Where it is now")]
    assert read('a = "Its progress is shown"; // a comment of it', "page.js") == [(1, "a comment of it"), (1, "Its progress is shown")]


def test_a_report_has_the_place_the_rule_and_the_sentence() -> None:
    [found] = words.findings([Text("docs/a.md", 3, "It runs. What runs\nis known.")])
    assert str(found) == "docs/a.md:3: opens with 'What': What runs is known."


def test_the_command_prints_each_finding_and_exits_with_1_if_there_is_one(tmp_path: Path) -> None:
    for name in ("words.py", "words_sources.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (tmp_path / "tools" / name).write_text((words.ROOT / "tools" / name).read_text())

    def run(written: str) -> tuple[int, str]:
        (tmp_path / "README.md").write_text(written)
        command = [sys.executable, "-m", "tools.words"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout

    assert run("It is new.\n") == (0, "")
    assert run("It is new.\n\nWhat is new.\n") == (1, "README.md:3: opens with 'What': What is new.\n")
