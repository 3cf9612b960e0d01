"""Whether drafting changes the text on this machine. Owns: the ways in which prompts are answered,
their order, and which answers are compared.

Every prompt is answered plainly and alone. Each way (draft depth, rows that decode together)
answers the same prompts, and its ids are compared with the plain ones; likewise in exact mode, with
those of plain decoding in it. Prompts are taken a few at a time through all ways, so that an
interruption leaves something to tell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

from mlx_mtp.answer import Answer
from mlx_mtp.decode.policy import Depth
from mlx_mtp.decode.sampling import RowSampling
from mlx_mtp.errors import UsageError, VerificationError
from mlx_mtp.llm import LLM
from mlx_mtp.measure.geometry import PLAIN, Geometry, Noise, measure_noise
from mlx_mtp.measure.judge import Judge, Parting
from mlx_mtp.measure.probe import Probed, probe
from mlx_mtp.measure.prompts import BenchPrompt, PromptSet
from mlx_mtp.types import EXACT_DEPTH, MAX_DEPTH, Request, SamplingParams

log = logging.getLogger("mlx_mtp")

GROUP = 8
"""Prompts that go through all ways before the next ones do."""
EXACT_PROMPTS = 8
"""Prompts that are answered in exact mode, where plain decoding costs what a verify does."""
WARM_UP_TOKENS = 4
LONG_EVERY = 6
"""Every so many built-in prompts one is long: several in one message."""


@dataclass(frozen=True)
class VerifyOptions:
    """What to compare.

    Attributes:
        rows: numbers of rows, each 1..MAX_ROWS.
        depths: draft depths, none of them 0; empty where nothing can draft.
        temperatures: 0 is greedy; at others each prompt has its number as its seed.
        max_tokens: per answer.
        positions: at least so many are compared between geometries, if there are.
    """

    rows: tuple[int, ...]
    depths: tuple[Depth, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    positions: int = 128


class Way(NamedTuple):
    """A way to decode: rows together, tokens drafted (0: plain), through one geometry or not."""

    rows: int
    depth: Depth
    exact: bool = False

    @property
    def geometry(self) -> Geometry:
        """Of its forwards; where the depth is chosen while decoding, the deepest one."""
        depth = MAX_DEPTH if self.depth == "auto" else self.depth
        return Geometry(self.rows, depth + 1)

    @property
    def reference(self) -> Way:
        """What it is compared with: plain decoding alone."""
        return Way(1, 0, self.exact)

    def __str__(self) -> str:
        drafts = "plain" if self.depth == 0 else f"depth {self.depth}"
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{drafts}, {rows}" + (", exact" if self.exact else "")


class Step(NamedTuple):
    """What is about to be done, in words, and how many answers there are by now."""

    what: str
    answers: int


@dataclass(frozen=True)
class Compared:
    """One answer beside its reference.

    Attributes:
        prompt: its number.
        parting: None: all ids are equal.
        texts: of the tokens where they part, the reference's first; empty for an end.
    """

    way: Way
    temperature: float
    prompt: int
    parting: Parting | None
    texts: tuple[str, str] = ("", "")


def chosen_prompts(prompts: PromptSet, count: int) -> tuple[BenchPrompt, ...]:
    """Of built-in prompts so many, some of them long: longer than sliding windows, and than what is
    prefilled at once."""
    short = iter(prompts.prompts * (count // len(prompts.prompts) + 1))
    texts = [prompt.text for prompt in prompts.prompts]
    chosen = []
    for number in range(count):
        if number % LONG_EVERY == LONG_EVERY // 2:
            turn = number // LONG_EVERY % len(texts)
            part = texts[turn:] if turn % 2 == 0 else texts[turn : turn + len(texts) // 3]
            chosen.append(BenchPrompt("long", "\n".join(part)))
        else:
            chosen.append(next(short))
    return tuple(chosen)


class Verification:
    """A verification under way.

    Args:
        llm: the pair.
        prompts: what it is asked.
        options: what to compare.

    Attributes:
        probed: which kernels give other bits for several token rows than for one.
        noise: how much rounding moves logits; None until it was measured.
        compared: all answers that were compared so far.
        seconds: of each answer that was made alone, by way, then temperature and prompt.

    Raises:
        UsageError: a prompt does not fit into the context.
    """

    def __init__(self, llm: LLM, prompts: Sequence[BenchPrompt], options: VerifyOptions) -> None:
        self.llm = llm
        self.prompts = tuple(prompts)
        self.options = options
        self.probed: list[Probed] = []
        self.noise: Noise | None = None
        self.compared: list[Compared] = []
        self.seconds: dict[Way, dict[tuple[float, int], float]] = {}
        self._ids = [
            llm.tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
            for prompt in prompts
        ]
        for number, ids in enumerate(self._ids, start=1):
            if len(ids) >= llm.context:
                raise UsageError(
                    f"Prompt {number} has {len(ids)} tokens and the model's context holds "
                    f"{llm.context}.",
                    "Shorten it.",
                )
        self._plain: dict[tuple[bool, float, int], list[int]] = {}
        self._answers = 0
        self._judge = Judge(llm.target, llm.defaults.suppress_tokens, self._known_noise)

    @property
    def ways(self) -> list[Way]:
        """All of them, references first; exact mode with one depth, as it has one geometry."""
        rows, depths = self.options.rows, self.options.depths
        ways = [Way(1, 0), *(Way(1, depth) for depth in depths if 1 in rows)]
        ways += [Way(many, depth) for many in rows if many > 1 for depth in (0, *depths)]
        ways += [Way(1, 0, True), *(Way(many, 0, True) for many in rows[-1:] if many > 1)]
        if depths:
            fixed = [depth for depth in depths if depth != "auto" and depth <= EXACT_DEPTH]
            ways += [Way(many, max(fixed, default=EXACT_DEPTH), True) for many in rows]
        return ways

    @property
    def total(self) -> int:
        """Answers of the whole plan."""
        counts = (len(self._asked(way, range(len(self.prompts)))) for way in self.ways)
        return len(self.options.temperatures) * sum(counts)

    def steps(self) -> Iterator[Step]:
        """Run the plan; each step is given before it is run. What was compared until an
        interruption is kept."""
        yield Step("kernels", 0)
        self.probed = probe(self.llm.target, self._ids[0])
        yield Step("warm-up", 0)
        self._warm_up()
        for first in range(0, len(self.prompts), GROUP):
            group = range(first, min(first + GROUP, len(self.prompts)))
            for temperature in self.options.temperatures:
                for way in self.ways:
                    for step in self._answer(way, temperature, self._asked(way, group)):
                        log.info("%s", step.what)
                        yield step
                    if self.noise is None:
                        yield Step("rounding noise", self._answers)
                        self._known_noise()

    def _asked(self, way: Way, prompts: range) -> range:
        """Which of these prompts are answered in this way."""
        return range(prompts.start, min(prompts.stop, EXACT_PROMPTS)) if way.exact else prompts

    def _warm_up(self) -> None:
        for way in self.ways:
            if way.rows == 1:
                params = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0)
                self._decode(way, [Request(token_ids=self._ids[0], params=params)])

    def _known_noise(self) -> Noise:
        """Measured over the first plain answers there are."""
        if self.noise is None:
            texts: list[tuple[list[int], list[int]]] = []
            for (_, _, number), answer in self._plain.items():
                if (left := self.options.positions - sum(len(ids) for _, ids in texts)) > 0:
                    texts.append((self._ids[number], answer[:left]))
            geometries = dict.fromkeys(way.geometry for way in self.ways if not way.exact)
            others = [one for one in geometries if one != PLAIN]
            self.noise = measure_noise(self.llm.target, texts, others)
        return self.noise

    def _answer(self, way: Way, temperature: float, group: range) -> Iterator[Step]:
        """Answer a group of prompts one way: alone one after the other, or together."""
        turns = [range(n, n + 1) for n in group] if way.rows == 1 else [group] if group else []
        warmth = f"temperature {temperature:g}" if temperature else "greedy"
        for turn in turns:
            yield Step(f"{way}, {warmth}", self._answers)
            requests = [self._request(number, temperature) for number in turn]
            began = perf_counter()
            answers = self._decode(way, requests)
            took = perf_counter() - began
            if way.rows == 1:
                self.seconds.setdefault(way, {})[temperature, turn[0]] = took
            for number, ids in zip(turn, answers, strict=True):
                self._compare(way, temperature, number, ids)
            self._answers += len(turn)

    def _request(self, number: int, temperature: float) -> Request:
        params = SamplingParams(
            max_tokens=self.options.max_tokens, temperature=temperature, seed=number
        )
        return Request(token_ids=self._ids[number], params=params)

    def _decode(self, way: Way, requests: Sequence[Request]) -> list[list[int]]:
        """The answers' ids. Raises VerificationError where there is none."""
        before, self.llm.exact = self.llm.exact, way.exact
        try:
            results = self.llm.generate(requests, batch_size=way.rows, draft_depth=way.depth)
        finally:
            self.llm.exact = before
        for result in results:
            if result.finish_reason == "error":
                raise VerificationError(
                    f"No answer came with {way}: {result.error}",
                    "See whether `mlx-mtp chat` answers with this model.",
                )
        return [result.token_ids for result in results]

    def _compare(self, way: Way, temperature: float, number: int, ids: list[int]) -> None:
        if way == way.reference:
            self._plain[way.exact, temperature, number] = ids
            return
        plain = self._plain[way.exact, temperature, number]
        sampling = self._sampling(number, temperature)
        prompt = self._ids[number]
        parting = self._judge.part(prompt, plain, ids, sampling, way.geometry, exact=way.exact)
        texts = ("", "")
        if parting is not None:
            texts = (self._text(parting.plain), self._text(parting.other))
        self.compared.append(Compared(way, temperature, number, parting, texts))

    def _text(self, token: int | None) -> str:
        return "" if token is None else self.llm.tokenizer.decode([token])

    def _sampling(self, number: int, temperature: float) -> RowSampling:
        request = self._request(number, temperature)
        answer = Answer(request, None, self.llm.defaults, self.llm.context, None)
        return answer.job.sampling
