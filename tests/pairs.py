"""The small golden pairs that tests run on: where they are and what their golden files say.

Knows the layout that tests/golden/README.md describes, and neither torch nor mlx. The folder
named by the environment variable MLX_MTP_EXTRA_PAIRS may hold more pairs of the same layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mlx_mtp import LLM

Loader = Callable[..., "LLM"]
"""The fixture `load_pair`: ``load_pair(path, dtype="float32", drafter="auto")``."""

OWN_PAIRS = Path(__file__).parent / "data" / "pairs"
FAMILIES = ("e2b", "moe", "dense", "unified")


def find_pairs() -> list[Path]:
    """Our own pairs in the order of FAMILIES, then those of MLX_MTP_EXTRA_PAIRS by name.

    Raises FileNotFoundError where that folder holds no pair: a typo must not skip tests.
    """
    pairs = [OWN_PAIRS / name for name in FAMILIES]
    if folder := os.environ.get("MLX_MTP_EXTRA_PAIRS"):
        extra = sorted(path.parent for path in Path(folder).glob("*/golden.json"))
        if not extra:
            raise FileNotFoundError(f"MLX_MTP_EXTRA_PAIRS: no */golden.json in {folder}")
        pairs += extra
    return pairs


PAIRS: list[Path] = find_pairs()


def pair_id(path: Path) -> str:
    """The test id of a pair: its name, with the parent folder's in front where it is not ours."""
    return path.name if path.parent == OWN_PAIRS else f"{path.parent.name}-{path.name}"


class RefRound(NamedTuple):
    """One round of the cache-free loop.

    committed: tokens whose keys and values the drafter may read, which is also the position of
    the bonus token; draft: the k tokens drafted after it; accepted: how many the target kept.
    """

    committed: int
    draft: tuple[int, ...]
    accepted: int


@dataclass(frozen=True)
class GoldenRow:
    """One prompt's golden ids. `plain`, `mtp` and `ref` are equal, and no EOS stops them."""

    plen: int
    first_bonus: int
    draft0: tuple[int, ...]
    plain: tuple[int, ...]
    mtp: tuple[int, ...]
    ref: tuple[int, ...]
    ref_rounds: tuple[RefRound, ...]
    min_top2_gap: float


@dataclass(frozen=True)
class Golden:
    """The golden outputs of one pair."""

    path: Path
    pair: str
    window: int
    k: int
    prompts: tuple[tuple[int, ...], ...]
    rows: tuple[GoldenRow, ...]

    @property
    def target(self) -> Path:
        return self.path / "target"

    @property
    def assistant(self) -> Path:
        return self.path / "assistant"

    def array(self, kind: str, row: int) -> np.ndarray | None:
        """golden.npz's `{kind}_{row}`, read on first use; None where the pair stores none.

        kind: target_logits, target_hidden, seq_logits, draft_logits or draft_hidden.
        """
        return _arrays(self.path).get(f"{kind}_{row}")

    def rows_with(self, kind: str) -> list[int]:
        """The rows that have an array of this kind, in order."""
        return [row for row in range(len(self.rows)) if self.array(kind, row) is not None]


@lru_cache
def load_golden(path: Path) -> Golden:
    """Reads `path/golden.json`; keys that no test needs are passed over."""
    data = json.loads((path / "golden.json").read_text())
    return Golden(
        path=path,
        pair=data["pair"],
        window=data["window"],
        k=data["k"],
        prompts=tuple(tuple(prompt) for prompt in data["prompts"]),
        rows=tuple(_row(row) for row in data["rows"]),
    )


def _row(row: dict[str, Any]) -> GoldenRow:
    return GoldenRow(
        plen=row["plen"],
        first_bonus=row["first_bonus"],
        draft0=tuple(row["draft0"]),
        plain=tuple(row["plain"]),
        mtp=tuple(row["mtp"]),
        ref=tuple(row["ref"]),
        ref_rounds=tuple(
            RefRound(r["committed"], tuple(r["draft"]), r["accepted"]) for r in row["ref_rounds"]
        ),
        min_top2_gap=row["min_top2_gap"],
    )


@lru_cache
def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path / "golden.npz") as archive:
        return {name: archive[name] for name in archive.files}
