"""Blocks give the bits of whole tensors, and those of mlx-lm; what is interrupted goes on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from random import Random

import mlx.core as mx
import mlx_lm.utils
import pytest
from made_checkpoints import write_small
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder

from mlx_mtp.convert import Options, convert, writer
from mlx_mtp.errors import ResourceError, UsageError
from mlx_mtp.files import read_headers, read_json, read_places, weight_files
from mlx_mtp.hub import BUNDLED

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
DENSE = PAIRS / "dense" / "target"
GROUPS_OF_32 = Options(group_size=32)


def parameters(model):
    return dict(tree_flatten(model.parameters()))


def digests(folder):
    """Every file of a folder: name -> hash."""
    return {
        str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def block_bytes(monkeypatch):
    """Blocks of a few rows that end within experts."""
    monkeypatch.setattr("mlx_mtp.convert.tensors.BLOCK_BYTES", 9_000)
    monkeypatch.setattr("mlx_mtp.convert.tensors.FP_BLOCK_BYTES", 9_000)


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize(
    ("options", "bits", "mode"),
    [
        (Options(bits=4), 4, "affine"),
        (Options(bits=3, group_size=32), 3, "affine"),
        (Options(mode="mxfp4"), 4, "mxfp4"),
        (Options(mode="nvfp4"), 4, "nvfp4"),
        (Options(mode="mxfp8"), 8, "mxfp8"),
        (Options(recipe="mixed_3_6"), None, "affine"),
        (Options(recipe="mixed_2_6"), None, "affine"),
    ],
)
@pytest.mark.usefixtures("block_bytes")
def test_every_bit_is_mlx_lms(name, options, bits, mode, tmp_path):
    convert(name, tmp_path / "out", options, drafter=None, verify=False)
    ours = parameters(mlx_lm.utils.load_model(tmp_path / "out", lazy=True)[0])
    model, config = mlx_lm.utils.load_model(BUNDLED[name])
    mixed = None if bits else mixed_quant_predicate_builder(options.recipe, model, 64)
    quantized, _ = mlx_lm.utils.quantize_model(
        model, config, options.group_size, bits, mode=mode, quant_predicate=mixed
    )
    theirs = parameters(quantized)
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        assert ours[path].dtype == array.dtype, path
        assert mx.array_equal(ours[path], array).item(), path


@pytest.mark.usefixtures("block_bytes")
def test_dequantizing_gives_what_quantized_weights_stand_for(tmp_path):
    convert("pocket-moe", tmp_path / "four", Options(bits=4), verify=False)
    report = convert(tmp_path / "four", tmp_path / "back", Options(recipe="dequantize"))
    assert report.target.quantization is report.drafter.quantization is None
    quantized = mlx_lm.utils.load_model(tmp_path / "four")[0]
    theirs = parameters(mlx_lm.utils.dequantize_model(quantized))
    back = parameters(mlx_lm.utils.load_model(tmp_path / "back")[0])
    assert back.keys() == theirs.keys()
    assert all(mx.array_equal(back[path], theirs[path]).item() for path in back)


def test_large_models_are_written_in_shards_with_an_index(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    convert(PAIRS / "moe" / "target", one, GROUPS_OF_32, verify=False)
    options = Options(group_size=32, shard_bytes=20_000)
    convert(PAIRS / "moe" / "target", many, options, verify=False)
    files = weight_files(many)
    assert len(files) > 2
    assert all(file.stat().st_size < 40_000 for file in files)
    whole, shards = read_headers(weight_files(one)), read_headers(files)
    assert whole == shards
    index = read_json(many / "model.safetensors.index.json")
    assert index["weight_map"].keys() == shards.keys()
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in shards.values())
    arrays = [parameters(mlx_lm.utils.load_model(folder)[0]) for folder in (one, many)]
    assert all(mx.array_equal(arrays[0][name], arrays[1][name]).item() for name in arrays[0])


def test_data_are_aligned(tmp_path):
    """Other readers map them; a header of any length and bytes between wider types disturb."""
    convert(PAIRS / "e2b" / "target", tmp_path / "out", Options(mode="mxfp4"), verify=False)
    for file in tmp_path.glob("out/**/*.safetensors"):
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
        for array in mx.load(str(file)).values():
            assert array.size
    for placed in read_places(tmp_path / "out" / "model.safetensors").values():
        width = placed.info.nbytes // max(1, mx.prod(mx.array(placed.info.shape)).item())
        assert placed.offset % width == 0


class Stopped(BaseException):
    """Stands for Ctrl-C."""


def stop_after(count):
    seen = []

    def observe(progress):
        seen.append(progress)
        if len(seen) > count:
            raise Stopped

    return observe


def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path):
    options = Options(group_size=32, shard_bytes=10_000)
    convert(DENSE, tmp_path / "whole" / "out", options)
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        convert(DENSE, out, options, observe=stop_after(30))
    assert not out.exists()
    done = list((tmp_path / ".out.partial" / "pair").glob("*.safetensors"))
    assert len(done) > 1
    before = {file.name: file.stat().st_mtime_ns for file in done}
    report = convert(DENSE, out, options)
    assert report.bytes_resumed > 0
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert digests(out) == digests(tmp_path / "whole" / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "whole"] == ["out"]


def test_a_shard_that_is_not_as_planned_is_written_anew(tmp_path):
    options = Options(group_size=32, shard_bytes=10_000)
    convert(DENSE, tmp_path / "whole" / "out", options, verify=False)
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        convert(DENSE, out, options, observe=stop_after(30), verify=False)
    shard = next((tmp_path / ".out.partial" / "pair").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[data.index(b'"dtype"') + 1] ^= 1  # in the header, of the same length
    shard.write_bytes(data)
    convert(DENSE, out, options, verify=False)
    assert digests(out) == digests(tmp_path / "whole" / "out")


def test_another_recipe_starts_anew(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        convert(DENSE, out, Options(bits=8, shard_bytes=20_000), observe=stop_after(30))
    report = convert(DENSE, out, Options(bits=4, shard_bytes=20_000), verify=False)
    assert report.bytes_resumed == 0
    fresh = tmp_path / "fresh" / "out"
    convert(DENSE, fresh, Options(bits=4, shard_bytes=20_000), verify=False)
    assert digests(out) == digests(fresh)


def test_what_is_done_is_not_done_again_unless_asked(tmp_path):
    out = tmp_path / "out"
    assert not convert(DENSE, out, GROUPS_OF_32, verify=False).was_done
    before = (out / "model.safetensors").stat().st_mtime_ns
    assert convert(DENSE, out, GROUPS_OF_32, verify=False).was_done
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(UsageError, match="not empty"):
        convert(DENSE, out, Options(bits=8))
    report = convert(DENSE, out, Options(bits=8, group_size=32), overwrite=True)
    assert not report.was_done
    assert read_json(out / "config.json")["quantization"]["bits"] == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_killed_after_its_last_step_is_done(tmp_path):
    out, left = tmp_path / "out", tmp_path / ".out.partial"
    report = convert(DENSE, out, GROUPS_OF_32, verify=False)
    for folder in (left, tmp_path / ".out.replaced"):
        folder.mkdir()
    (left / "state.json").write_text(f'{{"plan": "{report.plan.digest}", "checked": {{}}}}')
    again = convert(DENSE, out, GROUPS_OF_32, overwrite=True)
    assert again.was_done
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with (out / "model.safetensors").open("ab") as stream:
        stream.write(b"more")
    with pytest.raises(UsageError, match="not empty"):
        convert(DENSE, out, GROUPS_OF_32)


def test_only_a_conversion_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="no conversion of this program"):
        convert(DENSE, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"


def test_an_output_in_use_is_not_touched(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    keep = out / "mine.txt"
    keep.write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        convert(DENSE, out)
    assert [file.name for file in out.iterdir()] == ["mine.txt"]
    with pytest.raises(UsageError, match="is a file"):
        convert(DENSE, keep)
    keep.unlink()
    convert(DENSE, out, GROUPS_OF_32, verify=False)
    assert (out / "config.json").is_file()


def test_two_processes_do_not_write_the_same_output(tmp_path):
    def meanwhile(_):
        with pytest.raises(UsageError, match="Another process is writing"):
            convert(DENSE, tmp_path / "out", GROUPS_OF_32)
        raise Stopped

    with pytest.raises(Stopped):
        convert(DENSE, tmp_path / "out", GROUPS_OF_32, observe=meanwhile)


def test_a_full_disk_is_said_and_what_is_done_stays(tmp_path, monkeypatch):
    options = Options(group_size=32, shard_bytes=20_000)
    original, written = os.pwrite, []

    def pwrite(descriptor, data, offset):
        written.append(len(data))
        if sum(written) > 100_000:
            raise OSError(28, "No space left on device")
        return original(descriptor, data, offset)

    monkeypatch.setattr(writer.os, "pwrite", pwrite)
    with pytest.raises(ResourceError, match="disk is full") as caught:
        convert(DENSE, tmp_path / "out", options)
    assert caught.value.exit_code == 5
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert convert(DENSE, tmp_path / "out", options).bytes_resumed > 0


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        convert(DENSE, tmp_path / "file" / "out")


CHILD = """
import sys
from pathlib import Path
from mlx_mtp.convert import Options, convert
print("ready", flush=True)
convert(Path(sys.argv[1]), Path(sys.argv[2]), Options(group_size=32, shard_bytes=int(sys.argv[3])),
        overwrite=len(sys.argv) > 4, verify=False)
"""


def kill_and_go_on(target, out, shard_bytes, moments):
    """Start it, kill it after each of the moments (seconds), then let it end."""
    command = [sys.executable, "-c", CHILD, str(target), str(out), str(shard_bytes)]
    killed = 0
    for seconds in moments:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            time.sleep(seconds)
            killed += child.poll() is None
            child.send_signal(signal.SIGKILL)
    subprocess.run(command, check=True)
    return killed


def test_kill_9_leaves_what_the_same_command_goes_on_with(tmp_path):
    target = write_small(tmp_path / "target", "26B-A4B")
    options = Options(group_size=32, shard_bytes=60_000)
    shards = convert(target, tmp_path / "whole", options, verify=False).target.shards
    assert len(shards) > 20
    out = tmp_path / "sub" / "whole"
    written = out.parent / ".whole.partial" / "pair"
    command = [sys.executable, "-c", CHILD, str(target), str(out), "60000"]
    for count in (2, 10):
        with subprocess.Popen(command) as child:
            while len(list(written.glob("*.safetensors"))) < count:
                assert child.poll() is None
            child.send_signal(signal.SIGKILL)
        assert not out.exists()
    subprocess.run(command, check=True)
    assert digests(out) == digests(tmp_path / "whole")
    assert [path.name for path in out.parent.iterdir()] == ["whole"]


@pytest.mark.slow
def test_kill_9_at_20_random_moments(tmp_path):
    target = write_small(tmp_path / "target", "26B-A4B", scale=4)
    options = Options(group_size=32, shard_bytes=3_000_000)
    began = time.perf_counter()
    convert(target, tmp_path / "whole", options, verify=False)
    seconds = time.perf_counter() - began
    random, killed = Random(0), 0
    while killed < 20:
        out = tmp_path / "sub" / "whole"
        killed += kill_and_go_on(target, out, 3_000_000, [0.8 * seconds * random.random()])
        assert digests(out) == digests(tmp_path / "whole")
        assert [path.name for path in out.parent.iterdir()] == ["whole"]
        shutil.rmtree(out)


PEAK = """
import sys
from pathlib import Path
import mlx.core as mx
mx.eval(mx.quantize(mx.ones((64, 64))))
def high():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
bare = high()
import mlx_mtp.convert as package
announced = package.plan(sys.argv[1], drafter=None).peak_bytes
package.convert(sys.argv[1], sys.argv[2], drafter=None, verify=False)
print(bare, announced, high())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_is_bounded_whatever_the_checkpoint(tmp_path):
    target = write_small(tmp_path / "target", "31B", scale=5)
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    assert size > 250e6
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(target), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    bare, announced, taken = map(int, done.stdout.split())
    assert taken - bare < 250e6
    assert announced == pytest.approx(taken, rel=0.01)
