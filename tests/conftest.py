"""What holds for all tests."""

from hypothesis import settings

# How long an example takes says how busy the machine is; what must be quick is measured by the processor's time.
settings.register_profile("ours", deadline=None)
settings.load_profile("ours")
