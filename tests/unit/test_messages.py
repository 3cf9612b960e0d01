"""Every error says what is wrong and what to do about it, and `--debug` alone shows a traceback."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import mlx_mtp.errors

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "mlx_mtp").rglob("*.py"), *(ROOT / "convert").rglob("*.py")])
ERRORS = {name for name in vars(mlx_mtp.errors) if name.endswith("Error")}


def errors_of(file: Path) -> Iterator[ast.Call]:
    """Where a file makes an error of the package's tree."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ERRORS
        ):
            yield node


def ends(text: ast.expr) -> Iterator[str]:
    """The last words of a text, as far as they stand in the source; of each branch."""
    if isinstance(text, ast.IfExp):
        yield from ends(text.body)
        yield from ends(text.orelse)
    last = text.values[-1] if isinstance(text, ast.JoinedStr) else text
    if isinstance(last, ast.Constant):
        yield str(last.value)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_each_error_is_a_sentence_and_a_way_out(file: Path) -> None:
    for call in errors_of(file):
        where = f"{file.name}:{call.lineno}"
        assert len(call.args) == 2, f"{where} does not say what to do"
        for end in ends(call.args[0]):
            assert end.endswith("."), f"{where}: {end!r} ends no sentence"
        for end in ends(call.args[1]):
            assert end, f"{where} does not say what to do"
