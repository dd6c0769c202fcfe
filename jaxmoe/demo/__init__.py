"""`jaxmoe demo`: train a small byte-level MoE transformer over a mesh, then check it against the dense oracle."""

import argparse
import importlib.util
import sys

from jaxmoe.demo.options import add_arguments as add_arguments
from jaxmoe.demo.options import prepare

_EXTRAS = ("matplotlib", "optax", "rich")


def run(args: argparse.Namespace) -> int:
    """The demo from parsed arguments; returns 0, 1 (the oracle disagrees) or 2 (it cannot start as asked)."""
    missing = [name for name in _EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f"the demo needs {', '.join(missing)}. Install them: pip install 'jaxmoe[viz]'")
    try:
        options = prepare(args)
    except (ValueError, OSError) as error:
        return _refuse(str(error))
    from jaxmoe.demo.session import run_session  # needs the extras

    return run_session(options)


def _refuse(message: str) -> int:
    print(f"jaxmoe demo: error: {message}", file=sys.stderr)
    return 2
