"""The server reads headers through this room, so it must stay light."""

import subprocess
import sys

MODULES = ["gguf", "gguf_repack", "safetensors", "safetensors_folder", "nvfp4", "mxfp"]


def test_reading_headers_imports_neither_mlx_nor_the_gguf_package():
    wanted = "; ".join(f"import arriero.formats.{name}" for name in MODULES) + "; import arriero.model.gguf_config"
    check = f"{wanted}; import sys; print(sorted({{'mlx', 'mlx.core', 'gguf'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
