"""What was learned of round costs, kept per machine, versions and pair. Owns: its file.

A file that is damaged, of another version or not writable is as good as none: what it holds is
measured again.
"""

from __future__ import annotations

import json
import logging
import os
import platform
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mtp.files import fingerprint
from mlx_mtp.whole_files import replace_text, sweep

CACHE_VARIABLE = "MLX_MTP_CACHE"
"""Environment variable that names the cache folder; the user's own by default."""

log = logging.getLogger("mlx_mtp")


class DepthTable:
    """The kept costs of one pair on this machine.

    Args:
        target, drafter: their folders.
        dtype: of the activations.
    """

    def __init__(self, target: Path, drafter: Path, dtype: str) -> None:
        about = [
            platform.machine(),
            str(mx.device_info().get("device_name")),
            str(mx.default_device()),
            version("mlx"),
            version("mlx-mtp"),
            dtype,
            fingerprint(target),
            fingerprint(drafter),
        ]
        name = sha256("\0".join(about).encode()).hexdigest()[:24]
        self.path = _folder() / f"{name}.json"

    def read(self) -> Any:
        """The document kept, or None."""
        try:
            return json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return None

    def write(self, document: dict[str, Any]) -> None:
        """Keep a document instead of the one there is, as a whole."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            sweep(self.path.parent)
            replace_text(self.path, json.dumps(document), synced=False)
        except OSError as error:
            log.info("Round costs are not kept: %s", error)


def kept_costs(target: Path, drafter: Path, dtype: str) -> Any:
    """As `DepthTable.read`; where nothing is kept of any pair, no weight file is opened for it."""
    if not any(_folder().glob("*.json")):
        return None
    return DepthTable(target, drafter, dtype).read()


def _folder() -> Path:
    return cache_folder() / "depth"


def cache_folder() -> Path:
    """Of all that is learned about this machine."""
    if own := os.environ.get(CACHE_VARIABLE):
        with suppress(RuntimeError):  # ~ stands for no known user
            return Path(own).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("mlx-mtp", appauthor=False)
