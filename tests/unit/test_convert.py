"""A converted pair is what mlx-lm loads, what we load, and what the recipe says; or nothing."""

import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4

from mlx_mtp.convert import convert, writer
from mlx_mtp.convert.recipes import Recipe, block_of
from mlx_mtp.errors import IncompatibleError, UsageError, VerificationError
from mlx_mtp.files import read_headers, read_json, weight_files
from mlx_mtp.hub import find_drafter, resolve
from mlx_mtp.model.load import load_drafter, load_target
from mlx_mtp.pair import DrafterConfig, TargetConfig, check_pair

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
FAMILIES = ("e2b", "moe", "dense", "unified")
IDS = mx.array([[2, 17, 5, 200, 41], [2, 9, 9, 1, 0]])
RECIPES = {
    "affine4": {"bits": 4, "group_size": 32},
    "affine8": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "mode": "mxfp4"},
    "nvfp4": {"bits": 4, "mode": "nvfp4"},
    "none": {"bits": None},
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
    report = convert(PAIRS / family / "target", out, **RECIPES[recipe])
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
    convert(PAIRS / family / "target", tmp_path / "out", bits=None)
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
    report = convert(PAIRS / "moe" / "target", out, **RECIPES[recipe])
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
            (folder / "model.safetensors").symlink_to(source / "model.safetensors")
        convert(tmp_path / name / "target", tmp_path / name / "out", group_size=32)
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
    report = convert(PAIRS / "e2b" / "target", out, bits=4, group_size=64, drafter=None)
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


def test_the_router_takes_a_group_that_divides_or_stays():
    recipe = Recipe(4, 16, "nvfp4")
    sizes = {width: recipe.choose("layers.0.router.proj", width, False) for width in (64, 96, 48)}
    assert sizes[64] == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert sizes[96] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert isinstance(sizes[48], str)


def test_tables_that_nvfp4_cannot_look_rows_up_in_stay():
    """A look-up of one row fails in MLX at these widths; a product does not."""
    recipe = Recipe(4, 16, "nvfp4")
    assert isinstance(recipe.choose("embed_tokens", 48, True), str)
    assert recipe.choose("q_proj", 48, False) == recipe.params()
    assert recipe.choose("embed_tokens", 64, True) == recipe.params()


def test_drafter_bits_are_the_targets_unless_given(tmp_path):
    for bits, found in [(None, 4), (8, 8), (16, None)]:
        out = tmp_path / str(bits)
        report = convert(PAIRS / "dense" / "target", out, group_size=32, drafter_bits=bits)
        block = report.drafter.quantization
        assert (block and block["bits"]) == found
        assert drafter_of(out / "drafter")[0].quantization == block


def test_a_drafters_table_is_quantized_and_its_centroids_are_not(tmp_path):
    report = convert(PAIRS / "e2b" / "target", tmp_path / "e2b", group_size=32)
    names = parameters(drafter_of(tmp_path / "e2b" / "drafter")[1])
    assert "model.embed_tokens.scales" in names
    assert "masked_embedding.centroids.scales" not in names
    assert "pre_projection.scales" in names
    assert any("mlx-vlm" in warning for warning in report.warnings)
    convert(PAIRS / "dense" / "target", tmp_path / "dense", mode="nvfp4")
    names = parameters(drafter_of(tmp_path / "dense" / "drafter")[1])
    assert "pre_projection.scales" in names


def test_dtype_is_what_everything_unquantized_gets(tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / "moe" / "target", out, group_size=32, dtype="bfloat16")
    assert report.target.dtype == report.drafter.dtype == "bfloat16"
    assert read_json(out / "config.json")["dtype"] == "bfloat16"
    for folder in (out, out / "drafter"):
        kinds = {info.dtype for info in read_headers(weight_files(folder)).values()}
        assert kinds == {"BF16", "U32"}


def test_unquantized_experts_are_written_in_the_asked_dtype(tmp_path):
    """On the CPU they are widened to run, never to be written."""
    convert(PAIRS / "moe" / "target", tmp_path / "out", bits=None, dtype="bfloat16", drafter=None)
    headers = read_headers(weight_files(tmp_path / "out"))
    assert {info.dtype for info in headers.values()} == {"BF16"}


def test_large_models_are_written_in_shards_with_an_index(tmp_path, monkeypatch):
    one, many = tmp_path / "one", tmp_path / "many"
    convert(PAIRS / "moe" / "target", one, group_size=32)
    monkeypatch.setattr(writer, "SHARD_BYTES", 20_000)
    convert(PAIRS / "moe" / "target", many, group_size=32)
    files = weight_files(many)
    assert len(files) > 2
    assert all(file.stat().st_size < 40_000 for file in files)
    whole, shards = read_headers(weight_files(one)), read_headers(files)
    assert whole == shards
    index = read_json(many / "model.safetensors.index.json")
    assert index["weight_map"].keys() == shards.keys()
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in shards.values())
    assert mx.array_equal(target_of(one)[1](IDS), target_of(many)[1](IDS)).item()


def test_conversion_holds_a_shard_and_not_the_model(tmp_path, monkeypatch):
    values = read_json(PAIRS / "dense" / "target" / "config.json")
    values["text_config"] |= {"hidden_size": 256, "intermediate_size": 2048}
    config = TargetConfig.from_dict(values)
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    weights = parameters(model)
    size = sum(array.nbytes for array in weights.values())
    (tmp_path / "in").mkdir()
    mx.save_safetensors(str(tmp_path / "in" / "model.safetensors"), weights)
    (tmp_path / "in" / "config.json").write_text(json.dumps(values))
    del model, weights
    mx.clear_cache()
    monkeypatch.setattr(writer, "SHARD_BYTES", 1_000_000)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(tmp_path / "in", tmp_path / "out")
    assert mx.get_peak_memory() - before < size / 4


def test_the_origin_is_recorded_and_no_path_leaks(tmp_path):
    out = tmp_path / "out"
    report = convert(PAIRS / "unified" / "target", out, group_size=32)
    origin = read_json(out / "mlx_mtp.json")
    assert origin["target"]["source"] == "unified/target"
    assert origin["drafter"]["source"] == "unified/assistant"
    assert origin["target"]["quantization"] == report.target.quantization
    assert set(origin["versions"]) == {"mlx-mtp", "mlx", "mlx-lm"}
    for file in (*out.glob("*.json"), *out.glob("drafter/*.json")):
        assert str(PAIRS) not in file.read_text()


def test_a_pair_with_a_tokenizer_loads_in_mlx_lm_as_it_is(tmp_path):
    out = tmp_path / "pocket"
    convert("pocket", out, group_size=32)
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
    convert(PAIRS / "moe" / "target", first, group_size=32)
    with pytest.raises(UsageError, match="quantized already"):
        convert(first, second)
    assert not second.exists()
    convert(first, second, bits=None)
    for part in (".", "drafter"):
        files = [(folder / part / "model.safetensors").read_bytes() for folder in (first, second)]
        assert files[0] == files[1]
        configs = [read_json(folder / part / "config.json") for folder in (first, second)]
        assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 7}, "no 7 bits"),
        ({"bits": 4, "group_size": 16}, "no group size 16"),
        ({"bits": 8, "mode": "mxfp4"}, "no 8 bits"),
        ({"bits": 4, "mode": "mxfp8"}, "no 4 bits"),
        ({"bits": 4, "mode": "nvfp4", "group_size": 32}, "no group size 32"),
        ({"mode": "fp6"}, "fp6"),
        ({"bits": None, "group_size": 64}, "without bits"),
        ({"drafter_bits": 9}, "no 9 bits"),
    ],
)
def test_impossible_recipes_are_refused_before_any_work(options, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        convert(tmp_path / "does not exist", tmp_path / "out", **options)


def test_an_output_in_use_is_not_touched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    keep = out / "mine.txt"
    keep.write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        convert(PAIRS / "dense" / "target", out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    with pytest.raises(UsageError, match="is a file"):
        convert(PAIRS / "dense" / "target", keep)
    keep.unlink()
    convert(PAIRS / "dense" / "target", out, group_size=32)
    assert (out / "config.json").is_file()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing(failure, tmp_path, monkeypatch):
    calls = []

    def save(path, arrays, metadata):
        calls.append(path)
        if len(calls) == 2:
            raise failure
        original(path, arrays, metadata=metadata)

    original = mx.save_safetensors
    monkeypatch.setattr(mx, "save_safetensors", save)
    expected = KeyboardInterrupt if failure is KeyboardInterrupt else Exception
    with pytest.raises(expected) as caught:
        convert(PAIRS / "dense" / "target", tmp_path / "out", group_size=32)
    assert list(tmp_path.iterdir()) == []
    if failure is not KeyboardInterrupt:
        assert caught.value.exit_code == 5


def test_a_file_that_was_not_written_whole_is_found(tmp_path, monkeypatch):
    original = mx.save_safetensors

    def save(path, arrays, metadata):
        original(path, arrays, metadata=metadata)
        with open(path, "r+b") as stream:
            stream.truncate(Path(path).stat().st_size - 5)

    monkeypatch.setattr(mx, "save_safetensors", save)
    with pytest.raises(VerificationError, match="5 bytes"):
        convert(PAIRS / "dense" / "target", tmp_path / "out", group_size=32)
    assert not (tmp_path / "out").exists()


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
        (alone / file.name).symlink_to(file)
    report = convert(alone, tmp_path / "out", group_size=32)
    assert report.drafter is None
    assert any("No drafter" in warning for warning in report.warnings)
    assert not (tmp_path / "out" / "drafter").exists()


def test_the_block_names_what_differs_from_most():
    many, few = (
        {"bits": 4, "group_size": 64, "mode": "affine"},
        {"bits": 8, "group_size": 64, "mode": "affine"},
    )
    assert block_of({}) is None
    assert block_of({"a": many, "b": few, "c": many}) == many | {"b": few}
    assert json.dumps(block_of({"a": few})) == json.dumps(few)
