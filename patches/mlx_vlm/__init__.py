"""What is changed in mlx_vlm: one file per upstream module, at the same path."""

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
    "models.llada2_moe.config",
    "models.llada2_moe.language",
    "models.llada2_moe.llada2_moe",
)
