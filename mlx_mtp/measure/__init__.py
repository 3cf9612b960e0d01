"""Measurements on the user's own machine. Owns: what `mlx-mtp bench` runs, counts and concludes."""
