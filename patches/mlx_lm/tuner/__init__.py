"""What is changed in mlx_lm.tuner."""
