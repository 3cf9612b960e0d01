"""What was measured of one number of rows and one depth. Owns: from runs to figures.

Speeds count rounds in which all rows were live and nothing was prefilled beside; counts are over
all rounds. Knows nothing of engines and of how the figures are shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from mlx_mtp.measure.run import Round, Run
from mlx_mtp.types import MAX_DEPTH

Depth = int | Literal["auto"]


@dataclass(frozen=True)
class Drafts:
    """Drafts by position in their block, index 0 the first; those past an answer's end, or past
    one that was rejected, were never judged and do not count.

    Attributes:
        tried: drafts judged: all before them were kept.
        kept: of those, how many.
    """

    tried: tuple[int, ...]
    kept: tuple[int, ...]

    @classmethod
    def of(cls, rounds: Iterable[Round], prompts: frozenset[int] | None = None) -> Drafts:
        """Of rounds; only those of some prompts where they are given."""
        tried, kept = [0] * MAX_DEPTH, [0] * MAX_DEPTH
        for one in rounds:
            for row in one.rows:
                if prompts is not None and row.prompt not in prompts:
                    continue
                is_cut = row.tokens <= row.kept
                kept_here = min(row.kept, row.tokens)
                for place in range(kept_here):
                    kept[place] += 1
                judged = kept_here if is_cut else min(row.kept + 1, one.depth)
                for place in range(judged):
                    tried[place] += 1
        used = sum(count > 0 for count in tried)
        return cls(tuple(tried[:used]), tuple(kept[:used]))

    @property
    def shares(self) -> list[float]:
        """Chance that at least 1, 2, ... drafts of a block are kept."""
        reach, shares = 1.0, []
        for tried, kept in zip(self.tried, self.kept, strict=True):
            reach *= kept / tried
            shares.append(reach)
        return shares


@dataclass(frozen=True)
class KindFigures:
    """One kind of prompt within a cell; speeds with one row only, else None."""

    prompts: int
    tokens_per_second: float | None
    tokens_per_forward: float
    drafts: Drafts


@dataclass(frozen=True)
class Cell:
    """Figures of one number of rows and one depth; medians over runs where not said otherwise.

    Attributes:
        rows, depth: as asked for.
        runs: measured.
        tokens_per_second: while decoding, all rows together; None where so many rows never
            decoded together.
        end_to_end: tokens per second of whole runs: prefill, joining and leaving rows included.
        by_run: tokens_per_second of each run; None where it had no such round.
        tokens_per_forward: tokens of a row from one target forward.
        round_seconds, mean_round_seconds: of rounds of all rows, over all runs: their median and
            mean.
        depths: rounds by depth, over all runs.
        parked: why auto decoded plainly at the end.
        first_token_seconds: from admission to first token, over prompts and runs; with one row.
        peak_bytes: of MLX's allocator, weights included; the largest.
        round_bytes, bytes_per_second: what those rounds had to read, see measure.bandwidth: the
            mean of a round, and all of it over all their seconds.
        most_rows: most rows that decoded together.
        prompts, tokens, rounds, row_rounds, target_forwards, drafter_forwards, drafted, accepted:
            counts of the first run, as in RunStats.
        drafts: by position, over all runs.
        differing: prompts of which any run's ids differ from the plain ones; None without those.
        kinds: by kind of prompt.
    """

    rows: int
    depth: Depth
    runs: int
    tokens_per_second: float | None
    end_to_end: float
    by_run: tuple[float | None, ...]
    tokens_per_forward: float
    round_seconds: float | None
    mean_round_seconds: float | None
    depths: dict[int, int]
    parked: str | None
    first_token_seconds: float | None
    peak_bytes: int
    round_bytes: float | None
    bytes_per_second: float | None
    most_rows: int
    prompts: int
    tokens: int
    rounds: int
    row_rounds: int
    target_forwards: int
    drafter_forwards: int
    drafted: int
    accepted: int
    drafts: Drafts
    differing: int | None
    kinds: dict[str, KindFigures]


def make_cell(
    rows: int,
    depth: Depth,
    runs: Sequence[Run],
    kinds: Sequence[str],
    plain: Sequence[Sequence[int]] | None,
    round_bytes: Callable[[int, int, int], int],
) -> Cell:
    """The figures of at least one run.

    Args:
        kinds: of the prompts, in their order.
        plain: the ids that plain decoding of as many rows produced; None: unknown.
        round_bytes: bytes of a round of (rows, depth, committed tokens of the longest row).
    """
    rounds = [one for run in runs for one in run.rounds]
    steady = [one for one in rounds if _is_steady(one, rows)]
    by_run = tuple(_speed(run.rounds, rows) for run in runs)
    speeds = [speed for speed in by_run if speed is not None]
    read = sum(round_bytes(rows, one.depth, one.longest) for one in steady)
    first = runs[0].stats
    waits = [result.stats.first_token_seconds for run in runs for result in run.results]
    return Cell(
        rows=rows,
        depth=depth,
        runs=len(runs),
        tokens_per_second=median(speeds) if speeds else None,
        end_to_end=median(run.stats.tokens / run.seconds for run in runs),
        by_run=by_run,
        tokens_per_forward=_tokens_per_forward(rounds),
        round_seconds=median(one.seconds for one in steady) if steady else None,
        mean_round_seconds=fmean(one.seconds for one in steady) if steady else None,
        depths=dict(sorted(Counter(one.depth for one in rounds).items())),
        parked=runs[-1].parked,
        first_token_seconds=median(waits) if rows == 1 else None,
        peak_bytes=max(run.stats.peak_bytes for run in runs),
        round_bytes=read / len(steady) if steady else None,
        bytes_per_second=read / sum(one.seconds for one in steady) if steady else None,
        most_rows=max((len(one.rows) for one in rounds), default=0),
        prompts=len(kinds),
        tokens=first.tokens,
        rounds=first.rounds,
        row_rounds=first.row_rounds,
        target_forwards=first.target_forwards,
        drafter_forwards=first.drafter_forwards,
        drafted=first.drafted,
        accepted=first.accepted,
        drafts=Drafts.of(rounds),
        differing=None if plain is None else _differing(runs, plain),
        kinds=_by_kind(rows, runs, kinds),
    )


def _is_steady(one: Round, rows: int) -> bool:
    return one.is_alone and len(one.rows) == rows


def _speed(rounds: Iterable[Round], rows: int) -> float | None:
    steady = [one for one in rounds if _is_steady(one, rows)]
    seconds = sum(one.seconds for one in steady)
    return sum(one.tokens for one in steady) / seconds if seconds else None


def _tokens_per_forward(rounds: Iterable[Round], prompts: frozenset[int] | None = None) -> float:
    tokens = [
        row.tokens for one in rounds for row in one.rows if prompts is None or row.prompt in prompts
    ]
    return sum(tokens) / max(1, len(tokens))


def _differing(runs: Sequence[Run], plain: Sequence[Sequence[int]]) -> int:
    return sum(
        any(list(run.results[place].token_ids) != list(ids) for run in runs)
        for place, ids in enumerate(plain)
    )


def _by_kind(rows: int, runs: Sequence[Run], kinds: Sequence[str]) -> dict[str, KindFigures]:
    places: dict[str, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    rounds = [one for run in runs for one in run.rounds]
    figures = {}
    for kind, numbers in places.items():
        chosen = frozenset(numbers)
        speeds = []
        if rows == 1:
            own = [[one for one in run.rounds if one.rows[0].prompt in chosen] for run in runs]
            speeds = [speed for part in own if (speed := _speed(part, 1)) is not None]
        figures[kind] = KindFigures(
            prompts=len(numbers),
            tokens_per_second=median(speeds) if speeds else None,
            tokens_per_forward=_tokens_per_forward(rounds, chosen),
            drafts=Drafts.of(rounds, chosen),
        )
    return figures
