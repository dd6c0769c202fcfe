"""`jaxmoe bench AREA`: benchmarks over the devices at hand, one module an area, imported only when it is asked for."""

import argparse
import importlib
import sys

from jaxmoe.cli import Command
from jaxmoe.extras import missing

AREAS: dict[str, Command] = {
    "layer": Command("jaxmoe.bench.layer", "time the whole MoE layer on one GPU, all experts local"),
    "matmul": Command("jaxmoe.bench.matmul", "time the experts' grouped matmul on one GPU, every backend"),
    "transport": Command("jaxmoe.bench.transport", "time every transport over the mesh that is found"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the areas and their options."""
    areas = parser.add_subparsers(dest="area", metavar="AREA", required=True)
    for name, area in AREAS.items():
        sub = areas.add_parser(name, help=area.help, description=area.help[0].upper() + area.help[1:] + ".")
        importlib.import_module(area.module).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    """One area from parsed arguments; returns its exit status."""
    absent = missing("viz", "rich", *(["matplotlib"] if getattr(args, "plot", None) else []))
    if absent:
        print(f"jaxmoe bench: error: {absent}", file=sys.stderr)
        return 2
    return importlib.import_module(AREAS[args.area].module).run(args)
