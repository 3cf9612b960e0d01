"""Puts each of tests/faults.py into a copy of the tree and runs the tests that should notice.

    python tests/mutations.py                 all of them, some ten minutes on two cores
    python tests/mutations.py -k window       those whose name or file has "window" in it
    python tests/mutations.py --all-tests     the whole default suite for those that survive
    python tests/mutations.py --write         write tests/MUTATIONS.md

Exit code 1: a fault survived, or its old text is no longer there. A script, not a test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from faults import FAULTS, Fault

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("MUTATIONS.md")
LEFT_OUT = (".git", ".venv", "venv", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=unshrunk")
SEED = "--hypothesis-seed=0"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
HANGS = "time limit"


class Outcome(NamedTuple):
    """What came of a fault: the test that noticed, or "" if none did."""

    fault: Fault
    caught_by: str
    seconds: float


class Tree:
    """A copy of the repository to put faults into."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        # an installed package finds mlx_mtp.convert in the original, a link finds it here
        (folder / "mlx_mtp" / "convert").symlink_to(folder / "convert")

    def try_fault(self, fault: Fault, limit: float, all_tests: bool) -> Outcome:
        """Run its tests with a fault in place."""
        file, began = self.path / fault.file, time.monotonic()
        right = file.read_text()
        file.write_text(right.replace(fault.old, fault.new))
        try:
            caught_by = self.failing(fault.tests, limit)
            if not caught_by and all_tests:
                caught_by = self.failing(("-n", "2"), 20 * limit)
        finally:
            file.write_text(right)
        return Outcome(fault, caught_by, time.monotonic() - began)

    def failing(self, tests: tuple[str, ...], limit: float) -> str:
        """The first test that fails; "" if none does."""
        shutil.rmtree(self.path / ".hypothesis", ignore_errors=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "0", *OPTIONS, SEED, *tests],
            cwd=self.path,
            env=os.environ | {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return HANGS
        if process.returncode == 0:
            return ""
        found = FAILED.search(said)
        return found[1] if found else f"exit code {process.returncode}: {said.strip()[-200:]}"


def stale(faults: list[Fault]) -> list[str]:
    """Faults whose old text does not occur exactly once."""
    counts = {fault: (ROOT / fault.file).read_text().count(fault.old) for fault in faults}
    return [f"{one.name}: {one.file} has its text {n} times" for one, n in counts.items() if n != 1]


def run(
    faults: list[Fault], jobs: int, limit: float, all_tests: bool, checked: bool
) -> list[Outcome]:
    """Try all faults, so many at a time; prints each as it is done.

    Args:
        checked: first see that the tests pass without a fault.
    """
    free: SimpleQueue[Tree] = SimpleQueue()

    def attempt(fault: Fault) -> Outcome:
        tree = free.get()
        try:
            outcome = tree.try_fault(fault, limit, all_tests)
        finally:
            free.put(tree)
        print(line(outcome), flush=True)
        return outcome

    with tempfile.TemporaryDirectory(prefix="mlx-mtp-faults-") as folder:
        for number in range(jobs):
            free.put(tree := Tree(Path(folder, str(number))))
        tests = sorted({test for fault in faults for test in fault.tests})
        if checked and (failing := tree.failing(("-n", str(jobs), *tests), 10 * limit)):
            sys.exit(f"Without a fault there is one that fails, too: {failing}")
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(attempt, faults))


def line(outcome: Outcome) -> str:
    name, caught_by = outcome.fault.name, outcome.caught_by or "**survived**"
    return f"| {name} | {outcome.fault.file} | {caught_by} | {outcome.seconds:.0f} |"


def table(outcomes: list[Outcome]) -> str:
    caught = sum(bool(one.caught_by) for one in outcomes)
    head = (
        "# Seeded faults\n\n"
        f"Made by `python tests/mutations.py --write`: {caught} of {len(outcomes)} faults of "
        "`tests/faults.py` are noticed.\n\n"
        "| fault | file | test that noticed | seconds |\n|---|---|---|---|\n"
    )
    return head + "".join(line(one) + "\n" for one in outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-k", default="", metavar="WORD", help="only these")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="at a time [2]")
    parser.add_argument("--limit", type=float, default=120, metavar="S", help="of a fault [120 s]")
    parser.add_argument("--all-tests", action="store_true", help="all tests for survivors")
    parser.add_argument("--unchecked", action="store_true", help="not first without a fault")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    asked = parser.parse_args()
    faults = [one for one in FAULTS if asked.k in f"{one.name} {one.file}"]
    if found := stale(faults):
        print(*found, sep="\n", file=sys.stderr)
        return 1
    outcomes = run(faults, asked.jobs, asked.limit, asked.all_tests, not asked.unchecked)
    if asked.write:
        TABLE.write_text(table(outcomes))
    survivors = [one.fault.name for one in outcomes if not one.caught_by]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} faults are noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
