"""Fixtures of the unit tests: an empty hub cache, a hub on the loopback, inputs of a batch."""

import threading
from pathlib import Path

import pytest
from hubs import Hub
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
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file and return its path: ``write("a.txt", b"...")``."""

    def file(name: str, data: bytes) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    return file
