"""Fixtures of the unit tests: an empty hub cache, a hub on the loopback, inputs of a batch."""

from pathlib import Path

import pytest
from hubs import serving
from huggingface_hub import constants
from inputs import Write


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache; the client is offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def hub(cache, monkeypatch):
    """The loopback hub, with the client online."""
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file and return its path: ``write("a.txt", b"...")``."""

    def file(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    return file
