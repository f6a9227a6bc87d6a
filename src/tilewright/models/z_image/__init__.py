"""Z-Image's transformer."""
