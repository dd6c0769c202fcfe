"""Eight virtual CPU devices for every test; set JAXMOE_TEST_PLATFORM=gpu to run the tests marked gpu on a GPU."""

import os

import jax
import pytest

ON_GPU = os.environ.get("JAXMOE_TEST_PLATFORM") == "gpu"
if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Most of the suite's time is compiling small programs that run once: a third less of it without LLVM's optimisations.
jax.config.update("jax_disable_most_optimizations", not ON_GPU)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a GPU: set JAXMOE_TEST_PLATFORM=gpu on a machine with one")
    for item in items:
        if "gpu" in item.keywords and not ON_GPU:
            item.add_marker(skip)
        # pytest-xdist (--dist loadgroup): tests that share compiled functions run in one process.
        shares = getattr(item, "callspec", None) and item.callspec.params.get("setting")
        if shares or "contract" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {shares}"))
