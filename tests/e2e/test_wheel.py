"""The wheel has everything, works from an environment of its own and leaves nothing strange."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

import mlx_mtp

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a program that must succeed; it sees nothing of the source tree."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=cwd,
        env=kept | {"HF_HUB_OFFLINE": "1", "LC_ALL": "C.UTF-8"},
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the tree stays clean."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    skip = shutil.ignore_patterns("__pycache__")
    for name in ("mlx_mtp", "convert"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source)
    output = run(sys.executable, *command, cwd=folder)
    assert "Warning" not in output
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and its dependencies borrowed from this one."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder, "install", "--no-index", "--no-deps")
    run(*pip, wheel, cwd=folder)
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages(folder) / "borrowed.pth").write_text("\n".join(sorted(paths)) + "\n")
    return folder


def site_packages(folder: Path) -> Path:
    (found,) = folder.glob("lib/python*/site-packages")
    return found


def test_every_module_and_data_file_is_in(wheel: Path) -> None:
    expected = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "mlx_mtp").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    expected |= {
        str("mlx_mtp" / file.relative_to(ROOT)) for file in (ROOT / "convert").glob("*.py")
    }
    names = set(ZipFile(wheel).namelist())
    assert expected == {name for name in names if ".dist-info/" not in name}
    weights = {f"mlx_mtp/data/{pair}/target/model.safetensors" for pair in ("pocket", "pocket-moe")}
    assert {"mlx_mtp/py.typed"} | weights <= names
    assert wheel.stat().st_size < 12e6


def test_the_licence_is_in(wheel: Path) -> None:
    info = f"mlx_mtp-{mlx_mtp.__version__}.dist-info"
    with ZipFile(wheel) as content:
        licence = content.read(f"{info}/licenses/LICENSE").decode()
    assert "Apache License" in licence


def test_no_top_level_convert_lands_in_site_packages(installed: Path) -> None:
    assert not (site_packages(installed) / "convert").exists()
    code = "from importlib.util import find_spec as f; print(f('mlx_mtp.convert').origin)"
    origin = run(installed / "bin" / "python", "-c", code, cwd=installed).strip()
    assert Path(origin) == site_packages(installed) / "mlx_mtp" / "convert" / "__init__.py"


def test_the_program_runs_from_there(installed: Path) -> None:
    program = installed / "bin" / "mlx-mtp"
    assert run(program, "--help", cwd=installed).startswith("Usage: mlx-mtp ")
    assert "--drafter-bits" in run(program, "convert", "--help", cwd=installed)
    answer = ("--temperature", "0", "--max-tokens", "7", "-q")
    text = run(program, "chat", "-p", "Multiplication table of 7.", *answer, cwd=installed)
    assert text == "7 x 1 = 7\n"
