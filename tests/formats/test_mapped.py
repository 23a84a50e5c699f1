"""Mapping more files than a shell lets a process open."""

import resource
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from pathlib import Path
from arriero.errors import CheckpointError
from arriero.formats.mapped import map_file
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[2])))
held = []
for n in range(100):
    path = Path(sys.argv[1]) / str(n)
    try:
        path.write_bytes(bytes([n]))
        held.append(map_file(path))
    except (OSError, CheckpointError) as error:
        sys.exit(f"{len(held)} files, then {error}")
assert [int(view[0]) for view in held] == list(range(100))
"""


@pytest.mark.parametrize(("hard", "works"), [(200, True), (64, False)])
def test_the_limit_on_open_files_is_raised_when_it_is_met_as_far_as_it_goes(tmp_path, hard, works):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 200:
        pytest.skip("this process may not open 200 files")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), str(hard)], capture_output=True, text=True)
    assert (done.returncode == 0) is works, done.stderr
    if not works:
        assert "files, then" in done.stderr
        assert "Too many open files" in done.stderr
