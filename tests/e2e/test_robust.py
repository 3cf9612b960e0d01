"""Things that broke once, each with the right outcome."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from threading import Thread

import mlx.core as mx
import pytest

from mlx_mtp import LLM, SamplingParams, load
from mlx_mtp.convert import Options, convert
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, UsageError, VerificationError
from mlx_mtp.hub import BUNDLED

POCKET = BUNDLED["pocket"]
TABLE = "Multiplication table of 7."


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(POCKET.parent, tmp_path / "pair")
    return tmp_path / "pair" / "target"


@pytest.mark.parametrize("ids", [[1024], [1 << 40], list(range(1024))])
def test_suppressed_ids_are_checked_before_they_are_written(copied: Path, ids: list[int]) -> None:
    file = copied / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"suppress_tokens": ids}))
    with pytest.raises(IncompatibleError, match="suppress_tokens names"):
        load(copied)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1, top_k=0, top_p=1e-50, max_tokens=40),
        SamplingParams(temperature=1, top_k=64, top_p=1e-50, max_tokens=40),
        SamplingParams(temperature=1e-39, max_tokens=40),
        SamplingParams(temperature=1e-30, max_tokens=40),
        SamplingParams(temperature=1, top_k=1, max_tokens=40),
        SamplingParams(temperature=1, min_p=1, max_tokens=40),
    ],
)
def test_extreme_parameters_are_greedy(params: SamplingParams) -> None:
    llm = load("pocket")
    (greedy,) = llm.generate([TABLE], SamplingParams(temperature=0, max_tokens=40))
    assert llm.generate([TABLE], params)[0].token_ids == greedy.token_ids


def test_a_model_that_computes_no_numbers_says_so(copied: Path) -> None:
    file = copied / "model.safetensors"
    weights = dict(mx.load(str(file)))
    name = "model.language_model.norm.weight"
    weights[name] = weights[name] * mx.array(float("nan"), weights[name].dtype)
    mx.eval(weights)
    mx.save_safetensors(str(file), weights)
    llm = load(copied)
    (result,) = llm.generate([TABLE])
    assert (result.finish_reason, result.token_ids) == ("error", [])
    assert result.error is not None
    assert "not numbers" in result.error
    stream = llm.stream(TABLE)
    with pytest.raises(VerificationError, match="not numbers"):
        next(stream)


def test_a_model_serves_another_thread_than_the_one_that_loaded_it() -> None:
    box: list[LLM] = []
    thread = Thread(target=lambda: box.append(load("pocket")))
    thread.start()
    thread.join()
    (result,) = box[0].generate([TABLE], SamplingParams(temperature=0, max_tokens=20))
    assert result.text.startswith("7 x 1 = 7")


def test_convert_does_not_write_into_its_source(copied: Path) -> None:
    with pytest.raises(UsageError, match="lies inside the target's folder"):
        convert(copied, copied / "drafter")
    assert not (copied / "drafter").exists()


def test_a_mode_without_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mxfp4 is given with the recipe as-stored"):
        convert("pocket", tmp_path / "out", Options(recipe="as-stored", mode="mxfp4"))


@pytest.mark.parametrize("name", ["", " ", "~nosuchuser/model", "a" * 5000])
def test_names_that_are_no_paths(name: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        load(name)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": -1},
        {"final_logit_softcapping": 0},
        {"rope_parameters": {"full_attention": {"rope_theta": "x"}}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        {"rope_parameters": {"full_attention": {"rope_type": 7}}},
        {"rope_parameters": {"sliding_attention": {"rope_theta": -1}}},
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 5.0}}},
    ],
)
def test_config_values_out_of_range_name_their_key(copied: Path, change: dict[str, object]) -> None:
    file = copied / "config.json"
    config = json.loads(file.read_text())
    config["text_config"] |= change
    file.write_text(json.dumps(config))
    with pytest.raises(IncompatibleError, match=next(iter(change))):
        load(copied)


def test_mistakes_in_calls_are_sentences() -> None:
    llm = load("pocket")
    for call in (
        lambda: llm.generate("hi"),
        lambda: llm.generate([5]),  # type: ignore[list-item]
        lambda: llm.generate_ids([5]),  # type: ignore[list-item]
        lambda: llm.generate([TABLE], {"temperature": 0}),  # type: ignore[arg-type]
        lambda: load("pocket", draft_position="x"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError):
            call()
