"""What is written, others read: mlx-lm with its own commands, mlx-vlm where it is installed."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.convert import UNQUANTIZED, Options, convert
from mlx_mtp.files import read_headers, read_json, weight_files
from mlx_mtp.loading import load
from mlx_mtp.types import SamplingParams

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
IDS = mx.array([[2, 17, 5, 200, 41], [2, 9, 9, 1, 0]])
FAMILIES = ("e2b", "moe", "dense", "unified")


@pytest.mark.parametrize("options", [Options(), Options(mode="mxfp4"), Options(recipe="mixed_3_6")])
def test_mlx_lm_generates_the_same_text(options, tmp_path):
    convert("pocket", tmp_path / "out", options, verify=False)
    model, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    messages = [{"role": "user", "content": "Multiplication table of 7."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    theirs = mlx_lm.generate(model, tokenizer, ids, max_tokens=20)
    ours = load(tmp_path / "out").generate_ids(
        [ids], SamplingParams(temperature=0, max_tokens=20), draft_depth=4
    )
    assert tokenizer.decode(ours[0].token_ids).startswith(theirs)
    assert "7 x 1 = 7" in theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_towers_are_ignored_by_mlx_lm_and_by_us(family, tmp_path):
    target = PAIRS / family / "target"
    for towers in ("keep", "drop"):
        options = Options(group_size=32, towers=towers)
        convert(target, tmp_path / towers, options, verify=False)
    theirs = [mlx_lm.utils.load_model(tmp_path / t)[0](IDS) for t in ("keep", "drop")]
    assert mx.array_equal(*theirs).item()
    params = SamplingParams(temperature=0, max_tokens=8)
    ours = [load(tmp_path / t).generate_ids(IDS.tolist(), params) for t in ("keep", "drop")]
    assert [r.token_ids for r in ours[0]] == [r.token_ids for r in ours[1]]

    original = mx.load(str(target / "model.safetensors"))
    kept = mx.load(str(tmp_path / "keep" / "model.safetensors"))
    dropped = read_headers(weight_files(tmp_path / "drop"))
    towers = kept.keys() - dropped.keys()
    assert towers
    assert all(mx.array_equal(kept[name], original[name]).item() for name in towers)
    configs = [read_json(f / "config.json") for f in (tmp_path / "keep", target)]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_vlm_reads_a_target_with_its_towers(family, tmp_path):
    utils = pytest.importorskip("mlx_vlm.utils")
    options = Options(group_size=32, towers="keep")
    target = shutil.copytree(PAIRS / family / "target", tmp_path / "target")
    config = read_json(target / "config.json")
    vision = config["vision_config"]
    if family == "unified":  # mlx-vlm reads it from there; the real value is its default
        vision["model_patch_size"] = vision["patch_size"] * vision["pooling_kernel_size"]
    config["audio_config"] = None  # mlx-vlm builds audio parts of the real widths alone
    (target / "config.json").write_text(json.dumps(config))
    convert(target, tmp_path / "out", options, drafter=None, verify=False)
    theirs = utils.load_model(tmp_path / "out").language_model(IDS).logits
    ours = mlx_lm.utils.load_model(tmp_path / "out")[0](IDS)
    assert mx.allclose(ours, theirs, atol=1e-3).item()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("dense", Options(group_size=32)),
        ("unified", Options(group_size=32)),
        ("e2b", Options(group_size=32, drafter_head=UNQUANTIZED)),
        ("e2b", Options(recipe="as-stored")),
    ],
)
def test_mlx_vlm_reads_the_drafter(family, options, tmp_path):
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters")
    convert(PAIRS / family / "target", tmp_path / "out", options, verify=False)
    drafter, _ = drafters.load_drafter(str(tmp_path / "out" / "drafter"))
    theirs = dict(tree_flatten(drafter.parameters()))
    stored = mx.load(str(tmp_path / "out" / "drafter" / "model.safetensors"))
    for name in ("model.embed_tokens.weight", "pre_projection.weight"):
        assert mx.array_equal(theirs[name], stored[name]).item()


def test_a_head_left_as_it_is_brings_no_warning(tmp_path):
    target = PAIRS / "e2b" / "target"
    kept = Options(group_size=32, drafter_head=UNQUANTIZED)
    report = convert(target, tmp_path / "kept", kept, verify=False)
    assert not any("mlx-vlm" in warning for warning in report.warnings)
    headers = read_headers(weight_files(tmp_path / "kept" / "drafter"))
    assert "model.embed_tokens.scales" not in headers
    assert "pre_projection.scales" in headers


def test_the_tables_order_stays_the_original(tmp_path):
    """Permuting it is for running; on disk other programs read it as published."""
    convert(PAIRS / "e2b" / "target", tmp_path / "out", Options(group_size=32), verify=False)
    stored = mx.load(str(tmp_path / "out" / "drafter" / "model.safetensors"))
    original = mx.load(str(PAIRS / "e2b" / "assistant" / "model.safetensors"))
    name = "masked_embedding.token_ordering"
    assert mx.array_equal(stored[name], original[name]).item()
    parts = mx.quantize(original["model.embed_tokens.weight"], group_size=32, bits=4)
    for suffix, part in zip(("weight", "scales", "biases"), parts, strict=True):
        assert mx.array_equal(stored[f"model.embed_tokens.{suffix}"], part).item()
