"""What the runner knows of its allocator."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from arriero.runner import memory


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that the default device is a GPU that keeps 1000 bytes resident; records the limits that are set."""
    limits: list[int] = []
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.DeviceType.gpu))
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1000})
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    return limits


def test_a_cpu_has_no_wired_limit(monkeypatch):
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("there is nothing to wire"))
    assert memory.wire_weights() == 0


@pytest.mark.parametrize(("active", "limit"), [(600, 600), (1600, 1000)])
def test_the_wired_limit_is_the_weights_and_at_most_what_the_device_recommends(monkeypatch, gpu, active, limit):
    monkeypatch.setattr(mx, "get_active_memory", lambda: active)
    assert memory.wire_weights() == limit
    assert gpu == [limit]


def test_weights_beyond_the_recommendation_are_a_warning(monkeypatch, gpu, caplog):
    monkeypatch.setattr(mx, "get_active_memory", lambda: 1600)
    memory.wire_weights()
    assert "exceed" in caplog.text


def test_a_refused_wired_limit_is_a_warning(monkeypatch, gpu, caplog):
    def refuse(_):
        raise ValueError("no")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    assert memory.wire_weights() == 0
    assert "pageable" in caplog.text


def test_a_gpu_without_a_recommendation_is_left_alone(monkeypatch, gpu):
    monkeypatch.setattr(mx, "device_info", dict)
    assert memory.wire_weights() == 0
    assert gpu == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("[malloc] Unable to allocate 12 bytes."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[matmul] shapes do not match"), False),
        (ValueError("bad"), False),
    ],
)
def test_an_exception_for_lack_of_memory_is_known_by_its_type_or_text(error, expected):
    assert memory.is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")]
)
def test_bytes_are_written_as_people_read_them(count, text):
    assert memory.readable(count) == text


@pytest.mark.parametrize(
    ("on_gpu", "held", "size", "idle", "times"),
    [
        (False, 1, 0, False, 1),
        (True, 1, 0, False, 0),
        (True, memory.KEPT_BYTES + 1, 16 << 30, False, 1),
        (True, memory.KEPT_BYTES + 1, 48 << 30, False, 0),
        (True, memory.KEPT_BYTES + 1, 48 << 30, True, 1),
        (True, 2 * memory.KEPT_BYTES + 1, 48 << 30, False, 1),
    ],
)
def test_free_buffers_stay_with_an_nvidia_gpu_while_they_are_few(monkeypatch, on_gpu, held, size, idle, times):
    cleared = []
    monkeypatch.setattr(memory, "cuda", lambda: object() if on_gpu else None)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: held)
    monkeypatch.setattr(mx, "get_memory_limit", lambda: size)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(True))
    memory.release_buffers(idle=idle)
    assert len(cleared) == times
