"""`jaxmoe bench WHAT`: benchmarks that print a table, draw a plot and write rows of JSON."""

import argparse
import importlib
import sys

from jaxmoe.extras import missing

# WHAT: (module, help). Each module has `add_arguments(parser)` and `run(args) -> exit status`.
BENCHES = {
    "matmul": ("jaxmoe.bench.matmul", "the experts' grouped matmul, every backend, one GPU"),
    "layer": ("jaxmoe.bench.layer", "the whole MoE layer on one GPU, all experts local"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand a benchmark."""
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, text) in BENCHES.items():
        importlib.import_module(module).add_arguments(kinds.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    absent = missing("viz", "rich", *(["matplotlib"] if getattr(args, "plot", None) else []))
    if absent:
        print(f"jaxmoe bench: {absent}", file=sys.stderr)
        return 2
    return importlib.import_module(BENCHES[args.what][0]).run(args)
