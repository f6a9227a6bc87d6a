import json

import pytest
from safetensors.torch import save_file

from tilewright.weights.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture
def make_checkpoint(tmp_path):
    """Writes tensors as a model folder and opens it."""

    def make(tensors: dict, folder: str = "checkpoint", config: dict | None = None) -> Checkpoint:
        path = tmp_path / folder
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config or {"model_type": "test"}))
        save_file(tensors, path / "model.safetensors")
        return open_checkpoint(path)

    return make
