"""What is changed in mlx_vlm: one file per upstream module, at the same path."""

MODULES = ("utils",)
