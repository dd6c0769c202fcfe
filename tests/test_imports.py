"""The import rule: layers -> schedules -> {comm, permute, experts} -> routing -> config -> perf, and nothing upward."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# What each package of jaxmoe may import from jaxmoe, beside itself.
BASE = {"config", "mesh", "compat"}
ALLOWED = {
    "perf": set(),  # arithmetic over plain numbers, and the described hardware that a configuration may name
    "config": {"perf"},
    "compat": set(),
    "mesh": {"config", "compat"},
    "routing": {"config"},
    "permute": BASE | {"routing"},
    "experts": BASE | {"routing", "permute"},
    "comm": BASE | {"perf", "routing", "permute"},
    "schedules": BASE | {"routing", "permute", "experts", "comm"},
    "layers": BASE | {"routing", "permute", "experts", "comm", "schedules"},
    "hlo": set(),
}
# Programs on top: they may use all of the library, and no library module may use them.
PROGRAMS = {"cli", "extras", "demo", "viz", "bench", "launch"}


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _modules():
    return sorted((ROOT / "jaxmoe").rglob("*.py"))


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_jaxmoe_imports_point_one_way(path):
    parts = path.relative_to(ROOT / "jaxmoe").with_suffix("").parts
    package = parts[0]
    for name in _imports(path):
        if name.startswith("pallas_kernels"):
            assert path.name == "pallas.py", f"{path} imports {name}: only a pallas.py adapter may"
        if not name.startswith("jaxmoe"):
            continue
        target = name.split(".")[1] if "." in name else ""
        if package in PROGRAMS or package == "__init__" or target == package:
            continue
        assert package in ALLOWED, f"{path}: name its place in the import rule"
        assert target in ALLOWED[package], f"{path} imports {name}, against the import rule"


@pytest.mark.parametrize(
    "path", sorted((ROOT / "pallas_kernels").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_pallas_kernels_import_jax_alone(path):
    for name in _imports(path):
        assert not name.startswith("jaxmoe"), f"{path} imports {name}"


@pytest.mark.parametrize("path", _modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_private_jax_stays_in_compat(path):
    private = [n for n in _imports(path) if n.startswith("jax._src")]
    assert not private or path.name == "compat.py", f"{path} imports {private}"


def test_rooms_are_small():
    for folder, limit in (
        ("jaxmoe", 400),
        ("tests", 400),
        ("benchmarks", 400),
        ("examples", 400),
        ("pallas_kernels", 600),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= limit, f"{path} is over {limit} lines"
