"""The recipe of the embedded Qwen3-VL: what it is shown and asked, how it is trained, how it is judged."""
