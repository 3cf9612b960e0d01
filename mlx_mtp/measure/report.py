"""What a measurement says. Owns: comparisons between cells, the verdict in words, the document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mlx_mtp.llm import LLM
from mlx_mtp.measure.bench import BenchOptions
from mlx_mtp.measure.cell import Cell, Depth, Drafts
from mlx_mtp.measure.experts import ExpertTiming
from mlx_mtp.measure.machine import Machine
from mlx_mtp.measure.prompts import PromptSet
from mlx_mtp.model.experts import ExpertStrategy

SCHEMA = 1
UNEVEN = 1.5
"""Mean over median seconds of a depth's rounds from which on figures are not to be relied on."""
NEAR = 0.95
"""Share of the fastest depth's speed from which on auto came near it."""


@dataclass(frozen=True)
class Subject:
    """What was measured.

    Attributes:
        model, drafter: names; no drafter: None.
        quantization: MLX's of both, None for what is not quantized.
        dtype: of the activations.
    """

    model: str
    drafter: str | None
    quantization: dict[str, dict[str, Any] | None]
    dtype: str

    @classmethod
    def of(cls, llm: LLM) -> Subject:
        drafter = None if llm.drafter is None else llm.drafter.config.quantization
        return cls(
            llm.model_name,
            llm.drafter_name,
            {"target": _scheme(llm.target.config.quantization), "drafter": _scheme(drafter)},
            str(llm.target.dtype).rpartition(".")[2],
        )

    def __str__(self) -> str:
        """For example ``google/gemma-4-E4B-it (4 bit) with google/gemma-4-E4B-it-assistant``."""
        target = self.quantization["target"]
        how = self.dtype if target is None else f"{target.get('bits')} bit"
        drafter = f"with {self.drafter}" if self.drafter else "without a drafter"
        return f"{self.model} ({how}) {drafter}"


@dataclass(frozen=True)
class Report:
    """All that was measured.

    Attributes:
        cells: by rows and depth.
        experts: times of the target's experts, where it has some.
        strategy: how they were run.
        interrupted: the plan was not run to its end.
    """

    subject: Subject
    machine: Machine
    versions: dict[str, str | None]
    options: BenchOptions
    prompts: PromptSet
    cells: tuple[Cell, ...]
    experts: tuple[ExpertTiming, ...]
    strategy: ExpertStrategy
    interrupted: bool

    @property
    def label(self) -> str | None:
        """What has to stand beside every figure of a replay; None for real drafts."""
        if self.options.replay is None:
            return None
        shares = ", ".join(f"{share:g}" for share in self.options.replay)
        cost = "the drafter's time is in" if self.subject.drafter else "no drafter's time is in"
        return f"replayed acceptance {shares}; {cost}"

    @property
    def rows(self) -> list[int]:
        """Numbers of rows that were measured."""
        return sorted({cell.rows for cell in self.cells})

    def cell(self, rows: int, depth: Depth) -> Cell | None:
        found = (cell for cell in self.cells if (cell.rows, cell.depth) == (rows, depth))
        return next(found, None)

    def speed_up(self, cell: Cell) -> float | None:
        """Over plain decoding of as many rows: the median over the repeats of both."""
        plain = self.cell(cell.rows, 0)
        return None if plain is None else _ratio(cell, plain)

    def round_cost(self, cell: Cell) -> float | None:
        """Its rounds' seconds in plain rounds of as many rows."""
        plain = self.cell(cell.rows, 0)
        if plain is None or not plain.round_seconds or cell.round_seconds is None:
            return None
        return cell.round_seconds / plain.round_seconds

    def fastest(self, rows: int) -> Cell | None:
        """The fixed depth of the highest speed, 0 included."""
        cells = [
            cell
            for cell in self.cells
            if cell.rows == rows and cell.depth != "auto" and cell.tokens_per_second is not None
        ]
        return max(cells, key=lambda cell: self.speed_up(cell) or 0.0, default=None)

    def verdict(self) -> list[str]:
        """One sentence for each number of rows."""
        return [self._verdict(rows) for rows in self.rows]

    def _verdict(self, rows: int) -> str:
        name = "1 row" if rows == 1 else f"{rows} rows"
        best, plain, auto = self.fastest(rows), self.cell(rows, 0), self.cell(rows, "auto")
        if best is None or plain is None or not best.tokens_per_second or not _speeds(plain):
            return f"{name}: not enough was measured to compare."
        drafts = [cell for cell in self.cells if cell.rows == rows and cell.depth != 0]
        if not drafts:
            return f"{name}: {best.tokens_per_second:.0f} tok/s; nothing drafted, so there is "
            "nothing to compare."
        if best.depth == 0:
            text = f"no fixed depth beats plain decoding, {best.tokens_per_second:.0f} tok/s"
        else:
            gain = self.speed_up(best) or 0.0
            text = (
                f"depth {best.depth} is fastest, {best.tokens_per_second:.0f} tok/s and "
                f"{gain:.2f} times plain decoding"
            )
            if min(_speeds(best)) <= max(_speeds(plain)):
                text += ", but the runs of the two overlap"
        return f"{name}: {text}{self._of_auto(auto, best)}."

    def _of_auto(self, auto: Cell | None, best: Cell) -> str:
        share = None if auto is None else _ratio(auto, best)
        if share is None:
            return ""
        if share >= 1:
            word = "was faster still" if share > 2 - NEAR else "was as fast"
        else:
            word = "came near it" if share >= NEAR else "fell short of it"
        return f"; auto {word} ({100 * share:.0f} %)"

    def warnings(self) -> list[str]:
        """What the figures do not show by themselves, one sentence each."""
        found = []
        differing = [cell for cell in self.cells if cell.differing]
        if differing:
            worst = max(differing, key=lambda cell: (cell.differing or 0) / cell.prompts)
            found.append(
                f"Answers differ from plain decoding's at {len(differing)} of {len(self.cells)} "
                f"places, most at {_place(worst)}: {worst.differing} of {worst.prompts}. On a GPU "
                "nearly tied tokens can flip; on a CPU this is an error."
            )
        found += self._disturbed()
        found += [
            f"With {rows} rows no more than {most} decoded together, for lack of memory."
            for rows in self.rows
            if (most := max(cell.most_rows for cell in self.cells if cell.rows == rows)) < rows
        ]
        return found

    def _disturbed(self) -> list[str]:
        """A sentence where rounds of one depth took so unequally long that something else must
        have been at work."""
        cells = [cell for cell in self.cells if cell.depth != "auto" and cell.round_seconds]
        worst = max(cells, key=_unevenness, default=None)
        if worst is None or _unevenness(worst) < UNEVEN:
            return []
        return [
            f"Something else kept the machine busy: at {_place(worst)} the mean round took "
            f"{_unevenness(worst):.1f} times as long as the median one. Do not rely on these "
            "figures."
        ]

    def document(self) -> dict[str, Any]:
        """Everything, for programs; seconds, bytes, and tokens per second."""
        parameters = asdict(self.options)
        del parameters["replay"]
        parameters |= {"prompts": self.prompts.source}
        replayed = None
        if self.options.replay is not None:
            replayed = {
                "acceptance": list(self.options.replay),
                "drafter_time": self.subject.drafter is not None,
            }
        return {
            "schema": SCHEMA,
            "versions": self.versions,
            "machine": asdict(self.machine),
            **asdict(self.subject),
            "parameters": parameters,
            "replayed": replayed,
            "interrupted": self.interrupted,
            "experts": self._experts_document(),
            "cells": [rounded(self._cell_document(cell)) for cell in self.cells],
            "verdict": self.verdict(),
            "warnings": self.warnings(),
        }

    def _experts_document(self) -> dict[str, Any] | None:
        """How the experts were run, and the seconds of one layer's by strategy."""
        if not self.experts:
            return None
        timings = [
            {
                "tokens": one.tokens,
                "pairs": one.pairs,
                "distinct": one.distinct,
                "seconds": [
                    {**how._asdict(), "seconds": seconds} for how, seconds in one.seconds.items()
                ],
            }
            for one in self.experts
        ]
        return {"strategy": self.strategy._asdict(), "timings": rounded(timings)}

    def _cell_document(self, cell: Cell) -> dict[str, Any]:
        values = asdict(cell)
        drafts = _drafts_document(values.pop("drafts"), cell.drafts)
        kinds = values.pop("kinds")
        for kind, figures in cell.kinds.items():
            kinds[kind] |= _drafts_document(kinds[kind].pop("drafts"), figures.drafts)
        values["tokens_per_second_by_run"] = values.pop("by_run")
        values["end_to_end_tokens_per_second"] = values.pop("end_to_end")
        values["rounds_by_depth"] = values.pop("depths")
        values["differing_prompts"] = values.pop("differing")
        return {
            **values,
            "speed_up": self.speed_up(cell),
            "round_cost": self.round_cost(cell),
            "gigabytes_per_second": cell.bytes_per_second and cell.bytes_per_second / 1e9,
            **drafts,
            "kinds": kinds,
        }


def _speeds(cell: Cell) -> list[float]:
    return [speed for speed in cell.by_run if speed is not None]


def _ratio(cell: Cell, other: Cell) -> float | None:
    """How much faster one is: the median over the repeats that both have figures of."""
    pairs = zip(cell.by_run, other.by_run, strict=False)
    ratios = [own / its for own, its in pairs if own is not None and its is not None]
    return median(ratios) if ratios else None


def _drafts_document(counts: dict[str, Any], drafts: Drafts) -> dict[str, Any]:
    return {
        "acceptance": drafts.shares,
        "tried_by_position": counts["tried"],
        "kept_by_position": counts["kept"],
    }


def _place(cell: Cell) -> str:
    depth = "auto" if cell.depth == "auto" else f"depth {cell.depth}"
    return f"{depth} with {cell.rows} row{'s' if cell.rows > 1 else ''}"


def _unevenness(cell: Cell) -> float:
    return (cell.mean_round_seconds or 0.0) / (cell.round_seconds or 1.0)


def _scheme(block: dict[str, Any] | None) -> dict[str, Any] | None:
    """A quantization block without what it says about single modules."""
    return block and {key: value for key, value in block.items() if not _is_override(value)}


def _is_override(value: Any) -> bool:
    return isinstance(value, dict | bool)


def rounded(value: Any) -> Any:
    """A document with six digits of each number; more would be noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value
