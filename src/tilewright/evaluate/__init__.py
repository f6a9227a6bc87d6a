"""`tilewright eval`: measures the quality, speed and memory of weight formats."""
