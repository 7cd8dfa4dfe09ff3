"""What is changed in mlx_vlm.trainer."""
