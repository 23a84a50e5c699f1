"""Quantising over HTTP: statuses with progress, what `show` says afterwards, and refusals."""

import json

from tests.helpers.checkpoint_folder import tensors, write_folder


def uploaded(server, folder):
    return {path.name: server.store.blobs.ingest([path.read_bytes()]).digest for path in sorted(folder.iterdir())}


def test_a_quantised_import_reports_its_progress_and_what_it_lost(server, http, tmp_path):
    files = uploaded(server, write_folder(tmp_path / "m"))
    with http.stream("POST", "/api/create", json={"model": "q", "files": files, "quantize": "NVFP4"}) as reply:
        statuses = [json.loads(line) for line in reply.iter_lines()]
    texts = [status["status"] for status in statuses]
    assert texts[-1] == "success"
    assert "checking that the model can be loaded" in texts
    assert "importing 11 tensors, 7 of them quantised (nvfp4)" in texts
    moved = [status for status in statuses if status["status"] == "importing tensors"]
    assert moved[-1]["completed"] == moved[-1]["total"] == sum(value.nbytes for value in tensors().values())
    assert any(text.startswith("4 tensors from F32 to nvfp4: weight error 8.") for text in texts)
    shown = http.post("/api/show", json={"model": "q", "verbose": True}).json()
    assert shown["details"]["quantization_level"] == "nvfp4"
    assert shown["details"]["parameter_size"] == "47K"
    listed = {entry["name"]: entry for entry in shown["tensors"]}
    assert listed["model.layers.0.mlp.up_proj.weight"]["shape"] == [96, 64]
    assert listed["model.layers.0.mlp.up_proj.weight"]["type"].lower() == "nvfp4"
    assert listed["model.layers.0.mlp.down_proj.weight"]["type"].lower() == "mxfp8"


def test_an_unknown_precision_is_refused_before_anything_is_read(http):
    reply = http.post("/api/create", json={"model": "q", "files": {"a": "sha256:" + "0" * 64}, "quantize": "q4_K_M"})
    assert reply.status_code == 400
    assert "'q4_K_M' is not known; it can be nvfp4, mxfp4, mxfp8, int4, int8, bf16, f16" in reply.json()["error"]


def test_a_stored_model_is_not_quantised(http):
    reply = http.post("/api/create", json={"model": "q", "from": "tiny", "quantize": "nvfp4"})
    assert reply.status_code == 400
    assert "quantise while importing the original" in reply.json()["error"]
