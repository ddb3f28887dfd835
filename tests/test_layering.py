"""Imports go one way, heavy packages come in through their one door (docs of the layout: the README)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "verl_lite"

# A room may import itself and the rooms before it; leaves import no room.
LEAVES = {"config", "protocol", "batching", "plugins", "tracking", "legacy_keys", "__init__"}
ROOMS = ["algorithms", "models", "data", "rewards", "distributed", "rollout", "workers", "trainer"]
ENTRY_POINTS = {"cli", "plan", "inputs", "main_ppo"}
PEERS = {"algorithms", "models", "data", "rewards"}  # one layer: none of them imports another

DOORS = {
    "vllm": ("rollout/",),
    "hydra": ("cli.py",),
    "ray": ("distributed/cluster.py", "distributed/placement.py", "distributed/worker_group.py"),
}
HEAVY = ("torch", "ray", "vllm", "transformers", "tensordict", "hydra")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> Iterator[str]:
    """Every module imported anywhere in the file, except for type checkers only."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module == "verl_lite")


def own_imports(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imported(path) if name.startswith("verl_lite.")}
    return {name for name in names if name in LEAVES | ENTRY_POINTS or name in ROOMS}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    room = room_of(path)
    if room in ENTRY_POINTS:
        return
    allowed = {"protocol"} if room == "__init__" else LEAVES if room not in LEAVES else set()
    if room in ROOMS:
        below = [other for other in ROOMS[: ROOMS.index(room)] if room not in PEERS or other not in PEERS]
        allowed = allowed | {room, *below}
    assert own_imports(path) <= allowed, f"{path.name} may import {sorted(allowed)}"


def test_every_room_of_the_package_has_its_layer() -> None:
    assert {room_of(path) for path in modules()} <= LEAVES | ENTRY_POINTS | set(ROOMS)


@pytest.mark.parametrize(("package", "doors"), DOORS.items())
def test_a_heavy_package_is_imported_at_its_doors_only(package: str, doors: tuple[str, ...]) -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if any(name == package or name.startswith(package + ".") for name in imported(path))
    }
    assert {user for user in users if not user.startswith(doors)} == set()


def loaded_by(statement: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import verl_lite") == set()


def test_dataproto_costs_neither_ray_nor_vllm() -> None:
    assert loaded_by("from verl_lite import DataProto") & {"ray", "vllm"} == set()


def test_the_entry_point_loads_nothing_heavy_before_the_config_is_checked() -> None:
    assert loaded_by("import verl_lite.main_ppo") & {"torch", "ray", "vllm", "transformers"} == set()


def test_a_worker_group_comes_without_torch() -> None:
    # A host sets its thread counts before the first import of torch.
    assert loaded_by("import verl_lite.distributed.worker_group") & {"torch", "vllm"} == set()
