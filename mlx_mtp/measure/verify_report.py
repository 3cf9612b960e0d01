"""What a verification says. Owns: its counts, the verdict in words, the document.

A fault is a difference that rounding does not explain, any difference in exact mode, and logits of
blocks or batches that lie further from those of plain steps than rounding explains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mlx_mtp.measure.geometry import CAP, Geometry, Noise
from mlx_mtp.measure.machine import Machine
from mlx_mtp.measure.probe import Probed
from mlx_mtp.measure.prompts import BenchPrompt
from mlx_mtp.measure.report import Subject, rounded
from mlx_mtp.measure.verify import Compared, VerifyOptions, Way

SCHEMA = 1


class Count(NamedTuple):
    """Answers of one way at one temperature, by how they compare with their references."""

    way: Way
    temperature: float
    equal: int
    near_ties: int
    faults: int

    @property
    def answers(self) -> int:
        return self.equal + self.near_ties + self.faults


class Cost(NamedTuple):
    """Seconds for the same answers, alone, without and with exact mode."""

    depth: int | str
    answers: int
    seconds: float
    exact_seconds: float


@dataclass(frozen=True)
class VerifyReport:
    """All that was found.

    Attributes:
        source: of the prompts.
        noise: None where it was not measured yet.
        seconds: as `Verification` has them.
        interrupted: the plan was not run to its end.
    """

    subject: Subject
    machine: Machine
    versions: dict[str, str | None]
    options: VerifyOptions
    prompts: tuple[BenchPrompt, ...]
    source: str
    probed: tuple[Probed, ...]
    noise: Noise | None
    compared: tuple[Compared, ...]
    seconds: dict[Way, dict[tuple[float, int], float]]
    interrupted: bool

    # Counts.

    @property
    def ways(self) -> list[Way]:
        """Those that anything was compared of."""
        return list(dict.fromkeys(one.way for one in self.compared))

    def count(self, way: Way, temperature: float) -> Count:
        found = [one for one in self.compared if (one.way, one.temperature) == (way, temperature)]
        parted = [one.parting for one in found if one.parting is not None]
        faults = sum(parting.fault is not None for parting in parted)
        return Count(way, temperature, len(found) - len(parted), len(parted) - faults, faults)

    @property
    def partings(self) -> list[Compared]:
        """Answers that differ, faults first."""
        parted = [one for one in self.compared if one.parting is not None]
        return sorted(parted, key=lambda one: not _is_fault(one))

    @property
    def excessive(self) -> list[Geometry]:
        """Geometries whose logits differ by more than rounding."""
        return [] if self.noise is None else self.noise.excessive

    @property
    def has_faults(self) -> bool:
        return bool(self.excessive) or any(map(_is_fault, self.partings))

    def costs(self) -> list[Cost]:
        """What exact mode costs, of plain and of drafted decoding where both were timed."""
        found = []
        for way, exact in self.seconds.items():
            plain = self.seconds.get(way._replace(exact=False), {})
            both = [key for key in exact if key in plain]
            if way.exact and both:
                sums = (sum(one[key] for key in both) for one in (plain, exact))
                found.append(Cost(way.depth, len(both), *sums))
        return found

    # Words.

    def verdict(self) -> list[str]:
        """One sentence for each thing that was looked at; the first is about drafting."""
        groups = {
            "drafted": [one for one in self.compared if one.way.depth != 0 and not one.way.exact],
            "batch": [one for one in self.compared if one.way.depth == 0 and not one.way.exact],
            "exact": [one for one in self.compared if one.way.exact],
        }
        lines = [self._drafted(groups["drafted"])]
        if groups["batch"]:
            lines.append(_judged(groups["batch"], "plain decoding alone", "plain in a batch"))
        if groups["exact"]:
            lines.append(_judged(groups["exact"], "plain decoding in it", "in exact mode"))
        for geometry in self.excessive:
            assert self.noise is not None
            lines.append(
                f"FAULT: the logits of {geometry} lie {self.noise.spreads[geometry].largest:.2g} "
                f"from those of a plain step; a changed last bit moves them by "
                f"{self.noise.shaken.largest:.2g}."
            )
        return lines

    def _drafted(self, compared: Sequence[Compared]) -> str:
        if not self.subject.drafter:
            return "There is no drafter, so nothing was drafted."
        if not compared:
            return "No drafted answers were compared yet."
        if any(one.parting for one in compared):
            return _judged(compared, "plain decoding")
        ways = len({one.way for one in compared})
        heats = len({one.temperature for one in compared})
        prompts = len({one.prompt for one in compared})
        parts = [_number(prompts, "prompt"), _number(ways, "way") + " of drafting"]
        if heats > 1:
            parts.append(f"{heats} temperatures")
        return f"Same text: {' x '.join(parts)}, {len(compared)} answers, all ids equal."

    def warnings(self) -> list[str]:
        """What the verdict does not say, one sentence each."""
        if self.machine.device != "cpu":
            return []
        probed = not all(one.is_equal for one in self.probed)
        noisy = self.noise is not None and self.noise.largest > 0
        if not (probed or noisy):
            return []
        what = "kernels give other bits" if probed else "logits differ"
        return [f"On a CPU {what} for several token rows than for one, which is not expected."]

    # For programs.

    def document(self) -> dict[str, Any]:
        """Everything; logits, scores and seconds."""
        counts = [
            self.count(way, temperature)
            for way in self.ways
            for temperature in self.options.temperatures
        ]
        return {
            "schema": SCHEMA,
            "versions": self.versions,
            "machine": asdict(self.machine),
            **asdict(self.subject),
            "parameters": {
                **asdict(self.options),
                "prompts": self.source,
                "prompt_count": len(self.prompts),
            },
            "interrupted": self.interrupted,
            "ways": [
                {
                    **count.way._asdict(),
                    **_without(count._asdict(), "way"),
                    "answers": count.answers,
                }
                for count in counts
                if count.answers
            ],
            "differences": [self._difference(one) for one in self.partings],
            "noise": rounded(self._noise()),
            "kernels": rounded([asdict(one) | {"equal": one.is_equal} for one in self.probed]),
            "exact_cost": rounded([cost._asdict() for cost in self.costs()]),
            "fault": self.has_faults,
            "verdict": self.verdict(),
            "warnings": self.warnings(),
        }

    def _difference(self, one: Compared) -> dict[str, Any]:
        parting = one.parting
        assert parting is not None
        values = asdict(parting)
        fault = values.pop("fault")
        return {
            **one.way._asdict(),
            "temperature": one.temperature,
            "prompt": self.prompts[one.prompt].text,
            **rounded(values),
            "plain_text": one.texts[0],
            "other_text": one.texts[1],
            "near_tie": fault is None,
            "fault": fault,
        }

    def _noise(self) -> dict[str, Any] | None:
        if self.noise is None:
            return None
        spreads = [
            {**geometry._asdict(), **spread._asdict()}
            for geometry, spread in self.noise.spreads.items()
        ]
        return {
            "positions": self.noise.positions,
            "last_bit_changed": self.noise.shaken._asdict(),
            "spreads": spreads,
            "cap": CAP,
            "rounding": self.noise.rounding,
        }


def _is_fault(one: Compared) -> bool:
    return one.parting is not None and one.parting.fault is not None


def _judged(compared: Sequence[Compared], reference: str, where: str = "") -> str:
    """What came of some answers, in a sentence."""
    faults = sum(map(_is_fault, compared))
    near = sum(one.parting is not None for one in compared) - faults
    answers = _number(len(compared), "answer")
    if faults:
        text = f"{faults} of {answers} {_verb('differ', faults)} from those of {reference}"
        if not compared[0].way.exact:
            text += " by more than a near tie"
        return f"FAULT: {where + ' ' if where else ''}{text}."
    begin = f"{where[0].upper()}{where[1:]}: " if where else ""
    if near:
        return (
            f"{begin}{near} of {answers} {_verb('part', near)} from those of {reference} at near "
            "ties; from there on the text is another of the same quality."
        )
    return f"{begin}{answers}, all ids equal."


def _verb(plural: str, count: int) -> str:
    return f"{plural}s" if count == 1 else plural


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
