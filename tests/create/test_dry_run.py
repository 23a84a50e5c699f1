"""`create --dry-run`: what would become of each tensor, without a server."""

import pytest
from click.testing import CliRunner

from arriero.cli.main import cli
from arriero.create.create import create
from arriero.create.dry_run import Group, dry_run
from arriero.create.request import CreateRequest
from arriero.errors import InvalidRequest
from arriero.formats.safetensors import SafetensorsFile
from arriero.store.store import Store
from tests.create.test_adapter import peft
from tests.create.test_drafts import draft_folder
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.unchecked import unchecked


def files(folder):
    return {path.name: path for path in sorted(folder.iterdir())}


def test_groups_say_what_they_are_what_they_become_and_what_that_takes(tmp_path):
    found = dry_run(files(write_folder(tmp_path / "m")), "nvfp4")
    by_name = {group.name: group for group in found}
    assert by_name["model.layers.*.mlp.up_proj.weight"] == Group(
        "model.layers.*.mlp.up_proj.weight", 1, "F32", "nvfp4", 96 * 64 * 4, 96 * (64 // 2 + 64 // 16) + 4
    )
    assert by_name["model.layers.*.self_attn.v_proj.weight"].target == "mxfp8"
    assert by_name["model.embed_tokens.weight"].target == "F32"
    assert list(by_name) == sorted(by_name)


@pytest.mark.parametrize("kind", ["", "nvfp4", "int4", "mxfp8", "bf16"])
def test_the_planned_bytes_are_those_that_are_stored(tmp_path, kind):
    folder = write_folder(tmp_path / "m")
    planned = sum(group.target_bytes for group in dry_run(files(folder), kind))
    store = Store(tmp_path / "store")
    request = CreateRequest(model="m", files=upload(store, folder), quantize=kind)
    model = create(store, request, lambda status: None, check=unchecked)
    stored = [SafetensorsFile(path) for path in model.source().tensors.values()]
    assert sum(span.nbytes for file in stored for span in file.tensors.values()) == planned


def test_the_command_prints_a_table_and_sends_nothing(tmp_path, monkeypatch):
    write_folder(tmp_path / "m")
    (tmp_path / "Modelfile").write_text("FROM ./m\n")
    monkeypatch.setenv("ARRIERO_HOST", "127.0.0.1:1")  # nobody answers there
    done = CliRunner().invoke(cli, ["create", "x", "-f", str(tmp_path / "Modelfile"), "-q", "int4", "--dry-run"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].split() == ["TENSORS", "COUNT", "SOURCE", "TARGET", "SIZE"]
    assert any(line.split()[:4] == ["model.layers.*.mlp.down_proj.weight", "1", "F32", "F32"] for line in lines)
    assert any(line.split()[:4] == ["model.layers.*.self_attn.q_proj.weight", "1", "F32", "int4"] for line in lines)
    assert lines[-1].split()[:2] == ["all", "11"]


def test_a_gguf_file_has_no_plan(tmp_path):
    with pytest.raises(InvalidRequest, match="GGUF files are taken as they are"):
        dry_run({"a.gguf": tmp_path / "a.gguf"}, "int4")


def test_a_draft_and_an_adapter_are_in_the_plan(tmp_path):
    write_folder(tmp_path / "m")
    peft(tmp_path / "a")
    draft_folder(tmp_path, "dflash_full")
    text = "FROM ./m\nADAPTER ./a\nDRAFT ./draft\n"
    (tmp_path / "Modelfile").write_text(text)
    done = CliRunner().invoke(
        cli, ["create", "x", "-f", str(tmp_path / "Modelfile"), "--draft-quantize", "int8", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split() for line in done.output.splitlines()}
    assert rows["draft.layers.*.self_attn.q_proj.weight"][1:4] == ["2", "BF16", "int8"]
    assert rows["model.layers.*.self_attn.q_proj.weight"][1:6] == ["1", "F32", "+", "adapter", "F32"]
