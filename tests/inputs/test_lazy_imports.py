import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_decoders_and_templates_are_imported_when_used():
    """Start-up pays for none of them, and a text model runs where PyAV does not."""
    modules = ["tilewright.inputs.processor", "tilewright.inputs.video", "tilewright.models.qwen3_vl.processor"]
    code = "\n".join(
        [
            "import sys",
            *(f"import {module}" for module in modules),
            "found = {'av', 'jinja2', 'tokenizers', 'PIL', 'transformers', 'torchvision'} & set(sys.modules)",
            "assert not found, found",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
