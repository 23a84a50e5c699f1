"""What `make run` does: fetch a small real model, import it, ask it a question and print the streamed answer.

Everything goes through the product's own command line: a server of its own is started on a free port, with its store in
a folder of its own, so nothing of the user's is touched.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".cache" / "demo"
QUESTION = "What is the capital of France, and what is it known for? Answer in two sentences."


def main() -> int:
    """Run the demo; the exit code of the question."""
    question = " ".join(sys.argv[1:]) or QUESTION
    sys.path.insert(0, str(ROOT))
    from tools.models import fetch

    model = fetch("smollm2")
    HOME.mkdir(parents=True, exist_ok=True)
    modelfile = HOME / "Modelfile"
    modelfile.write_text(f"FROM {model}\nPARAMETER temperature 0\n", "utf-8")
    environ = {
        **os.environ,
        "ARRIERO_HOST": f"127.0.0.1:{_free_port()}",
        "ARRIERO_HOME": str(HOME),
        "ARRIERO_MODELS": str(HOME / "models"),
        "PYTHONUNBUFFERED": "1",
    }
    arriero = [sys.executable, "-m", "arriero"]
    with (HOME / "server.log").open("wb") as log:
        server = subprocess.Popen([*arriero, "serve"], env=environ, stdout=log, stderr=log)
    try:
        _wait(server, environ)
        subprocess.run([*arriero, "create", "smollm2", "-f", str(modelfile)], env=environ, check=True)
        print(f"\n>>> {question}", flush=True)
        return subprocess.run([*arriero, "run", "--verbose", "smollm2", question], env=environ, check=False).returncode
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], environ: dict[str, str]) -> None:
    host, _, port = environ["ARRIERO_HOST"].partition(":")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    sys.exit(f"the server did not start; see {HOME / 'server.log'}")


if __name__ == "__main__":
    sys.exit(main())
