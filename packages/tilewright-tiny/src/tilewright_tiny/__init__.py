"""The checkpoint folders of Tilewright's embedded models, and the image and sound of its demo."""

from pathlib import Path

FOLDER = Path(__file__).parent
