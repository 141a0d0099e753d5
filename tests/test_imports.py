"""How rooms may import each other: no circle of modules anywhere, and no torch where a service must start fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stretto

ROOT = Path(stretto.__file__).parent


def imports(path: Path) -> set[str]:
    """Modules of ours that are imported when this one is: not those inside functions or under TYPE_CHECKING."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("stretto")}


def graph() -> dict[str, set[str]]:
    paths = {".".join(("stretto", *p.relative_to(ROOT).with_suffix("").parts)): p for p in ROOT.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    return {name: imports(path) & set(modules) for name, path in modules.items()}


def test_modules_import_each_other_in_one_direction() -> None:
    """Also where two rooms use each other: harness.loop the engine's client, the engine's chat endpoint the harness's
    chat and parse."""
    list(TopologicalSorter(graph()).static_order())  # raises CycleError with the circle


def test_records_and_config_import_nothing_of_ours() -> None:
    found = graph()
    assert found["stretto.records"] == found["stretto.config"] == set()


@pytest.mark.parametrize(
    "module", ["stretto.rollouts.orchestrator", "stretto.rollouts.worker", "stretto.weights.follower"]
)
def test_services_without_a_model_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
