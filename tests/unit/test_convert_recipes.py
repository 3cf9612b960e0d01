"""Recipes choose as they say, mlx-lm's own as mlx-lm does, and nonsense is refused at once."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.convert import mixed_quant_predicate_builder
from mlx_lm.models import gemma4
from published import SIZES

from mlx_mtp.convert import UNQUANTIZED, Options, convert
from mlx_mtp.convert.grid import quantize_on_grid
from mlx_mtp.convert.recipes import MIXED, block_of
from mlx_mtp.errors import UsageError
from mlx_mtp.pair import TargetConfig

FOUR = {"group_size": 64, "bits": 4, "mode": "affine"}


def modules_of(size):
    config = TargetConfig.from_dict(SIZES[size][0])
    model = gemma4.Model(gemma4.ModelArgs.from_dict(config.mlx_lm_config))  # nothing is evaluated
    matrices = [(p, m) for p, m in model.named_modules() if hasattr(m, "to_quantized")]
    return config, model, matrices


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("size", ["E2B", "26B-A4B"])
def test_mixed_recipes_choose_what_mlx_lm_chooses(name, size):
    config, model, matrices = modules_of(size)
    theirs = mixed_quant_predicate_builder(name, model, 64)
    ours = Options(recipe=name).for_target(config.num_layers)
    for path, module in matrices:
        width = module.weight.shape[-1]
        assert ours.choose(path, width, isinstance(module, nn.Embedding)) == theirs(path, module)


@pytest.mark.parametrize("size", ["E4B", "26B-A4B"])
def test_uniform_bits_are_mlx_lms_choice(size):
    config, model, matrices = modules_of(size)
    theirs = model.quant_predicate
    ours = Options(bits=4).for_target(config.num_layers)
    for path, module in matrices:
        chosen = theirs(path, module)
        wanted = FOUR if chosen is True else {"mode": "affine"} | chosen
        assert ours.choose(path, module.weight.shape[-1], False) == wanted


def test_the_default_spares_what_is_fragile():
    config, _, matrices = modules_of("E4B")
    recipe = Options().for_target(config.num_layers)
    bits = {p: recipe.choose(p, m.weight.shape[-1], False)["bits"] for p, m in matrices}
    by_end = lambda end: {bits[path] for path in bits if path.endswith(end)}  # noqa: E731
    assert by_end("embed_tokens") == by_end("embed_tokens_per_layer") == {6}
    assert by_end("per_layer_input_gate") == by_end("per_layer_projection") == {8}
    assert by_end("q_proj") == by_end("down_proj") == {4}
    assert recipe.choose("layers.0.router.proj", 2816, False)["bits"] == 8

    drafter = Options().for_drafter()
    assert drafter.choose("model.embed_tokens", 256, True)["bits"] == 4
    assert drafter.choose("model.layers.0.mlp.up_proj", 256, False)["bits"] == 8
    assert isinstance(drafter.choose("masked_embedding.centroids", 256, False), str)


def test_the_router_takes_a_group_that_divides_or_stays():
    recipe = Options(mode="nvfp4").for_target(1)
    sizes = {width: recipe.choose("layers.0.router.proj", width, False) for width in (64, 96, 48)}
    assert sizes[64] == {"bits": 8, "group_size": 64, "mode": "affine"}
    assert sizes[96] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert isinstance(sizes[48], str)


def test_tables_that_nvfp4_cannot_look_rows_up_in_stay():
    """A look-up of one row fails in MLX at these widths; a product does not."""
    recipe = Options(mode="nvfp4").for_target(1)
    wanted = {"bits": 4, "group_size": 16, "mode": "nvfp4"}
    assert isinstance(recipe.choose("embed_tokens", 48, True), str)
    assert recipe.choose("q_proj", 48, False) == wanted
    assert recipe.choose("embed_tokens", 64, True) == wanted


def test_patterns_win_and_say_for_which_model():
    options = Options(keep=("*.v_proj=bf16", "layers.0.*=8", "drafter.pre_projection=2"))
    target, drafter = options.for_target(4), options.for_drafter()
    path = "language_model.model.layers.0.self_attn"
    assert target.choose(f"{path}.v_proj", 64, False) == "the command keeps it"
    assert target.choose(f"{path}.q_proj", 64, False) == FOUR | {"bits": 8}
    assert target.choose("language_model.model.layers.1.mlp.up_proj", 64, False) == FOUR
    assert drafter.choose("pre_projection", 64, False) == FOUR | {"bits": 2}
    assert drafter.choose("model.layers.0.self_attn.v_proj", 64, False) == FOUR | {"bits": 8}


def test_the_drafters_head_has_bits_of_its_own():
    for options, body, head in [
        (Options(bits=8), 8, 8),
        (Options(drafter_bits=3), 3, 3),
        (Options(drafter_bits=3, drafter_head=5), 3, 5),
        (Options(drafter_head=UNQUANTIZED), 8, None),
        (Options(recipe="as-stored", drafter_bits=4), 4, 4),
        (Options(recipe="as-stored"), None, None),
    ]:
        recipe = options.for_drafter()
        found = [
            choice and choice["bits"]
            for choice in (
                recipe.choose("post_projection", 64, False),
                recipe.choose("model.embed_tokens", 64, True),
            )
        ]
        assert found == [body, head]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bits": 7}, "no 7 bits"),
        ({"bits": 4, "group_size": 16}, "no group size 16"),
        ({"bits": 8, "mode": "mxfp4"}, "no 8 bits"),
        ({"bits": 4, "mode": "mxfp8"}, "no 4 bits"),
        ({"bits": 4, "mode": "nvfp4", "group_size": 32}, "no group size 32"),
        ({"mode": "fp6"}, "fp6"),
        ({"recipe": "as-stored", "group_size": 64}, "chooses its own"),
        ({"recipe": "mixed_4_6", "bits": 4}, "given with bits"),
        ({"recipe": "mixed_4_6", "mode": "mxfp4"}, "which is affine"),
        ({"recipe": "best"}, "recipe is 'best'"),
        ({"drafter_bits": 9}, "no 9 bits"),
        ({"drafter_head": 7}, "no 7 bits"),
        ({"keep": ("q_proj",)}, "keep is 'q_proj'"),
        ({"keep": ("q_proj=7",)}, "keep is 'q_proj=7'"),
        ({"shard_bytes": 0}, "shard size is 0"),
    ],
)
def test_impossible_recipes_are_refused_before_any_work(options, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        convert(tmp_path / "does not exist", tmp_path / "out", Options(**options))


def test_the_block_names_what_differs_from_most():
    many, few = FOUR, FOUR | {"bits": 8}
    assert block_of({}) is None
    assert block_of({"a": many, "b": few, "c": many}) == many | {"b": few}
    assert json.dumps(block_of({"a": few})) == json.dumps(few)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_weights_on_a_4_bit_grid_are_stored_as_they_are(dtype):
    """q4_0: whole steps from -8 to 7, -8 or 8 of them at the largest; MLX's own scale misses it."""
    steps = mx.random.randint(-7, 8, (40, 4, 32), key=mx.random.key(0))
    steps[..., 5] = -8
    scale = mx.random.uniform(0.01, 0.1, (40, 4, 1), key=mx.random.key(1)).astype(mx.float16)
    scale = scale.astype(mx.bfloat16).astype(mx.float32)
    sign = mx.where(mx.arange(160).reshape(40, 4, 1) % 3 == 0, -1.0, 1.0)
    weight = (steps * scale * sign).reshape(40, 128).astype(dtype)
    rounding = 0 if dtype == mx.float32 else 2**-7

    def error(quantized):
        back = mx.dequantize(*quantized, group_size=32, bits=4)
        return mx.max(mx.abs(back.astype(mx.float32) - weight) / mx.max(mx.abs(weight))).item()

    assert error(quantize_on_grid(weight, 32)) <= 1e-6 + rounding
    assert error(mx.quantize(weight, group_size=32, bits=4)) > 0.02


def test_weights_off_the_grid_are_as_near_as_mlx_puts_them():
    weight = mx.random.normal((64, 256), key=mx.random.key(2))
    back = mx.dequantize(*quantize_on_grid(weight, 32), group_size=32, bits=4)
    plain = mx.dequantize(*mx.quantize(weight, group_size=32, bits=4), group_size=32, bits=4)
    ours, theirs = (
        mx.max(mx.abs(weight - found).reshape(64, -1, 32), axis=-1) for found in (back, plain)
    )
    assert mx.all(ours <= theirs).item()
