"""Damage is found, in the source where possible before work, and in what was written always."""

import json
import os
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_mtp.convert import Options, blocks, convert, writer
from mlx_mtp.convert.check import allowed_error, check_decoding
from mlx_mtp.errors import (
    IncompatibleError,
    MlxMtpError,
    ModelNotFoundError,
    UsageError,
    VerificationError,
)
from mlx_mtp.files import INDEX, read_json, read_places

DENSE = Path(__file__).parents[1] / "data" / "pairs" / "dense" / "target"
GROUPS_OF_32 = Options(group_size=32)


@pytest.fixture
def source(tmp_path):
    """A copy to damage, in two shards with an index."""
    folder = tmp_path / "source" / "target"
    shutil.copytree(DENSE, folder)
    shutil.copytree(DENSE.parent / "assistant", folder.parent / "assistant")
    weights = mx.load(str(folder / "model.safetensors"))
    names = list(weights)
    weight_map = {}
    for number in (1, 2):
        file = f"model-{number:05}-of-00002.safetensors"
        shard = {name: weights[name] for name in names[number - 1 :: 2]}
        mx.save_safetensors(str(folder / file), shard)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def first(folder):
    return folder / "model-00001-of-00002.safetensors"


def truncate(folder):
    with first(folder).open("r+b") as stream:
        stream.truncate(first(folder).stat().st_size - 5)


def remove_shard(folder):
    first(folder).unlink()


def double_name(folder):
    second = folder / "model-00002-of-00002.safetensors"
    shutil.copyfile(second, first(folder))


def name_absent_file(folder):
    index = read_json(folder / INDEX)
    index["weight_map"]["more"] = "model-00003-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


def name_file_elsewhere(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../../etc/passwd"}}))


def break_index(folder):
    (folder / INDEX).write_text('{"weight_map": ')


def break_config(folder):
    (folder / "config.json").write_text("{")


def empty_config(folder):
    (folder / "config.json").write_text("{}")


def break_header(folder):
    with first(folder).open("r+b") as stream:
        stream.seek(9)
        stream.write(b"!!!!")


def other_shape(folder):
    weights = mx.load(str(first(folder)))
    name = next(name for name in weights if name.endswith("proj.weight"))
    weights[name] = weights[name][:8]
    mx.save_safetensors(str(first(folder)), dict(weights))


def lose_tensor(folder):
    weights = dict(mx.load(str(first(folder))))
    del weights[next(name for name in weights if name.endswith("proj.weight"))]
    mx.save_safetensors(str(first(folder)), weights)


def other_dtype(folder):
    weights = dict(mx.load(str(first(folder))))
    name = next(name for name in weights if name.endswith("proj.weight"))
    weights[name] = weights[name].astype(mx.int32)
    mx.save_safetensors(str(first(folder)), weights)


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (truncate, ModelNotFoundError, "5 bytes are missing"),
        (remove_shard, ModelNotFoundError, "lacks model-00001-of-00002"),
        (double_name, ModelNotFoundError, "is both in"),
        (name_absent_file, ModelNotFoundError, "lacks model-00003"),
        (name_file_elsewhere, ModelNotFoundError, "not a weight file of that folder"),
        (break_index, ModelNotFoundError, "not valid JSON"),
        (break_config, ModelNotFoundError, "not valid JSON"),
        (empty_config, IncompatibleError, "model_type is missing"),
        (break_header, ModelNotFoundError, "is damaged"),
        (other_shape, IncompatibleError, "has shape"),
        (lose_tensor, IncompatibleError, "lacks"),
        (other_dtype, IncompatibleError, "not a weight"),
    ],
)
def test_damage_is_found_before_anything_is_written(damage, error, said, source, tmp_path):
    damage(source)
    with pytest.raises(error, match=said) as caught:
        convert(source, tmp_path / "out", GROUPS_OF_32)
    assert caught.value.exit_code in (3, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_found_when_they_are_read(value, source, tmp_path):
    weights = dict(mx.load(str(first(source))))
    name = next(name for name in weights if name.endswith("proj.weight"))
    array = np.array(weights[name])
    array[-1, -1] = value
    weights[name] = mx.array(array)
    mx.save_safetensors(str(first(source)), weights)
    for options in (GROUPS_OF_32, Options(recipe="as-stored"), Options(dtype="float16")):
        with pytest.raises(ModelNotFoundError, match="not finite") as caught:
            convert(source, tmp_path / "out", options)
        assert name in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(("dtype", "largest"), [(mx.bfloat16, 3e38), (mx.float16, 65504)])
def test_the_largest_numbers_are_numbers(dtype, largest):
    name = {mx.bfloat16: "BF16", mx.float16: "F16"}[dtype]
    for value, finite in ((largest, True), (-largest, True), (float("inf"), False)):
        host = np.array(mx.array([1.0, value, 0.0, -0.0]).astype(dtype).view(mx.uint16))
        assert blocks._is_finite(host, name) == finite


def test_a_source_that_changes_meanwhile_is_noticed(source, tmp_path):
    def observe(progress):
        if progress.bytes_done:
            truncate(source)

    with pytest.raises(ModelNotFoundError):
        convert(source, tmp_path / "out", GROUPS_OF_32, observe=observe)
    assert not (tmp_path / "out").exists()


def test_a_parent_that_cannot_be_written_is_said(source, tmp_path, monkeypatch):
    def mkdir(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UsageError, match="cannot be written: Permission denied"):
        convert(source, tmp_path / "out", GROUPS_OF_32)


def test_bytes_that_do_not_arrive_are_found(source, tmp_path, monkeypatch):
    original = os.pwrite

    def pwrite(descriptor, data, offset):
        wrong = bytes(len(data)) if len(data) == 1024 else data
        return original(descriptor, wrong, offset)

    monkeypatch.setattr(writer.os, "pwrite", pwrite)
    with pytest.raises(VerificationError, match="is not what was written") as caught:
        convert(source, tmp_path / "out", GROUPS_OF_32)
    assert caught.value.exit_code == 7
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert convert(source, tmp_path / "out", GROUPS_OF_32).check.decoding.identical


def test_what_an_earlier_run_wrote_unchecked_is_checked(source, tmp_path):
    def stop(progress):
        if progress.step == "check":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", GROUPS_OF_32, verify=False, observe=stop)
    written = tmp_path / ".out.partial" / "pair" / "model.safetensors"
    placed = read_places(written)["language_model.model.layers.0.mlp.up_proj.weight"]
    with written.open("r+b") as stream:
        stream.seek(placed.offset)
        stream.write(b"\x07\x07\x07\x07")
    with pytest.raises(VerificationError, match="up_proj"):
        convert(source, tmp_path / "out", GROUPS_OF_32)
    assert convert(source, tmp_path / "out", GROUPS_OF_32).check.decoding.identical


def test_a_quantization_that_loses_too_much_is_found(source, tmp_path, monkeypatch):
    original = mx.quantize

    def quantize(weight, **params):
        return original(weight + 1, **params)

    monkeypatch.setattr(blocks.mx, "quantize", quantize)
    with pytest.raises(VerificationError, match="more than its mode allows"):
        convert(source, tmp_path / "out", GROUPS_OF_32)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 128])
def test_what_a_mode_allows_is_above_what_it_loses(bits, group_size):
    params = {"bits": bits, "group_size": group_size, "mode": "affine"}
    normal = mx.random.normal((64, 256), key=mx.random.key(0))
    spike = mx.where(mx.arange(256) % group_size == 0, 1.0, normal * 0.01)
    for weight in (normal, spike):
        back = mx.dequantize(*mx.quantize(weight, **params), **params)
        error = mx.linalg.norm(weight - back) / mx.linalg.norm(weight)
        assert error.item() < allowed_error(params)


def test_a_model_too_large_to_decode_with_is_said(tmp_path, monkeypatch):
    convert(DENSE, tmp_path / "out", GROUPS_OF_32, verify=False)
    monkeypatch.setattr("mlx_mtp.convert.check.device_limit", lambda: 1000)
    decoding = check_decoding(tmp_path / "out", has_drafter=True)
    assert "no text was decoded" in decoding.note
    assert decoding.identical is None


def test_the_check_is_recorded_and_the_card_says_it(tmp_path):
    report = convert("pocket", tmp_path / "out")
    decoding = report.check.decoding
    assert decoding.identical
    assert 0 < decoding.accepted <= decoding.drafted
    assert 0 < report.check.errors["dense MLP"] < 0.12
    recorded = read_json(tmp_path / "out" / "mlx_mtp.json")
    assert recorded["check"]["decoding"] == decoding._asdict()
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{decoding.accepted} of {decoding.drafted} drafts were accepted" in card
    assert "pocket, converted for MLX by mlx-mtp: 4 bit affine, groups of 64" in card
    convert("pocket", tmp_path / "unchecked", verify=False)
    assert read_json(tmp_path / "unchecked" / "mlx_mtp.json")["check"] is None
    assert "has not been checked" in (tmp_path / "unchecked" / "README.md").read_text()


def test_every_error_is_two_sentences(source, tmp_path):
    lose_tensor(source)
    with pytest.raises(MlxMtpError) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.message.endswith(".")
    assert caught.value.hint.endswith(".")
