"""A plan follows from headers alone, for the real sizes too, and holds when it is carried out."""

import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from made_checkpoints import drafter_tensors, nbytes, target_tensors, write_checkpoint, write_small
from published import PARAMETERS, SIZES, assistant

from mlx_mtp.convert import Options, convert, plan
from mlx_mtp.convert.plan import parts_of
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError, ResourceError, UsageError
from mlx_mtp.model.memory import MemoryBudget
from mlx_mtp.pair import TargetConfig

README = Path(__file__).parents[2] / "README.md"
PARTS = {"embeddings", "attention", "dense MLP", "norms"}


@pytest.mark.parametrize("size", SIZES)
def test_the_published_sizes_are_planned_from_their_headers(size, tmp_path):
    """The files are holes: the plan reads no tensor, and 62 GB would not fit here."""
    config, family = SIZES[size][:2]
    tensors = target_tensors(config)
    write_checkpoint(tmp_path / "target", config, tensors, shard_bytes=50 * 10**9)
    write_checkpoint(tmp_path / "assistant", assistant(size), drafter_tensors(assistant(size)))
    planned = plan(tmp_path / "target")
    assert (planned.target.parameter_count, planned.drafter.parameter_count) == PARAMETERS[size]

    dropped = {d.stored.name: d.why for d in planned.target.dropped}
    shared = [name for name, why in dropped.items() if "K and V" in why]
    assert len(shared) == 3 * config["text_config"]["num_kv_shared_layers"]
    assert sum(why == "vision or audio" for why in dropped.values()) == 2
    written = {tensor.rows.stored.name for tensor in planned.target.tensors}
    assert written | dropped.keys() == tensors.keys()
    assert not written & dropped.keys()
    assert planned.target.source_bytes == sum(nbytes(*entry) for entry in tensors.values())
    more = {"e-series": {"per-layer embeddings"}, "experts": {"experts", "router"}}
    assert {row[0] for row in parts_of(planned.target)} == PARTS | more.get(family, set())
    assert {row[0] for row in parts_of(planned.drafter)} == {"drafter head", "drafter body"}
    for mode in ("affine", "mxfp4", "nvfp4", "mxfp8"):
        taken = plan(tmp_path / "target", options=Options(mode=mode)).working_bytes
        assert taken < 256 * 2**20


@pytest.mark.parametrize("size", SIZES)
def test_the_readme_names_the_sizes(size, tmp_path):
    config, small = SIZES[size][0], assistant(size)
    write_checkpoint(tmp_path / "target", config, target_tensors(config), shard_bytes=50 * 10**9)
    write_checkpoint(tmp_path / "assistant", small, drafter_tensors(small))
    cells = [size]
    for options in (Options(recipe="as-stored"), Options(bits=8), Options()):
        parts = plan(tmp_path / "target", options=options).parts
        weights = [sum(tensor.bytes for tensor in part.tensors) for part in parts]
        cells.append(" + ".join(f"{size / 1e9:.2f}" for size in weights))
    budget = MemoryBudget(TargetConfig.from_dict(config), 2, sum(weights), limit=10**12)
    for rows, context in ((1, 2**13), (8, 2**13), (1, 2**17)):
        cells.append(f"{budget.needed(rows, context) / 1e9:.1f}")
    assert f"| {' | '.join(cells)} |\n" in README.read_text()


def test_the_unquantized_size_is_the_checkpoints(tmp_path):
    config = SIZES["26B-A4B"][0]
    write_checkpoint(tmp_path / "target", config, target_tensors(config, towers=False))
    planned = plan(tmp_path / "target", options=Options(recipe="as-stored"), drafter=None)
    assert sum(tensor.bytes for tensor in planned.target.tensors) == planned.target.source_bytes
    assert all(shard.bytes < 5.1e9 for shard in planned.target.shards)
    assert len(planned.target.shards) == 11  # 50.5 GB


def test_towers_are_kept_where_asked(tmp_path):
    config = SIZES["E2B"][0] | {"vision_config": {"model_type": "gemma4_vision"}}
    tensors = target_tensors(config)
    write_checkpoint(tmp_path / "target", config, tensors)
    planned = plan(tmp_path / "target", options=Options(towers="keep"), drafter=None)
    towers = {t.name: t for t in planned.target.tensors if t.part == "towers"}
    assert len(towers) == 2
    for name, tensor in towers.items():
        assert (tensor.action, tensor.outputs[0].info.shape) == ("copy", tensors[name][1])
    assert planned.target.config["vision_config"] == config["vision_config"]
    assert planned.target.parameter_count == PARAMETERS["E2B"][0]


@pytest.mark.parametrize("size", ["E4B", "26B-A4B", "31B", "12B"])
def test_the_announced_size_and_memory_are_what_it_takes(size, tmp_path, monkeypatch):
    target = write_small(tmp_path / "target", size)
    monkeypatch.setattr("mlx_mtp.convert.tensors.BLOCK_BYTES", 200_000)
    planned = plan(target, options=Options(bits=4), drafter=None)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    out = tmp_path / "out"
    convert(target, out, Options(bits=4), drafter=None, verify=False)
    taken = mx.get_peak_memory() - before
    sizes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert sizes == planned.bytes
    assert planned.working_bytes == pytest.approx(taken, rel=0.01)


def test_a_disk_too_small_is_found_before_anything_is_written(tmp_path, monkeypatch):
    config = SIZES["31B"][0]
    write_checkpoint(tmp_path / "target", config, target_tensors(config))
    usage = shutil.disk_usage(tmp_path)._replace(free=10**10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match=r"needs 1\d\.\d\d GB .* 10\.00 GB free") as caught:
        convert(tmp_path / "target", tmp_path / "out", drafter=None)
    assert caught.value.exit_code == 5
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"layers.0.mlp.up_proj.weight": ("BF16", (8, 8))}, IncompatibleError, r"has shape \[8, 8"),
        ({"layers.0.mlp.up_proj.weight": None}, IncompatibleError, "lacks"),
        ({"layers.0.mlp.extra.weight": ("BF16", (8, 8))}, IncompatibleError, "holds, beyond"),
        ({"layers.0.experts.gate_up_proj": ("BF16", (3, 5, 8))}, IncompatibleError, "no gate and"),
    ],
)
def test_tensors_that_do_not_fit_are_found_from_headers(change, error, said, tmp_path):
    config = SIZES["26B-A4B"][0]
    tensors = target_tensors(config)
    for name, entry in change.items():
        full = f"model.language_model.{name}"
        if entry is None:
            del tensors[full]
        else:
            tensors[full] = entry
    write_checkpoint(tmp_path / "target", config, tensors)
    with pytest.raises(error, match=said) as caught:
        plan(tmp_path / "target", drafter=None)
    assert caught.value.exit_code == 4


def test_a_drafter_of_another_target_is_found_from_headers(tmp_path):
    write_checkpoint(tmp_path / "target", SIZES["E2B"][0], target_tensors(SIZES["E2B"][0]))
    write_checkpoint(tmp_path / "assistant", assistant("E4B"), drafter_tensors(assistant("E4B")))
    with pytest.raises(IncompatibleError, match="belongs to another target"):
        plan(tmp_path / "target")


def test_gguf_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "gemma-4-Q4_K_M.gguf").write_bytes(b"GGUF")
    for name in (tmp_path, tmp_path / "gemma-4-Q4_K_M.gguf"):
        with pytest.raises(IncompatibleError, match="GGUF"):
            plan(name)


def test_a_qat_checkpoint_is_put_on_its_grid(tmp_path):
    target = write_small(tmp_path / "target", "31B", data=False)
    renamed = target.rename(tmp_path / "gemma-4-31B-it-qat-q4_0-unquantized")
    planned = plan(renamed, drafter=None)
    assert planned.is_qat
    on_grid = {t.part for t in planned.target.tensors if t.on_grid}
    assert on_grid == {"attention", "dense MLP"}
    assert planned.target.quantization["group_size"] == 32
    assert not any(
        t.on_grid for t in plan(renamed, options=Options(bits=4), drafter=None).target.tensors
    )


def test_a_pattern_that_hits_nothing_is_refused(tmp_path):
    target = write_small(tmp_path / "target", data=False)
    with pytest.raises(UsageError, match=r"'\*\.w_proj=8' matches no matrix"):
        plan(target, options=Options(keep=("*.v_proj=8", "*.w_proj=8")), drafter=None)


def test_other_files_change_the_digest_and_nothing_else_does(tmp_path):
    target = write_small(tmp_path / "target")
    first = plan(target, drafter=None).digest
    assert plan(target, drafter=None).digest == first
    assert plan(target, options=Options(bits=5), drafter=None).digest != first
    assert plan(target, options=Options(shard_bytes=10**6), drafter=None).digest != first
    with (target / "model.safetensors").open("r+b") as stream:
        stream.seek(-2, 2)
        stream.write(b"\x01\x3c")
    assert plan(target, drafter=None).digest != first


def test_a_weight_file_that_is_missing_is_named(tmp_path):
    config = SIZES["E2B"][0]
    write_checkpoint(tmp_path / "t", config, target_tensors(config), shard_bytes=10**9)
    (tmp_path / "t" / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="lacks model-00002-of-0000"):
        plan(tmp_path / "t", drafter=None)
