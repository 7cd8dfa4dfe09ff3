"""What is done with mlx_vlm: one file per upstream module that is changed, at the same path, and a line per module that
is built upon as it is."""

from ...compat import Lean

MODULES = (
    "utils",
    "generate.diffusion",
    "generate.dispatch",
    "generate.ar",
    "chat",
    "convert",
    "moe_offload",
    "train",
    "trainer.api",
    "evals.math_vista",
    "evals.mmmu",
    "evals.mmstar",
    "evals.ocrbench",
    "server.cli",
    "server.generation",
    "server.request_normalization",
)

_LLADA2 = "LLaDA2.0 and 2.1 are not decoded as they were compared"

# Module -> what is lost without it, and what is leaned on.
LEANS = {
    "generate.common": ("max_tokens of a request is not told from the server's default", ("DEFAULT_MAX_TOKENS",)),
    "models.base": (
        "LLaDA2.2 cannot be called as a model of mlx-vlm",
        (Lean("InputEmbeddingsFeatures", called=True), Lean("LanguageModelOutput", called=True)),
    ),
    "server.runtime": ("requests to the server for LLaDA2.2 are not checked", ("runtime", "ServerRuntime")),
    **{f"models.llada2_moe.{name}": (_LLADA2, ("*",)) for name in ("config", "language", "llada2_moe")},
}
