"""The seeded faults are still faults: each text is there, once, and what replaces it is Python."""

from __future__ import annotations

import ast
from collections import Counter

from faults import FAULTS
from mutations import ROOT, stale


def test_each_text_occurs_once_in_its_file() -> None:
    assert stale(list(FAULTS)) == []


def test_each_fault_is_another_program() -> None:
    for fault in FAULTS:
        right = (ROOT / fault.file).read_text()
        wrong = right.replace(fault.old, fault.new)
        assert wrong != right
        ast.parse(wrong)


def test_names_and_tests_are_there() -> None:
    assert not [name for name, count in Counter(f.name for f in FAULTS).items() if count > 1]
    for test in {test for fault in FAULTS for test in fault.tests}:
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text()
