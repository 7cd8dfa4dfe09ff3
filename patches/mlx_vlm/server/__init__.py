"""What is changed in mlx_vlm.server."""
