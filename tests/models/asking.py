"""Pictures, and messages about them, for engines."""

import numpy as np
from PIL import Image


def picture(seed, height=20, width=40):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def about(*parts):
    """A conversation of one message: texts are strings, all else is a picture."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": content}]
