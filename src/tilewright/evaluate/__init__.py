"""`tilewright eval`: what a format of weights costs in quality, and what it gains in speed and memory."""
