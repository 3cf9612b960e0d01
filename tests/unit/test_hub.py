"""Names lead to folders, the network is the last resort, and damaged files are told apart.

The hub of these tests is a server on this machine's loopback that speaks the few paths the
client asks for; nothing leaves the machine.
"""

import json
import logging
import struct

import pytest
from hubs import SHA
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.errors import ModelNotFoundError
from mlx_mtp.files import read_header, read_headers, read_json, weight_files
from mlx_mtp.hub import drafter_names, find_drafter, resolve


def safetensors_bytes(tensors=None, extra=b"", patch=None):
    """A safetensors file's bytes: name -> (dtype, shape, nbytes)."""
    tensors = {"w": ("F32", [2, 3], 24)} if tensors is None else tensors
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    header.update(patch or {})
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(position) + extra


def make_model(folder, files=("model.safetensors",)):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name in files:
        (folder / name).write_bytes(safetensors_bytes({f"{name}.w": ("F32", [1], 4)}))
    return folder


def put_in_cache(cache, name, sha=SHA, files=("model.safetensors",)):
    repo = cache / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(sha)
    return make_model(repo / "snapshots" / sha, files)


REPO = {"config.json": b"{}", "model.safetensors": safetensors_bytes(), "README.md": b"not wanted"}


def test_a_folder_is_itself(tmp_path):
    folder = make_model(tmp_path / "some model")
    found = resolve(str(folder))
    assert (found.path, found.revision) == (folder, None)


def test_a_folder_wins_over_a_hub_id(tmp_path, cache, monkeypatch):
    put_in_cache(cache, "org/model")
    make_model(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert not resolve("org/model").path.is_relative_to(cache)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "no folder nowhere"),
        ("./a/b/c", "no folder"),
        ("pockets", "Did you mean pocket"),
        ("gemma-4-E4B-it", "Did you mean google/gemma-4-E4B-it"),
    ],
)
def test_an_unknown_name_is_a_sentence(name, said, tmp_path, monkeypatch, cache):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=said) as caught:
        resolve(name)
    assert caught.value.exit_code == 3


def test_a_file_and_a_folder_without_config_are_told_apart(tmp_path):
    make_model(tmp_path / "pair" / "target")
    with pytest.raises(ModelNotFoundError, match="target"):
        resolve(str(tmp_path / "pair"))
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve(str(tmp_path / "pair" / "target" / "config.json"))


def test_a_complete_snapshot_needs_no_network(cache, hub):
    snapshot = put_in_cache(cache, "org/model")
    found = resolve("org/model")
    assert (found.path, found.revision, found.name) == (snapshot, SHA, "org/model")
    assert resolve(str(snapshot)) == found  # a snapshot's own path names it
    assert hub.asked == []


def test_cached_names_compare_without_case(cache):
    snapshot = put_in_cache(cache, "google/gemma-4-E4B-it")
    found = resolve("google/gemma-4-e4b-IT")
    assert (found.path, found.name) == (snapshot, "google/gemma-4-E4B-it")


def test_offline_and_absent_is_a_sentence(cache):
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve("org/model")
    put_in_cache(cache, "org/partial", files=("model-00001-of-00002.safetensors",))
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE"):
        resolve("org/partial")


def test_download_takes_what_is_wanted_and_only_once(cache, hub):
    hub.repos["org/model"] = REPO | {"drafter/model.safetensors": safetensors_bytes()}
    found = resolve("org/model")
    assert sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*.*")) == [
        "config.json",
        "drafter/model.safetensors",
        "model.safetensors",
    ]
    assert found.revision == SHA
    asked = len(hub.asked)
    assert resolve("org/model") == found
    assert len(hub.asked) == asked


def test_an_interrupted_download_is_completed(cache, hub):
    put_in_cache(cache, "org/model", files=("model-00001-of-00002.safetensors",))
    shards = {f"model-0000{i}-of-00002.safetensors": safetensors_bytes() for i in (1, 2)}
    hub.repos["org/model"] = {"config.json": b"{}"} | shards
    assert len(weight_files(resolve("org/model").path)) == 2


@pytest.mark.parametrize(
    ("state", "said", "hint"),
    [
        ("GatedRepo", "gated", "hf auth login"),
        ("RepoNotFound", "no such model on the hub", "hf auth login"),
        ("Busy", "cannot be reached", "network"),
    ],
)
def test_what_the_hub_refuses_is_a_sentence(state, said, hint, cache, hub, monkeypatch):
    hub.repos["org/model"] = state
    with pytest.raises(ModelNotFoundError, match=said) as caught:
        resolve("org/model")
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_a_misspelt_published_name_is_suggested(cache, hub):
    with pytest.raises(ModelNotFoundError, match="google/gemma-4-31B-it"):
        resolve("google/gemma4-31B-it")


def test_an_unknown_revision_is_a_sentence(cache, hub):
    hub.repos["org/model"] = REPO
    with pytest.raises(ModelNotFoundError, match="no revision v9"):
        resolve("org/model", revision="v9")


def test_without_network_the_cache_serves_what_it_has(cache, hub, caplog):
    """The tokenizer never arrived and the hub is down: the weights can still be run."""
    snapshot = put_in_cache(cache, "org/model")
    trees = snapshot.parent.parent / "trees"
    trees.mkdir()
    files = {name: {"size": 1, "blob_id": "b"} for name in ("config.json", "tokenizer.json")}
    (trees / f"{SHA}.json").write_text(json.dumps({"format_version": 1, "files": files}))
    hub.repos["org/model"] = "Busy"
    with caplog.at_level(logging.WARNING, "mlx_mtp"):
        assert resolve("org/model").path == snapshot


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("out", "out/drafter"),
        ("pair/target", "pair/assistant"),
        ("gemma-4-31b", "gemma-4-31b-assistant"),
    ],
)
def test_a_drafter_beside_the_target_is_found(target, drafter, tmp_path):
    path = make_model(tmp_path / target)
    assert find_drafter(str(path), path) is None
    beside = make_model(tmp_path / drafter)
    assert find_drafter(str(path), path) == beside


def test_its_own_drafter_folder_comes_first(tmp_path):
    path = make_model(tmp_path / "target")
    make_model(tmp_path / "assistant")
    make_model(tmp_path / "target-assistant")
    assert find_drafter(str(path), path) == tmp_path / "assistant"
    assert find_drafter(str(path), path) != make_model(path / "drafter")
    assert find_drafter(str(path), path) == path / "drafter"


def test_a_cached_drafter_is_found_without_case_and_without_network(cache, hub):
    target = put_in_cache(cache, "mlx-community/gemma-4-e4b-it-4bit")
    drafter = put_in_cache(cache, "google/gemma-4-E4B-it-assistant")
    assert find_drafter("mlx-community/gemma-4-E4B-it-4bit", target) == drafter
    own = put_in_cache(cache, "mlx-community/gemma-4-E4B-it-assistant-bf16")
    assert find_drafter("mlx-community/gemma-4-e4b-it-4bit", target) == own
    assert find_drafter(str(target), target) == own  # the snapshot's own path names it
    assert hub.asked == []


def test_a_drafter_is_downloaded_where_the_cache_has_none(cache, hub):
    target = put_in_cache(cache, "google/gemma-4-12B-it")
    hub.repos["google/gemma-4-12B-it-assistant"] = REPO
    found = find_drafter("google/gemma-4-12B-it", target)
    assert found is not None
    assert (found / "model.safetensors").is_file()


def test_no_drafter_anywhere_is_none(cache, hub, tmp_path):
    target = put_in_cache(cache, "google/gemma-4-12B-it")
    assert find_drafter("google/gemma-4-12B-it", target) is None
    asked = len(hub.asked)
    folder = make_model(tmp_path / "mine")
    assert find_drafter(str(folder), folder) is None
    assert len(hub.asked) == asked


def testdrafter_names_of_published_and_converted_targets():
    assert list(drafter_names("google/gemma-4-31B-it-qat-q4_0-unquantized")) == [
        "google/gemma-4-31B-it-qat-q4_0-unquantized-assistant"
    ]
    assert list(drafter_names("mlx-community/gemma-4-26b-a4b-it-8bit")) == [
        "mlx-community/gemma-4-26b-a4b-it-assistant-8bit",
        "mlx-community/gemma-4-26b-a4b-it-assistant-bf16",
        "google/gemma-4-26B-A4B-it-assistant",
    ]
    assert list(drafter_names("me/other")) == ["me/other-assistant"]


def test_json_files_fail_with_a_sentence(tmp_path):
    file = tmp_path / "config.json"
    for content, said in [(None, "missing"), (b"{", "valid JSON"), (b"[]", "no JSON object")]:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ModelNotFoundError, match=said):
            read_json(file)
    file.write_bytes(b"\xff\xfe" + b"[" * 100_000)
    with pytest.raises(ModelNotFoundError, match="valid JSON"):
        read_json(file)


def test_weight_files_follow_the_index(tmp_path):
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    make_model(tmp_path, names)
    make_model(tmp_path, ["model-left-over.safetensors"])
    index = {"weight_map": {"b": names[1], "a": names[0], "c": names[0]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(ModelNotFoundError, match=names[1]):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/model.safetensors", "a/b.safetensors", "x.bin", 3, ""]
)
def test_an_index_cannot_point_out_of_the_folder(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelNotFoundError, match="not a weight file"):
        weight_files(tmp_path)


def test_a_missing_shard_is_named_without_an_index(tmp_path):
    make_model(tmp_path, ["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"])
    with pytest.raises(ModelNotFoundError, match="model-00002-of-00003"):
        weight_files(tmp_path)


def test_other_formats_are_named(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"only model\.gguf"):
        weight_files(tmp_path)


def test_header_reads_names_dtypes_and_shapes(tmp_path):
    file = tmp_path / "m.safetensors"
    file.write_bytes(safetensors_bytes({"a": ("BF16", [3], 6), "b": ("U8", [0, 2], 0)}))
    assert read_header(file) == {"a": ("BF16", (3,), 6), "b": ("U8", (0, 2), 0)}


def test_a_truncated_file_says_how_much_is_missing(tmp_path):
    file = tmp_path / "m.safetensors"
    whole = safetensors_bytes()
    file.write_bytes(whole[:-10])
    with pytest.raises(ModelNotFoundError, match=r"m\.safetensors.* 10 bytes are missing"):
        read_header(file)


@given(cut=st.integers(0, len(safetensors_bytes()) - 1))
def test_every_truncation_is_found(cut, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "cut.safetensors"
    file.write_bytes(safetensors_bytes()[:cut])
    with pytest.raises(ModelNotFoundError, match=r"cut\.safetensors"):
        read_header(file)


@given(st.binary(max_size=200), st.integers(0, 90))
def test_noise_never_ends_in_anything_but_a_sentence(noise, where):
    import tempfile
    from pathlib import Path

    whole = safetensors_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "noise.safetensors"
        file.write_bytes(whole[:where] + noise + whole[where + len(noise) :])
        try:
            header = read_header(file)
        except ModelNotFoundError:
            return
        assert all(info.nbytes >= 0 for info in header.values())


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (safetensors_bytes(extra=b"abc"), "3 bytes at its end"),
        (safetensors_bytes({"w": ("F32", [2, 3], 20)}), "its shape needs 24"),
        (safetensors_bytes({"w": ("Q4", [2], 8)}), "unknown dtype 'Q4'"),
        (
            safetensors_bytes(patch={"w": {"dtype": "F32", "shape": [6], "data_offsets": [1, 25]}}),
            "do not follow",
        ),
        (safetensors_bytes(patch={"w": {"dtype": "F32", "shape": [-6]}}), "no shape"),
        (struct.pack("<Q", 1 << 60) + b"{}", "does not begin like"),
        (struct.pack("<Q", 2) + b"[]", "no JSON object"),
        (struct.pack("<Q", 16) + b'{"a": 1, "a": 2}', "not valid JSON"),
        (b"", "does not begin like"),
    ],
)
def test_a_damaged_header_is_named(file, said, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(file)
    with pytest.raises(ModelNotFoundError, match=said):
        read_header(path)


def test_one_name_in_two_shards_is_an_error(tmp_path):
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for file in files:
        file.write_bytes(safetensors_bytes())
    with pytest.raises(ModelNotFoundError, match=r"w is both in a\.safetensors and in b"):
        read_headers(files)
