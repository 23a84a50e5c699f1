import os
import subprocess
import sys
import threading

import arriero_cpu as cpu
import mlx.core as mx
import numpy as np
import pytest


def test_probe(monkeypatch):
    assert cpu.probe() == cpu.isa()
    monkeypatch.setattr(cpu, "built_for_mlx", "0.0.1")
    with pytest.raises(RuntimeError, match=r"built for mlx 0\.0\.1"):
        cpu.probe()
    monkeypatch.setattr(cpu, "built_for_mlx", mx.__version__)

    def refuse(*_):
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(cpu, "matmul", refuse)
    with pytest.raises(RuntimeError, match="rebuild arriero-cpu"):
        cpu.probe()
    monkeypatch.undo()
    monkeypatch.setattr(cpu, "_native", cpu._Missing(ImportError("no such symbol")))
    with pytest.raises(RuntimeError, match="no such symbol"):
        cpu.probe()


def test_threads_do_not_change_bits():
    before = cpu.threads()
    x, w = mx.random.normal((5, 512)), mx.random.normal((300, 512))
    one = {}
    for n in (1, 2, 3):
        cpu.set_threads(n)
        assert cpu.threads() == n
        one[n] = cpu.matmul(x, w)
        mx.eval(one[n])
    cpu.set_threads(before)
    assert mx.array_equal(one[1], one[2])
    assert mx.array_equal(one[1], one[3])


def test_sleeping_workers_wake():
    cpu.set_spin_us(0)
    x = mx.random.normal((64, 512))
    for _ in range(50):
        mx.eval(cpu.matmul(x, x))
    cpu.set_spin_us(200)


def test_environment():
    script = "import arriero_cpu; print(arriero_cpu.threads())"
    env = os.environ | {"ARRIERO_THREADS": "3"}
    out = subprocess.run([sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "3"


def test_streams_of_several_threads():
    x, w = mx.random.normal((40, 512)), mx.random.normal((300, 512))
    want = cpu.matmul(x, w)
    mx.eval(x, w, want)
    wrong = []

    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            for _ in range(30):
                y = cpu.matmul(x, w)
                mx.eval(y)
                if not np.array_equal(np.array(y), np.array(want)):
                    wrong.append(y)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
