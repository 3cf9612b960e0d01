"""A converted pair is what mlx-lm loads, what we load, and what the recipe says; or nothing."""

import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from mlx_mtp.convert import UNQUANTIZED, Options, convert
from mlx_mtp.errors import IncompatibleError, UsageError
from mlx_mtp.files import read_headers, read_json, weight_files
from mlx_mtp.hub import find_drafter, resolve
from mlx_mtp.model.load import load_drafter, load_target
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
FAMILIES = ("e2b", "moe", "dense", "unified")
GROUPS_OF_32 = Options(group_size=32)
KEPT = Options(recipe="as-stored")
IDS = mx.array([[2, 17, 5, 200, 41], [2, 9, 9, 1, 0]])
RECIPES = {
    "affine4": {"bits": 4, "group_size": 32},
    "affine8": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "mode": "nvfp4"},
    "none": {"recipe": "as-stored"},
}


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def target_of(folder, dtype=None):
    config = TargetConfig.from_dict(read_json(folder / "config.json"))
    return config, load_target(folder, config, dtype)


def drafter_of(folder, dtype=mx.float32):
    config = DrafterConfig.from_dict(read_json(folder / "config.json"))
    return config, load_drafter(folder, config, dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_and_we_load_the_same_model_from_a_converted_pair(family, recipe, tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / family / "target", out, Options(**RECIPES[recipe]), verify=False)
    theirs, _ = mlx_lm.utils.load_model(out)
    config, ours = target_of(out)
    assert mx.array_equal(ours(IDS), theirs(IDS)).item()
    assert (config.quantization is None) == (recipe == "none")

    assert report.out == out
    drafter_config, _ = drafter_of(out / "drafter")
    assert check_pair(config, drafter_config) == []
    assert find_drafter(str(out), out) == out / "drafter"


@pytest.mark.parametrize("family", FAMILIES)
def test_without_quantization_every_tensor_is_kept(family, tmp_path):
    convert(PAIRS / family / "target", tmp_path / "out", KEPT, verify=False)
    before = parameters(target_of(PAIRS / family / "target")[1])
    after = parameters(target_of(tmp_path / "out")[1])
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]).item() for name in before)
    stored = mx.load(str(tmp_path / "out" / "drafter" / "model.safetensors"))
    original = mx.load(str(PAIRS / family / "assistant" / "model.safetensors"))
    assert stored.keys() == original.keys()
    assert all(mx.array_equal(stored[name], original[name]).item() for name in stored)


@pytest.mark.parametrize("recipe", ["affine4", "mxfp4", "nvfp4"])
def test_quantized_tensors_are_mlx_own_quantization_of_the_source(recipe, tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / "moe" / "target", out, Options(**RECIPES[recipe]), verify=False)
    before = parameters(target_of(PAIRS / "moe" / "target")[1])
    after = parameters(target_of(out)[1])
    block = report.target.quantization
    quantized = [name.removesuffix(".scales") for name in after if name.endswith(".scales")]
    assert quantized
    for path in quantized:
        params = block.get(path, {key: block[key] for key in ("bits", "group_size", "mode")})
        wanted = mx.quantize(before[f"{path}.weight"], **params)
        for part, array in zip(("weight", "scales", "biases"), wanted, strict=False):
            assert mx.array_equal(after[f"{path}.{part}"], array).item(), path
    for path in report.target.unquantized:
        assert mx.array_equal(after[f"{path}.weight"], before[f"{path}.weight"]).item()
    for path in (name for name in quantized if name.endswith("router.proj")):
        params = block.get(path, {key: block[key] for key in ("bits", "group_size", "mode")})
        assert params == {"bits": 8, "group_size": 32, "mode": "affine"}  # the width is 32


def test_both_writings_of_the_config_convert_to_the_same_pair(tmp_path):
    """transformers' newer form is written back in the published flat one, which others read."""
    for name in ("config.json", "config.transformers5.json"):
        for part in ("target", "assistant"):
            source = PAIRS / "moe" / part
            folder = tmp_path / name / part
            folder.mkdir(parents=True)
            (folder / "config.json").write_text((source / name).read_text())
            shutil.copy(source / "model.safetensors", folder)
        convert(tmp_path / name / "target", tmp_path / name / "out", GROUPS_OF_32, verify=False)
    old, new = (tmp_path / name / "out" for name in ("config.json", "config.transformers5.json"))
    for part in (".", "drafter"):
        configs = [read_json(out / part / "config.json") for out in (old, new)]
        for config in configs:
            config["text_config"].pop("eos_token_id", None)
            config.pop("eos_token_id", None)
        assert configs[0] == configs[1]
        published = read_json(PAIRS / "moe" / "target" / "config.json")["text_config"]
        for key in ("global_head_dim", "num_global_key_value_heads"):
            assert configs[0]["text_config"][key] == published[key]
        files = [(out / part / "model.safetensors").read_bytes() for out in (old, new)]
        assert files[0] == files[1]


def test_matrices_that_a_group_does_not_divide_are_listed_and_left(tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / "e2b" / "target", out, Options(bits=4), drafter=None, verify=False)
    assert report.drafter is None
    listed = report.target.unquantized
    assert any(
        "per_layer_projection" in path and "16 is not divisible" in listed[path] for path in listed
    )
    matrices = {
        path
        for path, module in target_of(PAIRS / "e2b" / "target")[1].named_modules()
        if hasattr(module, "to_quantized")
    }
    stored = parameters(target_of(out)[1])
    left = {path for path in matrices if f"{path}.scales" not in stored}
    assert left == set(listed)
    assert read_json(out / "mlx_mtp.json")["target"]["unquantized"] == listed


def test_drafter_bits_are_the_targets_unless_given(tmp_path):
    for bits, found in [(None, 4), (8, 8), (UNQUANTIZED, None)]:
        out = tmp_path / str(bits)
        report = convert(
            PAIRS / "dense" / "target", out, Options(group_size=32, drafter_bits=bits), verify=False
        )
        block = report.drafter.quantization
        assert (block and block["bits"]) == found
        assert drafter_of(out / "drafter")[0].quantization == block


def test_a_drafters_table_is_quantized_and_its_centroids_are_not(tmp_path):
    report = convert(PAIRS / "e2b" / "target", tmp_path / "e2b", GROUPS_OF_32, verify=False)
    names = parameters(drafter_of(tmp_path / "e2b" / "drafter")[1])
    assert "model.embed_tokens.scales" in names
    assert "masked_embedding.centroids.scales" not in names
    assert "pre_projection.scales" in names
    assert any("mlx-vlm" in warning for warning in report.warnings)
    convert(PAIRS / "dense" / "target", tmp_path / "dense", Options(mode="nvfp4"), verify=False)
    names = parameters(drafter_of(tmp_path / "dense" / "drafter")[1])
    assert "pre_projection.scales" in names


def test_dtype_is_what_everything_unquantized_gets(tmp_path):
    out = tmp_path / "out"
    report = convert(
        PAIRS / "moe" / "target", out, Options(group_size=32, dtype="bfloat16"), verify=False
    )
    assert report.target.dtype == report.drafter.dtype == "bfloat16"
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    for folder in (out, out / "drafter"):
        kinds = {info.dtype for info in read_headers(weight_files(folder)).values()}
        assert kinds == {"BF16", "U32"}


def test_unquantized_experts_are_written_in_the_asked_dtype(tmp_path):
    """On the CPU they are widened to run, never to be written."""
    convert(
        PAIRS / "moe" / "target",
        tmp_path / "out",
        Options(recipe="as-stored", dtype="bfloat16"),
        drafter=None,
        verify=False,
    )
    headers = read_headers(weight_files(tmp_path / "out"))
    assert {info.dtype for info in headers.values()} == {"BF16"}


def test_the_origin_is_recorded_and_no_path_leaks(tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / "unified" / "target", out, GROUPS_OF_32, verify=False)
    origin = read_json(out / "mlx_mtp.json")
    assert origin["target"]["source"] == "unified/target"
    assert origin["drafter"]["source"] == "unified/assistant"
    assert origin["target"]["quantization"] == report.target.quantization
    assert set(origin["versions"]) == {"mlx-mtp", "mlx", "mlx-lm"}
    for file in (*out.glob("*.json"), *out.glob("drafter/*.json")):
        assert str(PAIRS) not in file.read_text()


def test_a_pair_with_a_tokenizer_loads_in_mlx_lm_as_it_is(tmp_path):
    out = tmp_path / "pocket"
    convert("pocket", out, GROUPS_OF_32, verify=False)
    source = resolve("pocket").path
    model, tokenizer = mlx_lm.load(str(out))
    ids = tokenizer.encode("one two")
    assert ids
    logits = model(mx.array([ids]))
    assert mx.array_equal(target_of(out)[1](mx.array([ids])), logits).item()
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_converting_a_converted_pair_is_refused_unless_its_weights_are_kept(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    convert(PAIRS / "moe" / "target", first, GROUPS_OF_32, verify=False)
    with pytest.raises(UsageError, match="quantized already"):
        convert(first, second)
    assert not second.exists()
    convert(first, second, KEPT, verify=False)
    for part in (".", "drafter"):
        files = [(folder / part / "model.safetensors").read_bytes() for folder in (first, second)]
        assert files[0] == files[1]
        configs = [read_json(folder / part / "config.json") for folder in (first, second)]
        assert configs[0] == configs[1]


def test_a_drafter_of_another_target_is_refused_before_writing(tmp_path):
    with pytest.raises(IncompatibleError):
        convert(PAIRS / "dense" / "target", tmp_path / "out", drafter=PAIRS / "e2b" / "assistant")
    with pytest.raises(IncompatibleError, match="is a target"):
        convert(PAIRS / "dense" / "target", tmp_path / "out", drafter=PAIRS / "dense" / "target")
    assert list(tmp_path.iterdir()) == []


def test_no_drafter_is_a_warning(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in (PAIRS / "dense" / "target").iterdir():
        shutil.copy(file, alone)
    report = convert(alone, tmp_path / "out", GROUPS_OF_32, verify=False)
    assert report.drafter is None
    assert any("No drafter" in warning for warning in report.warnings)
    assert not (tmp_path / "out" / "drafter").exists()
