import mlx.core as mx
import numpy as np
import pytest

mx.set_default_device(mx.cpu)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
