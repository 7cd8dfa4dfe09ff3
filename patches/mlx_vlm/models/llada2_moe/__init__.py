"""mlx-vlm's own LLaDA2, which decodes 2.0 and 2.1. Nothing of it is changed; whether it is the code that was compared
with this plugin's is checked when it is imported."""

from .... import Patch


def leaning(name: str) -> Patch:
    """The patch of a module that stays as it is."""
    return Patch(f"mlx_vlm.models.llada2_moe.{name}", "LLaDA2 may decode otherwise than it was compared", ())
