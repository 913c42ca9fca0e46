# SPDX-License-Identifier: Apache-2.0
"""The draws for reading tests, and the measure of rewritten docstrings."""

from click.testing import CliRunner

from tools import reading


def test_a_docstring_comes_with_its_qualified_name_and_its_signature() -> None:
    content = 'class A(B):\n    """Be a class."""\n    async def f(self, x: int) -> str:\n        """Do it."""\n    def g(self): ...\n'
    assert dict(reading.docstrings(content)) == {
        "A": ("class A(B)", "Be a class."),
        "A.f": ("def f(self, x: int) -> str", "Do it."),
    }


def test_a_docstring_with_another_first_word_alone_keeps_all_and_one_in_other_words_keeps_little() -> None:
    before = "What the ranks hold of an adapter in memory."
    assert reading.kept_share(before, "Return the part that ranks hold of an adapter in memory.") == 1.0
    assert reading.kept_share(before, "Sum the bytes of a loaded adapter over all processes.") < 0.5


def test_only_docstrings_whose_words_changed_count_as_rewritten() -> None:
    before = {("a.py", "f"): ("def f()", "Do this, then that."), ("a.py", "g"): ("def g()", "Give."), ("a.py", "h"): ("", "Gone.")}
    after = {("a.py", "f"): ("def f(x)", "Do this,\nthen that."), ("a.py", "g"): ("def g()", "Take.")}
    assert reading.rewritten(before, after) == {("a.py", "g"): ("Give.", "Take.")}


def test_a_draw_has_texts_of_users_and_docstrings_and_is_the_same_for_the_same_commit() -> None:
    first, second = (CliRunner().invoke(reading.main, ["items"]) for _ in range(2))
    assert first.exit_code == 0, first.output
    assert first.output == second.output
    assert f"\n{reading.ITEMS}. " in first.output
