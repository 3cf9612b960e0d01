"""Files of our own, written as a whole. Owns: putting one in the place of another, and removing
what a process left that was killed while it did.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

SWEPT_AFTER_SECONDS = 60
"""Age from which a file that nobody is writing was left by a process that was killed."""

_PARTIAL = re.compile(r"\..+\.json\.[0-9a-f]{8}")


def replace_text(path: Path, text: str, *, private: bool = False, synced: bool = True) -> None:
    """Put a text in the place of a file, as a whole. Raises OSError; the file is then as it was.

    Args:
        private: only this user may read it.
        synced: wait until it is on the disk.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        mode = 0o600 if private else 0o666
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "w", encoding="utf-8", errors="surrogatepass") as out:
            with suppress(OSError):  # some network disks have no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            out.write(text)
            out.flush()
            if synced:
                os.fsync(descriptor)
            os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what `replace_text` left in a folder of ours when its process was killed. What is
    being written is locked, or so new that it will be in a moment."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if _PARTIAL.fullmatch(entry.name):
                with suppress(OSError):
                    _remove_if_left(Path(entry.path))


def _remove_if_left(partial: Path) -> None:
    if time.time() - partial.stat().st_mtime < SWEPT_AFTER_SECONDS:
        return
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial.unlink()
    finally:
        os.close(descriptor)
