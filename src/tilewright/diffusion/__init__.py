"""Images and video from words: pipelines, the loop that they share, and `tilewright.Diffusion`."""
