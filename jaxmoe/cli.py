"""The command `jaxmoe`: one module a subcommand, imported only when that subcommand is asked for."""

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@dataclasses.dataclass(frozen=True)
class Command:
    """Where a subcommand lives: `module` has `add_arguments(parser)` and `run(args) -> exit status`."""

    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "bench": Command("jaxmoe.bench", "time parts of the library on the devices at hand"),
    "demo": Command("jaxmoe.demo", "train a small MoE transformer and check it against the dense oracle"),
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; argparse would print the whole usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}. See {self.prog} --help\n")


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of all subcommands, with the arguments of the `chosen` one alone."""
    parser = _Parser(prog="jaxmoe", description="Expert parallelism for JAX.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.help, description=command.help[0].upper() + command.help[1:] + ".")
        if name == chosen:
            importlib.import_module(command.module).add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Args:
      argv: the arguments; None takes those of the process.

    Returns:
      The exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    Example:
      >>> main(["no-such-command"])
      2
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    chosen = next((a for a in argv if not a.startswith("-")), None)
    try:
        args = build_parser(chosen).parse_args(argv)
        return importlib.import_module(COMMANDS[args.command].module).run(args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("\njaxmoe: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
