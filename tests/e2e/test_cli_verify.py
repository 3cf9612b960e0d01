"""`mlx-mtp verify` on the bundled pair: what it compares, and that it finds what is wrong.

Each fault is put into our own code, as a mistake would be; no test looks at how long anything took.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import pytest
from batches import PROGRAM, Done

from mlx_mtp.cli.app import run
from mlx_mtp.decode import engine, round
from mlx_mtp.decode.policy import Plan
from mlx_mtp.decode.round import Drafts, Outcome, Rows
from mlx_mtp.decode.sampling import Sampler
from mlx_mtp.llm import LLM
from mlx_mtp.model.attention import SlotMask
from mlx_mtp.model.cache import SlotCache
from mlx_mtp.model.span import Span
from mlx_mtp.model.target import Target
from mlx_mtp.types import MAX_DEPTH

PROMPTS = ["Count from 19 to 26.", "Tell me a story about the old queen."]
SMALL = ("--rows", "1", "--depths", "4", "--max-tokens", "10")
STORIES = [
    f"Tell me a story about the {who}." for who in ("old queen", "tired farmer", "young cook")
]
INTERRUPTED = ["--rows", "1", "--depths", "1", "--temperature", "0", "--max-tokens", "3"]
Patch = pytest.MonkeyPatch


class VerifyCommand(Protocol):
    def __call__(self, *arguments: object) -> Done:
        """Run `mlx-mtp verify` in this process."""


@pytest.fixture(scope="module")
def verify() -> Iterator[VerifyCommand]:
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    patch = pytest.MonkeyPatch()
    for name in ("MLX_MTP_MODEL", "MLX_MTP_DRAFTER"):
        patch.delenv(name, raising=False)
    patch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Done:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run(["verify", *map(str, arguments)])
        return Done(code, out.getvalue(), err.getvalue())

    yield call
    patch.undo()
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "mine.txt"
    file.write_text("\n".join(PROMPTS))
    return file


def document(done: Done) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(done.out.splitlines()[-1])
    return loaded


# Nothing wrong


@pytest.fixture(scope="module")
def sound(verify: VerifyCommand, prompts: Path) -> Done:
    small = ("--rows", "1,3", "--depths", "2,auto", "--max-tokens", 4)
    return verify("pocket", "--prompts", prompts, *small)


def test_sound_code_gives_the_same_text(sound: Done) -> None:
    found = document(sound)
    assert sound.code == 0
    assert found["verdict"] == [
        "Same text: 2 prompts x 4 ways of drafting x 2 temperatures, 16 answers, all ids equal.",
        "Plain in a batch: 4 answers, all ids equal.",
        "In exact mode: 12 answers, all ids equal.",
    ]
    assert (found["fault"], found["differences"], found["warnings"]) == (False, [], [])


def test_every_way_answers_every_prompt(sound: Done) -> None:
    found = document(sound)
    places = {(one["rows"], one["depth"], one["exact"]): one["answers"] for one in found["ways"]}
    usual = [(1, 2), (1, "auto"), (3, 0), (3, 2), (3, "auto")]
    exact = [(3, 0), (1, 2), (3, 2)]
    assert set(places) == {(*one, False) for one in usual} | {(*one, True) for one in exact}
    assert set(places.values()) == {2}
    assert found["parameters"]["temperatures"] == [0, 1]
    costs = [(cost["depth"], cost["answers"]) for cost in found["exact_cost"]]
    assert costs == [(0, 4), (2, 4)]


def test_on_a_cpu_nothing_rounds_otherwise(sound: Done) -> None:
    found = document(sound)
    assert {one["largest"] for one in found["noise"]["spreads"]} == {0}
    assert found["noise"]["last_bit_changed"]["largest"] > 0
    assert all(kernel["equal"] for kernel in found["kernels"])
    assert {"q_proj", "down_proj", "head", "rms_norm"} < {one["name"] for one in found["kernels"]}


def test_a_pipe_gets_plain_tables_that_fit(sound: Done) -> None:
    *shown, _ = sound.out.splitlines()
    assert "\x1b" not in sound.out
    assert max(map(len, shown)) <= 80
    assert "   3  plain           2 equal        2 equal" in shown


def test_without_a_drafter_batches_are_compared(verify: VerifyCommand) -> None:
    """On built-in prompts."""
    small = ("--quick", "--drafter", "none", "--rows", 3, "--max-tokens", 2, "--temperature", 1)
    found = document(verify("pocket", *small, "--json"))
    assert found["verdict"][:2] == [
        "There is no drafter, so nothing was drafted.",
        "Plain in a batch: 4 answers, all ids equal.",
    ]
    assert found["parameters"]["prompt_count"] == 4


# Faults


def in_verify(length: int) -> bool:
    """Whether a forward of so many tokens is a round's, as no prompt here is that short."""
    return 1 < length <= MAX_DEPTH + 1


def see_less(patch: Patch) -> None:
    """A verify's queries do not see the two tokens before them."""
    real = SlotCache.span

    def span(
        self: SlotCache, first_row: int, starts: mx.array, length: int, *rest: Any, **options: Any
    ) -> Span:
        made = real(self, first_row, starts, length, *rest, **options)
        if not in_verify(length):
            return made
        masks = {}
        for kind, ones in made.masks.items():
            masks[kind] = tuple(SlotMask(_without_newest(one.folded[:, 0, 0])) for one in ones)
        return replace(made, masks=masks)

    patch.setattr(SlotCache, "span", span)


def _without_newest(visible: mx.array) -> mx.array:
    """bool [rows, L, S] without the last slots that are shown."""
    behind = mx.cumsum(visible[..., ::-1].astype(mx.int32), axis=-1)[..., ::-1]
    return visible & ((behind > 3) | (behind == 1))


def stand_one_later(patch: Patch) -> None:
    """A verify's tokens are turned by the position after theirs."""
    real = SlotCache.span

    def span(
        self: SlotCache, first_row: int, starts: mx.array, length: int, *rest: Any, **options: Any
    ) -> Span:
        made = real(self, first_row, starts, length, *rest, **options)
        return replace(made, starts=starts + 1) if in_verify(length) else made

    patch.setattr(SlotCache, "span", span)


def take_the_next_noise(patch: Patch) -> None:
    """A drafted round's tokens get the noise of the positions after theirs."""
    real = round._noise

    def noise(rows: Rows, sampler: Sampler, plan: Plan, exact: bool) -> mx.array | None:
        later = replace(rows, lengths=rows.lengths + 1) if plan.depth else rows
        return real(later, sampler, plan, exact)

    patch.setattr(round, "_noise", noise)


def keep_all_drafts(patch: Patch) -> None:
    """Drafts are accepted, whatever the target's choices are."""
    real = engine.run_round

    def run_round(
        target: Target,
        cache: SlotCache,
        rows: Rows,
        sampler: Sampler,
        drafts: Drafts,
        *rest: Any,
        **options: Any,
    ) -> Outcome:
        with pytest.MonkeyPatch.context() as inner:
            if drafts.plan.depth and drafts.tokens is not None:
                choose, drafted = sampler.choose, drafts.tokens
                inner.setattr(
                    sampler,
                    "choose",
                    lambda *given: mx.concatenate([drafted, choose(*given)[:, -1:]], axis=1),
                )
            return real(target, cache, rows, sampler, drafts, *rest, **options)

    patch.setattr(engine, "run_round", run_round)


@pytest.mark.parametrize(
    ("put_in", "temperature"),
    [(see_less, 0), (stand_one_later, 0), (take_the_next_noise, 2), (keep_all_drafts, 1)],
)
def test_a_fault_is_found(
    verify: VerifyCommand,
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
    put_in: Callable[[Patch], None],
    temperature: int,
) -> None:
    put_in(monkeypatch)
    monkeypatch.setattr("mlx_mtp.measure.verify.EXACT_PROMPTS", 0)  # as quick as can be
    done = verify("pocket", "--prompts", prompts, *SMALL, "--temperature", temperature)
    found = document(done)
    assert done.code == 7
    assert found["fault"] is True
    assert found["verdict"][0].startswith("FAULT: ")
    assert "FAULT" in done.out.split("Where answers part")[0]
    assert not all(one["near_tie"] for one in found["differences"])


# Rounding


@pytest.fixture
def other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several token rows every logit is rounded otherwise, as by a GPU's other kernels."""
    real = Target.logits

    def logits(self: Target, hidden: mx.array, **options: Any) -> mx.array:
        out = real(self, hidden, **options)
        if out.size == out.shape[-1]:
            return out
        place = mx.arange(out.shape[-1])
        up = 2 * ((place * 7919) % 13 > 6) - 1
        return out + (out * (up * float(mx.finfo(out.dtype).eps))).astype(out.dtype)

    monkeypatch.setattr(Target, "logits", logits)


@pytest.fixture
def stories(tmp_path: Path) -> tuple[object, ...]:
    """Asked so warmly that some tokens are nearly tied."""
    (tmp_path / "stories.txt").write_text("\n".join(STORIES))
    asked = ("--rows", 1, "--depths", 4, "--max-tokens", 6, "--temperature", 2)
    return "pocket", "--prompts", tmp_path / "stories.txt", *asked


@pytest.mark.usefixtures("other_kernels")
def test_rounding_is_a_near_tie(verify: VerifyCommand, stories: tuple[object, ...]) -> None:
    """Usual answers part at near ties, those of exact mode do not part."""
    done = verify(*stories)
    found = document(done)
    assert done.code == 0
    assert found["differences"]
    assert {(one["exact"], one["near_tie"]) for one in found["differences"]} == {(False, True)}
    sentence = "those of plain decoding at near ties; from there on the text is another of the same"
    assert sentence in found["verdict"][0]
    assert found["verdict"][1] == "In exact mode: 3 answers, all ids equal."
    assert "A near tie" in done.out
    assert "On a CPU kernels give other bits" in done.err
    assert 0 < found["noise"]["rounding"] < 2 * found["noise"]["last_bit_changed"]["largest"]
    assert [one["name"] for one in found["kernels"] if not one["equal"]] == ["head"]


@pytest.mark.usefixtures("other_kernels")
def test_in_exact_mode_a_near_tie_is_a_fault(
    verify: VerifyCommand, stories: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the mode does nothing, so its answers differ as the others do."""
    nothing = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(LLM, "exact", nothing, raising=False)  # an attribute of instances
    done = verify(*stories, "--json")
    found = document(done)
    assert done.code == 7
    assert found["verdict"][-1].startswith("FAULT: in exact mode ")
    assert {(one["exact"], one["near_tie"]) for one in found["differences"]} == {
        (False, True),
        (True, False),
    }


# Refusals: before the model is loaded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "9"], "error: The rows are '9'.\n  Give whole numbers from 1 to 8 "),
        (["--depths", "2,8"], "error: The draft depth is '8'."),
        (["--depths", "0"], "error: There is no depth to compare.\n  Give depths from 1 to 7."),
        (["--max-tokens", "0"], "error: max_tokens is 0."),
        (["--temperature", "-1"], "error: temperature is -1.0."),
        (["--prompts", os.devnull], f"error: {os.devnull} has no prompts."),
        (["--drafter", "none", "--depths", "2"], "error: There is no drafter for these depths."),
    ],
)
def test_what_cannot_be_compared_is_refused(
    verify: VerifyCommand, arguments: list[str], message: str
) -> None:
    done = verify("./no-such-folder", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(message)


def test_a_prompt_that_does_not_fit_is_an_error(verify: VerifyCommand, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 40_000)
    done = verify("pocket", "--prompts", tmp_path / "long.txt")
    assert (done.code, done.out) == (2, "")
    assert "the model's context holds" in done.err


# Ctrl-C


def test_an_interrupt_shows_what_was_found(prompts: Path) -> None:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLX_MTP_MODEL")}
    many = prompts.with_name("many.txt")
    many.write_text((prompts.read_text() + "\n") * 100)
    process = subprocess.Popen(
        [PROGRAM, "verify", "pocket", "-v", "--prompts", str(many), *INTERRUPTED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "plain, 1 row, exact" in line:  # so drafts were compared for some prompts
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=60)
    found = json.loads(out.splitlines()[-1])
    assert process.returncode == 130
    assert found["interrupted"] is True
    assert found["ways"][0]["answers"] == 8
    assert found["verdict"][0].startswith("Same text: 8 prompts x 1 way of drafting, 8 answers")
    assert "Interrupted: this is what was found so far." in out
