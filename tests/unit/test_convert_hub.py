"""A hub checkpoint is planned from its headers and fetched file by file; uploads ask first."""

from pathlib import Path

import pytest
from hubs import SHA
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from mlx_mtp import hub_client
from mlx_mtp.cli.app import run
from mlx_mtp.convert import Options, convert, plan
from mlx_mtp.errors import IncompatibleError, ModelNotFoundError
from mlx_mtp.files import read_json
from mlx_mtp.hub import BUNDLED

SHARDED = Options(bits=4, shard_bytes=400_000)


def files_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def repo(hub, tmp_path):
    """pocket on the hub, its target in several files."""
    kept = Options(recipe="as-stored", shard_bytes=10**6)
    convert("pocket", tmp_path / "shards", kept, verify=False)
    files = files_of(tmp_path / "shards")
    del files["README.md"], files["mlx_mtp.json"]
    hub.repos["google/gemma-4-E2B-it"] = files
    assistant = BUNDLED["pocket"].parent / "assistant"
    hub.repos["google/gemma-4-E2B-it-assistant"] = files_of(assistant)
    hub.asked.clear()
    return "google/gemma-4-E2B-it"


def test_a_plan_downloads_no_weights(repo, hub, cache):
    planned = plan(repo)
    local = plan("pocket")
    assert planned.target.parameter_count == local.target.parameter_count
    assert planned.target.bytes == local.target.bytes
    assert planned.drafter.bytes == local.drafter.bytes
    weights = {p: d for p, d in hub.repos[repo].items() if p.endswith(".safetensors")}
    assert len(weights) > 3
    drafter = len(hub.repos[f"{repo}-assistant"]["model.safetensors"])
    assert planned.download_bytes == sum(map(len, weights.values())) + drafter
    assert not list(cache.rglob("*.safetensors"))
    assert planned.target.revision == SHA


@pytest.mark.parametrize("low_disk", [False, True])
def test_hub_files_are_fetched_one_by_one(repo, hub, cache, low_disk, tmp_path):
    out = tmp_path / "out"
    staging = tmp_path / ".out.partial" / "source"
    most, fetched = [], []

    def observe(progress):
        fetched.append(progress.bytes_fetched)
        most.append(len(list(staging.rglob("*.safetensors"))) if staging.exists() else 0)

    convert(repo, out, SHARDED, low_disk=low_disk, observe=observe, verify=low_disk)
    convert("pocket", tmp_path / "local", SHARDED, verify=False)
    drafter = hub.repos[f"{repo}-assistant"]
    sizes = [len(d) for p, d in [*hub.repos[repo].items(), *drafter.items()] if "model" in p]
    assert max(fetched) == max(sizes)
    written = list(out.rglob("*.safetensors"))
    assert len(written) > 4
    for file in written:
        assert file.read_bytes() == (tmp_path / "local" / file.relative_to(out)).read_bytes()
    assert read_json(out / "mlx_mtp.json")["target"]["revision"] == SHA
    assert (out / "tokenizer.json").read_bytes() == hub.repos[repo]["tokenizer.json"]
    assert "- google/gemma-4-E2B-it" in (out / "README.md").read_text()
    assert (read_json(out / "mlx_mtp.json")["check"] is not None) == low_disk
    assert not staging.exists()
    kept = list(cache.rglob("*.safetensors"))
    assert bool(kept) != low_disk
    assert max(most) <= (2 if low_disk else 0)


def test_low_disk_goes_on_after_an_interruption(repo, hub, tmp_path):
    def stop(progress):
        if progress.bytes_done > progress.bytes_total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(repo, tmp_path / "out", SHARDED, low_disk=True, observe=stop)
    hub.asked.clear()
    report = convert(repo, tmp_path / "out", SHARDED, low_disk=True, verify=False)
    assert report.bytes_resumed > 0
    convert("pocket", tmp_path / "local", SHARDED, verify=False)
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "local" / file.name).read_bytes()


def test_what_the_hub_lacks_is_said_before_any_download(repo, hub, cache):
    second = sorted(name for name in hub.repos[repo] if name.endswith(".safetensors"))[1]
    del hub.repos[repo][second]
    with pytest.raises(ModelNotFoundError, match=f"lacks {second}"):
        plan(repo)
    hub.repos[repo] = {"config.json": hub.repos[repo]["config.json"], "m-Q4_0.gguf": b"GGUF"}
    with pytest.raises(IncompatibleError, match="GGUF"):
        plan(repo)
    with pytest.raises(ModelNotFoundError, match="no such model"):
        plan("google/gemma-4-E3B-it")
    hub.repos["google/gemma-4-E4B-it"] = "GatedRepo"
    with pytest.raises(ModelNotFoundError, match="gated"):
        plan("google/gemma-4-E4B-it")


def test_a_revision_that_is_not_there_is_said(repo):
    with pytest.raises(ModelNotFoundError, match="has no revision nowhere"):
        plan(repo, revision="nowhere")


@pytest.fixture
def uploads(monkeypatch):
    """What would be uploaded: (repository, private, files)."""
    found = []

    def create_repo(self, name, private, exist_ok):
        found.append((name, private))
        return f"https://huggingface.co/{name}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        found.append((repo_id, sorted(file.name for file in Path(folder_path).iterdir())))

    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "someone"})
    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return found


def test_an_upload_asks_first_and_is_private(uploads, tmp_path, monkeypatch, capsys):
    arguments = ["convert", "pocket", "-o", str(tmp_path / "out"), "--upload", "me/pocket"]
    assert run(arguments) == 2
    assert "asks first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert uploads == []
    assert run([*arguments, "--yes", "--no-verify"]) == 0
    name, private = uploads[0]
    assert (name, private) == ("me/pocket", True)
    assert {"config.json", "README.md", "mlx_mtp.json", "drafter"} <= set(uploads[1][1])
    assert "uploaded to https://huggingface.co/me/pocket, private" in capsys.readouterr().err


def test_an_upload_without_a_login_is_refused_before_work(tmp_path, monkeypatch, capsys):
    def whoami(self):
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(HfApi, "whoami", whoami)
    assert run(["convert", "pocket", "-o", str(tmp_path / "out"), "--upload", "me/pocket"]) == 3
    assert "nobody is logged in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ModelNotFoundError, match="nobody is logged in"):
        hub_client.logged_in_name("me/pocket")
