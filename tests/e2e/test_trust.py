"""What is not trusted: code and links in checkpoints, templates, tokens on their way to the screen,
other users of the machine, and text that a terminal would obey."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hubs import Hub, serving
from huggingface_hub import constants
from mistakes import POCKET, TINY

from mlx_mtp import load
from mlx_mtp.chat.input import Reader
from mlx_mtp.chat.store import Saved, Store
from mlx_mtp.cli.app import run
from mlx_mtp.cli.console import Console
from mlx_mtp.cli.once import receive
from mlx_mtp.convert import Options, convert
from mlx_mtp.errors import MlxMtpError, ModelNotFoundError
from mlx_mtp.hub import resolve
from mlx_mtp.links import refuse_links_out
from mlx_mtp.plain import json_line, printable, without_tokens
from mlx_mtp.types import Chunk

ROOT = Path(__file__).parents[2]
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\rb\u202ec"
ESCAPES = ("\x1b", "\x07", "\x9b", "\r", "\u202e")
TOKEN = "hf_" + "Secret0" * 5


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    log = logging.getLogger("mlx_mtp")
    level, handlers = log.level, list(log.handlers)
    log.handlers.clear()
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    shutil.copytree(POCKET, tmp_path / "pair")
    return tmp_path / "pair" / "target"


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


# Code


FORBIDDEN = {"pickle", "dill", "joblib", "marshal", "shelve", "torch", "yaml"}


def test_nothing_that_runs_code_from_files_is_used() -> None:
    for file in [*(ROOT / "mlx_mtp").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]:
        text = file.read_text()
        assert not re.search(r"trust_remote_code\W+True", text), file
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), file
            assert not FORBIDDEN & {name.split(".")[0] for name in names}, file


def test_code_that_comes_with_a_checkpoint_is_neither_run_nor_asked_about(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "mine.py").write_text("open('owned', 'w')\nclass Mine: pass\n")
    edit(
        copied / "config.json",
        auto_map={"AutoConfig": "mine.Mine", "AutoModel": "mine.Mine"},
        model_file="mine.py",
    )
    monkeypatch.chdir(copied)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # it would be run where it is asked
    load(copied).generate(["Spell a."], None)
    edit(
        copied / "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["mine.Mine", "mine.Mine"]},
    )
    with pytest.raises(ModelNotFoundError, match="no code of a model is ever run"):
        load(copied).generate(["Spell a."])
    (copied / "tokenizer_mine.py").write_text("")
    out = copied.parent / "out"
    convert(copied, out, Options(recipe="as-stored"), drafter=None, verify=False)
    assert not [file for file in out.iterdir() if file.suffix == ".py"]
    assert not (copied / "owned").exists()
    assert "mine" not in sys.modules


# Links


def test_a_hubs_snapshot_of_links_to_blobs_is_a_model(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--model"
    snapshot, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for n, file in enumerate((TINY / "dense" / "target").iterdir()):
        shutil.copy(file, blobs / str(n))
        (snapshot / file.name).symlink_to(f"../../blobs/{n}")
    assert load(snapshot, drafter=None).generate_ids([[2, 5]])[0].error is None


def test_links_within_a_folder_and_to_whole_folders_are_followed(tmp_path: Path) -> None:
    shutil.copytree(TINY / "dense" / "target", tmp_path / "there" / "model")
    shutil.copytree(TINY / "dense" / "assistant", tmp_path / "drafter")
    model = tmp_path / "here"
    model.symlink_to("there/model")  # the user's own
    (model / "model-a.safetensors").symlink_to("model.safetensors")
    (model / "notes").symlink_to("/etc")
    refuse_links_out(model)
    (model / "model-a.safetensors").unlink()
    (model / "drafter").symlink_to(tmp_path / "drafter")
    assert load(model).drafter is not None


@pytest.mark.parametrize("name", ["config.json", "LICENSE", "additional_chat_templates"])
@pytest.mark.parametrize("target", ["../../secret", "/etc/passwd", "itself"])
def test_a_link_out_of_a_models_folder_is_refused(name: str, target: str, tmp_path: Path) -> None:
    shutil.copytree(TINY / "dense" / "target", tmp_path / "a" / "target")
    (tmp_path / "secret").write_text("{}")
    link = tmp_path / "a" / "target" / name
    link.unlink(missing_ok=True)
    link.symlink_to(name if target == "itself" else target)
    with pytest.raises(ModelNotFoundError, match=r"link that leads out|holds no config"):
        resolve(str(tmp_path / "a" / "target"))
    with pytest.raises(MlxMtpError):
        convert(tmp_path / "a" / "target", tmp_path / "out", drafter=None)
    assert not (tmp_path / "out").exists()


# Templates; tests/bad_pairs.py has those that are refused


def test_a_template_without_end_can_be_interrupted(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = "{% for i in range(99999) %}"
    (copied / "chat_template.jinja").write_text(3 * loop + 3 * "{% endfor %}")

    def press_ctrl_c(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    load(copied).tokenizer.encode("x")  # what takes long at first
    before = signal.signal(signal.SIGALRM, press_ctrl_c)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        code = run(["chat", str(copied), "-p", "Hello"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert (code, capsys.readouterr().err) == (130, "")


# Tokens


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on the loopback."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(monkeypatch) as server:
        yield server


@pytest.mark.parametrize("token", [TOKEN, TOKEN + "\x01\x7f", TOKEN + "é"])
@pytest.mark.parametrize("state", ["GatedRepo", "RepoNotFound"])
def test_a_token_is_never_shown(
    token: str,
    state: str,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repos["org/model"] = state
    for command in (["chat", "org/model", "-p", "x"], ["convert", "org/model", "-o", "out"]):
        for more in ([], ["--debug", "--json"]):
            assert run([*command, *more]) == 3
            out, err = capsys.readouterr()
            assert "Secret0" not in out + err
            assert ("Traceback" in err) == bool(more)


def test_another_programs_words_lose_their_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "my-own-secret\x01\n")
    for words in (
        "Illegal header value b'Bearer my-own-secret\\x01'",
        "with my-own-secret\x01 sent",
        f"another's {TOKEN}, too",
        "authorization: bearer abc",
    ):
        shown = without_tokens(words)
        assert "[token]" in shown
        assert not {"secret", "Secret0", "abc"} & set(shown.replace("-", " ").split())
    console = Console(debug=True)
    try:
        raise ValueError("Illegal header value b'Bearer my-own-secret\\x01'")
    except ValueError:
        console.error("It said my-own-secret\x01.")
    console.start_logging()
    logging.getLogger("mlx_mtp").warning("sent %s", TOKEN)
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert not any(secret in err for secret in ("own-secret", "Secret0"))


def test_a_conversion_keeps_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    convert(TINY / "dense" / "target", tmp_path / "out", Options(recipe="as-stored"), verify=False)
    files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert {"mlx_mtp.json", "README.md"} <= {file.name for file in files}
    assert not any(TOKEN.encode() in file.read_bytes() for file in files)


# Other users


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_conversations_and_history_are_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "data" / "mlx-mtp"
    monkeypatch.setenv("MLX_MTP_HOME", str(home))
    umask = os.umask(0)
    try:
        store = Store()
        store.save(Saved("a", "m", [{"role": "user", "content": "x"}]))
        history = home / "history"
        history.touch(0o666)
        Reader(history)
    finally:
        os.umask(umask)
    assert (mode(home), mode(home / "chats")) == (0o700, 0o700)
    assert (mode(store.path("a")), mode(history)) == (0o600, 0o600)


def test_a_journal_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("Spell a.\n")
    umask = os.umask(0)
    try:
        assert run(["batch", "in.txt", "-o", "out.jsonl", "-m", "pocket", "-q"]) == 0
    finally:
        os.umask(umask)
    assert mode(Path("out.jsonl.journal")) == 0o600


# Terminals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_escape_sequence_of_a_models_and_a_pipe_gets_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, shown in (
        (Terminal(), "a]0;owned[2J31mb\u202ec\n"),
        (io.StringIO(), HOSTILE + "\n"),
    ):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        receive([Chunk(text=HOSTILE)], lambda: None, show=True)
        assert stream.getvalue() == shown
        receive([Chunk(thinking=HOSTILE)], lambda: None, show=False, show_thinking=True)
        assert stream.getvalue() == shown + shown.removesuffix("\n")


def test_messages_show_what_they_quote_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path / "home"))
    Path(HOSTILE.replace("\r", "")).mkdir()
    for command in (
        ["chat", "./" + HOSTILE, "-p", "x", "--debug"],
        ["chat", "--" + HOSTILE],
        [HOSTILE],
        ["batch", HOSTILE, "-o", "x"],
        ["bench", "pocket", "--prompts", HOSTILE],
        ["convert", "./" + HOSTILE.replace("\r", ""), "-o", HOSTILE],
    ):
        assert run(command) in (2, 3)
        out, err = capsys.readouterr()
        assert (out, [one for one in ESCAPES if one in err]) == ("", [])


def test_what_is_shown_of_names_is_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLX_MTP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    Store().save(Saved("a", HOSTILE, [{"role": "user", "content": HOSTILE}]))
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "kind": kind}) + "\n" for kind in (HOSTILE, "b"))
    )
    folder = Path(HOSTILE)
    shutil.copytree(POCKET, folder)
    quick = ["--depths", "0", "--rows", "1", "--max-tokens", "2", "--repeat", "1", "--share"]
    for command in (
        ["chat", "--list"],
        ["info", str(folder / "target")],
        ["info", str(folder / "target"), "--json"],
        ["bench", str(folder / "target"), "--prompts", "prompts.jsonl", *quick],
    ):
        assert run(command) == 0, command
        out, err = capsys.readouterr()
        assert "owned" in out
        assert not [one for one in ESCAPES if one in out + err], command


def test_what_is_printable_can_be_told_apart_and_json_reads_back() -> None:
    text = HOSTILE + "\ud800 \u2028ü漢😀\n"
    assert printable(text).isprintable()
    assert printable("ü漢😀 a\\b") == "ü漢😀 a\\b"
    line = json_line({"a": text})
    assert line.isprintable()
    assert json.loads(line) == {"a": text}
    line.encode()
