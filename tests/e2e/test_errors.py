"""What goes wrong with models and prompts: one sentence, what to do, the right exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mtp.cli.app import run
from mlx_mtp.hub import BUNDLED

POCKET = BUNDLED["pocket"]
ASSISTANT = POCKET.parent / "assistant"


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


CASES: dict[str, tuple[Callable[[Path], object], int, str, str]] = {
    "an unknown model type": (
        lambda pair: edit(pair / "target" / "config.json", lambda c: c.update(model_type="llama")),
        4,
        "is of type 'llama', which this program cannot run.",
        "Known types: gemma4",
    ),
    "no weights": (
        lambda pair: (pair / "target" / "model.safetensors").unlink(),
        3,
        "holds no model*.safetensors.",
        "",
    ),
    "no config": (
        lambda pair: (pair / "target" / "config.json").unlink(),
        3,
        "holds no config.json.",
        "",
    ),
    "truncated weights": (
        lambda pair: cut(pair / "target" / "model.safetensors"),
        3,
        "is damaged: 1,000 bytes are missing at its end",
        "Download or copy the model again.",
    ),
    "truncated drafter weights": (
        lambda pair: cut(pair / "assistant" / "model.safetensors"),
        3,
        "is damaged: 1,000 bytes are missing at its end",
        "Download or copy the model again.",
    ),
    "a drafter of another target": (
        lambda pair: edit(
            pair / "assistant" / "config.json", lambda c: c.update(backbone_hidden_size=1536)
        ),
        4,
        "This drafter belongs to another target: hidden size is 128 in the target and 1536 in the "
        "drafter.",
        "Use the -assistant checkpoint of the same target.",
    ),
    "a config that is no JSON": (
        lambda pair: (pair / "target" / "config.json").write_text("{"),
        3,
        "config.json is not valid JSON.",
        "Download or copy the model again.",
    ),
    "no tokenizer": (
        lambda pair: [file.unlink() for file in (pair / "target").glob("tokenizer*")],
        3,
        "There is no tokenizer in",
        "Take tokenizer.json and tokenizer_config.json from the original checkpoint.",
    ),
    "a config of another shape": (
        lambda pair: edit(
            pair / "target" / "config.json",
            lambda c: c["text_config"].update(intermediate_size=100),
        ),
        4,
        "has shape",
        "Use the checkpoint that belongs to this config.json.",
    ),
}


def said(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    code = run(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return code, captured.err


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_pair(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, code, sentence, hint = CASES[case]
    shutil.copytree(POCKET.parent, tmp_path / "pair")
    damage(tmp_path / "pair")
    got, err = said(capsys, ["chat", str(tmp_path / "pair" / "target"), "-p", "Hello"])
    assert (got, err.count("error: ")) == (code, 1)
    assert sentence in err
    assert hint in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([str(ASSISTANT)], 4, "is a drafter (gemma4_assistant), not a target."),
        (["pocket", "--drafter", str(POCKET)], 4, "is a target (gemma4), not a drafter."),
        (["pocket", "--drafter", "nowhere"], 3, "There is no folder nowhere"),
        (["google/gemma-4-E4B-it"], 3, "is neither a folder nor complete in the cache"),
        (["pocket", "--draft-depth", "9"], 2, "The draft depth is '9'."),
        (["pocket", "--drafter", "none", "--draft-depth", "3"], 2, "but no drafter is loaded."),
        (["pocket", "--temperature", "-1"], 2, "temperature is -1"),
    ],
)
def test_a_wrong_command(
    arguments: list[str],
    code: int,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    got, err = said(capsys, ["chat", *arguments, "-p", "Hello"])
    assert (got, err.count("error: ")) == (code, 1)
    assert sentence in err


def test_a_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, ["chat", "pocket", "-p", "word " * 5000])
    assert code == 2
    assert "and the model's context holds 4096.\n  Shorten the prompt." in err
