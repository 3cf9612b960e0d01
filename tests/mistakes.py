"""Mistakes to be made by tests: one `Case` each, and what makes its input.

The tables are in bad_*.py; test_bad_inputs.py runs them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mlx_mtp.hub import BUNDLED

TINY = Path(__file__).parent / "data" / "pairs"
POCKET = BUNDLED["pocket"].parent

TARGET, ASSISTANT = Path("pair/target"), Path("pair/assistant")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHAT = ("chat", "pair/target", "-p", "Hello")
CONFIG, DRAFTERS_CONFIG = TARGET / "config.json", ASSISTANT / "config.json"
GENERATION, JINJA = TARGET / "generation_config.json", TARGET / "chat_template.jinja"
TOKENS, TOKENS_CONFIG = TARGET / "tokenizer.json", TARGET / "tokenizer_config.json"


class Case(NamedTuple):
    """One mistake and what the program makes of it.

    Attributes:
        code: exit code.
        error: what stderr has behind ``error: ``, in full; ``{here}`` is the working directory and
            ``{any}`` any text, where a library has its say.
        hint: the line below.
        make: makes the input in the working directory, which is empty.
        command: the command line, without the program's name.
        environment: variables that are set; None removes one.
        stdin: what is piped in.
    """

    code: int
    error: str
    hint: str
    make: Callable[[], object] = lambda: None
    command: tuple[str, ...] = CHAT
    environment: Mapping[str, str | None] = MappingProxyType({})
    stdin: bytes = b""


def tiny(*changes: Callable[[], object], pair: str = "dense") -> Callable[[], None]:
    """A copy of a pair of some kilobytes, without a tokenizer, that is then changed."""
    return lambda: _copied(TINY / pair, changes)


def pocket(*changes: Callable[[], object]) -> Callable[[], None]:
    """The same of the bundled pair, which can answer."""
    return lambda: _copied(POCKET, changes)


def _copied(pair: Path, changes: tuple[Callable[[], object], ...]) -> None:
    for half in ("target", "assistant"):
        shutil.copytree(pair / half, Path("pair") / half)
    for change in changes:
        change()


def edit(file: Path, scope: str | None = None, **values: Any) -> Callable[[], None]:
    """Set keys of a JSON file, in one of its objects; ... takes a key out."""

    def change() -> None:
        document = json.loads(file.read_bytes())
        place = document if scope is None else document[scope]
        for key, value in values.items():
            if value is ...:
                del place[key]
            else:
                place[key] = value
        file.write_text(json.dumps(document))

    return change


def write(file: Path | str, content: bytes | str | object) -> Callable[[], None]:
    """Put a file there: bytes, a text, or JSON."""

    def change() -> None:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))

    return change


def remove(*files: Path) -> Callable[[], None]:
    return lambda: [file.unlink() for file in files]


def rename(file: Path, name: str) -> Callable[[], object]:
    return lambda: file.rename(file.with_name(name))


def cut(file: Path, size: int) -> Callable[[], None]:
    """Keep the first bytes of a file, or, below 0, all but the last ones."""
    return lambda: file.write_bytes(file.read_bytes()[:size]) and None


def grow(file: Path, size: int) -> Callable[[], None]:
    """A file of that many bytes that takes no room on the disk."""
    return lambda: os.truncate(file, size)


def link(file: Path, target: str) -> Callable[[], None]:
    """A symbolic link in the place of a file."""

    def change() -> None:
        file.unlink(missing_ok=True)
        file.symlink_to(target)

    return change


def header(text: bytes | object, length: int | None = None) -> bytes:
    """A safetensors file of a header and 24 bytes of data."""
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(24)


def entry(dtype: str = "F32", shape: object = (6,), offsets: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensors(change: Callable[[dict[str, Any]], object], half: Path = TARGET) -> Callable[[], None]:
    """Change the tensors of a weight file."""

    def rewrite() -> None:
        import mlx.core as mx

        weights = dict(mx.load(str(half / WEIGHTS)))
        change(weights)
        mx.save_safetensors(str(half / WEIGHTS), weights)

    return rewrite


def resized(name: str) -> Callable[[], None]:
    import mlx.core as mx

    return tensors(lambda w: w.update({name: mx.zeros((3, 5))}))


def chat(*options: str) -> tuple[str, ...]:
    return ("chat", "pocket", "-p", "Hello", *options)


def batch(*options: str) -> tuple[str, ...]:
    return ("batch", "in.jsonl", "-o", "out.jsonl", "--model", "pocket", *options)


def convert(*options: str) -> tuple[str, ...]:
    return ("convert", "pocket", "-o", "out", *options)


def bench(*options: str) -> tuple[str, ...]:
    return ("bench", "pocket", *options)


def both(*makes: Callable[[], object]) -> Callable[[], object]:
    return lambda: [make() for make in makes]


IN = write("in.jsonl", '{"prompt": "Spell a."}\n')
