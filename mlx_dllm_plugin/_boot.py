"""What every interpreter start pays for: one import finder that compares names.

The start-up line calls `startup()`; the first import of mlx_lm or mlx_vlm then imports `mlx_dllm_plugin`, which
activates. This file is installed twice, here and beside the start-up line as `_mlx_dllm_boot`, so that the line needs
no guard against a missing package. Whichever copy ran first holds the state. It imports nothing but sys.
"""

import sys


class HostFinder:
    """Notices the first import of a host. `mlx_dllm_plugin.patches` takes its place in `sys.meta_path`."""

    armed = True

    def find_spec(self, fullname, path=None, target=None):
        if fullname in {"mlx_lm", "mlx_vlm"} and self.armed:
            try:
                import mlx_dllm_plugin  # noqa: F401
            except Exception as error:
                self.armed = False
                complain(f"not active, {fullname} works without it: {describe(error)}", error)
        return None


FINDER = HostFinder()


def enabled() -> bool:
    """False if MLX_DLLM_PLUGIN=0 or `python -X mlx_dllm=0` turned the plugin off."""
    import os

    return os.environ.get("MLX_DLLM_PLUGIN") != "0" and sys._xoptions.get("mlx_dllm") != "0"


def startup() -> None:
    """Wait for a host to be imported. Called by the start-up line; a second call changes nothing."""
    if enabled() and FINDER not in sys.meta_path and "mlx_dllm_plugin" not in sys.modules:
        sys.meta_path.insert(0, FINDER)


def describe(error: BaseException) -> str:
    """The error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def complain(message: str, error: BaseException | None = None) -> None:
    """One line on stderr, and with MLX_DLLM_DEBUG=1 the traceback. A host must never fail because of us."""
    import os

    if sys.stderr is None:  # pythonw, detached daemons
        return
    try:
        print(f"[mlx-dllm-plugin] {message}", file=sys.stderr)
        if error is not None and os.environ.get("MLX_DLLM_DEBUG") == "1":
            import traceback

            traceback.print_exception(error, file=sys.stderr)
    except (OSError, ValueError):  # nobody reads it, or it is closed
        pass
