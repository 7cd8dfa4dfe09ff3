"""`python -m mlx_dllm_plugin`: the hosts' commands with the plugin active where start-up files do not run, and ours."""

import sys

OURS = ("doctor", "infill", "info")

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


if __name__ == "__main__":
    sys.exit(main())
