"""Configs: every writing of one model gives one translation, and a wrong pair is named."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import ROPE, SIZES

from mlx_mtp.errors import IncompatibleError
from mlx_mtp.pair import DrafterConfig, GenerationDefaults, TargetConfig, check_pair


def assistant_of(config, heads=4, ordered=False):
    """The assistant that fits a target's config."""
    text = config["text_config"]
    unified = config["model_type"] == "gemma4_unified"
    own = {
        key: text[key]
        for key in (
            "num_key_value_heads",
            "num_global_key_value_heads",
            "head_dim",
            "global_head_dim",
            "attention_k_eq_v",
            "sliding_window",
            "vocab_size",
            "rope_parameters",
            "model_type",
            "dtype",
        )
        if key in text
    }
    return {
        "model_type": "gemma4_unified_assistant" if unified else "gemma4_assistant",
        "backbone_hidden_size": text["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "text_config": own
        | {
            "hidden_size": 256,
            "intermediate_size": 2048,
            "num_attention_heads": heads,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    }


def modern(config):
    """Rewrite as transformers 5.24 saves: per_layer_config instead of the two global keys."""
    config = copy.deepcopy(config)
    text = config["text_config"]
    override = {"head_dim": text.pop("global_head_dim")}
    kv_heads = text.pop("num_global_key_value_heads", None)
    if kv_heads is not None and text.get("attention_k_eq_v"):
        override["num_key_value_heads"] = kv_heads
    text["per_layer_config"] = {
        str(index): dict(override)
        for index, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }
    return config


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes_have_their_family_and_donor_layers(size):
    config, family, donors, owning, global_kv = SIZES[size]
    target = TargetConfig.from_dict(config)
    assert target.family == family
    assert target.donors == donors
    assert target.num_kv_layers == owning
    assert target.num_global_kv_heads == global_kv
    full = donors["full_attention"]
    assert (target.kv_heads(full), target.kv_head_dim(full)) == (global_kv, 512)
    assert target.kv_head_dim(full - 1) == 256
    assert (target.num_experts, target.top_k_experts) == ((128, 8) if size == "26B-A4B" else (0, 0))


@pytest.mark.parametrize("size", SIZES)
def test_per_layer_config_and_flat_text_mean_the_same_target(size):
    config = SIZES[size][0]
    target = TargetConfig.from_dict(config)
    assert TargetConfig.from_dict(modern(config)) == target
    flat = config["text_config"] | {"eos_token_id": config["eos_token_id"]}
    alone = TargetConfig.from_dict(flat)
    assert alone.mlx_lm_config == target.mlx_lm_config
    assert alone.family == target.family


@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_reads_back_as_the_same_target(size):
    target = TargetConfig.from_dict(SIZES[size][0])
    written = json.loads(json.dumps(target.mlx_lm_config))
    again = TargetConfig.from_dict(written)
    assert again.mlx_lm_config == target.mlx_lm_config
    assert (again.family, again.donors) == (target.family, target.donors)


@pytest.mark.parametrize("size", SIZES)
def test_every_layer_reads_an_owning_layer_of_its_own_type(size):
    target = TargetConfig.from_dict(SIZES[size][0])
    for layer, kind in enumerate(target.layer_types):
        source = target.kv_source(layer)
        assert source < target.num_kv_layers
        assert target.layer_types[source] == kind
        assert source == (layer if layer < target.num_kv_layers else target.donors[kind])


@pytest.mark.parametrize("size", SIZES)
def test_mlx_lm_builds_what_the_config_says(size):
    """mlx-lm's own defaults are E2B's; a key left to them would be wrong for every other size."""
    from mlx_lm.models import gemma4, gemma4_text

    target = TargetConfig.from_dict(SIZES[size][0])
    text = gemma4_text.ModelArgs.from_dict(
        gemma4.ModelArgs.from_dict(target.mlx_lm_config).text_config
    )
    assert text.vocab_size == target.vocab_size == 262144
    assert text.num_kv_shared_layers == target.num_kv_shared_layers
    assert text.hidden_size_per_layer_input == target.hidden_size_per_layer_input
    assert text.enable_moe_block == (size == "26B-A4B")
    assert text.use_double_wide_mlp == (size == "E2B")
    assert tuple(text.layer_types) == target.layer_types
    assert text.rope_parameters == ROPE


def test_vocabulary_comes_from_the_text_config_and_stands_at_the_top():
    config = copy.deepcopy(SIZES["E2B"][0])
    config["vocab_size"] = 99
    config["text_config"]["vocab_size"] = 512
    assert TargetConfig.from_dict(config).mlx_lm_config["vocab_size"] == 512
    del config["text_config"]["vocab_size"]
    assert TargetConfig.from_dict(config).vocab_size == 99


def test_mlx_lm_config_is_a_copy_each_time():
    target = TargetConfig.from_dict(SIZES["E2B"][0])
    target.mlx_lm_config["text_config"]["layer_types"].clear()
    assert len(target.mlx_lm_config["text_config"]["layer_types"]) == 35


@pytest.mark.parametrize("own", [2, None])
def test_global_kv_heads_count_only_where_k_equals_v(own):
    config = copy.deepcopy(SIZES["31B"][0])
    config["text_config"]["num_global_key_value_heads"] = own
    config["text_config"]["attention_k_eq_v"] = False
    assert TargetConfig.from_dict(config).num_global_kv_heads == 16


def test_absent_layer_types_follow_transformers():
    config = copy.deepcopy(SIZES["31B"][0])
    types = config["text_config"].pop("layer_types")
    assert TargetConfig.from_dict(config).layer_types == tuple(types)


def test_top_level_keys_for_the_towers_are_not_kept():
    config = SIZES["31B"][0] | {"vision_config": {}, "image_token_id": 5, "auto_map": {"a": "b.py"}}
    kept = TargetConfig.from_dict(config).mlx_lm_config
    assert kept["image_token_id"] == 5
    assert kept["eos_token_id"] == [1, 106]
    assert not {"vision_config", "auto_map"} & set(kept)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("writing", ["flat", "modern"])
def test_the_assistant_of_a_size_fits_it_and_no_other(size, writing):
    config = SIZES[size][0]
    assistant = assistant_of(config)
    drafter = DrafterConfig.from_dict(modern(assistant) if writing == "modern" else assistant)
    for other, (other_config, *_) in SIZES.items():
        target = TargetConfig.from_dict(other_config)
        if other == size:
            assert check_pair(target, drafter) == []
        else:
            with pytest.raises(IncompatibleError):
                check_pair(target, drafter)


def test_drafter_layers_all_share_whatever_the_file_says():
    drafter = DrafterConfig.from_dict(assistant_of(SIZES["E4B"][0]))
    assert drafter.text_config["num_kv_shared_layers"] == 4


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("vocab_size", 512, "vocabulary size"),
        ("sliding_window", 1024, "sliding window"),
        ("num_key_value_heads", 4, "KV heads of"),
        ("head_dim", 128, "head width of sliding attention"),
        ("global_head_dim", 256, "head width of full attention"),
    ],
)
def test_a_mismatch_is_named_with_both_values(key, value, named):
    config = SIZES["E4B"][0]
    target = TargetConfig.from_dict(config)
    assistant = assistant_of(config)
    before = assistant["text_config"][key]
    assistant["text_config"][key] = value
    with pytest.raises(IncompatibleError, match=named) as caught:
        check_pair(target, DrafterConfig.from_dict(assistant))
    assert str(value) in caught.value.message
    assert str(before) in caught.value.message
    assert caught.value.exit_code == 4


def test_unified_and_other_assistants_do_not_mix():
    assistant = assistant_of(SIZES["12B"][0])
    assistant["model_type"] = "gemma4_assistant"
    with pytest.raises(IncompatibleError, match="gemma4_assistant"):
        check_pair(TargetConfig.from_dict(SIZES["12B"][0]), DrafterConfig.from_dict(assistant))


def test_a_converted_unified_target_still_knows_its_assistant():
    target = TargetConfig.from_dict(TargetConfig.from_dict(SIZES["12B"][0]).mlx_lm_config)
    assert check_pair(target, DrafterConfig.from_dict(assistant_of(SIZES["12B"][0]))) == []


def test_warnings_say_that_dtypes_or_qat_differ():
    config = SIZES["31B"][0]
    assistant = assistant_of(config)
    target = TargetConfig.from_dict(config)
    drafter = DrafterConfig.from_dict(assistant)
    assert check_pair(target, drafter, "g/gemma-4-31B-it", "g/gemma-4-31B-it-assistant") == []
    (warning,) = check_pair(target, drafter, "g/gemma-4-31B-it-QAT", "g/gemma-4-31B-it-assistant")
    assert "QAT" in warning
    assistant["text_config"]["dtype"] = "torch.float32"
    (warning,) = check_pair(target, DrafterConfig.from_dict(assistant))
    assert "bfloat16" in warning
    assert "float32" in warning


def test_kinds_are_told_apart_and_the_other_half_is_named():
    config = SIZES["E4B"][0]
    with pytest.raises(IncompatibleError, match=r"Use a/gemma-4-e4b-it as the target"):
        TargetConfig.from_dict(assistant_of(config), source="a/gemma-4-e4b-it-assistant")
    with pytest.raises(IncompatibleError, match="google/gemma-4-E4B-it"):
        TargetConfig.from_dict(assistant_of(config), source="/models/mine")
    with pytest.raises(IncompatibleError, match="google/gemma-4-E4B-it-assistant"):
        DrafterConfig.from_dict(config, source="google/gemma-4-E4B-it")
    with pytest.raises(IncompatibleError, match="gemma4_unified_assistant"):
        DrafterConfig.from_dict({"model_type": "llama"})
    with pytest.raises(IncompatibleError, match="gemma4_unified_text"):
        TargetConfig.from_dict({"model_type": "gemma3"})


REQUIRED = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "sliding_window",
    "vocab_size",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_a_missing_key_is_named(key, kind):
    config = copy.deepcopy(SIZES["E2B"][0])
    config = config if kind == "target" else assistant_of(config)
    del config["text_config"][key]
    read = TargetConfig.from_dict if kind == "target" else DrafterConfig.from_dict
    with pytest.raises(IncompatibleError, match=f"{key} is missing"):
        read(config)


JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = JSON | st.lists(JSON, max_size=3) | st.dictionaries(st.text(max_size=5), JSON, max_size=3)


@given(key=st.sampled_from(sorted(SIZES["26B-A4B"][0]["text_config"])), value=JSON)
def test_ill_typed_values_end_in_a_sentence(key, value):
    """Whatever stands in a key: the config is read, or IncompatibleError names the key."""
    config = copy.deepcopy(SIZES["26B-A4B"][0])
    config["text_config"][key] = value
    message = key
    try:
        TargetConfig.from_dict(config)
    except IncompatibleError as error:
        message = error.message
    assert key in message or key == "model_type"


@given(config=JSON)
def test_anything_that_is_not_a_config_ends_in_a_sentence(config):
    for read in (TargetConfig.from_dict, DrafterConfig.from_dict):
        with pytest.raises(IncompatibleError):
            read(config)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ({"5": {"head_dim": 512}, "11": {"head_dim": 256}}, "different shapes"),
        ({"0": {"num_key_value_heads": 4}}, "different shapes"),
        ({"5": {"intermediate_size": 4}}, "intermediate_size"),
    ],
)
def test_layers_that_mlx_lm_cannot_build_are_refused(override, named):
    config = modern(SIZES["31B"][0])
    config["text_config"]["per_layer_config"] |= override
    with pytest.raises(IncompatibleError, match=named):
        TargetConfig.from_dict(config)


def test_other_architectural_changes_are_refused():
    for key, value in [("hidden_activation", "silu"), ("use_bidirectional_attention", "all")]:
        config = copy.deepcopy(SIZES["31B"][0])
        config["text_config"][key] = value
        with pytest.raises(IncompatibleError, match=key):
            TargetConfig.from_dict(config)


def test_quantization_block_is_read_or_refused():
    config = dict(SIZES["31B"][0])
    block = {"bits": 4, "group_size": 64, "mode": "affine", "a.router.proj": {"bits": 8}}
    block["a.router.proj"]["group_size"] = 64
    assert TargetConfig.from_dict(config | {"quantization": block}).quantization == block
    assert TargetConfig.from_dict(config).quantization is None
    for wrong, named in [
        ({"bits": 4, "group_size": 16}, "group size 16"),
        ({"bits": 4, "group_size": 32, "mode": "fp6"}, "fp6"),
        ({"bits": 4, "group_size": 64, "p": {"bits": 7, "group_size": 64}}, "bits is 7"),
    ]:
        with pytest.raises(IncompatibleError, match=named):
            TargetConfig.from_dict(config | {"quantization": wrong})
    foreign = {"quant_method": "compressed-tensors"}
    with pytest.raises(IncompatibleError, match="compressed-tensors"):
        TargetConfig.from_dict(config | {"quantization_config": foreign})


def test_centroid_head_must_divide_the_vocabulary():
    assistant = assistant_of(SIZES["E2B"][0], ordered=True)
    assert DrafterConfig.from_dict(assistant).centroid_top_k == 32
    assistant["num_centroids"] = 2047
    with pytest.raises(IncompatibleError, match="num_centroids"):
        DrafterConfig.from_dict(assistant)
    assistant["use_ordered_embeddings"] = False  # declared, unused
    assert not DrafterConfig.from_dict(assistant).use_ordered_embeddings


def test_stop_ids_stay_a_list_and_the_first_file_wins():
    config = {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1}}
    read = GenerationDefaults.from_dict
    assert read({"eos_token_id": [1, 106, 50]}, config).eos_token_ids == (1, 106, 50)
    assert read({"eos_token_id": 7}, config).eos_token_ids == (7,)
    assert read({}, config).eos_token_ids == (1, 106)
    assert read(None, {"text_config": {"eos_token_id": 1}}).eos_token_ids == (1,)
    assert read(None, None).eos_token_ids == ()


def test_generation_defaults_keep_sampling_and_greedy_apart():
    read = GenerationDefaults.from_dict
    published = read({"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95})
    assert (published.temperature, published.top_k, published.top_p) == (1.0, 64, 0.95)
    assert read({"do_sample": False, "temperature": 0.7}).temperature == 0
    assert read({}).temperature == 0
    assert read({"do_sample": True}).temperature == 1
    assert read({"suppress_tokens": [3, 4]}).suppress_tokens == (3, 4)
    assert read({"num_assistant_tokens": 4}).num_assistant_tokens == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0},
        {"min_p": 2},
        {"temperature": "hot"},
        {"temperature": -1},
        {"eos_token_id": "x"},
    ],
)
def test_generation_defaults_name_a_wrong_key(wrong):
    with pytest.raises(IncompatibleError, match=next(iter(wrong))):
        GenerationDefaults.from_dict(wrong)
