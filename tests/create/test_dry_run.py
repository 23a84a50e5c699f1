"""`create --dry-run`: what would become of each tensor, without a server."""

import pytest
from click.testing import CliRunner

from arriero.cli.main import cli
from arriero.create.create import create
from arriero.create.dry_run import Group, dry_run
from arriero.create.request import CreateRequest
from arriero.errors import InvalidRequest
from arriero.formats.gguf import GGUFFile
from arriero.formats.safetensors import SafetensorsFile
from arriero.store.store import Store
from arriero.store.tensors import tensor_groups, tensors
from tests.create.test_adapter import peft
from tests.create.test_drafts import draft_folder
from tests.helpers.checkpoint_folder import upload, write_folder
from tests.helpers.gguf_files import write_tiny_llama_gguf
from tests.helpers.unchecked import unchecked


def rows_of(groups):
    """What of a planned group and of a stored one is the same."""
    return {
        (group.name, getattr(group, "target", None) or group.type): (
            group.count,
            getattr(group, "target_bytes", None) or group.nbytes,
        )
        for group in groups
    }


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


def test_a_gguf_file_is_planned_as_it_is_stored(tmp_path):
    path = tmp_path / "model.bin"  # its kind is in its bytes
    write_tiny_llama_gguf(path)
    as_it_is = dry_run({"model.bin": path}, "")
    assert {group.source for group in as_it_is} == {group.target for group in as_it_is}
    assert sum(group.target_bytes for group in as_it_is) == sum(t.nbytes for t in GGUFFile(path).tensors.values())
    planned = dry_run({"model.bin": path}, "bf16")
    store = Store(tmp_path / "store")
    files = {"model.gguf": store.blobs.put(path.read_bytes()).digest}
    model = create(store, CreateRequest(model="m", files=files, quantize="bf16"), lambda status: None, check=unchecked)
    assert rows_of(planned) == rows_of(tensor_groups(tensors(model)))


@pytest.mark.parametrize("kind", ["", "nvfp4", "int8"])
def test_a_stored_model_is_planned_as_it_becomes(tmp_path, kind):
    store = Store(tmp_path / "store")
    first = CreateRequest(model="base", files=upload(store, write_folder(tmp_path / "m")))
    base = create(store, first, lambda status: None, check=unchecked)
    planned = dry_run(base, kind)
    request = CreateRequest(model="other", from_="base", quantize=kind)
    model = create(store, request, lambda status: None, check=unchecked)
    assert rows_of(planned) == rows_of(tensor_groups(tensors(model)))


def test_a_precision_that_changes_nothing_is_refused_as_create_does(tmp_path):
    store = Store(tmp_path / "store")
    request = CreateRequest(model="m", files=upload(store, write_folder(tmp_path / "m")), quantize="int4")
    model = create(store, request, lambda status: None, check=unchecked)
    with pytest.raises(InvalidRequest, match="no tensor of the model becomes int4"):
        dry_run(model, "int4")


def test_the_draft_that_a_stored_model_keeps_is_in_its_plan(tmp_path):
    store = Store(tmp_path / "store")
    request = CreateRequest(
        model="m",
        files=upload(store, write_folder(tmp_path / "m")),
        draft_files=upload(store, draft_folder(tmp_path, "dflash_full")),
    )
    model = create(store, request, lambda status: None, check=unchecked)
    kept = {group.name: group.target for group in dry_run(model, "") if group.name.startswith("draft.")}
    assert kept["draft.layers.*.self_attn.q_proj.weight"] == "BF16"
    packed = {group.name: group.target for group in dry_run(model, "", draft=model, draft_precision="int8")}
    assert packed["draft.layers.*.self_attn.q_proj.weight"] == "int8"


def test_the_command_plans_a_model_of_the_store_and_pulls_none(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    request = CreateRequest(model="base", files=upload(store, write_folder(tmp_path / "m")))
    create(store, request, lambda status: None, check=unchecked)
    monkeypatch.setenv("ARRIERO_MODELS", str(store.root))
    monkeypatch.setenv("ARRIERO_HOST", "127.0.0.1:1")  # nobody answers there
    (tmp_path / "Modelfile").write_text("FROM base\n")
    arguments = ["create", "x", "-f", str(tmp_path / "Modelfile"), "-q", "int4", "--dry-run"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].split()[:2] == ["all", "11"]
    (tmp_path / "Modelfile").write_text("FROM bse\n")
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 1
    assert f"FROM bse is no file, no folder and no model of the store at {store.root}" in done.output


@pytest.mark.parametrize(("extra", "found"), [([], "model 'a b'"), (["-q", "q9"], "quantisation 'q9' is not known")])
def test_what_can_not_be_is_refused_before_anything_is_read(tmp_path, monkeypatch, extra, found):
    monkeypatch.chdir(tmp_path)  # where there is no model
    done = CliRunner().invoke(cli, ["create", "a" if extra else "a b", *extra])
    assert done.exit_code == 1
    assert found in str(done.exception)


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
