"""Many requests at once: scheduling, caches of pages and features, sampling, and the loop that drives them."""
