"""Batches of prompts: ours with and without drafts against mlx-vlm's and mlx-lm's.

    python bench/batch.py [MODEL] [--prompts 64] [--rows 8] [--shapes unequal] [--depth 4]

All engines answer the same prompt ids greedily from the same files, a copy of the pair in MLX's
layout and one dtype. The prompts are held out. Unequal ones are of any length, some behind earlier
turns, each with a budget of its own; equal ones are of one length and one budget. The engines take
turns in one process; seconds are medians of whole runs without loading. mlx-vlm comes with the
extra `bench`; without it the others are measured. The last line of stdout is one JSON document.
Seconds hold for this machine only; counts hold everywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "pocket"))

import mlx.core as mx
from peers import Answers, Counts, Engine, Job, MlxLmPlain, MlxVlm, counting_host
from text import FREE_KINDS, Sample, held_out_prompts, structured_prompts

from mlx_mtp import LLM, Request, SamplingParams, load
from mlx_mtp.convert import Options, convert
from mlx_mtp.files import read_json
from mlx_mtp.hub import resolve
from mlx_mtp.versions import versions

REFERENCE = "ours-plain"
ENGINES = ("ours-mtp", REFERENCE, "mlx-vlm-mtp", "mlx-vlm-plain", "mlx-lm-plain")
SHAPES = ("unequal", "equal")
PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "mlx-mtp", "transformers")


class Ours:
    """`LLM.generate`; depth 0 decodes plainly."""

    def __init__(self, name: str, llm: LLM, rows: int, depth: int) -> None:
        self.name = name
        self._llm = llm
        self._rows = rows
        self._depth = depth

    def generate(self, jobs: Sequence[Job]) -> Answers:
        requests = [
            Request(
                token_ids=job.ids, params=SamplingParams(temperature=0, max_tokens=job.max_tokens)
            )
            for job in jobs
        ]
        results = self._llm.generate(requests, batch_size=self._rows, draft_depth=self._depth)
        return Answers(
            [result.token_ids for result in results],
            sum(result.stats.prefill_seconds for result in results),
        )

    @contextmanager
    def counting(self, counts: Counts) -> Iterator[None]:
        self._llm.reset_run_stats()
        yield
        stats = self._llm.run_stats
        counts.target_forwards += stats.target_forwards
        counts.prefill_forwards += stats.prefill_forwards
        counts.drafter_forwards += stats.drafter_forwards
        counts.drafted += stats.drafted
        counts.accepted += stats.accepted


@dataclass
class Measured:
    """One engine's runs.

    Attributes:
        ids: of each answer, without the id that ended it.
        differs: [job, place] where an answer first departs from the reference.
        seconds: of each timed run.
        prompt_seconds: the part of them that went into prompts.
        cpu_seconds: what all threads of the process used in them.
    """

    counts: Counts
    ids: list[list[int]]
    differs: list[list[int]]
    seconds: list[float] = field(default_factory=list)
    prompt_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def time(self, engine: Engine, jobs: Sequence[Job]) -> None:
        """One timed run."""
        gc.collect()
        mx.clear_cache()
        began, used = perf_counter(), process_time()
        answers = engine.generate(jobs)
        self.seconds.append(perf_counter() - began)
        self.cpu_seconds.append(process_time() - used)
        self.prompt_seconds.append(answers.prompt_seconds)

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self.counts),
            "tokens": sum(map(len, self.ids)),
            "differing_rows": len(self.differs),
            "differs_at": self.differs,
            "median_seconds": median(self.seconds),
            "seconds": self.seconds,
            "prompt_seconds": self.prompt_seconds,
            "cpu_seconds": self.cpu_seconds,
        }


def equal_jobs(llm: LLM, number: int, max_tokens: int) -> list[Job]:
    """Prompts of the length that most of them have, with one budget."""
    by_length: dict[int, list[list[int]]] = {}
    for sample in structured_prompts(8 * number):
        ids = llm.tokenizer.encode_chat(conversation([], sample))
        by_length.setdefault(len(ids), []).append(ids)
    most = max(by_length.values(), key=len)
    return [Job(most[place % len(most)], max_tokens) for place in range(number)]


def unequal_jobs(llm: LLM, number: int, max_tokens: int) -> list[Job]:
    """Prompts of every kind, every third after one or two exchanges, with unequal budgets."""
    rng = Random(0)
    free = [sample for kind in FREE_KINDS for sample in held_out_prompts(kind, number)]
    samples = rng.sample(free, min(len(free), number // 4))
    samples += structured_prompts(number - len(samples))
    rng.shuffle(samples)
    jobs = []
    for place, sample in enumerate(samples):
        exchanges = rng.choice((1, 2)) if place % 3 == 0 else 0
        earlier = [samples[(place + step) % len(samples)] for step in range(1, 1 + exchanges)]
        ids = llm.tokenizer.encode_chat(conversation(earlier, sample))
        jobs.append(Job(ids, rng.randint(max(1, max_tokens // 5), max_tokens)))
    return jobs


def conversation(earlier: Sequence[Sample], last: Sample) -> list[dict[str, Any]]:
    messages = []
    for sample in earlier:
        messages.append({"role": "user", "content": sample.prompt})
        messages.append({"role": "assistant", "content": sample.answer})
    return [*messages, {"role": "user", "content": last.prompt}]


def make_engines(pair: Path, llm: LLM, rows: int, options: argparse.Namespace) -> list[Engine]:
    """The engines that were asked for, the reference in any case, without what isn't installed."""
    stop_ids = llm.defaults.eos_token_ids
    makers = {
        "ours-mtp": lambda: Ours("ours-mtp", llm, rows, options.depth),
        REFERENCE: lambda: Ours(REFERENCE, llm, rows, 0),
        "mlx-vlm-mtp": lambda: MlxVlm(pair, rows, options.depth, stop_ids),
        "mlx-vlm-plain": lambda: MlxVlm(pair, rows, 0, stop_ids),
        "mlx-lm-plain": lambda: MlxLmPlain(pair, rows),
    }
    wanted = [name for name in ENGINES if name in options.engines or name == REFERENCE]
    if versions(["mlx-vlm"])["mlx-vlm"] is None and any("vlm" in name for name in wanted):
        print("mlx-vlm is not installed (extra `bench`); going on without it.")
        wanted = [name for name in wanted if "vlm" not in name]
    return [makers[name]() for name in wanted]


def runnable(model: str) -> str | None:
    """The dtype to convert to: None, as stored, but for experts on MLX's CPU backend float32."""
    text = read_json(resolve(model).path / "config.json").get("text_config", {})
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    return "float32" if text.get("enable_moe_block") and on_cpu else None


def count(engine: Engine, jobs: Sequence[Job], stop_ids: Sequence[int]) -> Measured:
    """A run that warms up and counts; its ids are the engine's."""
    counts = Counts()
    with engine.counting(counts), counting_host(counts):
        answers = engine.generate(jobs).ids
    ids = [answer[:-1] if answer and answer[-1] in stop_ids else answer for answer in answers]
    return Measured(counts, ids, [])


def first_difference(ids: list[int], reference: list[int]) -> int | None:
    """The first place at which two answers differ, one that ends sooner included."""
    if ids == reference:
        return None
    pairs = zip(ids, reference, strict=False)
    unequal = [place for place, (one, other) in enumerate(pairs) if one != other]
    return unequal[0] if unequal else min(len(ids), len(reference))


def measure(
    engines: Sequence[Engine], jobs: Sequence[Job], stop_ids: Sequence[int], repeat: int
) -> dict[str, Measured]:
    """Counts and ids of one run of each engine, then timed runs in turns."""
    runs = {engine.name: count(engine, jobs, stop_ids) for engine in engines}
    reference = runs[REFERENCE].ids
    for run in runs.values():
        places = map(first_difference, run.ids, reference)
        run.differs = [[job, place] for job, place in enumerate(places) if place is not None]
    for _ in range(repeat):
        for engine in engines:
            runs[engine.name].time(engine, jobs)
    return runs


def show(runs: dict[str, Measured]) -> None:
    ours = [name for name in runs if name.startswith("ours")]
    print(
        f"{'engine':13} {'target':>6} {'prefill':>7} {'drafter':>7} {'accepted':>13} {'reads':>6} "
        f"{'evals':>6} {'tokens':>6} {'differ':>6} {'prompts':>8} {'seconds':>8} "
        + " ".join(f"{'/ ' + name:>12}" for name in ours)
    )
    for name, run in runs.items():
        counts, seconds = run.counts, median(run.seconds)
        accepted = f"{counts.accepted} of {counts.drafted}" if counts.drafted else "-"
        ratios = [seconds / median(runs[one].seconds) for one in ours]
        print(
            f"{name:13} {counts.target_forwards:6} {counts.prefill_forwards:7} "
            f"{counts.drafter_forwards:7} {accepted:>13} {counts.host_reads:6} {counts.evals:6} "
            f"{sum(map(len, run.ids)):6} {len(run.differs):6} "
            f"{median(run.prompt_seconds):8.2f} {seconds:8.2f} "
            + " ".join(f"{ratio:12.2f}" for ratio in ratios)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="pocket")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=[8])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["unequal"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=100, help="the largest budget")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engines", type=lambda names: names.split(","), default=ENGINES)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of all engines; default: as stored, or float32 where MLX runs nothing else",
    )
    options = parser.parse_args()
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(f"unknown engines: {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"unknown shapes: {', '.join(sorted(unknown))}; known: {', '.join(SHAPES)}")

    with TemporaryDirectory() as folder:
        pair = Path(folder) / "pair"
        kept = Options(recipe="as-stored", dtype=options.dtype or runnable(options.model))
        report = convert(options.model, pair, kept, verify=False)
        dtype, llm = report.target.dtype, load(pair)
        runs = []
        for shape in options.shapes:
            make_jobs = equal_jobs if shape == "equal" else unequal_jobs
            jobs = make_jobs(llm, options.prompts, options.max_tokens)
            for rows in options.rows:
                engines = make_engines(pair, llm, rows, options)
                found = measure(engines, jobs, llm.defaults.eos_token_ids, options.repeat)
                runs.append(document(shape, rows, jobs, found))
                lengths = runs[-1]["prompt_ids"]
                print(
                    f"{options.model} in {dtype}, {len(jobs)} {shape} prompts of {lengths[0]} to "
                    f"{lengths[-1]} ids, rows {rows}, depth {options.depth}"
                )
                show(found)
    report_document = {
        "model": options.model,
        "dtype": dtype,
        "prompts": options.prompts,
        "depth": options.depth,
        "runs": runs,
        "device": str(mx.default_device()),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": versions(PACKAGES),
    }
    print(json.dumps(report_document))


def document(
    shape: str, rows: int, jobs: Sequence[Job], runs: dict[str, Measured]
) -> dict[str, Any]:
    lengths = [len(job.ids) for job in jobs]
    return {
        "shape": shape,
        "rows": rows,
        "prompt_ids": [min(lengths), sum(lengths), max(lengths)],
        "budgets": [min(job.max_tokens for job in jobs), max(job.max_tokens for job in jobs)],
        "engines": {name: run.document() for name, run in runs.items()},
    }


if __name__ == "__main__":
    main()
