"""Models of very many tensors, as the published FP8 one: headers are read once, and nothing grows with the weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.create.test_policies import EXPERTS, FLASH_NEXT, HIDDEN, TEXT, WIDTH, flash_next
from tests.helpers.sparse_file import write_sparse

TABLE = f"{TEXT}layers.1.ple.ple_embedding.ngram_embedding"
SHARDS = 131
ONE = (("gate_proj", (WIDTH, HIDDEN)), ("up_proj", (WIDTH, HIDDEN)), ("down_proj", (HIDDEN, WIDTH)))


def inventory(layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Names, types and shapes of the published repository in blocks of FP8, with so many of its layers."""
    for name, shape in flash_next():
        layer = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= layers:
            continue
        if name.endswith(".experts.gate_up_proj"):
            for expert in range(EXPERTS):
                for part, (rows, columns) in ONE:
                    module = f"{name.removesuffix('.gate_up_proj')}.{expert}.{part}"
                    yield f"{module}.weight", "F8_E4M3", (rows, columns)
                    yield f"{module}.weight_scale_inv", "BF16", (rows // 128, columns // 128)
        elif not name.endswith(".experts.down_proj"):
            yield name, "F8_E4M3" if f"{TABLE}.shard_" in name else "BF16", shape
    yield f"{TABLE}.weight_scale", "BF16", (1,)
    for name in ("layer_multipliers", "table_offsets", "table_primes"):
        yield f"{TABLE}.hashstats_{name}", "I64", (16 if name.startswith("table") else 3,)


def write_shards(folder: Path, layers: int) -> int:
    """The shards, without any weights in them, and the number of their tensors."""
    entries = list(inventory(layers))
    index = {}
    each = -(-len(entries) // SHARDS)
    for number in range(SHARDS):
        shard = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        part = entries[number * each : (number + 1) * each]
        write_sparse(folder / shard, {name: (kind, shape) for name, kind, shape in part})
        index |= {name: shard for name, _, _ in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(FLASH_NEXT | {"quantization_config": {"quant_method": "fp8"}}))
    return len(entries)


PLAN = """
import json, resource, sys, time
from pathlib import Path
from arriero.create.inventory import take_inventory
from arriero.create.plan import make_plan
from arriero.create.recode import Recoding
files = {path.name: path for path in Path(sys.argv[1]).iterdir()}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
inventory = take_inventory(files)
plans = [make_plan(inventory, recoding) for recoding in (None, Recoding.to("nvfp4", inventory.config))]
print(json.dumps({
    "tensors": len(inventory.tensors),
    "layers": [len(plan.blobs) for plan in plans],
    "bytes": [sum(blob.stored_bytes for blob in plan.blobs) for plan in plans],
    "seconds": time.process_time() - started,
    "kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
}))
"""


def planned(folder: Path) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", PLAN, str(folder)], capture_output=True, check=True, timeout=300)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_fp8_experts_are_planned_as_one_layer_for_each_module(tmp_path):
    count = write_shards(tmp_path, 3)
    found = planned(tmp_path)
    assert found["tensors"] == count > 12_000
    # Three mixtures and that of the head for drafts; every other tensor is a layer of its own.
    assert found["layers"][0] == count - 4 * (6 * EXPERTS - 1)
    assert found["seconds"] < 20
    assert found["kilobytes"] < 200_000


@pytest.mark.slow
def test_the_published_model_of_152089_tensors_is_planned_in_seconds_and_half_a_gigabyte(tmp_path):
    assert write_shards(tmp_path, 48) == 152_089
    found = planned(tmp_path)
    assert found["tensors"] == 152_089
    assert max(found["layers"]) < 1700
    assert round(found["bytes"][1] / 2**30, 1) == 97.8
    assert found["seconds"] < 60
    assert found["kilobytes"] < 600_000
