"""What quantising holds in memory does not grow with the model, nor with its largest tensor."""

import time
import tracemalloc

from arriero.create import quantize
from arriero.create.inventory import take_inventory
from arriero.create.plan import make_plan
from arriero.create.recode import Recoding
from arriero.create.write import write_tensor
from arriero.store.store import Store
from tests.helpers.synthetic import write_synthetic

TENSOR = 4096 * 4096 * 2


def peak(folder, store, kind):
    """Bytes that Python and NumPy held at most while every tensor was made."""
    inventory = take_inventory({path.name: path for path in folder.iterdir()})
    plan = make_plan(inventory, Recoding.to(kind, inventory.config, search=False))
    assert plan.made == len(plan.blobs) > 0
    tracemalloc.start()
    try:
        with store.building() as build:
            for blob in plan.blobs:
                write_tensor(build, blob, lambda count: None, lambda blob, error: None)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_less_than_the_codes_of_one_tensor_are_held_whatever_the_model_s_size(tmp_path, monkeypatch):
    monkeypatch.setattr("arriero.create.quantize.THREADS", 2)  # each holds the scratch of a block
    write_synthetic(tmp_path / "m", layers=1, hidden=4096, tensor_rows=4096)
    codes = TENSOR // 2
    assert peak(tmp_path / "m", Store(tmp_path / "store"), "mxfp8") < 0.8 * codes


def test_blocks_wait_for_a_disk_that_is_slower_than_the_threads(monkeypatch):
    monkeypatch.setattr(quantize, "THREADS", 2)
    started = []
    for number, start in enumerate(
        quantize._in_order((400, quantize.BLOCK), lambda start, stop: started.append(start) or start)
    ):
        assert start == number
        if number in (0, 100):
            time.sleep(0.1)  # more than the threads need for all that they may do
        assert len(started) <= number + 2 * 2 + 2
    assert len(started) == 400
