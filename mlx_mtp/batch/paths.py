"""Files of a batch. Owns: which paths can be input and OUTPUT, OUTPUT put in place as a whole, and
what the system's errors mean in this package's words.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import TextIO

from mlx_mtp.batch.sources import TEXT_SUFFIXES
from mlx_mtp.errors import MlxMtpError, ResourceError, UsageError

AGAIN = "run the same command again; finished rows are kept."

_DEVICES = ("/dev/std", "/dev/fd/", "/proc/")
_ANOTHER = "Choose another output."


def journal_path(output: Path) -> Path:
    """Where the journal of an OUTPUT stands: beside it, its name and ``.journal``.

    Beside the file itself where OUTPUT is a link, so that all its names have one journal.
    """
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + ".journal")


def check_paths(source: Path, output: Path) -> None:
    """Raises UsageError where writing `output` or its journal would overwrite the input.

    Nor may OUTPUT be a file that the next run would read as input, where `source` is a folder.
    """
    if _is_same(source, output):
        raise UsageError(f"{output} is both the input and the output.", _ANOTHER)
    if _is_same(source, journal_path(output)):
        raise UsageError(f"{source} is the journal of {output}.", "Choose another input.")
    if not source.is_dir():
        return
    folder = Path(os.path.realpath(source))
    names = {Path(os.path.realpath(output.parent), output.name), Path(os.path.realpath(output))}
    is_inside = any(n.suffix.lower() in TEXT_SUFFIXES and folder in n.parents for n in names)
    if is_inside or (output.exists() and any(_is_same(f, output) for f in _read_files(source))):
        raise UsageError(
            f"{output} would be read as input: it is in {source}.",
            "Choose an output in another folder.",
        )


def check_output(output: Path) -> None:
    """Raises UsageError where `output` cannot be written, or not be replaced as a whole."""
    try:
        mode = os.stat(output).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise file_error(output, error) from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"{output} is a folder.", "Name a file in it.")
    if not stat.S_ISREG(mode) or os.path.abspath(output).startswith(_DEVICES):
        raise UsageError(f"{output} is not a regular file.", _ANOTHER)
    target = Path(os.path.realpath(output))
    for folder in (output.parent, target.parent):
        if not folder.is_dir():
            raise UsageError(f"The folder {folder} does not exist.", "Make it first.")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UsageError(f"The folder {folder} cannot be written to.", _ANOTHER)
    if target.exists() and not os.access(target, os.W_OK):
        raise UsageError(f"{output} is write-protected.", _ANOTHER)


def replace_output(output: Path, write: Callable[[TextIO], None]) -> None:
    """Put what `write` writes in the place of `output`, all of it or nothing.

    The text is UTF-8 and its newlines stay as written; a lone surrogate becomes ``\\udc80``, which
    JSON reads back. A link stays and what it leads to is replaced. Raises UsageError or
    ResourceError; on any error `output` is as it was.
    """
    check_output(output)
    target = Path(os.path.realpath(output))
    number = sha256(os.fsencode(target.name)).hexdigest()[:8]
    partial = target.with_name(f".{target.name[:50]}.{number}.partial")
    try:
        # of a run that was killed while it wrote; no other one writes, as the journal is locked
        partial.unlink(missing_ok=True)
        # not tempfile: its files are private, where a new output gets the mode of the umask
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace", newline="") as out:
            if target.exists():
                os.fchmod(descriptor, stat.S_IMODE(target.stat().st_mode))
            write(out)
            out.flush()
            os.fsync(descriptor)
        os.replace(partial, target)
        sync_folder(target.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise file_error(output, error) from error
        raise


def sync_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def file_error(path: Path, error: OSError, doing: str = "written") -> MlxMtpError:
    """What the system said of a file, in this package's words."""
    message = f"{path} cannot be {doing}: {error.strerror or error}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(message, f"Free some space and {AGAIN}")
    if error.errno == errno.EIO:
        return ResourceError(message, f"Check the disk and {AGAIN}")
    return UsageError(message, _ANOTHER)


def _is_same(one: Path, other: Path) -> bool:
    """Whether two names lead to one file, also through links, or would where it is absent."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def _read_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES)
