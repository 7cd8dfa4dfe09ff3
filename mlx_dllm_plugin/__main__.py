"""`python -m mlx_dllm_plugin`: the hosts' commands with the plugin active where start-up files do not run, and ours."""

import os
import sys

OURS = ("doctor", "infill", "info", "verify")

USAGE = f"""\
usage: python -m mlx_dllm_plugin COMMAND ...

mlx-lm's commands (generate, chat, server, convert, ...) run as `mlx_lm COMMAND` with the plugin active. Use this
where start-up files do not run: `python -S`, zip applications, `pip install --target`.
Commands of this package: {", ".join(OURS)}. Add --help to a command for its options."""


def main() -> int | None:
    """Run the command in `sys.argv`. Returns the exit status."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(USAGE)
        return 0
    if command in OURS:
        _leave_working_directory()
        from .commands import main as run_ours

        return run_ours()

    from mlx_lm import cli

    sys.argv[0] = "mlx_lm"
    try:
        cli.main()
    except ValueError as error:
        if not str(error).startswith("CLI requires a subcommand"):
            raise
        print(f"mlx_dllm_plugin: no command {command!r}; see `python -m mlx_dllm_plugin --help`", file=sys.stderr)
        return 2
    return 0


def _leave_working_directory() -> None:
    """`python -m` looks for modules in the working directory first, and in the directory of a checkpoint that would run
    code that came with it. Not if this package was found there: a checkout."""
    package = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.exists(".") and os.path.realpath(sys.path[0]) == os.getcwd() != os.path.dirname(package):
        del sys.path[0]


if __name__ == "__main__":
    sys.exit(main())
