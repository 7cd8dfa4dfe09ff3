"""Architectures that mlx-lm lacks, one file each in mlx-lm's own shape."""
