"""Fixtures shared by all tests: the pairs, loaded once per session and dtype."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from pairs import FAMILIES, OWN_PAIRS, PAIRS, Loader, pair_id

from mlx_mtp.llm import LLM
from mlx_mtp.loading import load

# Nothing that a test learns is kept, and nothing that was kept is used; processes inherit it.
_cache = tempfile.TemporaryDirectory(prefix="mlx-mtp-tests-")
os.environ["MLX_MTP_CACHE"] = _cache.name

# For those who want to know only whether a property fails: `pytest --hypothesis-profile=unshrunk`.
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])


# A run in the background ignores SIGINT and would hand that down to the programs it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def load_pair() -> Loader:
    """A pair by its folder, loaded once: ``load_pair(path, dtype="float32", drafter="auto")``."""
    loaded: dict[tuple[object, ...], LLM] = {}

    def get(path: Path, dtype: str = "float32", **options: object) -> LLM:
        key = (path, dtype, json.dumps(options, sort_keys=True, default=str))
        if key not in loaded:
            loaded[key] = load(path / "target", dtype=dtype, **options)  # type: ignore[arg-type]
        return loaded[key]

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `pair` once for each pair.

    A module whose tests hardly depend on the family names some in FAMILIES_BY_DEFAULT; the others
    are slow there.
    """
    if "pair" in metafunc.fixturenames:
        default = getattr(metafunc.module, "FAMILIES_BY_DEFAULT", FAMILIES)
        pairs = [
            pair
            if pair.name in default or pair.parent != OWN_PAIRS
            else pytest.param(pair, marks=pytest.mark.slow)
            for pair in PAIRS
        ]
        metafunc.parametrize("pair", pairs, ids=map(pair_id, PAIRS))
