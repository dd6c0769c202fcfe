"""The choice between transports, and the figures that led to it."""

import dataclasses
from collections.abc import Mapping

from jaxmoe.perf.cost import Traffic, Workload, needed_rows, predicted_us, traffic
from jaxmoe.perf.hardware import Hardware

BASELINE = "it is the baseline"
OPT_IN = "allow_ragged=True was not asked for"


@dataclasses.dataclass(frozen=True)
class Option:
    """One transport's figures.

    Attributes:
      transport: its name.
      wire_rows: the bound on its blocks; None where it has none.
      traffic: bytes on the wire per rank.
      dispatch_us: predicted.
      combine_us: predicted.
      total_us: predicted, the routing's gather included.
      refused: why it cannot be chosen; None if it can.
    """

    transport: str
    wire_rows: int | None
    traffic: Traffic
    dispatch_us: float
    combine_us: float
    total_us: float
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What `choose_transport` decided; printing it gives a table.

    Attributes:
      name: the transport.
      wire_rows: what it is to run with; None drops nothing.
      reason: in words.
      options: every transport's figures, the fastest first.
      workload: the call.
      hardware: the rates.
      skew: largest block over the mean one, if it was given.
    """

    name: str
    wire_rows: int | None
    reason: str
    options: tuple[Option, ...]
    workload: Workload
    hardware: Hardware
    skew: float | None

    def option(self, transport: str) -> Option:
        """The figures of one transport."""
        return next(o for o in self.options if o.transport == transport)

    def __str__(self) -> str:
        w, h = self.workload, self.hardware
        skew = "" if self.skew is None else f" skew={self.skew:.2f}"
        lines = [
            f"transport {self.name!r}: {self.reason}",
            f"  T={w.tokens} D={w.d_model} E={w.num_experts} K={w.top_k} R={w.ranks} L={w.experts_per_rank} "
            f"lanes={w.lanes} {w.dtype}{f' / {w.combine_dtype}' if w.combine_dtype else ''} p={w.chance:.3f}{skew}",
            f"  {h.name}: {h.link_gbs:g} GB/s in a node, {h.network_gbs:g} GB/s between nodes"
            + (" (nominal: compare bytes, not times)" if h.virtual else ""),
            f"  {'transport':<12}{'wire_rows':>10}{'dispatch MB':>13}{'combine MB':>12}{'routing MB':>12}"
            f"{'predicted us':>14}",
        ]
        for o in self.options:
            t = o.traffic
            lines.append(
                f"{'>' if o.transport == self.name else ' ':>2}{o.transport:<12}{o.wire_rows or '-':>10}"
                f"{t.dispatch.bytes / 1e6:>13.3f}{t.combine.bytes / 1e6:>12.3f}{t.metadata.bytes / 1e6:>12.3f}"
                f"{o.total_us:>14.1f}" + (f"  not chosen: {o.refused}" if o.refused else "")
            )
        return "\n".join(lines)


def choose_transport(
    workload: Workload,
    hardware: Hardware,
    *,
    skew: float | None = None,
    allow_ragged: bool = False,
    refused: Mapping[str, str] | None = None,
) -> Choice:
    """The transport with the least predicted time: argmin over transports of routing + dispatch + combine.

    Pure: the same arguments give the same choice on every rank. `all_gather` wins a tie, since it drops nothing and is
    immune to skew; `naive` is never chosen. `all_to_all` needs a bound on its blocks to move less than `all_gather`:
    `workload.wire_rows`, or the expected rows times `skew`.

    Args:
      workload: T, D, E, K, R, dtypes, lanes and wire_rows.
      hardware: described or measured rates.
      skew: largest block over the mean one (`observed_skew`); at least 1. It bounds the blocks of `all_to_all` where
        wire_rows is None, and slows `ragged`, whose busiest pair of ranks holds up the others.
      allow_ragged: `ragged` may be chosen; it is opt-in, since its collective is young.
      refused: transport -> why it may not be chosen, such as what `ragged`'s preflight said.

    Returns:
      Choice.

    Raises:
      ValueError: a skew below 1.

    Example:
      >>> from jaxmoe.perf.hardware import HARDWARE
      >>> load = Workload(tokens=4096, d_model=7168, num_experts=256, top_k=8, ranks=8)
      >>> choose_transport(load, HARDWARE["h200"]).name
      'all_gather'
      >>> choose_transport(load, HARDWARE["h200"], skew=1.1).name
      'all_to_all'
    """
    if skew is not None and not skew >= 1:
        raise ValueError(f"skew is the largest block over the mean one and at least 1; got {skew!r}. Pass 1.0 or more.")
    reasons = {"naive": BASELINE, **({} if allow_ragged else {"ragged": OPT_IN}), **(refused or {})}
    padded = workload
    if workload.wire_rows is None and skew is not None:
        padded = dataclasses.replace(workload, wire_rows=needed_rows(workload, skew))
    # Stable sort: all_gather is first, and so wins a tie.
    options = sorted(
        (
            _option("all_gather", dataclasses.replace(workload, wire_rows=None), hardware, reasons),
            _option("all_to_all", padded, hardware, reasons),
            _option("ragged", workload, hardware, reasons, skew),
            _option("naive", dataclasses.replace(workload, wire_rows=None), hardware, reasons),
        ),
        key=lambda o: o.total_us,
    )
    able = [o for o in options if o.refused is None]
    if not able:
        raise ValueError(f"every transport is refused: {reasons}. Leave 'all_gather' out of refused.")
    best = able[0]
    words = _reason(best, able[1:], workload, hardware, skew)
    return Choice(best.transport, best.wire_rows, words, tuple(options), workload, hardware, skew)


def _option(
    name: str, load: Workload, hardware: Hardware, reasons: Mapping[str, str], skew: float | None = None
) -> Option:
    sent, rate = traffic(name, load), hardware.measured(name)
    dispatch_us, combine_us = (
        predicted_us(dataclasses.replace(w, bytes=round(w.bytes * (skew or 1.0))), load.ranks, hardware, rate)
        for w in (sent.dispatch, sent.combine)
    )
    total_us = predicted_us(sent.metadata, load.ranks, hardware) + dispatch_us + combine_us
    return Option(name, load.wire_rows, sent, dispatch_us, combine_us, total_us, reasons.get(name))


def _reason(best: Option, rest: list[Option], load: Workload, hardware: Hardware, skew: float | None) -> str:
    """One sentence or two."""
    if load.ranks == 1:
        return "one rank, so nothing travels."
    words = f"{best.total_us:.0f} us predicted for {best.traffic.bytes / 1e6:.2f} MB a rank"
    if rest:
        words += f"; {rest[0].transport} {rest[0].total_us:.0f} us for {rest[0].traffic.bytes / 1e6:.2f} MB"
    words += "."
    if hardware.virtual:
        words += f" The rates of {hardware.name} are nominal, so bytes decide."
    if best.transport == "all_to_all" and best.wire_rows is not None:
        source = "wire_rows" if load.wire_rows is not None else f"a skew of {skew:.2f}"
        words += f" Blocks of {best.wire_rows} rows, from {source}; tokens over them are dropped and counted."
    elif best.transport == "all_gather" and load.wire_rows is None and skew is None:
        words += (
            f" A token needs {load.chance:.0%} of the ranks, but without wire_rows or a skew blocks of all_to_all hold "
            "all tokens, at the same bytes."
        )
    return words
