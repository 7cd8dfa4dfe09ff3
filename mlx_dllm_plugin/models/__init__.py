"""Architectures that mlx-lm lacks, one file each in mlx-lm's own shape. Upstream's module of the same name wins."""
