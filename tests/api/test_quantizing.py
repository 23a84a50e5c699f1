"""Quantising over HTTP: statuses with progress, what `show` says afterwards, and refusals."""

import json

import mlx.core as mx

from tests.helpers.checkpoint_folder import tensors, write_folder
from tests.helpers.drafts import GOLDENS


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


def test_a_stored_model_is_quantised_from_what_is_stored(server, http, tmp_path):
    files = uploaded(server, write_folder(tmp_path / "m"))
    assert http.post("/api/create", json={"model": "whole", "files": files, "stream": False}).status_code == 200
    body = {"model": "q", "from": "whole", "quantize": "int8", "stream": False}
    assert http.post("/api/create", json=body).json() == {"status": "success"}
    shown = http.post("/api/show", json={"model": "q"}).json()
    assert shown["details"]["quantization_level"] == "int8"
    assert "tensors" not in shown
    groups = {group["name"]: group for group in shown["tensor_groups"]}
    up = groups["model.layers.*.mlp.up_proj.weight"]
    # 8 bits a number, and a scale and a zero point in float32 for each group of 64.
    assert up == {
        "name": "model.layers.*.mlp.up_proj.weight",
        "type": "int8",
        "count": 1,
        "parameters": 96 * 64,
        "bytes": 96 * 64 + 96 * 8,
    }


def test_a_draft_is_shown_beside_its_model_and_listed_on_its_own(server, http, tmp_path):
    target, draft = write_folder(tmp_path / "m", config={"num_hidden_layers": 1}), tmp_path / "d"
    draft.mkdir()
    config = json.loads((GOLDENS / "dflash_full" / "config.json").read_text())
    config |= {"vocab_size": 259, "num_target_layers": 1}
    config["dflash_config"]["target_layer_ids"] = [0]
    # One tap in the place of two: half of the width that the features have.
    held = dict(mx.load(str(GOLDENS / "dflash_full" / "model.safetensors")))
    held["fc.weight"] = held["fc.weight"][:, :64]
    mx.save_safetensors(str(draft / "model.safetensors"), held)
    (draft / "config.json").write_text(json.dumps(config))
    body = {"model": "pair", "files": uploaded(server, target), "draft_files": uploaded(server, draft), "stream": False}
    reply = http.post("/api/create", json=body | {"quantize": "int8", "draft_quantize": "int4"})
    assert reply.json() == {"status": "success"}
    shown = http.post("/api/show", json={"model": "pair", "verbose": True}).json()
    assert shown["details"]["quantization_level"] == "int8"
    assert not any(tensor["name"].startswith("draft.") for tensor in shown["tensors"])
    assert shown["draft"]["architecture"] == "DFlashDraftModel"
    assert shown["draft"]["quantization_level"] == "int4"
    assert {tensor["name"].partition(".")[0] for tensor in shown["draft"]["tensors"]} == {"draft"}
    listed = next(m for m in http.get("/api/tags").json()["models"] if m["name"] == "pair:latest")
    facts = {name: value for name, value in shown["draft"].items() if not name.startswith("tensor")}
    assert listed["draft"] == facts
    assert listed["details"]["quantization_level"] == "int8"
    assert listed["size"] + listed["draft"]["size"] == server.store.get("pair").manifest.size
    assert http.request("DELETE", "/api/delete", json={"model": "pair"}).status_code == 200
