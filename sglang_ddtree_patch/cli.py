"""The `ddtree` command: one subcommand a module, found here and nowhere else.

A command module has `add_parser(subparsers)`, which sets `run` to a function from the parsed arguments to
an exit code. Nothing on this path imports SGLang or torch, so that help and errors come at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from sglang_ddtree_patch import __version__
from sglang_ddtree_patch.errors import ConfigurationError
from sglang_ddtree_patch.launch import demo, models, patch, serve
from sglang_ddtree_patch.launch.bench import command as bench
from sglang_ddtree_patch.launch.doctor import command as doctor
from sglang_ddtree_patch.launch.probe import command as probe

COMMANDS = (serve, demo, doctor, probe, bench, models, patch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C, 141 nobody reads on (`| head`).
    """
    parser = build_parser()
    arguments, unknown = parser.parse_known_args(argv)
    if arguments.takes_sglang_flags:
        arguments.sglang_flags = unknown
    elif unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except ConfigurationError as error:
        print(f"ddtree: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddtree",
        description="DDTree speculative decoding for stock SGLang.",
        epilog="example:\n  ddtree demo\n  ddtree serve --model-path TARGET --draft DRAFT\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(takes_sglang_flags=False)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
