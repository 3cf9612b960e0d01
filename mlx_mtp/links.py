"""Symbolic links in a model's folder. Owns: which of them may be followed."""

from __future__ import annotations

import os
from pathlib import Path

from mlx_mtp.errors import ModelNotFoundError

_TEMPLATES = "additional_chat_templates"


def refuse_links_out(folder: Path) -> None:
    """Raises ModelNotFoundError where a file of a model is a link that leads out of its folder.

    Whoever made the folder could have other files of this machine read, copied and uploaded.
    Links to the blobs of a hub's cache are how it keeps its snapshots.
    """
    root = folder.resolve()
    for file in [*sorted(root.iterdir()), *sorted((root / _TEMPLATES).glob("*"))]:
        if file.is_symlink() and (not file.is_dir() or file.name == _TEMPLATES):
            try:
                end = file.resolve()
            except (OSError, RuntimeError):  # a link to itself
                end = Path(os.sep)
            cache = end.parent.parent.name
            is_blob = end.parent.name == "blobs" and cache.startswith("models--")
            if not (end.is_relative_to(root) or is_blob):
                shown = folder / file.relative_to(root)
                raise ModelNotFoundError(
                    f"{shown} is a link that leads out of its folder.", "Put the file itself there."
                )
