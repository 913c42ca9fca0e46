# SPDX-License-Identifier: Apache-2.0
"""The signatures in the records of model classes and the facts of pipeline classes, compared with the installed libraries or renewed.

    python -m tools.families            says which records and facts differ from what is installed
    python -m tools.families --write    writes the installed signatures, versions and facts
    python -m tools.families --new Name prints a record of a class that has none

A test compares too. Look at the model's code before you write: a new or renamed argument may need a role, or another rule.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from diffusion_worker.runner import families
from diffusion_worker.runner.families import TESTED_WITH, ModelRecord, merged_methods, models, signature_of
from tools import pipeline_facts

FOLDER = Path(families.__file__).parent
WIDTH = 105


def find_class(name: str) -> Any:
    """Return the class of this name that diffusers or transformers exports, else one in any of their modules; None if there is none."""
    for library in TESTED_WITH:
        if found := getattr(importlib.import_module(library), name, None):
            return found
    for library in TESTED_WITH:
        root = Path(importlib.import_module(library).__path__[0])
        for path in sorted(root.rglob("*.py")):
            if re.search(rf"^class {name}\b", path.read_text(), re.MULTILINE):
                return getattr(importlib.import_module(".".join((library, *path.relative_to(root).with_suffix("").parts))), name)
    return None


def installed(name: str, methods: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Return the name of the library that has this class, and the signature of each of the methods that the class has.

    Raises:
        ClickException: there is no such class.
    """
    found = find_class(name)
    if found is None:
        raise click.ClickException(f"{name} is neither in diffusers nor in transformers")
    library = found.__module__.partition(".")[0]
    signatures = {method: text for method in methods if (text := signature_of(found, method)) is not None}
    return library, signatures


def differences(record: ModelRecord) -> Iterator[str]:
    """Yield a line for each method of a record whose signature is not that of the installed class."""
    _, now = installed(record.name, tuple(record.signatures))
    for method, text in record.signatures.items():
        if text != now.get(method):
            tested = f"{record.library} {TESTED_WITH[record.library]}"
            yield f"{record.name}.{method}: tested with {tested} ({text}), installed ({now.get(method, 'no such method')})"


def renewed(source: str) -> str:
    """Return the source of a file with the signatures of every model record as installed; nothing is written."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    data = source.encode()
    for first, last, text in sorted(_replacements(ast.parse(source), starts), reverse=True):
        data = data[:first] + text.encode() + data[last:]
    return data.decode()


def _replacements(tree: ast.AST, starts: list[int]) -> Iterator[tuple[int, int, str]]:
    """Yield, for each dictionary of signatures in the records, the bytes where it begins and ends, and the new text."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == ModelRecord.__name__):
            continue
        written = {keyword.arg: keyword.value for keyword in node.keywords}
        methods = tuple(ast.literal_eval(written["signatures"]))
        _, signatures = installed(ast.literal_eval(node.args[0]), methods)
        value = written["signatures"]
        assert value.end_lineno is not None and value.end_col_offset is not None
        yield starts[value.lineno - 1] + value.col_offset, starts[value.end_lineno - 1] + value.end_col_offset, _literal(signatures)


def _literal(signatures: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{method}": {_wrapped(text)}' for method, text in signatures.items()) + "}"


def _wrapped(text: str) -> str:
    """Return a text as a Python literal, or as several in parentheses if it is too long for a line."""
    parts = textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
    quoted = [f"{part} " for part in parts[:-1]] + parts[-1:]
    literals = ['"' + part.replace("\\", "\\\\").replace('"', '\\"') + '"' for part in quoted]
    return literals[0] if len(literals) == 1 else "(" + "\n".join(literals) + ")"


def formatted(source: str) -> str:
    """Return a Python source as ruff formats it; raise CalledProcessError if ruff refuses it."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FOLDER / "family.py"), "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout


def new_record(name: str) -> str:
    """Return the source of a new record for a class, with the signatures of the methods that are merged."""
    library, signatures = installed(name, merged_methods(find_class(name)))
    named = "" if library == "diffusers" else f'library="{library}", '
    return formatted(f'RECORDS = (ModelRecord("{name}", {named}signatures={_literal(signatures)},),)\n')


def family_files() -> list[Path]:
    """Return the paths of all files of families that have records, sorted."""
    return [path for path in sorted(FOLDER.glob("*.py")) if "\nRECORDS" in path.read_text()]


@click.command()
@click.option("--write", is_flag=True, help="Write the installed signatures and versions, and the facts of pipelines.")
@click.option("--new", metavar="NAME", help="Print a record of a class that has none.")
def main(*, write: bool, new: str | None) -> None:
    """Compare the records of model classes and the facts of pipelines with the installed libraries; exit 1 if one differs."""
    if new:
        click.echo(new_record(new), nl=False)
        return
    lines = [line for record in models() for line in differences(record)] + list(pipeline_facts.differences())
    click.echo("\n".join(lines) or "every record has the installed signature")
    if write:
        for path in family_files():
            path.write_text(formatted(renewed(path.read_text())))
        versions = ", ".join(f'"{library}": "{version(library)}"' for library in TESTED_WITH)
        record_file = FOLDER / "record.py"
        record_file.write_text(re.sub(r"TESTED_WITH = .*", f"TESTED_WITH = {{{versions}}}", record_file.read_text()))
        pipeline_facts.PAGE.write_text(pipeline_facts.written(pipeline_facts.table()))
    elif lines:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
