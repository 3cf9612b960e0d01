"""Every layout of one checkpoint gives the same model; anything else is named."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma4

from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, UsageError
from mlx_mtp.model.load import activation_dtype, load_drafter, load_target, target_name
from mlx_mtp.pair import DrafterConfig, TargetConfig

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
FAMILIES = ("e2b", "moe", "dense", "unified")
IDS = mx.array([[2, 17, 5, 200, 41], [2, 9, 9, 1, 0]])


def config_of(folder, kind=TargetConfig, name="config.json"):
    return kind.from_dict(json.loads((folder / name).read_text()))


def hf_weights(family, part="target"):
    return dict(mx.load(str(PAIRS / family / part / "model.safetensors")))


def save(folder, weights):
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def same(left, right):
    left, right = parameters(left), parameters(right)
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and mx.array_equal(left[name], right[name]).item()
        for name in left
    )


def text_only(weights):
    """Bare names of the text model, towers gone."""
    bare = {}
    for name, array in weights.items():
        ours = target_name(name)
        if ours is not None:
            bare[ours.removeprefix("language_model.model.")] = array
    return bare


def split_experts(weights):
    """Experts as mlx-lm and mlx-vlm store them."""
    split = {}
    for name, array in weights.items():
        if name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            gate, up = mx.split(array, 2, axis=-2)
            split[f"{base}switch_glu.gate_proj.weight"] = mx.contiguous(gate)
            split[f"{base}switch_glu.up_proj.weight"] = mx.contiguous(up)
        elif name.endswith("experts.down_proj"):
            split[name.replace("down_proj", "switch_glu.down_proj.weight")] = array
        else:
            split[name] = array
    return split


def quantized(family, **options):
    """Parameters of a target quantized by mlx, and the config's block for them."""
    target = PAIRS / family / "target"
    model = load_target(target, config_of(target))
    block = {"group_size": 32, "bits": 4, "mode": "affine"} | options

    def choose(path, module):
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % block["group_size"]:
            return False
        if path.endswith("router.proj"):
            block[path] = {"group_size": min(64, module.weight.shape[-1]), "bits": 8}
            return block[path]
        return True

    nn.quantize(
        model, block["group_size"], block["bits"], mode=block["mode"], class_predicate=choose
    )
    return model, block


@pytest.mark.parametrize("name", ["config.json", "config.transformers5.json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_writings_of_the_config_load_what_mlx_lm_loads(family, name):
    target = PAIRS / family / "target"
    ours = load_target(target, config_of(target, name=name))
    theirs, _ = mlx_lm.utils.load_model(target)
    assert same(ours, theirs)
    assert mx.array_equal(ours(IDS), theirs(IDS)).item()


@pytest.mark.parametrize("experts", [dict, split_experts])
@pytest.mark.parametrize("prefix", ["language_model.model.", "language_model.", "model.", ""])
@pytest.mark.parametrize("family", ["e2b", "moe"])
def test_every_layout_is_the_same_model(family, prefix, experts, tmp_path):
    target = PAIRS / family / "target"
    config = config_of(target)
    weights = experts(text_only(hf_weights(family)))
    folder = save(tmp_path, {prefix + name: array for name, array in weights.items()})
    assert same(load_target(folder, config), load_target(target, config))


def test_shards_and_the_index_are_followed(tmp_path):
    target = PAIRS / "dense" / "target"
    weights = hf_weights("dense")
    names = sorted(weights)
    files = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    halves = [names[::2], names[1::2]]
    for file, half in zip(files, halves, strict=True):
        mx.save_safetensors(str(tmp_path / file), {name: weights[name] for name in half})
    index = {name: file for file, half in zip(files, halves, strict=True) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = config_of(target)
    assert same(load_target(tmp_path, config), load_target(target, config))
    with (tmp_path / files[1]).open("r+b") as stream:
        stream.truncate((tmp_path / files[1]).stat().st_size - 7)
    with pytest.raises(ModelNotFoundError, match="7 bytes are missing"):
        load_target(tmp_path, config)


def test_keys_and_values_of_sharing_layers_and_a_tied_head_are_dropped(tmp_path):
    target = PAIRS / "e2b" / "target"
    weights = hf_weights("e2b")
    for part, shape in [("k_proj.weight", [16, 64]), ("v_proj.weight", [16, 64])]:
        weights[f"model.language_model.layers.7.self_attn.{part}"] = mx.ones(shape)
    weights["model.language_model.layers.7.self_attn.k_norm.weight"] = mx.ones([16])
    weights["lm_head.weight"] = mx.ones([512, 64])
    for tower in ("model.audio_tower.a", "vision_tower.b", "model.embed_vision.c", "embed_audio.d"):
        weights[f"{tower}.weight"] = mx.ones([3])
    config = config_of(target)
    assert same(load_target(save(tmp_path, weights), config), load_target(target, config))


def test_an_untied_head_is_loaded(tmp_path):
    config = json.loads((PAIRS / "dense" / "target" / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    table = hf_weights("dense")["model.language_model.embed_tokens.weight"]
    weights = hf_weights("dense") | {"lm_head.weight": mx.ones(table.shape)}
    model = load_target(save(tmp_path, weights), TargetConfig.from_dict(config))
    assert mx.array_equal(model.language_model.lm_head.weight, mx.ones(table.shape)).item()


def test_missing_and_extra_tensors_are_named_up_to_five(tmp_path):
    config = config_of(PAIRS / "dense" / "target")
    weights = hf_weights("dense")
    del weights["model.language_model.layers.3.mlp.up_proj.weight"]
    with pytest.raises(IncompatibleError, match=r"lacks .*layers\.3\.mlp\.up_proj\.weight") as e:
        load_target(save(tmp_path / "one", weights), config)
    assert e.value.exit_code == 4
    for layer in range(3):
        del weights[f"model.language_model.layers.{layer}.layer_scalar"]
        del weights[f"model.language_model.layers.{layer}.input_layernorm.weight"]
    with pytest.raises(IncompatibleError, match="and 2 more"):
        load_target(save(tmp_path / "many", weights), config)
    weights = hf_weights("dense") | {"model.language_model.layers.9.oddity": mx.ones([2])}
    with pytest.raises(IncompatibleError, match=r"beyond.*layers\.9\.oddity"):
        load_target(save(tmp_path / "extra", weights), config)


def test_a_wrong_shape_or_dtype_is_named(tmp_path):
    config = config_of(PAIRS / "moe" / "target")
    name = "model.language_model.layers.2.self_attn.k_proj.weight"
    rows, width = hf_weights("moe")[name].shape
    sizes = rf"k_proj.*\[{2 * rows}, {width}\].*\[{rows}, {width}\]"
    wrong = hf_weights("moe") | {name: mx.ones([2 * rows, width])}
    with pytest.raises(IncompatibleError, match=sizes):
        load_target(save(tmp_path / "a", wrong), config)
    integers = {name: mx.ones([rows, width], mx.int8)}
    with pytest.raises(IncompatibleError, match=r"k_proj.*int8"):
        load_target(save(tmp_path / "b", hf_weights("moe") | integers), config)
    odd = {"model.language_model.layers.0.experts.gate_up_proj": mx.ones([6, 63, 32])}
    with pytest.raises(IncompatibleError, match="experts"):
        load_target(save(tmp_path / "c", hf_weights("moe") | odd), config)


def test_one_tensor_under_two_prefixes_is_an_error(tmp_path):
    weights = hf_weights("dense") | {"language_model.model.norm.weight": mx.ones([64])}
    with pytest.raises(IncompatibleError, match="two names"):
        load_target(save(tmp_path, weights), config_of(PAIRS / "dense" / "target"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 8, "group_size": 64},
        {"mode": "mxfp4"},
        {"mode": "nvfp4", "group_size": 16},
        {"mode": "mxfp8", "bits": 8},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["e2b", "moe"])
def test_quantized_weights_load_with_any_spelling_of_the_block(family, options, tmp_path):
    model, block = quantized(family, **options)
    folder = save(tmp_path, parameters(model))
    original = json.loads((PAIRS / family / "target" / "config.json").read_text())
    plain = {key: value for key, value in block.items() if not isinstance(value, dict)}
    short = {key.removeprefix("language_model."): value for key, value in block.items()}
    for spelling in (block, short, plain, None):
        loaded = load_target(folder, TargetConfig.from_dict(original | {"quantization": spelling}))
        assert same(loaded, model)
    assert mx.array_equal(loaded(IDS), model(IDS)).item()


def test_a_block_that_does_not_fit_the_tensors_is_named(tmp_path):
    model, block = quantized("moe")
    folder = save(tmp_path, parameters(model))
    original = json.loads((PAIRS / "moe" / "target" / "config.json").read_text())
    block["language_model.model.layers.0.mlp.up_proj"] = {"group_size": 64, "bits": 8}
    with pytest.raises(IncompatibleError, match=r"layers\.0\.mlp\.up_proj"):
        load_target(folder, TargetConfig.from_dict(original | {"quantization": block}))


@pytest.mark.parametrize("asked", [None, "float16", "bfloat16", "float32"])
def test_all_floating_tensors_get_one_activation_dtype(asked, tmp_path):
    weights = {
        name: array.astype(mx.float32 if "norm" in name else mx.bfloat16)
        for name, array in hf_weights("e2b").items()
    }
    folder = save(tmp_path, weights)
    model = load_target(folder, config_of(PAIRS / "e2b" / "target"), asked)
    wanted = getattr(mx, asked or "bfloat16")
    assert {array.dtype for array in parameters(model).values()} == {wanted}
    assert activation_dtype(model) == wanted
    assert model(IDS).dtype == wanted


def test_quantized_tables_give_the_dtype_of_their_scales_or_of_the_norms(tmp_path):
    for mode, size in (("affine", 32), ("mxfp4", 32)):
        model, block = quantized("dense", mode=mode, group_size=size)
        weights = {
            name: array.astype(mx.float16) if array.dtype == mx.float32 else array
            for name, array in parameters(model).items()
        }
        original = json.loads((PAIRS / "dense" / "target" / "config.json").read_text())
        config = TargetConfig.from_dict(original | {"quantization": block})
        loaded = load_target(save(tmp_path / mode, weights), config)
        kinds = {
            a.dtype for a in parameters(loaded).values() if mx.issubdtype(a.dtype, mx.floating)
        }
        assert kinds == {mx.float16}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a limit of the CPU backend")
def test_unquantized_experts_are_widened_on_the_cpu_and_that_is_said(caplog):
    target = PAIRS / "moe" / "target"
    with caplog.at_level(logging.WARNING, "mlx_mtp"):
        model = load_target(target, config_of(target), "bfloat16")
    assert [record.name for record in caplog.records] == ["mlx_mtp"]
    wide = {name for name, array in parameters(model).items() if array.dtype == mx.float32}
    assert len(wide) == 3 * config_of(target).num_layers
    assert all(".experts.switch_glu." in name for name in wide)
    mx.eval(model(IDS))


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_loading_in_another_dtype_holds_one_tensor_twice_at_most(family, tmp_path):
    values = json.loads((PAIRS / family / "target" / "config.json").read_text())
    values["text_config"] |= {"hidden_size": 256, "intermediate_size": 1024}
    config = TargetConfig.from_dict(values)
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))
    save(tmp_path, parameters(model))
    largest = max(array.nbytes for array in parameters(model).values())
    del model
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    dtype = "bfloat16" if family == "dense" else "float32"
    loaded = load_target(tmp_path, config, dtype)
    size = sum(array.nbytes for array in parameters(loaded).values())
    assert mx.get_active_memory() - before < size * 1.05
    assert mx.get_peak_memory() - before < size * 1.05 + 2 * largest


def test_an_unknown_dtype_is_a_usage_error():
    target = PAIRS / "dense" / "target"
    with pytest.raises(UsageError, match="int8"):
        load_target(target, config_of(target), "int8")


def test_lazy_loading_reads_the_same_values():
    target = PAIRS / "dense" / "target"
    config = config_of(target)
    assert same(load_target(target, config, lazy=True), load_target(target, config))


@pytest.mark.parametrize("name", ["config.json", "config.transformers5.json"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_drafters_parameters_are_the_checkpoints(family, name):
    assistant = PAIRS / family / "assistant"
    model = load_drafter(assistant, config_of(assistant, DrafterConfig, name), mx.float32)
    stored = hf_weights(family, "assistant")
    assert parameters(model).keys() == stored.keys()
    for key, array in parameters(model).items():
        assert mx.array_equal(array, stored[key]).item(), key


def test_the_drafter_takes_the_targets_dtype():
    assistant = PAIRS / "e2b" / "assistant"
    model = load_drafter(assistant, config_of(assistant, DrafterConfig), mx.bfloat16)
    kinds = {key: array.dtype for key, array in parameters(model).items()}
    assert kinds.pop("masked_embedding.token_ordering") == mx.int32
    assert set(kinds.values()) == {mx.bfloat16}


def test_what_a_drafter_does_not_use_is_dropped(tmp_path):
    assistant = PAIRS / "dense" / "assistant"
    config = config_of(assistant, DrafterConfig)
    weights = hf_weights("dense", "assistant") | {
        "lm_head.weight": mx.ones([512, 48]),
        "model.layers.0.self_attn.k_proj.weight": mx.ones([4]),
        "model.layers.0.self_attn.v_proj.weight": mx.ones([4]),
        "model.layers.0.self_attn.k_norm.weight": mx.ones([4]),
        "masked_embedding.centroids.weight": mx.ones([4]),
        "masked_embedding.token_ordering": mx.arange(4),
    }
    loaded = load_drafter(save(tmp_path, weights), config, mx.float32)
    assert same(loaded, load_drafter(assistant, config, mx.float32))


def test_a_centroid_head_that_is_declared_must_be_there_and_whole(tmp_path):
    config = config_of(PAIRS / "e2b" / "assistant", DrafterConfig)
    weights = hf_weights("e2b", "assistant")
    ordering = "masked_embedding.token_ordering"
    weights[ordering] = mx.zeros_like(weights[ordering])
    with pytest.raises(IncompatibleError, match="not a permutation"):
        load_drafter(save(tmp_path / "a", weights), config, mx.float32)
    del weights[ordering]
    with pytest.raises(IncompatibleError, match=ordering):
        load_drafter(save(tmp_path / "b", weights), config, mx.float32)


@pytest.mark.parametrize("family", ["e2b", "unified"])
def test_a_quantized_drafter_loads(family, tmp_path):
    assistant = PAIRS / family / "assistant"
    model = load_drafter(assistant, config_of(assistant, DrafterConfig), mx.float32)
    nn.quantize(
        model,
        32,
        4,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0,
    )
    values = json.loads((assistant / "config.json").read_text())
    config = DrafterConfig.from_dict(values | {"quantization": {"bits": 4, "group_size": 32}})
    assert config.quantization is not None
    assert same(load_drafter(save(tmp_path, parameters(model)), config, mx.float32), model)
