"""Parts of messages as OpenAI's clients send them."""

import base64
import io

import numpy as np
from PIL import Image


def image(height, width, seed=0, mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, len(mode)), dtype=np.uint8)
    data = io.BytesIO()
    Image.fromarray(pixels, mode).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}
