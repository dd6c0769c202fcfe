"""What the demo says in the terminal and writes as JSON."""

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxmoe.demo.options import Options
from jaxmoe.demo.oracle import NEAR_TIE, TOLERANCE, Verdict
from jaxmoe.demo.train import Step

# Steps over which the last loss and the speed are means.
RECENT = 10
# Progress lines where the output is no terminal.
_LINES = 10
_BAR_WIDTH = 16


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything a run found out."""

    options: Options
    steps: list[Step]
    verdict: Verdict
    seconds: float
    pictures: list[str]

    @property
    def loss_first(self) -> float:
        """Of the first batch, before any update; about ln 256 = 5.55."""
        return self.steps[0].loss

    @property
    def loss_last(self) -> float:
        """The mean of the last steps."""
        return float(np.mean([s.loss for s in self.steps[-RECENT:]]))

    def as_json(self) -> dict:
        """The results by their published keys; relative errors are ‖a - b‖ / ‖b‖, losses nats per byte."""
        o, v = self.options, self.verdict
        return {
            "loss_first": self.loss_first,
            "loss_last": self.loss_last,
            "forward_rel_err": v.forward_rel_err,
            "grad_rel_err": v.max_grad_rel_err,
            "grad_rel_err_by_parameter": v.grad_rel_err,
            "tolerance": TOLERANCE,
            "selection_differs": v.selection_differs,
            "selection_gap": v.selection_gap,
            "oracle_agrees": not v.faults,
            "dropped_tokens": sum(s.dropped for s in self.steps),
            "tokens_per_expert": self.steps[-1].tokens_per_expert.tolist(),
            "ep_size": o.ep_size,
            "data_size": o.data_size,
            "experts": o.moe.router.num_experts,
            "top_k": o.moe.router.top_k,
            "transport": o.moe.transport,
            "schedule": o.schedule_name,
            "steps": o.steps,
            "seed": o.seed,
            "tokens_per_second": tokens_per_second(o, self.steps),
            "seconds": self.seconds,
            "device": o.mesh.devices.flat[0].device_kind,
            "jax": jax.__version__,
            "pictures": self.pictures,
        }


def tokens_per_second(options: Options, steps: list[Step]) -> float:
    """Over the last steps, without the first one, which compiles."""
    recent = steps[1:][-RECENT:] or steps
    return options.batch * options.seq * len(recent) / sum(s.seconds for s in recent)


def print_setting(console: Console, options: Options, num_parameters: int) -> None:
    """What is about to run."""
    o, router, devices = options, options.moe.router, options.mesh.devices.flat
    kind = "virtual CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    spread = f"{o.ep_size} ranks share the experts"
    if o.data_size > 1:
        spread = f"{o.data_size} data-parallel groups; in each, {spread}"
    grid = Table.grid(padding=(0, 2))
    layer = f"{router.num_experts} experts, top {router.top_k}"
    for name, value in (
        ("machine", f"{o.mesh.size} {kind}, jax {jax.__version__}"),
        ("mesh", spread),
        ("MoE layer", f"{layer}, transport {o.moe.transport}, schedule {o.schedule_name}"),
        ("model", f"{num_parameters / 1e6:.2f} M parameters"),
        ("text", o.text_name),
        ("a step", f"{o.batch} sequences x {o.seq} bytes = {o.batch * o.seq} tokens"),
    ):
        grid.add_row(Text(name, style="dim"), Text(value))
    console.print(Text("jaxmoe demo", style="bold"))
    console.print(grid)
    console.print()


@contextlib.contextmanager
def progress(console: Console, options: Options) -> Iterator:
    """A function to call with all steps so far: a live bar on a terminal, a few lines elsewhere, nothing if quiet."""
    if not console.is_terminal:
        every = max(1, options.steps // _LINES)

        def line(steps: list[Step]) -> None:
            s = steps[-1]
            if s.index % every == 0 or s.index == options.steps - 1:
                rate = "compiled" if s.index == 0 else f"{tokens_per_second(options, steps):,.0f} tokens/s"
                console.print(
                    f"step {s.index + 1:>{len(str(options.steps))}}/{options.steps}  loss {s.loss:.3f}  {rate}"
                )

        yield line
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss [bold]{task.fields[loss]}[/bold]"),
        TextColumn("{task.fields[rate]}", justify="right"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("compiling", total=options.steps, loss="-", rate="")

        def show(steps: list[Step]) -> None:
            rate = "" if len(steps) == 1 else f"{tokens_per_second(options, steps):,.0f} tokens/s"
            bar.update(task, description="training ", completed=len(steps), loss=f"{steps[-1].loss:.3f}", rate=rate)

        yield show


def print_experts(console: Console, options: Options, step: Step) -> None:
    """Tokens per expert of one step, a column with bars for every layer."""
    counts = step.tokens_per_expert
    layers, E = counts.shape
    fullest, even = max(counts.max(), 1), counts.sum(1).mean() / E
    table = Table(title=f"Tokens per expert in the last step (even share: {even:.0f})", title_justify="left", box=None)
    table.add_column("rank", justify="right", style="dim")
    table.add_column("expert", justify="right")
    for layer in range(layers):
        table.add_column(f"layer {layer}", justify="right")
        table.add_column("", width=_BAR_WIDTH, no_wrap=True)
    for e in range(E):
        cells: list[str | Text] = []
        for layer in range(layers):
            n = int(counts[layer, e])
            cells += [str(n), Text("█" * round(_BAR_WIDTH * n / fullest), style="cyan")]
        table.add_row(str(e * options.ep_size // E), str(e), *cells)
    console.print(table)
    ratio = ", ".join(f"{c.max() / max(c.mean(), 1e-9):.2f}" for c in counts)
    console.print(f"Fullest expert over the mean: {ratio} (1 is even). Dropped in this step: {step.dropped}.")
    console.print()


def print_verdict(console: Console, results: Results) -> None:
    """The largest relative differences, one line a parameter."""
    v = results.verdict
    table = Table(title="Mesh against dense oracle on one device: ‖a − b‖ / ‖b‖", title_justify="left", box=None)
    table.add_column("")
    table.add_column("‖b‖", justify="right", style="dim")
    table.add_column("difference", justify="right")
    table.add_row("logits", "", _coloured(v.forward_rel_err))
    for name, value in v.grad_rel_err.items():
        table.add_row(f"∂ {name}", f"{v.grad_norm[name]:.1e}", _coloured(value))
    table.add_row(Text("largest of the gradients", style="bold"), "", _coloured(v.max_grad_rel_err))
    console.print(table)
    console.print(
        f"Own choice of experts differs for {v.selection_differs} of {v.tokens} (token, layer) pairs"
        + (f", by a score of at most {v.selection_gap:.1e} (near tie: {NEAR_TIE:.0e})." if v.selection_differs else ".")
    )
    console.print()


def _coloured(error: float) -> Text:
    return Text(f"{error:.1e}", style="green" if error <= TOLERANCE else "bold red")


def print_summary(console: Console, results: Results) -> None:
    """The last lines: loss, verdict, files."""
    r, v = results, results.verdict
    dropped = sum(s.dropped for s in r.steps)
    console.print(
        f"Loss {r.loss_first:.3f} → {r.loss_last:.3f} nats/byte ({r.loss_last / r.loss_first:.0%}; mean of last "
        f"{min(RECENT, len(r.steps))} steps). Dropped: {dropped}. {r.seconds:.0f} s."
    )
    if not v.faults:
        console.print(
            f"[bold green]The oracle agrees[/]: output to {v.forward_rel_err:.1e}, "
            f"gradients to {v.max_grad_rel_err:.1e} (limit {TOLERANCE:.0e})."
        )
    for path in r.pictures + ([str(r.options.json)] if r.options.json else []):
        console.print(Text(f"Wrote {path}"), soft_wrap=True)
