"""Half an hour of everything at once: `pytest -m soak -n 0 -s`.

Random work through the API and the program on both bundled pairs. All the time the ids are those
of plain decoding alone, memory stays flat, and no file, thread or open descriptor is left behind.
SOAK_MINUTES says how long, SOAK_SEED repeats a run's choices.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from shutil import rmtree
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from batches import begun, finish, finished, read_jsonl, start, wait_for, write_jsonl
from terminal import PROMPT, Terminal

from mlx_mtp import LLM, Request, Result, SamplingParams, load
from mlx_mtp.hub import BUNDLED
from mlx_mtp.types import MAX_DEPTH, MAX_ROWS, Message

MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SEED = int(os.environ.get("SOAK_SEED", time.time()))
WARM_UP = 0.25
"""Share of the time after which memory has to be flat."""
PROMPTS = (
    "Multiplication table of {}.",
    "Count from {} to 90.",
    "Spell banana.",
    "A list of three fruits.",
    "Sort {}, 3, 9, 1.",
    "Write a Python function that doubles {}.",
)


class Memory(NamedTuple):
    """Of this process at rest: seconds since the start, RSS, MLX's arrays, open descriptors."""

    at: float
    rss: int
    active: int
    descriptors: int


class Soak:
    """The work, and what it is checked against.

    Args:
        folder: empty; the program's temporary files go to `temporary` in it.
    """

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.folder, self.temporary = folder, temporary
        self.llms = {name: load(name) for name in sorted(BUNDLED)}
        self.done = Counter[str]()
        self.tokens = 0

    def begin(self, seed: int) -> None:
        """Draw a piece of work."""
        self.rng = Random(seed)
        self.name = self.rng.choice(sorted(self.llms))

    @property
    def llm(self) -> LLM:
        return self.llms[self.name]

    # What is asked for, and what must come.

    def prompt(self) -> str:
        return self.rng.choice(PROMPTS).format(self.rng.randint(2, 80))

    def params(self, longest: int = 60) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice((0, 0, 0.7, 1, 3)),
            top_k=rng.choice((0, 5, 64)),
            top_p=rng.choice((1.0, 0.9)),
            min_p=rng.choice((0, 0, 0.05)),
            seed=rng.randrange(2**32),
            max_tokens=rng.randint(1, longest),
            stop=rng.choice(((), (), ("4", "zz"))),
            ignore_eos=rng.random() < 0.3,
        )

    def requests(self, most: int) -> list[Request]:
        return [self.request(str(n)) for n in range(self.rng.randint(1, most))]

    def request(self, name: str) -> Request:
        if self.rng.random() < 0.6:
            return Request(prompt=self.prompt(), params=self.params(), id=name)
        length = self.rng.choice((1, self.rng.randint(2, 60), self.rng.randint(2, 600)))
        ids = [2, *(self.rng.randrange(20, 1000) for _ in range(length - 1))]
        return Request(token_ids=ids, params=self.params(), id=name)

    def alone(self, request: Request) -> Result:
        (result,) = self.llm.generate([request], batch_size=1, draft_depth=0)
        return result

    def check(self, request: Request, result: Result) -> None:
        expected = self.alone(request)
        if result.finish_reason == "cancelled":
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            assert result.error is None
            assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
            assert result.finish_reason == expected.finish_reason
        self.tokens += len(result.token_ids)

    def depth(self) -> Any:
        return self.rng.choice(("auto", *range(MAX_DEPTH + 1)))

    # The pieces of work.

    def batch(self) -> None:
        requests = self.requests(20)
        rows = self.rng.randint(1, MAX_ROWS)
        results = self.llm.generate(requests, batch_size=rows, draft_depth=self.depth())
        for request, result in zip(requests, results, strict=True):
            self.check(request, result)

    def stopped_batch(self) -> None:
        requests = {request.id: request for request in self.requests(20)}
        completions = self.llm.as_completed(requests.values(), draft_depth=self.depth())
        wanted = self.rng.randint(0, len(requests))
        for count, result in enumerate(completions):
            self.check(requests[result.id], result)
            if count == wanted:
                if self.rng.random() < 0.5:
                    break
                completions.stop()

    def closed_stream(self) -> None:
        request = self.request("a")
        stream = self.llm.stream(request, draft_depth=self.depth())
        ids = [t for chunk in islice(stream, self.rng.randint(0, 40)) for t in chunk.token_ids]
        del stream
        assert ids == self.alone(request).token_ids[: len(ids)]

    def talk(self) -> None:
        """A session with replies that are broken off, taken back and made again."""
        session, messages = self.llm.session(), list[Message]()
        for _ in range(self.rng.randint(2, 8)):
            what = self.rng.choice(("say", "say", "undo", "again")) if messages else "say"
            if what == "undo":
                del messages[-2:]
                continue
            if what == "again":
                del messages[-1]
            else:
                messages.append({"role": "user", "content": self.prompt()})
            params, end, ids = self.params(200), self.rng.choice((0, 3, 30, 999)), list[int]()
            is_closed = self.rng.random() < 0.5
            for chunk in session.send(messages, params, draft_depth=self.depth()):
                ids += chunk.token_ids
                if len(ids) >= end and is_closed:
                    break
                if len(ids) >= end:
                    session.stop()
            session.end_turn()
            fresh = self.llm.session().send(messages, params, draft_depth=0)
            expected = [t for chunk in islice(fresh, len(ids)) for t in chunk.token_ids]
            assert ids == expected[: len(ids)]
            self.tokens += len(ids)
            messages.append(session.reply())
        session.close()

    def threads(self) -> None:
        """Requests from several threads, some of them cancelled, to a model that is closed."""
        own, requests = load(self.name), self.requests(12)
        cancelled = {request.id for request in requests if self.rng.random() < 0.3}
        seconds = self.rng.uniform(0, 0.1)

        def ask(request: Request) -> Result:
            handle = own.submit(request)
            if request.id in cancelled:
                time.sleep(seconds)
                handle.cancel()
            return handle.result(timeout=120)

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(ask, requests))
        own.close()
        for request, result in zip(requests, results, strict=True):
            self.check(request, result)

    def killed_batch(self) -> None:
        """A batch that is killed or interrupted, and again while it goes on where it was."""
        asked = [
            Request(prompt=self.prompt(), params=self.params(30), id=str(n))
            for n in range(self.rng.randint(5, 40))
        ]
        rows = [{"id": one.id, "prompt": one.prompt, **given(one.params)} for one in asked]
        source = write_jsonl(self.folder / "in.jsonl", rows)
        output = self.folder / "out.jsonl"
        arguments = (source, "-o", output, "--model", self.name)
        for _ in range(self.rng.randint(1, 2)):
            runs, wanted = begun(output), finished(output) + self.rng.randint(0, 8)
            process = start(*arguments, "--draft-depth", self.depth())

            def is_time(runs: int = runs, wanted: int = wanted) -> bool:
                return begun(output) > runs and finished(output) >= wanted

            wait_for(process, is_time)
            process.send_signal(how := self.rng.choice((signal.SIGKILL, signal.SIGINT)))
            assert finish(process).code in (-signal.SIGKILL, 130, 0), how
        done = finish(start(*arguments))
        assert done.code == 0, done.err
        results = {row["id"]: row for row in read_jsonl(output)}
        assert len(results) == len(rows)
        for one in asked:
            expected = self.alone(one)
            assert results[one.id]["text"] == expected.text
            self.tokens += len(expected.token_ids)
            assert results[one.id]["finish_reason"] == expected.finish_reason
        names = {"in.jsonl", "out.jsonl", "out.jsonl.journal"}
        assert {path.name for path in self.folder.iterdir()} == names

    def killed_chat(self) -> None:
        """A conversation that is killed in the middle of a reply, and goes on."""
        home = self.folder
        options = ("chat", self.name, "--temperature", "0.2", "--max-tokens", "400")
        with Terminal(*options, home=home) as terminal:
            terminal.say(self.prompt())
            terminal.expect(r"context \d+/")
            terminal.say("/set ignore_eos on")
            terminal.expect("ignore_eos +on")
            terminal.say(self.prompt())
            time.sleep(self.rng.uniform(0, 3))
            terminal.kill(signal.SIGKILL)
            assert terminal.end() == -signal.SIGKILL
        with Terminal("chat", "--continue", home=home) as terminal:
            terminal.say("/set ignore_eos off")
            terminal.expect("ignore_eos +off")
            terminal.say("Spell banana.")
            terminal.expect(r"context \d+/")
            terminal.expect(PROMPT)
            terminal.type("\x04")
            assert terminal.end() == 0
        assert {path.name for path in home.iterdir()} == {"chats", "history"}
        messages = only_chat(home)
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                params = SamplingParams(temperature=0.2, seed=message["seed"], ignore_eos=True)
                fresh = self.llm.session().send(messages[:place], params, draft_depth=0)
                ids = message["token_ids"]
                alone = [t for chunk in islice(fresh, len(ids)) for t in chunk.token_ids]
                assert ids == alone[: len(ids)]
                self.tokens += len(ids)

    def work(self) -> Callable[[], None]:
        """The next piece: starting the program takes long, so there is less of that."""
        inside = [self.batch, self.stopped_batch, self.closed_stream, self.talk, self.threads]
        return self.rng.choice([*inside * 3, self.killed_batch, self.killed_chat])


def given(params: SamplingParams | None) -> dict[str, Any]:
    """A row's own parameters."""
    assert params is not None
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")
    values = {name: getattr(params, name) for name in names}
    return values | {"stop": list(params.stop), "ignore_eos": params.ignore_eos}


def only_chat(home: Path) -> list[Message]:
    (path,) = (home / "chats").iterdir()
    messages: list[Message] = json.loads(path.read_text())["messages"]
    return messages


def at_rest(began: float) -> Memory:
    gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        # glibc keeps freed memory, in an arena for each thread that there ever was at once
        ctypes.CDLL(None).malloc_trim(0)
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True)
    descriptors = len(os.listdir("/dev/fd"))
    rss = int(shown.stdout) * 1024
    return Memory(time.monotonic() - began, rss, mx.get_active_memory(), descriptors)


def quarters(seen: list[Memory]) -> tuple[list[Memory], list[Memory]]:
    """The first and the last quarter of what was seen after the warm-up."""
    warm = [one for one in seen if one.at >= WARM_UP * seen[-1].at]
    few = max(1, len(warm) // 4)
    return warm[:few], warm[-few:]


@pytest.fixture
def soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Soak:
    temporary, folder = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return Soak(folder, temporary)


@pytest.mark.soak
def test_soak(soak: Soak) -> None:
    began, seen = time.monotonic(), list[Memory]()
    threads = set(threading.enumerate())
    seeds = Random(SEED)
    print(f"\nSOAK_SEED={SEED}")
    while not seen or seen[-1].at < 60 * MINUTES:
        soak.folder.mkdir()
        soak.begin(seed := seeds.randrange(2**32))
        work = soak.work()
        print(f"{work.__name__} on {soak.name}, {seed}", flush=True)
        work()
        soak.done[work.__name__] += 1
        rmtree(soak.folder)
        assert set(threading.enumerate()) == threads
        # MLX keeps the kernels that it compiles
        assert {path.name for path in soak.temporary.iterdir()} <= {"mlx"}
        seen.append(at_rest(began))
    first, last = quarters(seen)
    rss = [median(one.rss for one in part) / 1e6 for part in (first, last)]
    active = [max(one.active for one in part) / 1e6 for part in (first, last)]
    print(
        f"soak: {seen[-1].at / 60:.1f} min, {sum(soak.done.values())} pieces of work, "
        f"{soak.tokens} tokens compared, RSS {rss[0]:.0f} -> {rss[1]:.0f} MB, arrays at rest "
        f"{active[0]:.2f} -> {active[1]:.2f} MB, {dict(soak.done)}"
    )
    assert rss[1] <= 1.1 * rss[0] + 20
    assert active[1] <= 1.01 * active[0] + 0.1
    assert last[-1].descriptors <= first[0].descriptors
