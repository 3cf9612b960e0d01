"""The package is one stair: a file imports from its own room or a lower floor, never upwards."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 330
FLOORS: dict[str, int] = {
    "mlx_mtp.errors": 1,
    "mlx_mtp.config_json": 2,
    "mlx_mtp.files": 2,
    "mlx_mtp.generation_config": 2,
    "mlx_mtp.hub": 2,
    "mlx_mtp.hub_client": 2,
    "mlx_mtp.links": 2,
    "mlx_mtp.messages": 2,
    "mlx_mtp.pair": 2,
    "mlx_mtp.plain": 2,
    "mlx_mtp.quantization": 2,
    "mlx_mtp.types": 2,
    "mlx_mtp.versions": 2,
    "mlx_mtp.whole_files": 2,
    "mlx_mtp.literal": 3,
    "mlx_mtp.model": 3,
    "mlx_mtp.tokenizer": 3,
    "mlx_mtp.decode": 4,
    "mlx_mtp": 5,  # the public names
    "mlx_mtp.answer": 5,
    "mlx_mtp.completions": 5,
    "mlx_mtp.depth_table": 5,
    "mlx_mtp.llm": 5,
    "mlx_mtp.loading": 5,
    "mlx_mtp.session": 5,
    "mlx_mtp.transcript": 5,
    "mlx_mtp.worker": 5,
    "mlx_mtp.batch": 6,
    "mlx_mtp.chat": 6,
    "mlx_mtp.convert": 6,
    "mlx_mtp.measure": 6,
    "mlx_mtp.info": 7,
    "mlx_mtp.cli": 8,
}


def modules() -> dict[str, Path]:
    """Dotted name -> file of everything that is shipped."""
    found = {}
    for file in [*(ROOT / "mlx_mtp").rglob("*.py"), *(ROOT / "convert").rglob("*.py")]:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "convert":
            parts.insert(0, "mlx_mtp")
        found[".".join(parts).removesuffix(".__init__")] = file
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """Our modules that a module imports, anywhere in it: late imports count as well."""
    file = MODULES[name]
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names = {f"{base}.{alias.name}" for alias in node.names}
            # `from package import name` is the name's module where it is one, else the package
            found.update(names & set(MODULES) or {base})
    return {target for target in found if target.split(".")[0] == "mlx_mtp"} - {name}


def room(name: str) -> str:
    """What a module belongs to: its package, or itself where it lies in mlx_mtp/ directly."""
    return ".".join(name.split(".")[:2])


def is_allowed(importer: str, imported: str) -> bool:
    above, below = FLOORS[room(importer)], FLOORS[room(imported)]
    is_loose = all(MODULES[room(one)].name != "__init__.py" for one in (importer, imported))
    public = "mlx_mtp" in (importer, imported)
    same_room = room(importer) == room(imported) or is_loose or public
    return below < above or (below == above and same_room)


def test_every_module_has_a_floor() -> None:
    assert {room(name) for name in MODULES} <= set(FLOORS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_lead_down(name: str) -> None:
    targets = imports(name)
    unknown = sorted(target for target in targets if target not in MODULES)
    assert not unknown, f"{name} imports {unknown}, which do not exist"
    upward = sorted(target for target in targets if not is_allowed(name, target))
    assert not upward, f"{name} (floor {FLOORS[room(name)]}) imports {upward}"


def test_there_are_no_circles() -> None:
    # the public names stand for what they re-export
    graph = {name: imports(name) for name in MODULES if name != "mlx_mtp"}
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("name", sorted(MODULES))
def test_files_stay_short(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("name", sorted(MODULES))
def test_only_the_command_line_prints(name: str) -> None:
    if room(name) == "mlx_mtp.cli" or name == "mlx_mtp.chat.render":
        return
    tree = ast.parse(MODULES[name].read_text())
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert not any(isinstance(func, ast.Name) and func.id == "print" for func in calls)
