"""One run of the demo from start to end: train, check, draw, report."""

import json
import sys
import time

import jax
from rich.console import Console

from jaxmoe import viz
from jaxmoe.demo import oracle, report
from jaxmoe.demo.options import Options
from jaxmoe.demo.train import Step, Trainer


def run_session(options: Options) -> int:
    """Train, compare with the oracle, write the pictures and the JSON file.

    Returns:
      The exit status: 0, or 1 when the oracle disagrees.
    """
    start_s = time.perf_counter()
    console = Console(quiet=options.quiet, highlight=False)
    # On a GPU, XLA's default for float32 products is TF32, whose rounding (1e-3) would hide an error from the oracle.
    with jax.default_matmul_precision("highest"):
        steps, trainer = _train(options, console)
        verdict = oracle.check(trainer.model, trainer.batch(options.steps - 1), options.mesh)
    pictures = _draw(options, steps)
    results = report.Results(options, steps, verdict, time.perf_counter() - start_s, pictures)
    report.print_experts(console, options, steps[-1])
    report.print_verdict(console, results)
    if options.json:
        options.json.write_text(json.dumps(results.as_json(), indent=2) + "\n")
    report.print_summary(Console(highlight=False) if options.quiet else console, results)
    for fault in verdict.faults:
        print(f"jaxmoe demo: the oracle disagrees: {fault}", file=sys.stderr)
    return 1 if verdict.faults else 0


def _train(options: Options, console: Console) -> tuple[list[Step], Trainer]:
    steps: list[Step] = []
    with jax.set_mesh(options.mesh):
        trainer = Trainer(options)
        report.print_setting(console, options, trainer.num_parameters)
        with report.progress(console, options) as show:
            for step in trainer.steps():
                steps.append(step)
                show(steps)
    console.print()
    return steps, trainer


def _draw(options: Options, steps: list[Step]) -> list[str]:
    """Write loss.png and expert_load.png; returns their paths."""
    counts = [s.tokens_per_expert for s in steps]
    figures = {
        "loss.png": viz.loss_curve([s.loss for s in steps]),
        "expert_load.png": viz.expert_load(counts, ranks=options.ep_size),
    }
    paths = []
    for name, figure in figures.items():
        path = options.out / name
        figure.savefig(path, dpi=150)
        paths.append(str(path))
    return paths
