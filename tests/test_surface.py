"""The public surface: what `import jaxmoe` gives, that all of it is documented, and that its examples run."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import jaxmoe

SURFACE = {
    "AutoTransport",
    "Handle",
    "MoE",
    "MoEConfig",
    "MoEParams",
    "MoEStats",
    "Orders",
    "RouterConfig",
    "Routing",
    "Sequential",
    "Stage",
    "TokenChunks",
    "combine",
    "dense_moe",
    "dispatch",
    "explain_transport",
    "gate",
    "grouped_matmul",
    "init_params",
    "make_mesh",
    "moe",
    "moe_on_rank",
    "weave",
}
MODULES = sorted(m.name for m in pkgutil.walk_packages(jaxmoe.__path__, "jaxmoe.") if not m.name.endswith("__main__"))


def test_surface_is_what_it_says():
    public = {n for n, v in vars(jaxmoe).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == SURFACE


@pytest.mark.parametrize("name", sorted(SURFACE))
def test_public_names_are_documented(name):
    thing = getattr(jaxmoe, name)
    text = inspect.getdoc(thing)
    assert text and text.splitlines()[0].endswith((".", ":")), name
    if inspect.isfunction(thing):
        for part in ("Args:", "Returns:", "Example"):
            assert part in text, f"{name} lacks {part}"


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_import_is_light_and_starts_no_backend():
    """Importing must not touch devices: a program may still choose its platform afterwards."""
    code = (
        "import jaxmoe, sys, jax; jax.config.update('jax_num_cpu_devices', 3);"
        "assert 'matplotlib' not in sys.modules and 'rich.progress' not in sys.modules;"
        "jax.config.update('jax_platforms', 'cpu'); print(len(jax.devices()))"
    )
    root = pathlib.Path(jaxmoe.__file__).parents[1]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert out.stdout.strip() == "3", out.stderr
